"""Gradient accumulation over groups of micro-batches. Between two groups, the sums are in host memory.

A group's backward operation continues with exactly the sums of the group before: in the same type, and with the record
of tensors that no micro-batch has reached yet. Results therefore do not depend on the size of the groups. If a group
ends inside a lane, the lane's sum goes with the total of the lanes before.

If the job has several GPU workers, another one computes the next group, and goes on with the sums from the same slots.

Sums are copied back before their operation is computed, for one operation at a time. Meanwhile other sums are being
added to or copied out. No thread waits for a copy; the thread that copies sums back waits only for memory.
"""

import functools
import threading
from collections.abc import Callable, Iterable, Sequence

import torch

from windlass.actors.job import JobContext
from windlass.actors.lifecycle import working_at, works_at
from windlass.actors.messages import ComputeBlock, Message, SpanKind, SumParts, SumPassed, SumTaken
from windlass.actors.timeline import FROM_DEVICE, TO_DEVICE, SpanRecorder
from windlass.actors.worker_policy import ReturningSums, Use, rank_of
from windlass.engine.device import Device, Event, Stream, TensorArena, copy_all
from windlass.engine.memory_plan import batches_to_copy
from windlass.engine.model import GradBuffer, ModelLayout
from windlass.storage.ids import ActorName, ChunkKey, Span
from windlass.storage.memory import SlotPool


