"""The gradients' way from the device to host memory, or through it to the SSDs.

A block's gradient is summed in a buffer on the device; once the device was given its copies, the buffer may be used
again, by what waits for them there. One thread has the device copy. Where a step has several groups of micro-batches,
the sums of each go to host memory until the next one's (`partial_grads`). All buffers are made at set-up.
"""

import functools
import queue
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from windlass.actors.gpu_worker.grad_accumulation import PartialGrads, Use
from windlass.actors.job import JobContext, grad_precision
from windlass.actors.lifecycle import working_at, works_at
from windlass.actors.messages import (
    ComputeBlock,
    GradChunk,
    GradDiscarded,
    GradOffloaded,
    Message,
    OffloadGrad,
    SpanKind,
)
from windlass.actors.ssd import ChunkClient, chunk_io
from windlass.actors.timeline import FROM_DEVICE, SpanRecorder
from windlass.engine.device import TORCH_DTYPE, BufferClass, Device, DeviceBuffers, Event, copy
from windlass.engine.memory_plan import grad_buffers_of_job
from windlass.engine.model import GradBuffer
from windlass.storage.ids import BlockIndex, ChunkKey, Span, StateKind
from windlass.storage.memory import SlotPool


@dataclass(frozen=True, slots=True)
class _Complete:
    """A gradient as the optimizer will see it."""

    flat: torch.Tensor
    event: Event  # of the compute stream, which is through with it then


@dataclass(frozen=True, slots=True)
class _Partial:
    """A sum that a group leaves to the next."""

    operation: ComputeBlock  # that added to it last
    use: Use
    grad: GradBuffer
    event: Event  # of the compute stream, which is through with it then


