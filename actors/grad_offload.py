"""The gradients' way from the device to host memory, or through it to the SSDs.

A block's gradient is summed in a buffer on the device, which is free again once its copy lies in host memory. One
thread copies. Where a step has several groups of micro-batches, the sums of each go to host memory until the next one's
(`partial_grads`).
"""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from windlass.actors.chunk_io import ChunkIoClient, chunk_io
from windlass.actors.context import JobContext, grad_precision
from windlass.actors.guarded_threads import works_at
from windlass.actors.messages import ComputeBlock, GradChunk, GradDropped, GradOffloaded, Message, OffloadGrad, SpanKind
from windlass.actors.partial_grads import PartialGrads, Use
from windlass.actors.spans import FROM_DEVICE, SpanLog
from windlass.engine.device import Device
from windlass.engine.formats import TORCH_DTYPE
from windlass.engine.grad_buffer import GradBuffer
from windlass.storage.arena import SlotPool
from windlass.storage.ids import BlockIndex, ChunkKey, Span, StateKind

# Gradients of so many blocks may lie on the device while the offload is behind.
MAX_GRAD_BUFFERS = 2


@dataclass(frozen=True, slots=True)
class _Partial:
    """A sum that a group leaves to the next."""

    operation: ComputeBlock  # that added to it last
    use: Use
    grad: GradBuffer