def host_and_device(
    layout: ModelLayout, arena: TensorArena, slot: Span, flat: torch.Tensor, key: ChunkKey
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a chunk's place in host memory, and its part of a gradient on the device."""
    start, stop = layout.chunk_range(key)
    return arena.view(slot.offset, stop - start, flat.dtype), flat[start:stop]


def _parts_of(grad: GradBuffer, slots: Sequence[Span]) -> SumParts:
    return sum_parts(grad.flat.dtype, grad.touched, slots)


def sum_parts(dtype: torch.dtype, touched: Iterable[str], slots: Iterable[Span]) -> SumParts:
    """Describes a sum in host memory."""
    return SumParts(str(dtype).removeprefix("torch."), tuple(touched), tuple(slots))


class PartialGrads:
    """Stores one gradient sum for each use of a block's params, each in its own slots.

    Some sums stay on the device: see `blocks_with_sums_on_device`.
    """

    def __init__(
        self,
        context: JobContext,
        device: Device,
        take: Callable[[Use, int, torch.dtype, Stream], torch.Tensor],
        arena: TensorArena,
        spans: SpanRecorder,
        send: Callable[[ActorName, Message], None],
        *,
        rank: int,
    ) -> None:
        """`take` acquires a buffer for a use of a block. `send` tells other GPU workers of sums. `rank` is that of this
        one.
        """
        self._context = context
        self._send = send
        self._rank, self._num_ranks = rank, context.spec.num_ranks
        self._device = device
        self._take = take
        self._arena = arena
        self._spans = spans
        self._slots, self._lane_slots = context.partial_slots(), context.open_lane_slots()
        self._passing: tuple[SlotPool, SlotPool] | None = None
        if context.plan.passes_sums_at_once and rank < context.plan.num_groups - 1:
            pools, taker = context.passing_pools(rank), context.gpu_worker(rank + 1)
            names = [f"slots of {what} that {taker} has not taken" for what in ("sums", "unfinished lanes")]
            sums, lanes = (
                SlotPool(pool.offset, pool.slot_nbytes, pool.num_slots, name=name, token=device.token)
                for name, pool in zip(names, pools, strict=True)
            )
            self._passing = sums, lanes
        self._changed = threading.Condition()
        self._num_leaving = 0  # sums that will be copied out, and have no slots yet
        # Sums of blocks whose gradients leave in pieces return in pieces, too: see `streamed_grads`. Those that lie in
        # the memory of pieces return when that memory is theirs.
        self._sums = ReturningSums(
            context.blocks_with_sums_on_device,
            (*context.plan.grad_streamed_blocks, *context.plan.grad_overlaid_blocks),
            context.plan.tied_in_pieces,
        )
        self._left: dict[Use, SumPassed] = {}  # sums in slots, for a group of this GPU worker
        # The sums of the first expected operation, each with the event after its copy.
        self._back: dict[Use, tuple[GradBuffer, Event]] = {}

    def expect(self, operation: ComputeBlock) -> None:
        """Queues the sums of an operation to be copied back, after those of operations that were queued earlier."""
        with self._changed:
            self._sums.expect(operation)
            self._changed.notify_all()

    def take(self, operation: ComputeBlock, use: Use) -> GradBuffer:
        """Acquires a sum of the group before, for work that is queued on the compute stream from now on.

        Raises the errors of `CancelToken.wait_for`.
        """
        if self._sums.takes_own_way(use):
            grad, copied = self._bring_back(operation, use, self.wait_for(operation, use))
        else:
            with self._changed:
                self._wait(operation, use, lambda: use in self._back)
                grad, copied = self._back.pop(use)
                self._sums.take(use)
                self._changed.notify_all()
        self._device.compute.wait(copied)
        return grad

    def wait_for(self, operation: ComputeBlock, use: Use) -> SumPassed:
        """Waits until the group before has left a sum in host memory. It must be one that takes a way of its own.

        The caller calls `was_read` after it has queued all copies of the sum.

        Raises the errors of `CancelToken.wait_for`.
        """
        with self._changed:
            self._wait(operation, use, lambda: use in self._left)
            return self._left.pop(use)

    def was_read(self, operation: ComputeBlock, left: SumPassed) -> None:
        """Tells another GPU worker that the slots of its sum are free, if sums pass at once."""
        if self._context.plan.passes_sums_at_once:
            sender = self._context.gpu_worker(rank_of(operation.group - 1, self._num_ranks))
            lane_slots = () if left.lane is None else left.lane.slots
            taken = SumTaken(job=left.job, step=left.step, slots=left.total.slots, lane_slots=lane_slots)
            self._send(sender, taken)

    def will_leave(self, num_sums: int) -> None:
        """Announces calls of `copy_out`. The thread that queues operations calls it after each."""
        with self._changed:
            self._num_leaving += num_sums

    def copy_out(self, operation: ComputeBlock, use: Use, grad: GradBuffer) -> None:
        """Queues the copy of a sum to slots, on the device-to-host stream. May wait for slots."""
        slots = self._slots_for(use)
        lane_slots = [] if grad.lane is None else self._slots_for(use, is_lane=True)
        with self._changed:
            self._num_leaving -= 1
            self._changed.notify_all()
        self._copy(operation, use, grad.flat, slots, is_out=True)
        if grad.lane is not None:
            self._copy(operation, use, grad.lane.flat, lane_slots, is_out=True)

        def passes() -> None:
            # Which tensors a sum has is known only when it was computed.
            lane = None if grad.lane is None else _parts_of(grad.lane, lane_slots)
            self.pass_on(operation, use, _parts_of(grad, slots), lane)

        self._device.d2h.then(working_at(operation, passes))

    def slots_for(self, operation: ComputeBlock, use: Use) -> list[Span]:
        """Returns slots for a sum that an operation will leave, before it is queued; see `_slots_for`.

        Sums that pass at once get slots in the order of operations. Otherwise there may be a deadlock: the next GPU
        worker frees none before it has all sums of an earlier operation.
        """
        if self._passing is not None:
            what = f"slots for the sums of operations before block {operation.block} in step {operation.step}"
            with self._changed:
                self._device.token.wait_for(self._changed, lambda: not self._num_leaving or None, what)
        return self._slots_for(use)

    def pass_on(self, operation: ComputeBlock, use: Use, total: SumParts, lane: SumParts | None = None) -> None:
        """Passes a sum in host memory to the next group."""
        following = rank_of(operation.group + 1, self._num_ranks)
        message = SumPassed(job=operation.job, step=operation.step, user=use[0], block=use[1], total=total, lane=lane)
        if following == self._rank:
            self.take_sum(message)
        else:
            self._send(self._context.gpu_worker(following), message)

    def take_sum(self, message: SumPassed) -> None:
        """Takes note of a sum in slots, which a group of this GPU worker continues."""
        use = (message.user, message.block)
        with self._changed:
            self._left[use] = message
            if not self._sums.takes_own_way(use):
                self._sums.left(use)
            self._changed.notify_all()

    def release_slots(self, message: SumTaken) -> None:
        """Releases the slots of a sum that another GPU worker has taken."""
        assert self._passing is not None, "only sums that pass at once are taken by others"
        for pool, slots in zip(self._passing, (message.slots, message.lane_slots), strict=True):
            pool.release(slots)

    def run(self) -> None:
        """Copies sums back, in the thread of this object."""
        while (due := self._next()) is not None:
            operation, uses = due
            works_at(operation)
            with self._changed:
                left = {use: self._left.pop(use) for use in uses}
            back = {use: self._bring_back(operation, use, message) for use, message in left.items()}
            with self._changed:
                self._back = back
                self._changed.notify_all()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _slots_for(self, use: Use, *, is_lane: bool = False) -> list[Span]:
        """Returns the slots of a sum's chunks; those of a sum that passes at once are acquired."""
        keys = self._context.layout.keys_of_sum(use[1])
        if self._passing is not None:
            return self._passing[is_lane].acquire(len(keys))
        slots = self._lane_slots if is_lane else self._slots
        return [slots[use[0], key] for key in keys]

    def _next(self) -> tuple[ComputeBlock, list[Use]] | None:
        """Waits for the next operation whose sums can be copied back; returns None if the job was stopped."""
        with self._changed:
            self._device.token.wait_for_work(self._changed, lambda: self._sums.is_due)
            return None if self._device.token.is_cancelled else self._sums.begin()

    def _wait(self, operation: ComputeBlock, use: Use, is_there: Callable[[], bool]) -> None:
        """Waits for a sum of the group before. The caller holds the lock."""
        cause, sender = "the copies from and to host memory are stuck", rank_of(operation.group - 1, self._num_ranks)
        if sender != self._rank:
            cause = f"{self._context.gpu_worker(sender)} has not left it, or {cause}"
        what = (
            f"the gradient of block {use[1]} in step {operation.step}, as group {operation.group - 1} of its "
            f"micro-batches left it, to come back to the device; {cause}"
        )
        self._device.token.wait_for(self._changed, lambda: is_there() or None, what)

    def _bring_back(self, operation: ComputeBlock, use: Use, left: SumPassed) -> tuple[GradBuffer, Event]:
        total, copied = self._bring_flat_back(operation, use, left.total)
        if left.lane is not None:
            total.lane, copied = self._bring_flat_back(operation, use, left.lane)
        self._device.h2d.then(working_at(operation, functools.partial(self.was_read, operation, left)))
        return total, copied

    def _bring_flat_back(self, operation: ComputeBlock, use: Use, left: SumParts) -> tuple[GradBuffer, Event]:
        numel = self._context.layout.blocks[use[1]].numel
        flat = self._take(use, numel, getattr(torch, left.dtype), self._device.h2d)
        return GradBuffer(flat, left.touched), self._copy(operation, use, flat, left.slots, is_out=False)

    def _copy(
        self, operation: ComputeBlock, use: Use, flat: torch.Tensor, slots: Sequence[Span], *, is_out: bool
    ) -> Event:
        """Queues the copies of a sum's chunks; returns the event after them."""
        stream, keys = self._device.d2h if is_out else self._device.h2d, self._context.layout.keys_of_sum(use[1])
        slot_of = dict(zip(keys, slots, strict=True))
        nbytes = {key: self._context.chunk_numel(key) * flat.itemsize for key in keys}
        for batch in batches_to_copy(keys, nbytes.__getitem__):
            pairs = [host_and_device(self._context.layout, self._arena, slot_of[key], flat, key) for key in batch]
            if not is_out:
                pairs = [(here, there) for there, here in pairs]
            begun = stream.record()
            stream.run(functools.partial(copy_all, pairs))
            copied = {key: nbytes[key] for key in batch}
            note = functools.partial(self._note, operation, copied, begun, stream.record(), is_out=is_out)
            stream.then(working_at(operation, note))
        return stream.record()

    def _note(
        self, operation: ComputeBlock, nbytes: dict[ChunkKey, int], begun: Event, copied: Event, *, is_out: bool
    ) -> None:
        resource, kind = (FROM_DEVICE, SpanKind.COPY_PARTIAL_OUT) if is_out else (TO_DEVICE, SpanKind.COPY_PARTIAL_IN)
        self._spans.note_batch(resource, kind, operation.step, nbytes, begun.time_s(), copied.time_s())