class GradOffload:
    """Gradients from the operation that begins them until they are in the slots lent to the optimizers.

    That of a block whose states rest on the device stays there until its update. `report` sends to the scheduler.
    """

    def __init__(
        self,
        context: JobContext,
        device: Device,
        memory: torch.Tensor,
        io: ChunkClient,
        spans: SpanRecorder,
        report: Callable[[Message], None],
        *,
        summed_in_fp32: Collection[int],
    ) -> None:
        """`summed_in_fp32`: blocks whose gradients may be, whatever they travel in."""
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
        self._complete: dict[BlockIndex, _Complete] = {}
        self._permits = threading.Semaphore(context.plan.num_grad_buffers)
        self._permitted: set[BlockIndex] = set()
        self._told_step = 0  # the last one whose backward pass is over and told
        planned = self._plan_buffers(summed_in_fp32)
        self._flats = DeviceBuffers(device, planned, name="gradients", deadline_s=context.spec.deadline_s)
        self._partials = PartialGrads(context, device, self._flats, memory, spans)

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

        For what the compute stream is given from now on.

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
            numel = self._context.layout.blocks[block].numel
            self._buffers[use] = GradBuffer(self._flats.take(numel, dtype, self._device.compute))
        return self._buffers[use]

    def set_aside(self, operation: ComputeBlock) -> None:
        """The compute stream was given an operation of a group that is not the step's last: the next group goes on with
        its sums."""
        for use in self._partials.uses(operation):
            self._requests.put(_Partial(operation, use, self._buffers.pop(use), self._device.compute.record()))

    def complete(self, block: BlockIndex, look: Callable[[torch.Tensor], object]) -> None:
        """Nothing is added any more. `look` is work for the compute stream: it sees what will be offloaded, as what
        overflows on the way there must not be missed."""
        params = [(p.name, p.offset, p.numel) for p in self._context.layout.blocks[block].params]
        (grad, *others), compute = self._sums_of(block), self._device.compute

        def finish() -> None:
            for other in others:
                grad.merge(other, params)
            grad.finish(params)

        compute.run(finish)
        flat, unused = grad.flat, [other.flat for other in others]
        if flat.dtype is not self._dtype:
            flat = self._flats.take(flat.numel(), self._dtype, compute)
            compute.run(functools.partial(flat.copy_, grad.flat))
            unused.append(grad.flat)
        for each in unused:
            self._flats.give(each, compute)
        compute.run(functools.partial(look, flat))
        with self._lock:
            self._complete[block] = _Complete(flat, compute.record())

    def backward_over(self, step: int) -> None:
        """All gradients of a step are complete."""
        self._told_step = step
        self._spans.tell(step)

    def take(self, block: BlockIndex) -> torch.Tensor:
        """A complete gradient, for an update in the compute stream; `give_back` must follow."""
        return self._take(block).flat

    def give_back(self, flat: torch.Tensor) -> None:
        """The compute stream was given the update."""
        self._flats.give(flat, self._device.compute)

    def request(self, message: OffloadGrad) -> None:
        """Begins to bring a complete gradient to where it is kept."""
        self._requests.put(message)

    def take_back(self, spans: tuple[Span, ...]) -> None:
        """An optimizer is done with slots."""
        self._slots.release(spans)

    def drop(self, message: GradDiscarded) -> None:
        """A step is skipped."""
        self._slots.release([chunk.span for chunk in message.chunks if chunk.span is not None])
        if message.block in self._context.plan.device_blocks:
            self.give_back(self.take(message.block))

    def stop(self) -> None:
        """Ends the thread, and the waits of others."""
        self._slots.close()
        self._flats.close()
        self._permits.release()
        self._partials.stop()
        self._requests.put(None)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _plan_buffers(self, summed_in_fp32: Collection[int]) -> dict[BufferClass, int]:
        layout, plan = self._context.layout, self._context.plan
        planned = grad_buffers_of_job(
            [block.numel for block in layout.blocks],
            layout.shared,
            itemsize=self._dtype.itemsize,
            summed_in_fp32=summed_in_fp32,
            resident=plan.device_blocks,
            num_groups=plan.num_groups,
            num_grad_buffers=plan.num_grad_buffers,
        )
        dtypes = {self._dtype.itemsize: self._dtype, torch.float32.itemsize: torch.float32}
        return {(numel, dtypes[itemsize]): number for (numel, itemsize), number in planned.items()}

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
                spans = self._copy_out(request, self._take(request.block))
                self._device.d2h.then(working_at(request, functools.partial(self._copied, request, spans)))

    def _leave(self, partial: _Partial) -> None:
        self._device.d2h.wait(partial.event)
        self._partials.leave(partial.operation, partial.use, partial.grad)
        user, block = partial.use
        self._let_go(partial.grad.flat, block if user == block else None)

    def _let_go(self, flat: torch.Tensor, permitted: BlockIndex | None) -> None:
        """The device was given a buffer's copies; `permitted`: the block whose permit it had, if any."""
        self._flats.give(flat, self._device.d2h)
        if permitted in self._permitted:
            self._permitted.remove(permitted)
            self._permits.release()

    def _take(self, block: BlockIndex) -> _Complete:
        with self._lock:
            return self._complete.pop(block)

    def _copied(self, request: OffloadGrad, spans: dict[ChunkKey, Span]) -> None:
        """All of a gradient lies in slots."""
        if request.block in self._context.plan.spilled_blocks:
            self._spill(request, spans)
        else:
            self._finish(request, tuple(GradChunk(key, span) for key, span in spans.items()))

    def _spill(self, request: OffloadGrad, spans: dict[ChunkKey, Span]) -> None:
        """From slots to the SSDs."""
        num_missing = len(spans)

        def written(key: ChunkKey) -> None:
            nonlocal num_missing
            self._slots.release([spans[key]])
            with self._lock:
                num_missing -= 1
                is_last = num_missing == 0
            if is_last:
                self._finish(request, tuple(GradChunk(key, None) for key in spans))

        itemsizes = {StateKind.GRAD: self._dtype.itemsize}
        items = [
            chunk_io(key, self._context.chunk_numel(key), {StateKind.GRAD: span.offset}, itemsizes)
            for key, span in spans.items()
        ]
        self._io.write(items, request.step, (request.step, request.block), written)

    def _copy_out(self, request: OffloadGrad, grad: _Complete) -> dict[ChunkKey, Span]:
        """Has the device copy a gradient to slots; its buffer may be used again."""
        layout, block, d2h = self._context.layout, request.block, self._device.d2h
        keys = layout.chunk_keys(block)
        spans = dict(zip(keys, self._slots.acquire(len(keys), self._context.spec.deadline_s), strict=True))
        d2h.wait(grad.event)
        for key, span in spans.items():
            start, stop = layout.chunk_range(key)
            source = grad.flat[start:stop]
            target = self._memory[span.offset : span.offset + source.nbytes].view(source.dtype)
            begun = d2h.record()
            d2h.run(functools.partial(copy, target, source))
            note = functools.partial(self._note, request, key, begun, d2h.record(), source.nbytes)
            d2h.then(working_at(request, note))
        self._let_go(grad.flat, block)
        return spans

    def _note(self, request: OffloadGrad, key: ChunkKey, begun: Event, copied: Event, nbytes: int) -> None:
        kind, start_s, end_s = SpanKind.COPY_GRAD_OUT, begun.time_s(), copied.time_s()
        self._spans.note(FROM_DEVICE, kind, request.step, key.block, key.chunk, start_s, end_s, nbytes)

    def _finish(self, request: OffloadGrad, chunks: tuple[GradChunk, ...]) -> None:
        if request.step <= self._told_step:  # else the end of the backward pass tells
            self._spans.tell(request.step)
        self._report(GradOffloaded(job=self._context.spec.job, step=request.step, block=request.block, chunks=chunks))