class GradOffload:
    """Gradients from the operation that begins them until they are in the slots lent to the optimizers.

    That of a block whose states rest on the device stays there until its update. `report` sends to the scheduler.
    """

    def __init__(
        self,
        context: JobContext,
        device: Device,
        memory: torch.Tensor,
        io: ChunkIoClient,
        spans: SpanLog,
        report: Callable[[Message], None],
    ) -> None:
        self._context = context
        self._device = device
        self._memory = memory
        self._io = io
        self._spans = spans
        self._report = report
        self._dtype = TORCH_DTYPE[grad_precision(context.spec)]
        pool = context.plan.grads
        self._slots = SlotPool(pool.offset, pool.slot_nbytes, pool.num_slots, name="grad slots")
        self._requests: queue.Queue[OffloadGrad | _Partial | None] = queue.Queue()
        self._lock = threading.Lock()
        # Being summed. Of tensors that several operations use each has a sum of its own, until the last one: those over
        # micro-batches must not depend on how these are grouped.
        self._buffers: dict[Use, GradBuffer] = {}
        self._partials = PartialGrads(context, device, memory, spans)
        self._complete: dict[BlockIndex, torch.Tensor] = {}  # as the optimizer will see them
        self._permits = threading.Semaphore(MAX_GRAD_BUFFERS)
        self._permitted: set[BlockIndex] = set()
        self._told_step = 0  # the last one whose backward pass is over and told

    # --- what the worker calls --------------------------------------------------------------------------------------

    @property
    def loops(self) -> tuple[Callable[[], None], ...]:
        """What its threads run."""
        return (self._run, self._partials.run)

    def expect(self, operation: ComputeBlock) -> None:
        """The operation will be computed: what an earlier group left to it is brought back in time."""
        self._partials.expect(operation)

    def buffer(self, operation: ComputeBlock, block: BlockIndex, dtype: torch.dtype) -> GradBuffer:
        """What an operation adds a block's gradient to: empty, of this type, or what the group before has summed.

        Raises:
            TimeoutError: none came free, or what the group before left did not come, within the job's deadline.
        """
        use = (operation.block, block)
        if use in self._buffers:  # on the device since the group before
            return self._buffers[use]
        # The shared one is exempt: it waits for the last operation of the step, which must not wait for it. So is
        # what stays on the device until its update.
        if block == operation.block and block not in self._context.plan.device_blocks:
            deadline_s = self._context.spec.deadline_s
            if not self._permits.acquire(timeout=deadline_s):
                raise TimeoutError(
                    f"no gradient buffer came free for block {block} in step {operation.step} within {deadline_s:g} s; "
                    "the gradient offload or the optimizer is stuck"
                )
            self._permitted.add(block)
        if operation.group > 0 and block not in self._context.plan.device_blocks:
            self._buffers[use] = self._partials.take(operation, use)
        else:
            self._buffers[use] = GradBuffer(self._device.take(self._context.layout.blocks[block].numel, dtype))
        return self._buffers[use]

    def set_aside(self, operation: ComputeBlock) -> None:
        """An operation of a group that is not the step's last is done: the next group goes on with its sums."""
        for use in self._partials.uses(operation):
            self._requests.put(_Partial(operation, use, self._buffers.pop(use)))

    def complete(self, block: BlockIndex) -> torch.Tensor:
        """Nothing is added any more; what will be offloaded. What overflows on the way there must not be missed."""
        params = [(p.name, p.offset, p.numel) for p in self._context.layout.blocks[block].params]
        grad, *others = self._sums_of(block)
        for other in others:
            grad.merge(other, params)
        grad.finish(params)
        flat, unused = grad.flat, [other.flat for other in others]
        if flat.dtype is not self._dtype:
            flat = self._device.take(grad.flat.numel(), self._dtype).copy_(grad.flat)
            unused.append(grad.flat)
        if unused:
            self._device.synchronize()  # the next to use them may be a copy to the device
            for each in unused:
                self._device.give(each)
        with self._lock:
            self._complete[block] = flat
        return flat

    def backward_over(self, step: int) -> None:
        """All gradients of a step are complete."""
        self._told_step = step
        self._spans.tell(step)

    def take(self, block: BlockIndex) -> torch.Tensor:
        """A complete gradient, for who updates it on the device."""
        with self._lock:
            return self._complete.pop(block)

    def request(self, message: OffloadGrad) -> None:
        """Begins to bring a complete gradient to where it is kept."""
        self._requests.put(message)

    def take_back(self, spans: tuple[Span, ...]) -> None:
        """An optimizer is done with slots."""
        self._slots.release(spans)

    def drop(self, message: GradDropped) -> None:
        """A step is skipped."""
        self._slots.release([chunk.span for chunk in message.chunks if chunk.span is not None])
        if message.block in self._context.plan.device_blocks:
            self._device.give(self.take(message.block))

    def stop(self) -> None:
        """Ends the thread, and the waits of others."""
        self._slots.close()
        self._permits.release()
        self._partials.stop()
        self._requests.put(None)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _sums_of(self, block: BlockIndex) -> list[GradBuffer]:
        """Of all operations that use a block, in their order, its own last."""
        shared = self._context.layout.shared
        users = [BlockIndex(user) for user in reversed(range(len(shared))) if block in shared[user]]
        return [self._buffers.pop((user, block)) for user in users]

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            if isinstance(request, _Partial):
                works_at(request.operation)
                self._leave(request)
            else:
                works_at(request)
                self._offload(request)

    def _leave(self, partial: _Partial) -> None:
        self._partials.leave(partial.operation, partial.use, partial.grad)
        user, block = partial.use
        self._let_go(partial.grad.flat, block if user == block else None)

    def _offload(self, request: OffloadGrad) -> None:
        flat = self.take(request.block)
        if request.block in self._context.plan.spilled_blocks:
            self._spill(request, flat)
        else:
            chunks = tuple(GradChunk(key, span) for key, span in self._copy_out(request, flat).items())
            self._finish(request, chunks)

    def _let_go(self, flat: torch.Tensor, permitted: BlockIndex | None) -> None:
        """A buffer was copied out; `permitted`: the block whose permit it had, if any."""
        self._device.give(flat)
        if permitted in self._permitted:
            self._permitted.remove(permitted)
            self._permits.release()

    def _spill(self, request: OffloadGrad, flat: torch.Tensor) -> None:
        """Through slots to the SSDs."""
        spans = self._copy_out(request, flat)
        num_missing = len(spans)

        def written(key: ChunkKey) -> None:
            nonlocal num_missing
            self._slots.release([spans[key]])
            with self._lock:
                num_missing -= 1
                is_last = num_missing == 0
            if is_last:
                self._finish(request, tuple(GradChunk(key, None) for key in spans))

        itemsizes = {StateKind.GRAD: flat.itemsize}
        items = [
            chunk_io(key, self._context.chunk_numel(key), {StateKind.GRAD: span.offset}, itemsizes)
            for key, span in spans.items()
        ]
        self._io.write(items, request.step, (request.step, request.block), written)

    def _copy_out(self, request: OffloadGrad, flat: torch.Tensor) -> dict[ChunkKey, Span]:
        """A block's gradient to slots; its buffer is free then."""
        layout, block = self._context.layout, request.block
        keys = layout.chunk_keys(block)
        spans = dict(zip(keys, self._slots.acquire(len(keys), self._context.spec.deadline_s), strict=True))
        for key, span in spans.items():
            start, stop = layout.chunk_range(key)
            source = flat[start:stop]
            target = self._memory[span.offset : span.offset + source.nbytes].view(flat.dtype)
            start_s, kind = time.monotonic(), SpanKind.COPY_GRAD_OUT
            self._device.copy_out(target, source)
            self._spans.note(
                FROM_DEVICE, kind, request.step, block, key.chunk, start_s, time.monotonic(), source.nbytes
            )
        self._let_go(flat, block)
        return spans

    def _finish(self, request: OffloadGrad, chunks: tuple[GradChunk, ...]) -> None:
        if request.step <= self._told_step:  # else the end of the backward pass tells
            self._spans.tell(request.step)
        self._report(GradOffloaded(job=self._context.spec.job, step=request.step, block=request.block, chunks=chunks))
