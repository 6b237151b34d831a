"""The gradients of streamed layers, if the plan has them leave the device in pieces during their backward operation.

Such a gradient has no buffer of its own, and so waits for none. Its slots in host memory are acquired before its
operation. Between two groups of micro-batches its sums are in the slots for partial sums.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from windlass.actors.job import JobContext, piece_bounds
from windlass.actors.messages import ComputeBlock, SpanKind
from windlass.actors.timeline import FROM_DEVICE, TO_DEVICE, WHOLE_BLOCK, SpanRecorder
from windlass.engine.device import Device, Event, OverlaidBuffers, TensorArena, copy_all
from windlass.engine.memory_plan import NUM_REST_BUFFERS
from windlass.engine.model import ModelLayout
from windlass.engine.optimizer import NormInParts
from windlass.engine.pieces import GradPieceBuffers, PieceSums, StreamedGrad
from windlass.storage.ids import BlockIndex, ChunkKey, Span
from windlass.storage.memory import SlotPool


@dataclass(frozen=True, slots=True, eq=False)
class _Slots:
    """A GradHome in the slots of a block's chunks."""

    operation: ComputeBlock
    slots: Mapping[ChunkKey, Span]
    is_partial: bool  # the next group of micro-batches continues the sum
    dtype: torch.dtype
    layout: ModelLayout
    arena: TensorArena
    spans: SpanRecorder

    def store(self, source: torch.Tensor, start: int) -> None:
        """See GradHome."""
        copy_all(self._host_and_device(source, start))

    def load(self, target: torch.Tensor, start: int) -> None:
        """See GradHome."""
        copy_all([(there, here) for here, there in self._host_and_device(target, start)])

    def moved(self, begun: Event, ended: Event, nbytes: int, *, is_out: bool) -> None:
        """See GradHome."""
        kind = SpanKind.COPY_PARTIAL_OUT if self.is_partial else SpanKind.COPY_GRAD_OUT
        resource = FROM_DEVICE
        if not is_out:
            resource, kind = TO_DEVICE, SpanKind.COPY_PARTIAL_IN
        operation, start_s, end_s = self.operation, begun.time_s(), ended.time_s()
        self.spans.note(resource, kind, operation.step, operation.block, WHOLE_BLOCK, start_s, end_s, nbytes)

    def _host_and_device(self, flat: torch.Tensor, start: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns the parts of a piece by chunk: the place in host memory, and the part on the device."""
        pairs, stop = [], start + flat.numel()
        for key, slot in self.slots.items():
            first, last = self.layout.chunk_range(key)
            low, high = max(start, first), min(stop, last)
            if low < high:
                offset = slot.offset + (low - first) * self.dtype.itemsize
                pairs.append((self.arena.view(offset, high - low, self.dtype), flat[low - start : high - start]))
        return pairs


class StreamedGrads:
    """The gradients of the plan's blocks with streamed gradients, from their first operation until they are in slots.

    The thread that queues operations calls `begin` and `end`.
    """

    def __init__(
        self,
        context: JobContext,
        device: Device,
        arena: TensorArena,
        slots: SlotPool,
        spans: SpanRecorder,
        dtype: torch.dtype,
        memory: OverlaidBuffers,
    ) -> None:
        """`slots`: for complete gradients, of type `dtype`. `memory`: has the buffers, of user None."""
        blocks = [BlockIndex(block) for block in context.plan.grad_streamed_blocks]
        self._context = context
        self._device = device
        self._arena = arena
        self._slots = slots
        self._spans = spans
        self._dtype = dtype
        self._partial_slots = context.partial_slots()
        self._sums: dict[BlockIndex, PieceSums] = {}
        self._last: StreamedGrad | None = None
        cuts = piece_bounds(context)
        self._bounds = {block: (*cuts[block], context.layout.blocks[block].numel) for block in blocks}
        self._memory = memory
        flats = memory.buffers[None]
        self._buffers = GradPieceBuffers(device, flats[:-NUM_REST_BUFFERS], flats[-NUM_REST_BUFFERS:])
        self._complete: dict[BlockIndex, dict[ChunkKey, Span]] = {}

    def begin(self, operation: ComputeBlock) -> StreamedGrad:
        """Returns the place to which an operation adds. `end` must follow. May wait for slots and for memory."""
        others = self._memory.enter(None)
        self._device.compute.run(functools.partial(self._buffers.wait_for_others, others))
        block = operation.block
        is_complete = operation.group == self._context.plan.num_groups - 1
        keys = self._context.layout.chunk_keys(block)
        if is_complete:
            slots = dict(zip(keys, self._slots.acquire(len(keys)), strict=True))
            self._complete[block] = slots
        else:
            slots = {key: self._partial_slots[block, key] for key in keys}
        layout = self._context.layout
        home = _Slots(operation, slots, not is_complete, self._dtype, layout, self._arena, self._spans)
        self._last = StreamedGrad(
            self._buffers,
            self._bounds[block],
            [(param.name, param.offset, param.numel) for param in layout.blocks[block].params],
            self._sums.setdefault(block, PieceSums()),
            home,
            is_complete=is_complete,
        )
        self._device.compute.run(self._last.begin)
        return self._last

    def end(self, block: BlockIndex) -> NormInParts | None:
        """Ends the last operation, after it was queued. Returns the norm of a complete gradient, known in its turn."""
        grad = self._last
        assert grad is not None, "an operation has begun"
        self._last = None
        self._device.compute.run(grad.end)
        self._device.compute.run(lambda: self._memory.leave(self._buffers.ends))
        if grad.norm is not None:
            del self._sums[block]
        return grad.norm

    def slots_of(self, block: BlockIndex) -> dict[ChunkKey, Span]:
        """Removes and returns the slots of a complete gradient. Its last pieces may be on their way."""
        return self._complete.pop(block)

    def then(self, callback: Callable[[], None]) -> None:
        """Calls back when all pieces that have left until now are in their slots."""
        self._buffers.then(callback)
