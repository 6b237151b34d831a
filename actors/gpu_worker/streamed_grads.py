"""The gradients of streamed blocks, if the plan has them leave the device in pieces during their backward operation.

Such a gradient has no buffer of its own, and so waits for none. Its slots in host memory are acquired before its
operation. Between two groups of micro-batches its sums are in the slots for partial sums. The GPU worker of the next
group goes on with them.

The sum over slices of the head is in fp32. If the gradient has 16 bits, it is between slices in slots of the running
operation, and is rounded in the last one.

Gradients of embedding and head that are not streamed lie in the same memory. With several lanes it has room for one sum
of each only, so the total of earlier lanes waits in host memory.
"""

import functools
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from windlass.actors.gpu_worker.grad_accumulation import PartialGrads, sum_parts
from windlass.actors.job import JobContext, piece_bounds
from windlass.actors.lifecycle import working_at
from windlass.actors.messages import ComputeBlock, Phase, SpanKind, SumPassed
from windlass.actors.timeline import FROM_DEVICE, TO_DEVICE, WHOLE_BLOCK, SpanRecorder
from windlass.engine.device import Device, Event, OverlaidBuffers, TensorArena, copy_all
from windlass.engine.memory_plan import NUM_REST_BUFFERS
from windlass.engine.model import GradBuffer, ModelLayout
from windlass.engine.optimizer import NormInParts
from windlass.engine.pieces import (
    ChunkNorms,
    GradPieceBuffers,
    HostTotal,
    PieceLanes,
    PieceSums,
    RoundedSums,
    StreamedGrad,
    SumBesideTotal,
    TiedSums,
)
from windlass.storage.ids import BlockIndex, ChunkKey, Span
from windlass.storage.memory import SlotPool


@dataclass(frozen=True, slots=True, eq=False)
class _Slots:
    """A GradHome in the slots of a block's chunks."""

    operation: ComputeBlock
    slots: Mapping[ChunkKey, Span]
    is_partial: bool  # a lane's sum, or one that the next group of micro-batches continues
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


