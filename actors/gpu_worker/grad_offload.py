"""Offloads gradients from the device to host memory, or through it to the SSDs.

A block's gradient is summed in a buffer on the device. Once its copies are queued, the buffer may be used again by
work that waits for them on the device. One thread queues the copies. If a step has several groups of micro-batches, the
sums of a group go to host memory until the next group (`grad_accumulation`). All buffers are allocated at set-up.
"""

import functools
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from windlass.actors.gpu_worker.grad_accumulation import PartialGrads, host_and_device
from windlass.actors.gpu_worker.streamed_grads import StreamedGrads
from windlass.actors.job import JobContext, grad_precision, piece_bounds
from windlass.actors.lifecycle import working_at, works_at
from windlass.actors.messages import (
    ComputeBlock,
    GradChunk,
    GradOffloaded,
    Message,
    SpanKind,
    SumPassed,
    SumTaken,
)
from windlass.actors.ssd import SsdClient, chunk_io
from windlass.actors.timeline import FROM_DEVICE, SpanRecorder
from windlass.actors.worker_policy import Countdown, GradSums, OffloadQueue, SumSource, Use
from windlass.engine.device import (
    TORCH_DTYPE,
    BufferClass,
    Device,
    DeviceBuffers,
    Event,
    OverlaidBuffers,
    Stream,
    TensorArena,
    copy_all,
    round_in_place,
)
from windlass.engine.memory_plan import (
    batches_to_copy,
    grad_buffers_of_job,
    grad_overlay_of_job,
)
from windlass.engine.model import GradBuffer, GradSink, LaneSums
from windlass.engine.optimizer import NormInParts
from windlass.engine.pieces import ChunkNorms, SumBesideTotal
from windlass.storage.cancellation import Permits, TaskQueue
from windlass.storage.ids import ActorName, BlockIndex, ChunkKey, Span, StateKind, Step
from windlass.storage.memory import SlotPool


@dataclass(frozen=True, slots=True)
class _Complete:
    """A complete gradient, in the type that the optimizer gets."""

    flat: torch.Tensor
    event: Event  # on the compute stream, after the gradient's last change


@dataclass(frozen=True, slots=True)
class _Offload:
    """A complete gradient on its way to host memory or the SSDs."""

    operation: ComputeBlock  # the last one that added to it
    sq_sums: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Partial:
    """A sum that the next group of micro-batches continues."""

    operation: ComputeBlock  # the last one that added to the sum
    use: Use
    grad: GradBuffer
    event: Event  # on the compute stream, after the sum's last change


