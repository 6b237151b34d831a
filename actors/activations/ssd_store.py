"""Offloads activations to the SSDs and reads them back, through staging buffers in host memory.

A tensor is cut into parts of a few slots. A part needs one buffer for its write and one for its read. It acquires the
buffer only when nothing else is missing for that transfer, and releases it at the end. Therefore parts never deadlock,
however few buffers there are. One stream copies in each direction; the SSD servers read and write the SSDs. So no
thread waits for a copy, and the thread that launches kernels waits only until the SSDs have answered.
"""

import functools
import threading
import time
from collections.abc import Callable

import torch

from windlass.actors.activations.parts import At, BufferQueue, Moment, Part, SsdSwap, cut, slots_of_part
from windlass.actors.activations.scratch_slots import ScratchSlots
from windlass.actors.job import JobContext, aligned
from windlass.actors.messages import ReadActivations, WriteActivations
from windlass.actors.ssd import SsdClient
from windlass.amounts import bytes_text
from windlass.engine.activations import ActivationMemoryError, SwapCounter, SwapCounts, SwapWatch, wait_on_device
from windlass.engine.device import Device, Event, TensorArena, copy
from windlass.storage.ids import Span
from windlass.storage.memory import SlotPool

# Seconds. Shorter waits are not reported.
_LEAST_WAIT_S = 1e-4