@dataclass(frozen=True, slots=True, eq=False)
class _Last:
    """The operation that was begun last."""

    operation: ComputeBlock
    block: BlockIndex  # whose gradient it is
    grad: StreamedGrad
    sums: PieceSums
    slots: Mapping[ChunkKey, Span]  # the place of the sums after it
    left: SumPassed | None  # the sums of the group before


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
        partials: PartialGrads,
        spans: SpanRecorder,
        dtype: torch.dtype,
        memory: OverlaidBuffers,
        *,
        rank: int,
    ) -> None:
        """`slots`: for complete gradients, of type `dtype`. `partials`: sums of other groups.

        `memory`: has the buffers for pieces, of user None.
        """
        blocks = [BlockIndex(block) for block in context.plan.grad_streamed_blocks]
        self._context = context
        self._device = device
        self._arena = arena
        self._slots = slots
        self._spans = spans
        self._dtype = dtype
        self._partials = partials
        self._lanes = context.spec.training.lane_division
        self._running_slots = context.running_sum_pool(rank).spans
        self._last: _Last | None = None
        cuts = piece_bounds(context)
        self._bounds = {block: (*cuts[block], context.layout.blocks[block].numel) for block in blocks}
        self._memory = memory
        self._tied = frozenset(context.plan.tied_in_pieces)
        self._in_fp32 = frozenset(context.plan.fp32_in_pieces)
        self._by_user = {user: self._open_buffers(memory.buffers[user]) for user in (None, *self._in_fp32)}
        self._user_of: dict[BlockIndex, BlockIndex | None] = {}  # by block: the buffers of its last operation
        self._complete: dict[BlockIndex, dict[ChunkKey, Span]] = {}

    def begin(self, operation: ComputeBlock, block: BlockIndex, dtype: torch.dtype) -> StreamedGrad:
        """Returns the place to which an operation adds a block's gradient, for sums of type `dtype`. `end` must follow.

        May wait for slots, for memory, and for the sum of the group before, or of another block's operation.
        """
        user = self._user_of[block] = block if block in self._in_fp32 and dtype is torch.float32 else None
        buffers, use = self._buffers_of(block), (operation.block, block)
        assert buffers.dtype is dtype, "the plan has buffers for such sums"
        others = self._memory.enter(user)
        self._device.compute.run(functools.partial(buffers.wait_for_others, others))
        sums, left = PieceSums(), None
        if operation.group > 0:
            left = self._partials.wait_for(operation, use)
            sums = self._pieces_of(operation, block, left)
        is_complete = operation.group == self._context.plan.num_groups - 1 and operation.block == block
        keys = self._context.layout.chunk_keys(block)
        acquired = self._slots.acquire(len(keys)) if is_complete else self._partials.slots_for(operation, use)
        slots = dict(zip(keys, acquired, strict=True))
        rounded = tied = None
        if is_complete:
            self._complete[block] = slots
            if block in self._tied:
                sums, tied, rounded = self._with_other_use(operation, sums)
            elif user is not None:
                rounded = self._rounded(operation, block, self._running_slots)
        grad = StreamedGrad(
            buffers,
            self._bounds[block],
            self._params_of(block),
            sums,
            self._home(operation, block, slots, is_partial=not is_complete),
            is_complete=is_complete,
            moves=is_complete or self._context.plan.passes_sums_at_once,
            lanes=self._lanes_of(operation),
            rounded=rounded,
            tied=tied,
        )
        self._last = _Last(operation, block, grad, sums, slots, left)
        self._device.compute.run(grad.begin)
        return grad

    def end(self) -> NormInParts | ChunkNorms | None:
        """Ends the last operation, after it was queued. Returns the norm of a complete gradient, known in its turn.

        If the gradient is not complete, the next group gets it.
        """
        last = self._last
        assert last is not None, "an operation has begun"
        self._last = None
        self._device.compute.run(last.grad.end)
        self._device.compute.run(lambda: self._memory.leave(self._buffers_of(last.block).ends))
        # As work of the stream, because only then the copies are queued on the other streams.
        self._device.compute.run(functools.partial(self._when_moved, last))
        return last.grad.norm or last.grad.norms

    def beside_total(self, operation: ComputeBlock, sums: GradBuffer, left: SumPassed | None) -> SumBesideTotal:
        """Returns the sums of lanes of another block's operation, which lie in the memory of pieces.

        `sums`: the buffer, which is empty. `left`: the total of the groups before.
        """
        block, keys = operation.block, self._context.layout.chunk_keys(operation.block)
        total = None
        if left is not None:
            home = self._home(operation, block, dict(zip(keys, left.total.slots, strict=True)), is_partial=True)
            was_read = functools.partial(self._partials.was_read, operation, left)
            total = HostTotal(home=home, touched=left.total.touched, on_read=working_at(operation, was_read))
        between = None
        if len(self._running_slots) >= len(keys):
            between = self._home(operation, block, dict(zip(keys, self._running_slots, strict=False)), is_partial=True)
        _, *parts = self._memory.buffers[block]
        return SumBesideTotal(self._by_user[None], sums, parts, self._params_of(block), total, between)

    def slots_of(self, block: BlockIndex) -> dict[ChunkKey, Span]:
        """Removes and returns the slots of a complete gradient. Its last pieces may be on their way."""
        return self._complete.pop(block)

    def then(self, block: BlockIndex, callback: Callable[[], None]) -> None:
        """Calls back when all pieces of a block that have left until now are in their slots."""
        self._buffers_of(block).then(callback)

    def has_begun(self, user: BlockIndex) -> bool:
        """Returns whether an operation of a block has begun and not ended."""
        return self._last is not None and self._last.operation.block == user

    # --- inside -----------------------------------------------------------------------------------------------------

    def _open_buffers(self, flats: Sequence[torch.Tensor]) -> GradPieceBuffers:
        return GradPieceBuffers(self._device, flats[:-NUM_REST_BUFFERS], flats[-NUM_REST_BUFFERS:])

    def _buffers_of(self, block: BlockIndex) -> GradPieceBuffers:
        return self._by_user[self._user_of.get(block)]

    def _with_other_use(self, operation: ComputeBlock, own: PieceSums) -> tuple[PieceSums, TiedSums, RoundedSums]:
        """Returns the sum that the head has left of a tied embedding, and the embedding's own to be added to it."""
        block, layout = operation.block, self._context.layout
        head = BlockIndex(len(layout.blocks) - 1)
        left = self._partials.wait_for(operation, (head, block))
        keys, home = layout.chunk_keys(block), None
        if self._context.spec.training.num_microbatches > 1:
            slots = self._partials.slots_for(operation, (block, block))
            home = self._home(operation, block, dict(zip(keys, slots, strict=True)), is_partial=True)
        rounded = self._rounded(operation, block, left.total.slots)
        return self._pieces_of(operation, block, left), TiedSums(own=own, own_home=home), rounded

    def _rounded(self, operation: ComputeBlock, block: BlockIndex, slots: Sequence[Span]) -> RoundedSums:
        """Describes a sum in fp32 that becomes a gradient. `slots`: its place until then, one for each chunk."""
        keys = self._context.layout.chunk_keys(block)
        between = self._home(operation, block, dict(zip(keys, slots, strict=True)), is_partial=True)
        last = self._context.spec.training.num_microbatches - 1
        return RoundedSums(between=between, last_microbatch=last, dtype=self._dtype)

    def _when_moved(self, last: _Last) -> None:
        """Tells other GPU workers of an operation's sums when they were read, and when they are in host memory."""
        buffers = self._buffers_of(last.block)
        if last.left is not None:
            was_read = functools.partial(self._partials.was_read, last.operation, last.left)
            buffers.h2d.then(working_at(last.operation, was_read))
        if last.grad.norm is None and last.grad.norms is None:
            buffers.d2h.then(working_at(last.operation, functools.partial(self._pass_on, last)))

    def _params_of(self, block: BlockIndex) -> list[tuple[str, int, int]]:
        return self._context.layout.grad_parts(block, self._context.spec.training.cut_matrices)

    def _home(
        self, operation: ComputeBlock, block: BlockIndex, slots: Mapping[ChunkKey, Span], *, is_partial: bool
    ) -> _Slots:
        dtype = self._buffers_of(block).dtype if is_partial else self._dtype
        return _Slots(operation, slots, is_partial, dtype, self._context.layout, self._arena, self._spans)

    def _lanes_of(self, operation: ComputeBlock) -> PieceLanes | None:
        if self._lanes.num_lanes == 1:
            return None
        stop = min((operation.group + 1) * self._context.plan.group_size, self._lanes.num_microbatches)
        home = None
        if self._lanes.has_long_lane or operation.phase is Phase.HEAD:  # the head may have several slices
            keys = self._context.layout.chunk_keys(operation.block)
            slots = dict(zip(keys, self._running_slots, strict=False))
            home = self._home(operation, operation.block, slots, is_partial=True)
        chunk_numel = self._context.layout.chunk_numel
        return PieceLanes(division=self._lanes, last=self._lanes.lane_of(stop - 1), home=home, chunk_numel=chunk_numel)

    def _pieces_of(self, operation: ComputeBlock, block: BlockIndex, left: SumPassed) -> PieceSums:
        """Returns the sums that the group before has left, or another block's operation."""
        touched = set(left.total.touched)
        slots = dict(zip(self._context.layout.chunk_keys(block), left.total.slots, strict=True))
        home, bounds = self._home(operation, block, slots, is_partial=True), self._bounds[block]
        offsets = [offset for name, offset, _ in self._params_of(block) if name in touched]
        pieces = {bisect_right(bounds, offset, hi=len(bounds) - 1) - 1 for offset in offsets}
        return PieceSums(touched, dict.fromkeys(pieces, (home, None)))

    def _pass_on(self, last: _Last) -> None:
        dtype = self._buffers_of(last.block).dtype
        parts = sum_parts(dtype, last.sums.touched, last.slots.values())
        self._partials.pass_on(last.operation, (last.operation.block, last.block), parts)