class GradOffload:
    """Manages gradients from their first operation until they are in the slots that the optimizers read.

    Gradients of blocks whose states are resident on the device stay there until the update.
    """

    def __init__(
        self,
        context: JobContext,
        device: Device,
        arena: TensorArena,
        io: SsdClient,
        spans: SpanRecorder,
        send: Callable[[ActorName, Message], None],
        report: Callable[[ComputeBlock, tuple[float, ...]], None],
        *,
        rank: int = 0,
        summed_in_fp32: Collection[int],
    ) -> None:
        """`summed_in_fp32` has the blocks whose gradients may be summed in fp32, even if they are offloaded in another
        type. `send` sends an optimizer its share. `report` reports a gradient to the scheduler: the operation
        that completed it, and its sums of squares.
        """
        self._context = context
        self._device = device
        self._arena = arena
        self._io = io
        self._spans = spans
        self._send = send
        self._report = report
        self._dtype = TORCH_DTYPE[grad_precision(context.spec)]
        self._lanes = context.spec.training.lane_division
        pool, token = context.plan.grads, device.token
        self._slots = SlotPool(pool.offset, pool.slot_nbytes, pool.num_slots, name="grad slots", token=token)
        self._requests: TaskQueue[_Offload | _Partial] = TaskQueue(token)
        self._lock = threading.Lock()
        self._writes_left = Countdown()  # by step and block
        self._offload_queue = OffloadQueue(context.spec.effective_ordering, frozenset(context.plan.spilled_blocks))
        self._waiting: dict[tuple[Step, BlockIndex], _Offload] = {}
        self._borrowed = context.layout.borrowed
        self._sums = GradSums(context.layout.shared, context.blocks_with_sums_on_device)
        self._buffers: dict[Use, GradBuffer] = {}
        self._complete: dict[BlockIndex, _Complete] = {}
        self._permits = Permits(token, context.plan.num_grad_buffers)
        self._flushed_step = 0  # the last step whose backward pass is over and whose spans were sent
        planned = self._plan_buffers(summed_in_fp32)
        self._flats = DeviceBuffers(device, planned, name="gradients")
        self._partials = PartialGrads(context, device, self._take, arena, spans, send, rank=rank)
        self._in_pieces = frozenset(context.plan.grad_streamed_blocks)
        self._overlay: OverlaidBuffers | None = None
        self._pieces: StreamedGrads | None = None
        if self._in_pieces:
            self._overlay = OverlaidBuffers(device, self._plan_overlay(summed_in_fp32), name="gradients")
            self._pieces = StreamedGrads(
                context, device, arena, self._slots, self._partials, spans, self._dtype, self._overlay, rank=rank
            )
        self._beside_totals: dict[Use, SumBesideTotal] = {}  # of the operation that was begun last
        self._committed = -1
        self._uncommitted: list[_Offload] = []  # streamed gradients that spill after the next commit

    # --- calls of the GPU worker ------------------------------------------------------------------------------------

    @property
    def loops(self) -> tuple[Callable[[], None], ...]:
        """The functions to run in threads."""
        return (self._run, self._partials.run)

    def expect(self, operation: ComputeBlock) -> None:
        """Queues the sums of an earlier group to be copied back, for an operation that will be computed."""
        self._partials.expect(operation)

    def take_sum(self, message: SumPassed) -> None:
        """Takes note that another GPU worker has left a sum in host memory, for a group of this one."""
        self._partials.take_sum(message)

    def sum_taken(self, message: SumTaken) -> None:
        """Releases the slots of a sum that another GPU worker has taken."""
        self._partials.release_slots(message)

    def buffer(self, operation: ComputeBlock, block: BlockIndex, dtype: torch.dtype) -> GradSink:
        """Acquires the buffer to which an operation adds a block's gradient.

        It is empty and of type `dtype`, or has the sums of the group before. It is for work that is queued on the
        compute stream from now on.

        Raises the errors of `CancelToken.wait_for`.
        """
        if block in self._in_pieces:
            return self._streamed.begin(operation, block, dtype)
        use = (operation.block, block)
        source = self._sums.begin(operation, block)
        if source is not SumSource.DEVICE and self._sums.needs_permit(use):
            where = f"block {block} in step {operation.step}"
            self._permits.acquire(f"a gradient buffer for {where}; the gradient offload or the optimizer is stuck")
        numel = self._context.layout.blocks[block].numel
        if self._lanes.num_lanes > 1 and self._is_overlaid(use):
            left = self._partials.wait_for(operation, use) if source is SumSource.HOST else None
            sums = self._buffers[use] = GradBuffer(self._take(use, numel, dtype, self._device.compute))
            self._beside_totals[use] = self._streamed.beside_total(operation, sums, left)
            return self._beside_totals[use]
        if source is SumSource.HOST:
            self._buffers[use] = self._partials.take(operation, use)
        elif source is SumSource.NEW_BUFFER:
            self._buffers[use] = GradBuffer(self._take(use, numel, dtype, self._device.compute))
        total = self._buffers[use]
        return total if self._lanes.num_lanes == 1 else self._in_lanes(operation, block, total)

    def end_lanes(self, operation: ComputeBlock) -> None:
        """Adds lanes to the totals that an operation leaves, except for those that the next group continues.

        It is called after the operation is queued on the compute stream.
        """
        _, stop = self._microbatches(operation)
        if self._lanes.num_lanes == 1 or self._lanes.has_open_lane(stop):
            return
        for block in operation.blocks:
            use = (operation.block, block)
            if block in self._in_pieces:
                continue  # they end with their operation
            if (beside := self._beside_totals.pop(use, None)) is not None:
                self._device.compute.run(beside.finish)
                continue
            total = self._buffers[use]
            if total.lane is None:
                continue
            # The lane has already ended, unless its last micro-batches are missing in a small step.
            sums = LaneSums(total, self._params_of(block), is_first_lane=False)
            self._device.compute.run(sums.end_lane)
            self._flats.give(total.lane.flat, self._device.compute)
            total.lane = None

    def queue_partial_sums(self, operation: ComputeBlock) -> None:
        """Queues the sums of an operation to be copied out for the next group.

        It is called after the operation is queued on the compute stream, in all groups but the step's last.
        """
        if operation.block in self._in_pieces:
            self._streamed.end()
            return
        self._end_tied(operation.block)
        uses = [use for use in self._sums.pass_on(operation) if use[1] not in self._in_pieces]
        self._partials.will_leave(len(uses))
        for use in uses:
            self._requests.put(_Partial(operation, use, self._buffers.pop(use), self._device.compute.record()))

    def complete(
        self,
        block: BlockIndex,
        on_complete: Callable[[torch.Tensor | NormInParts | ChunkNorms], object],
        received: Sequence[GradBuffer] = (),
    ) -> None:
        """Completes a block's gradient after its last operation.

        `on_complete` is run on the compute stream with the gradient in its final type, because the conversion may
        overflow. Of a gradient that has left in pieces it gets the norms. `received`: sums of other boxes, which are
        added. The sum of two numbers does not depend on their order, so its bits are those of one box.
        """
        if block in self._in_pieces:
            norm = self._streamed.end()
            assert norm is not None, "the last group's operation completes the gradient"
            self._device.compute.run(functools.partial(on_complete, norm))
            return
        self._end_tied(block)
        params = self._params_of(block)
        (grad, *others), compute = map(self._buffers.pop, self._sums.complete(block)), self._device.compute

        def finish() -> None:
            for other in (*others, *received):
                grad.merge(other, params)
            grad.finish(params)

        compute.run(finish)
        flat, unused = grad.flat, [other.flat for other in others]
        if flat.dtype is not self._dtype:
            flat = self._narrow(flat)
            compute.run(functools.partial(round_in_place, grad.flat, flat))
        for buffer in unused:
            self._give(buffer, compute)
        compute.run(functools.partial(on_complete, flat))
        with self._lock:
            self._complete[block] = _Complete(flat, compute.record())

    def hand_over(self, operation: ComputeBlock, send: Callable[[GradBuffer], None]) -> None:
        """Passes an operation's sums for blocks of other boxes to `send`, in the step's last group.

        `send` queues their copies on the device-to-host stream.
        """
        for use in self._sums.complete_for_others(operation.block, self._borrowed):
            grad = self._buffers.pop(use)
            send(grad)
            self._give(grad.flat, self._device.d2h)

    def backward_over(self, step: int) -> None:
        """Sends the spans of a step once all its gradients are complete."""
        self._flushed_step = step
        self._spans.tell(step)

    def acquire(self, block: BlockIndex) -> torch.Tensor:
        """Acquires a complete gradient for an update on the compute stream; `release_buffer` must follow."""
        return self._pop_complete(block).flat

    def release_buffer(self, flat: torch.Tensor) -> None:
        """Releases a gradient's buffer after its update was queued on the compute stream."""
        self._flats.give(flat, self._device.compute)

    def computed(self, operation: ComputeBlock, sq_sums: tuple[float, ...]) -> None:
        """Offloads a gradient that the device has computed, when its turn comes.

        `operation` is the last one of its block, whose states are not resident on the device.
        """
        request = _Offload(operation, sq_sums)
        if operation.block in self._in_pieces:
            self._streamed_computed(request)
            return
        with self._lock:
            self._waiting[(operation.step, operation.block)] = request
            self._start_offloads(self._offload_queue.push(operation.step, operation.block))

    def commit_reached(self, step: Step) -> None:
        """Records a commit, after which gradients may overwrite the states of earlier ones."""
        with self._lock:
            self._committed = step
            self._start_offloads(self._offload_queue.commit_reached(step))
            ready = [request for request in self._uncommitted if request.operation.step <= step + 1]
            self._uncommitted = [request for request in self._uncommitted if request not in ready]
        for request in ready:
            self._streamed_computed(request)

    def release_slots(self, spans: tuple[Span, ...]) -> None:
        """Releases slots that an optimizer has finished reading."""
        self._slots.release(spans)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _is_overlaid(self, use: Use) -> bool:
        """Returns whether the sum of a use lies in the memory of gradients in pieces."""
        user, block = use
        return user == block and block in self._context.plan.grad_overlaid_blocks

    def _take(self, use: Use, numel: int, dtype: torch.dtype, stream: Stream) -> torch.Tensor:
        """Acquires a buffer for a sum of a use of a block, or for its gradient; see `DeviceBuffers.take`."""
        if self._overlay is not None and self._is_overlaid(use):
            return self._overlay.take(use[1], numel, dtype, stream)
        return self._flats.take(numel, dtype, stream)

    def _narrow(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns the start of an fp32 buffer in the type in which gradients leave, to be released instead."""
        buffers = self._overlay if self._overlay is not None and self._overlay.has(flat) else self._flats
        return buffers.narrow(flat, self._dtype)

    def _give(self, flat: torch.Tensor, stream: Stream) -> None:
        """Releases a buffer; see `DeviceBuffers.give`."""
        if self._overlay is not None and self._overlay.has(flat):
            self._overlay.give(flat, stream)
        else:
            self._flats.give(flat, stream)

    def _plan_overlay(self, summed_in_fp32: Collection[int]) -> dict[int | None, list[BufferClass]]:
        context, cuts = self._context, piece_bounds(self._context)
        users = grad_overlay_of_job(
            [block.numel for block in context.layout.blocks],
            {block: cuts[BlockIndex(block)] for block in context.plan.grad_streamed_blocks},
            context.plan.grad_overlaid_blocks,
            itemsize=self._dtype.itemsize,
            summed_in_fp32=summed_in_fp32,
            has_lanes=self._lanes.num_lanes > 1,
            fp32_in_pieces=context.plan.fp32_in_pieces,
            is_summed=context.spec.training.num_microbatches > 1,
        )
        dtypes = {self._dtype.itemsize: self._dtype, torch.float32.itemsize: torch.float32}
        return {user: [(numel, dtypes[itemsize]) for numel, itemsize in classes] for user, classes in users.items()}

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
            elsewhere=(*plan.grad_streamed_blocks, *plan.grad_overlaid_blocks),
            tied_in_pieces=plan.tied_in_pieces,
            lanes=self._lanes,
            group_size=plan.group_size,
        )
        dtypes = {self._dtype.itemsize: self._dtype, torch.float32.itemsize: torch.float32}
        return {(numel, dtypes[itemsize]): number for (numel, itemsize), number in planned.items()}

    def _params_of(self, block: BlockIndex) -> list[tuple[str, int, int]]:
        return self._context.layout.grad_parts(block, self._context.spec.training.cut_matrices)

    def _microbatches(self, operation: ComputeBlock) -> tuple[int, int]:
        """Returns the first and past-last micro-batch of an operation's group in a full step."""
        start = operation.group * self._context.plan.group_size
        return start, min(start + self._context.plan.group_size, self._lanes.num_microbatches)

    def _in_lanes(self, operation: ComputeBlock, block: BlockIndex, total: GradBuffer) -> LaneSums:
        """Returns the sums of lanes for an operation. A buffer for later lanes is acquired if they begin in it."""
        start, stop = self._microbatches(operation)
        if total.lane is None and self._lanes.needs_lane_sum(stop):
            total.lane = GradBuffer(self._flats.take(total.flat.numel(), total.flat.dtype, self._device.compute))
        return LaneSums(total, self._params_of(block), is_first_lane=self._lanes.lane_of(start) == 0)

    def _end_tied(self, user: BlockIndex) -> None:
        """Ends a block's operation that may have added to the gradient of a tied block in pieces."""
        if self._pieces is not None and self._pieces.has_begun(user):
            self._pieces.end()

    @property
    def _streamed(self) -> StreamedGrads:
        assert self._pieces is not None, "the plan has gradients in pieces"
        return self._pieces

    def _streamed_computed(self, request: _Offload) -> None:
        """Continues after the operation of a gradient that leaves in pieces, whose last ones may be on their way.

        It holds its slots since before its operation. So it does not wait for its turn behind gradients that wait for
        slots: there could be a deadlock.
        """
        operation = request.operation
        with self._lock:
            spills = operation.block in self._context.plan.spilled_blocks
            if spills and self._committed < operation.step - 1:
                self._uncommitted.append(request)
                return
        spans = self._streamed.slots_of(operation.block)
        copied = working_at(operation, functools.partial(self._copied, request, spans))
        self._streamed.then(operation.block, copied)

    def _run(self) -> None:
        while (request := self._requests.take()) is not None:
            if isinstance(request, _Partial):
                works_at(request.operation)
                self._copy_out_partial(request)
            else:
                works_at(request.operation)
                spans = self._copy_out(request.operation, self._pop_complete(request.operation.block))
                self._device.d2h.then(working_at(request.operation, functools.partial(self._copied, request, spans)))

    def _start_offloads(self, keys: Sequence[tuple[Step, BlockIndex]]) -> None:
        for key in keys:
            self._requests.put(self._waiting.pop(key))

    def _copy_out_partial(self, partial: _Partial) -> None:
        self._device.d2h.wait(partial.event)
        self._partials.copy_out(partial.operation, partial.use, partial.grad)
        if partial.grad.lane is not None:
            self._flats.give(partial.grad.lane.flat, self._device.d2h)
        self._release_buffer_and_permit(partial.grad.flat, partial.use)

    def _release_buffer_and_permit(self, flat: torch.Tensor, use: Use) -> None:
        """Releases a buffer after its copies were queued, and its permit, if it has one."""
        self._give(flat, self._device.d2h)
        if self._sums.needs_permit(use):
            self._permits.release()

    def _pop_complete(self, block: BlockIndex) -> _Complete:
        with self._lock:
            return self._complete.pop(block)

    def _copied(self, request: _Offload, spans: dict[ChunkKey, Span]) -> None:
        """Continues after a gradient was copied to slots: writes it to the SSDs, or reports it."""
        if request.operation.block in self._context.plan.spilled_blocks:
            self._spill(request, spans)
        else:
            self._finish(request, tuple(GradChunk(key, span) for key, span in spans.items()))

    def _spill(self, request: _Offload, spans: dict[ChunkKey, Span]) -> None:
        """Writes a gradient from its slots to the SSDs."""
        task = (request.operation.step, request.operation.block)
        with self._lock:
            self._writes_left.start(task, len(spans))

        def written(key: ChunkKey) -> None:
            self._slots.release([spans[key]])
            with self._lock:
                is_last = self._writes_left.part_done(task)
            if is_last:
                self._finish(request, tuple(GradChunk(key, None) for key in spans))

        itemsizes = {StateKind.GRAD: self._dtype.itemsize}
        items = [
            chunk_io(key, self._context.chunk_numel(key), {StateKind.GRAD: span.offset}, itemsizes)
            for key, span in spans.items()
        ]
        step = request.operation.step
        self._io.write(items, step, (step, request.operation.block), written)

    def _copy_out(self, operation: ComputeBlock, grad: _Complete) -> dict[ChunkKey, Span]:
        """Queues the copies of a gradient to slots and releases its buffer; returns the slots."""
        layout, block, d2h = self._context.layout, operation.block, self._device.d2h
        keys = layout.chunk_keys(block)
        spans = dict(zip(keys, self._slots.acquire(len(keys)), strict=True))
        nbytes = {key: self._context.chunk_numel(key) * self._dtype.itemsize for key in keys}
        d2h.wait(grad.event)
        for batch in batches_to_copy(keys, nbytes.__getitem__):
            begun = d2h.record()
            pairs = [host_and_device(layout, self._arena, spans[key], grad.flat, key) for key in batch]
            d2h.run(functools.partial(copy_all, pairs))
            copied = {key: nbytes[key] for key in batch}
            d2h.then(working_at(operation, functools.partial(self._note, operation, copied, begun, d2h.record())))
        self._release_buffer_and_permit(grad.flat, (block, block))
        return spans

    def _note(self, operation: ComputeBlock, nbytes: dict[ChunkKey, int], begun: Event, copied: Event) -> None:
        kind, start_s, end_s = SpanKind.COPY_GRAD_OUT, begun.time_s(), copied.time_s()
        self._spans.note_batch(FROM_DEVICE, kind, operation.step, nbytes, start_s, end_s)

    def _finish(self, request: _Offload, chunks: tuple[GradChunk, ...]) -> None:
        operation = request.operation
        if operation.step <= self._flushed_step:  # else `backward_over` sends the spans
            self._spans.tell(operation.step)
        shares: dict[ActorName, list[GradChunk]] = {}
        for chunk in chunks:
            shares.setdefault(self._context.optimizer_of(chunk.key), []).append(chunk)
        for name, share in shares.items():
            self._send(
                name,
                GradOffloaded(job=operation.job, step=operation.step, block=operation.block, chunks=tuple(share)),
            )
        self._report(operation, request.sq_sums)
        if operation.block not in self._in_pieces:
            with self._lock:
                self._start_offloads(self._offload_queue.offload_finished())