class SsdActivations:
    """Stores tensors in the scratch space of the job's SSDs.

    One thread calls `put` and `prefetch`; another may call `wait_for` and `drop`.
    """

    def __init__(
        self,
        context: JobContext,
        rank: int,
        device: Device,
        arena: TensorArena,
        client: SsdClient,
        watch: SwapWatch,
        *,
        max_leaving_nbytes: int,
    ) -> None:
        """Opens the two streams. The device's token ends all waits.

        `max_leaving_nbytes` limits the bytes that wait on the device for their copies; a single put may exceed it.
        """
        plan, num_ssds = context.plan, len(context.ssds)
        pool, num_staged = context.activation_pool(rank), plan.num_staged_activations
        self._device = device
        self._token = device.token
        self._arena = arena
        self._client = client
        self._server_of = context.ssd_server
        self._watch = watch
        self._max_leaving_nbytes = max_leaving_nbytes
        self._slot_nbytes = pool.slot_nbytes
        self._part_slots = slots_of_part(num_staged, num_ssds)
        self._buffers = SlotPool(
            pool.offset + (pool.num_slots - num_staged) * pool.slot_nbytes,
            pool.slot_nbytes * self._part_slots,
            num_staged // self._part_slots,
            name="staging buffers",
            token=device.token,
        )
        self._num_slots = plan.num_ssd_activations
        num_slots = [context.num_scratch_slots(ssd) for ssd in range(num_ssds)]
        self._slots = ScratchSlots(num_slots, [facts.weight for facts in context.ssds])
        self._first_slots = [rank * number for number in num_slots]  # on each SSD; the others are those of other ranks
        self._outward = device.open_stream()
        self._inward = device.open_stream()
        self._changed = threading.Condition()
        # All attributes below are protected by `_changed`.
        self._now = Moment()
        self._turns = BufferQueue()
        self._num_settling = 0  # parts of dropped tensors that still hold slots or a buffer
        self._leaving_nbytes = 0
        self._counter = SwapCounter()

    # --- calls of the owner -----------------------------------------------------------------------------------------

    def begin(self, moment: Moment) -> None:
        """Sets the operation to which later puts and prefetches belong."""
        with self._changed:
            self._now = moment

    def put(self, tensor: torch.Tensor) -> SsdSwap:
        """Offloads a flat uint8 tensor from the device; see ActivationStore.

        Raises:
            ActivationMemoryError: there are not enough free slots.
            TimeoutError: earlier puts hang.
            InterruptedError: the job was stopped.
        """
        nbytes = tensor.nbytes
        with self._changed:
            self._wait_to_leave(nbytes)
            self._wait_for_slots(nbytes)
            swap = SsdSwap(nbytes, self._now, tensor, self._device.compute.record())
            swap.parts = list(cut(swap, self._slots, self._slot_nbytes, self._part_slots))
            swap.num_on_device = swap.num_missing = swap.num_to_return = len(swap.parts)
            self._line_up(swap)
            self._leaving_nbytes += nbytes
            self._counter.hold(nbytes)
            parts = self._hand_out_buffers()
        self._request(parts)
        return swap

    def prefetch(self, swap: SsdSwap, target: torch.Tensor) -> None:
        """Starts to read a tensor back into `target`, device memory of the same size. At most one call per tensor."""
        with self._changed:
            swap.target, swap.wanted_in = target, self._now
            # Queued work may still read what the target's memory held before.
            self._inward.wait(self._device.compute.record())
            self._line_up(swap)
            parts = self._hand_out_buffers()
        self._request(parts)

    def wait_for(self, swap: SsdSwap) -> None:
        """Makes later work of the compute stream wait for a prefetched tensor. The handle is invalid afterwards.

        The call waits until the tensor has come from the SSDs, not for its copies to the device.

        Raises:
            TimeoutError: the tensor did not arrive in time.
            InterruptedError: the job was stopped.
        """
        with self._changed:
            swap.is_demanded = True
            for part in swap.parts:
                self._turns.wait(part)
            parts = self._hand_out_buffers()
        self._request(parts)
        with self._changed:
            try:
                self._wait_until(lambda: swap.num_to_return == 0, lambda: self._missing(swap))
                returned = swap.returned
            finally:
                self._drop(swap)
        assert returned is not None
        wait_on_device(self._device, self._watch, returned)

    def drop(self, swap: SsdSwap) -> None:
        """Discards a tensor. The handle is invalid afterwards."""
        with self._changed:
            self._drop(swap)

    @property
    def counts(self) -> SwapCounts:
        """The bytes transferred and held so far."""
        with self._changed:
            return self._counter.counts

    # --- inside: waits ------------------------------------------------------------------------------------------------

    def _wait_until(self, condition: Callable[[], bool], what: Callable[[], str]) -> None:
        start_s = time.monotonic()
        try:
            self._token.wait_for(self._changed, condition, what)
        finally:
            if (end_s := time.monotonic()) - start_s > _LEAST_WAIT_S:
                self._watch.waited(self._watch.owner(), start_s, end_s)

    def _wait_to_leave(self, nbytes: int) -> None:
        self._wait_until(
            lambda: not self._leaving_nbytes or self._leaving_nbytes + nbytes <= self._max_leaving_nbytes,
            lambda: (
                f"{bytes_text(self._leaving_nbytes)} of activations to leave the device for the SSDs; the copies or "
                "the SSDs are stuck"
            ),
        )

    def _wait_for_slots(self, nbytes: int) -> None:
        count = -(-nbytes // self._slot_nbytes)
        self._wait_until(
            lambda: self._slots.num_free >= count or not self._num_settling,
            lambda: "the SSD slots of dropped activations; the copies or the SSDs are stuck",
        )
        if self._slots.num_free < count:
            raise ActivationMemoryError(
                f"no room for {bytes_text(nbytes)} of activations: {count} slots of {bytes_text(self._slot_nbytes)} "
                f"are needed on the SSDs, as host memory is full, and {self._num_slots - self._slots.num_free} "
                f"of {self._num_slots} are in use; raise ssd_activation_nbytes of the placement, or let "
                "fewer layers swap"
            )

    def _missing(self, swap: SsdSwap) -> str:
        missing = [part for part in swap.parts if part.at is not At.GONE]
        ssds = ", ".join(sorted({self._server_of(part.ssd) for part in missing}))
        return (
            f"{bytes_text(sum(part.nbytes for part in missing))} of {bytes_text(swap.nbytes)} of activations of "
            f"block {swap.left_in.block}, step {swap.left_in.step} to come back from {ssds}; see the logs of the SSD "
            "servers, and check the disks"
        )

    # --- inside: requests, without the lock ---------------------------------------------------------------------------

    def _request(self, parts: list[Part]) -> None:
        for part in parts:
            assert part.buffer is not None
            self._client.move_activations(
                ReadActivations if part.at is At.RETURNING else WriteActivations,
                part.ssd,
                step=part.asked_in.step,
                block=part.swap.left_in.block,
                slots=tuple(self._first_slots[part.ssd] + slot for slot in part.slots),
                span=Span(part.buffer.offset, aligned(part.nbytes)),
                priority=part.priority,
                on_done=functools.partial(self._has_moved, part),
            )

    def _has_moved(self, part: Part) -> None:
        """Processes the end of a part's transfer. SSD servers may answer after the token is cancelled."""
        with self._changed:
            if part.swap.is_dropped or self._token.is_cancelled:
                self._free(part)
            elif part.at is At.RETURNING:
                self._copy_in(part)
            else:
                self._release_buffer(part)
                part.at = At.SSD
                self._turns.wait(part)
            parts = self._hand_out_buffers()
        self._request(parts)

    # --- inside: all these are called with the lock held --------------------------------------------------------------

    def _line_up(self, swap: SsdSwap) -> None:
        self._turns.begin(swap)
        for part in swap.parts:
            self._turns.wait(part)

    def _hand_out_buffers(self) -> list[Part]:
        """Gives free buffers to the parts whose turn it is; returns those to request from the SSD servers."""
        to_request: list[Part] = []
        while not self._token.is_cancelled and (part := self._turns.first()) is not None:
            buffers = self._buffers.try_acquire(1)
            if not buffers:
                break
            (part.buffer,) = buffers
            if part.at is At.DEVICE:
                part.at = At.LEAVING
                self._copy_out(part)
            else:
                part.at = At.RETURNING
                to_request.append(part)
        return to_request

    def _drop(self, swap: SsdSwap) -> None:
        """Drops a tensor. Parts in transfer are released at the end of the transfer, all others at once."""
        if swap.num_missing:
            self._counter.held_nbytes -= swap.nbytes
        swap.target = None  # now only the caller and copies hold it
        for part in swap.parts:
            if part.at in (At.LEAVING, At.RETURNING):
                self._num_settling += 1
            elif part.at is not At.GONE:
                if part.at is At.DEVICE:
                    self._leave(part)
                self._free(part)
        swap.is_dropped = True
        self._changed.notify_all()

    def _leave(self, part: Part) -> None:
        """Records that a part no longer needs its source."""
        swap = part.swap
        swap.num_on_device -= 1
        self._leaving_nbytes -= part.nbytes
        if swap.num_on_device == 0:
            swap.source = None

    def _free(self, part: Part) -> None:
        """Releases a part's slots and buffer."""
        part.at = At.GONE
        self._slots.give_back(part.ssd, part.slots)
        self._release_buffer(part)
        if part.swap.is_dropped:
            self._num_settling -= 1
            self._changed.notify_all()

    def _release_buffer(self, part: Part) -> None:
        if part.buffer is not None:
            self._buffers.release([part.buffer])
            part.buffer = None

    def _copy_out(self, part: Part) -> None:
        swap = part.swap
        assert swap.source is not None
        assert swap.source_ready is not None
        self._outward.wait(swap.source_ready)
        begun = self._outward.record()
        self._outward.run(functools.partial(copy, self._in_buffer(part), swap.source[part.range]))
        # The callback holds the source, so that its memory is not reused before the copy has read it.
        left = functools.partial(self._has_left, part, swap.source, begun, self._outward.record())
        self._outward.then(left)

    def _copy_in(self, part: Part) -> None:
        swap = part.swap
        assert swap.target is not None
        begun = self._inward.record()
        self._inward.run(functools.partial(copy, swap.target[part.range], self._in_buffer(part)))
        self._inward.then(functools.partial(self._is_back, part, swap.target, begun, self._inward.record()))
        swap.num_to_return -= 1
        if not swap.num_to_return:
            # Another event, so that on a CPU the callbacks have run before a wait for this event ends.
            swap.returned = self._inward.record()
            self._changed.notify_all()

    def _in_buffer(self, part: Part) -> torch.Tensor:
        assert part.buffer is not None
        return self._arena.view(part.buffer.offset, part.nbytes, torch.uint8)

    # --- inside: callbacks of the streams -----------------------------------------------------------------------------

    def _has_left(self, part: Part, source: torch.Tensor, begun: Event, copied: Event) -> None:
        self._note(part, begun, copied, is_out=True)
        with self._changed:
            self._leave(part)
            self._counter.out_nbytes += part.nbytes
            parts = []
            if part.swap.is_dropped or self._token.is_cancelled:
                self._free(part)
            else:
                parts.append(part)
            parts += self._hand_out_buffers()
            self._changed.notify_all()
        self._request(parts)

    def _is_back(self, part: Part, target: torch.Tensor, begun: Event, copied: Event) -> None:
        """Frees a part's slots and buffer. The callback holds `target`, so that its memory is not reused before."""
        self._note(part, begun, copied, is_out=False)
        swap = part.swap
        with self._changed:
            self._counter.in_nbytes += part.nbytes
            swap.num_missing -= 1
            if swap.num_missing == 0 and not swap.is_dropped:
                self._counter.held_nbytes -= swap.nbytes
            self._free(part)
            parts = self._hand_out_buffers()
            self._changed.notify_all()
        self._request(parts)

    def _note(self, part: Part, begun: Event, copied: Event, *, is_out: bool) -> None:
        left_in = part.swap.left_in
        owner = (left_in.step, left_in.block)
        self._watch.moved(owner, begun.time_s(), copied.time_s(), part.nbytes, is_out=is_out)
