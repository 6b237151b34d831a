"""A store of activations in host memory."""

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from windlass.amounts import bytes_text
from windlass.engine.activations.store import SwapCounter, SwapCounts, SwapHandle, SwapWatch, Unwatched, wait_on_device
from windlass.engine.device import Device, Event, TensorArena, copy
from windlass.storage.ids import Span
from windlass.storage.memory import SlotPool


class ActivationMemoryError(RuntimeError):
    """The host memory for activations is full."""


@dataclass(slots=True)
class _Held:
    """The state of the bytes behind one handle."""

    owner: object
    left: Event  # the copy to host memory is over
    back: tuple[torch.Tensor, Event] | None = None  # target on the device, and the event that ends the copy into it


class HostActivations:
    """Stores activations in slots of host memory that the caller owns. One stream copies in each direction.

    The slots of a put need not be adjacent, so only its last slot may be partly unused. On a GPU the memory should be
    pinned. No thread waits for a copy on a GPU, except a `put` that would exceed `max_leaving_nbytes`.
    """

    def __init__(
        self,
        device: Device,
        arena: TensorArena,
        slots: SlotPool,
        *,
        max_leaving_nbytes: int,
        watch: SwapWatch | None = None,
    ) -> None:
        """Opens the two streams. The device's token ends their threads, and waits for copies and for slots.

        Args:
            device: the device that the activations leave.
            arena: the host memory.
            slots: the parts of `arena` that may be used.
            max_leaving_nbytes: limit of the bytes in flight to the host; a single larger put is still accepted.
            watch: is notified of each copy and each wait.
        """
        self._device = device
        self._arena = arena
        self._slots = slots
        self._max_leaving_nbytes = max_leaving_nbytes
        self._watch: SwapWatch = watch or Unwatched()
        self._held: dict[SwapHandle, _Held] = {}  # from `put` until `get` or `drop`
        self._taken: dict[SwapHandle, list[Span]] = {}  # from `put` until the last copy is over
        self._changed = threading.Condition()
        self._num_puts = 0
        self._num_returning = 0  # handles whose slots become free when their copies are over
        self._leaving_nbytes = 0
        self._counter = SwapCounter()
        self._outward = device.open_stream()
        self._inward = device.open_stream()

    def put(self, tensor: torch.Tensor) -> SwapHandle:
        """See ActivationStore.

        Raises:
            ActivationMemoryError: there are not enough free slots.
            TimeoutError: earlier puts hang.
        """
        nbytes = tensor.nbytes
        owner = self._watch.owner()
        with self._changed:
            self._wait_until(
                lambda: not self._leaving_nbytes or self._leaving_nbytes + nbytes <= self._max_leaving_nbytes
            )
            spans = self._take_slots(nbytes)
            handle = SwapHandle(self._num_puts, nbytes)
            self._num_puts += 1
            self._taken[handle] = spans
            self._leaving_nbytes += nbytes
            self._counter.hold(nbytes)
            self._outward.wait(self._device.compute.record())
            begun = self._outward.record()
            for host, device in _pieces(self._arena.memory, spans, tensor):
                self._outward.run(functools.partial(copy, host, device))
            copied = self._outward.record()
            # The callback holds the tensor, so that its memory is not reused before the copy has read it.
            self._outward.then(functools.partial(self._has_left, tensor, owner, begun, copied))
            # A second event, so that on a CPU the callback has run before a wait for this event ends.
            self._held[handle] = _Held(owner, self._outward.record())
        return handle

    def room_nbytes(self, wanted_nbytes: int) -> int:
        """Returns how many bytes of a put of that size would fit, in whole slots. Waits for slots that are being freed.

        Raises:
            TimeoutError: the wait timed out.
        """
        num_slots = -(-wanted_nbytes // self._slots.slot_nbytes)
        with self._changed:
            self._wait_until(lambda: self._num_free >= num_slots or not self._num_returning)
            return min(wanted_nbytes, self._num_free * self._slots.slot_nbytes)

    def prefetch(self, handle: SwapHandle, into: torch.Tensor | None = None) -> None:
        """See ActivationStore. `into`: device memory of the same size to copy into, else new memory."""
        with self._changed:
            held = self._held[handle]
            if held.back is not None:
                return
            target = self._device.empty(handle.nbytes) if into is None else into
            self._num_returning += 1
            self._inward.wait(held.left)
            self._inward.wait(self._device.compute.record())
            begun = self._inward.record()
            for host, device in _pieces(self._arena.memory, self._taken[handle], target):
                self._inward.run(functools.partial(copy, device, host))
            copied = self._inward.record()
            self._inward.then(functools.partial(self._is_back, handle, target, held.owner, begun, copied))
            held.back = target, self._inward.record()

    def get(self, handle: SwapHandle) -> torch.Tensor:
        """See ActivationStore.

        Raises:
            TimeoutError: the copy hangs. A failed copy raises its own error.
        """
        self.prefetch(handle)
        with self._changed:
            held = self._held.pop(handle)
        assert held.back is not None
        target, copied = held.back
        try:
            wait_on_device(self._device, self._watch, copied)
        except TimeoutError as error:
            raise TimeoutError(
                f"{error}: {bytes_text(handle.nbytes)} of activations did not come back from host memory"
            ) from error
        return target

    def drop(self, handle: SwapHandle) -> None:
        """See ActivationStore."""
        with self._changed:
            held = self._held.pop(handle)
            if held.back is None:
                self._num_returning += 1
                self._outward.then(functools.partial(self._release, handle))

    @property
    def counts(self) -> SwapCounts:
        """See ActivationStore."""
        with self._changed:
            return self._counter.counts

    def close(self) -> None:
        """Releases all slots. Call it when the threads of the streams have ended."""
        with self._changed:
            for handle in list(self._taken):
                self._num_returning += 1
                self._release(handle)
            self._held.clear()

    @property
    def _num_free(self) -> int:
        statistics = self._slots.statistics
        return (statistics.held_nbytes - statistics.in_use_nbytes) // self._slots.slot_nbytes

    def _take_slots(self, nbytes: int) -> list[Span]:
        num_slots = -(-nbytes // self._slots.slot_nbytes)
        self._wait_until(lambda: self._num_free >= num_slots or not self._num_returning)
        spans = self._slots.try_acquire(num_slots)
        if len(spans) < num_slots:
            raise ActivationMemoryError(
                f"no room for {bytes_text(nbytes)} of activations: {num_slots} slots of "
                f"{bytes_text(self._slots.slot_nbytes)} are needed, and "
                f"{bytes_text(self._slots.statistics.in_use_nbytes)} of "
                f"{bytes_text(self._slots.statistics.held_nbytes)} are in use; raise "
                "host_activation_nbytes of the placement, or let fewer layers swap"
            )
        return sorted(spans, key=lambda span: span.offset)

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        if condition():
            return
        start_s = time.monotonic()
        try:
            self._device.token.wait_for(
                self._changed,
                condition,
                lambda: f"{bytes_text(self._leaving_nbytes)} of activations to reach host memory; the copy is stuck",
            )
        finally:
            self._watch.waited(self._watch.owner(), start_s, time.monotonic())

    def _has_left(self, tensor: torch.Tensor, owner: object, begun: Event, copied: Event) -> None:
        self._watch.moved(owner, begun.time_s(), copied.time_s(), tensor.nbytes, is_out=True)
        with self._changed:
            self._leaving_nbytes -= tensor.nbytes
            self._counter.out_nbytes += tensor.nbytes
            self._changed.notify_all()

    def _is_back(self, handle: SwapHandle, target: torch.Tensor, owner: object, begun: Event, copied: Event) -> None:
        """Frees the slots. The callback holds `target` until here, so that its memory is not reused during the copy."""
        self._watch.moved(owner, begun.time_s(), copied.time_s(), target.nbytes, is_out=False)
        with self._changed:
            self._counter.in_nbytes += target.nbytes
        self._release(handle)

    def _release(self, handle: SwapHandle) -> None:
        """Frees the slots of a handle. No copy may still read or write them."""
        with self._changed:
            self._slots.release(self._taken.pop(handle))
            self._counter.held_nbytes -= handle.nbytes
            self._num_returning -= 1
            self._changed.notify_all()


def _pieces(memory: torch.Tensor, spans: list[Span], tensor: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns pairs (host, device) of equal size, one for each run of adjacent slots. `spans` are sorted by offset."""
    runs: list[list[int]] = []
    for span in spans:
        if runs and runs[-1][1] == span.offset:
            runs[-1][1] += span.nbytes
        else:
            runs.append([span.offset, span.offset + span.nbytes])
    pieces, start = [], 0
    for first, past_last in runs:
        nbytes = min(past_last - first, tensor.nbytes - start)
        pieces.append((memory[first : first + nbytes], tensor[start : start + nbytes]))
        start += nbytes
    return pieces
