"""A store of activations in host memory."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from windlass.engine.activations import SwapCounts, SwapHandle, SwapWatch, Unwatched
from windlass.engine.device import Device
from windlass.storage.arena import SlotPool
from windlass.storage.ids import Span


class ActivationMemoryError(RuntimeError):
    """There is no room left for activations that leave the device."""


class ActivationTimeoutError(TimeoutError):
    """A copy of activations did not end in time."""


@dataclass(slots=True)
class _Held:
    """What one handle stands for."""

    spans: list[Span]
    owner: object
    left: "Future[None]"
    back: "Future[torch.Tensor] | None" = None


class HostActivations:
    """Activations in slots of a piece of host memory that its caller owns, moved by one thread each way.

    Slots may lie anywhere, so memory is lost only in the last slot of each put. On a GPU the memory should be pinned.
    """

    def __init__(
        self,
        device: Device,
        memory: torch.Tensor,
        slots: SlotPool,
        *,
        max_leaving_nbytes: int,
        deadline_s: float,
        watch: SwapWatch | None = None,
    ) -> None:
        """`memory`: flat uint8; offsets of `slots` count from its start.

        `max_leaving_nbytes`: bytes on their way out that may still lie on the device; one put is always let through.
        """
        self._device = device
        self._memory = memory
        self._slots = slots
        self._max_leaving_nbytes = max_leaving_nbytes
        self._deadline_s = deadline_s
        self._watch: SwapWatch = watch or Unwatched()
        self._held: dict[SwapHandle, _Held] = {}
        self._changed = threading.Condition()
        self._num_puts = 0
        self._num_dropping = 0
        self._leaving_nbytes = 0
        self._out_nbytes = 0
        self._in_nbytes = 0
        self._held_nbytes = 0
        self._peak_held_nbytes = 0
        self._outward = ThreadPoolExecutor(1, thread_name_prefix="activations-out")
        self._inward = ThreadPoolExecutor(1, thread_name_prefix="activations-in")

    def put(self, tensor: torch.Tensor) -> SwapHandle:
        """See ActivationStore.

        Raises:
            ActivationMemoryError: there are not enough free slots.
            ActivationTimeoutError: earlier puts hang.
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
            self._leaving_nbytes += nbytes
            self._held_nbytes += nbytes
            self._peak_held_nbytes = max(self._peak_held_nbytes, self._held_nbytes)
            left = self._outward.submit(self._copy_out, tensor, spans, owner, self._device.after_now())
            self._held[handle] = _Held(spans, owner, left)
        return handle

    def room_nbytes(self, wanted_nbytes: int) -> int:
        """How much of a put of that size would find room, in whole slots; what is being dropped is waited for.

        Raises:
            ActivationTimeoutError: that hangs.
        """
        num_slots = -(-wanted_nbytes // self._slots.slot_nbytes)
        with self._changed:
            if self._num_free < num_slots:
                self._wait_until(lambda: not self._num_dropping)
            return min(wanted_nbytes, self._num_free * self._slots.slot_nbytes)

    def prefetch(self, handle: SwapHandle, into: torch.Tensor | None = None) -> None:
        """See ActivationStore. `into`: device memory of the same size, for who has some."""
        with self._changed:
            held = self._held[handle]
            if held.back is None:
                target = into
                if target is None:
                    target = torch.empty(handle.nbytes, dtype=torch.uint8, device=self._device.device)
                held.back = self._inward.submit(self._copy_in, target, held, self._device.after_now())

    def get(self, handle: SwapHandle) -> torch.Tensor:
        """See ActivationStore.

        Raises:
            ActivationTimeoutError: the copy hangs. A failed copy raises its own error.
        """
        self.prefetch(handle)
        with self._changed:
            held = self._held.pop(handle)
        assert held.back is not None
        if held.back.done():
            return held.back.result()
        start_s = time.monotonic()
        try:
            return held.back.result(self._deadline_s)
        except TimeoutError as error:
            raise ActivationTimeoutError(
                f"{handle.nbytes} bytes of activations did not come back from host memory within {self._deadline_s:g} "
                "s; the copy is stuck, or the deadline is too short for this machine"
            ) from error
        finally:
            self._watch.waited(start_s, time.monotonic())

    def drop(self, handle: SwapHandle) -> None:
        """See ActivationStore."""
        with self._changed:
            held = self._held.pop(handle)
            self._num_dropping += 1
        # Its slots are free when the copies to and from them are over.
        if held.back is not None:
            held.back.add_done_callback(self._dropped)
        else:
            self._outward.submit(self._release, held.spans, handle.nbytes).add_done_callback(self._dropped)

    @property
    def counts(self) -> SwapCounts:
        """See ActivationStore."""
        with self._changed:
            return SwapCounts(
                out_nbytes=self._out_nbytes,
                in_nbytes=self._in_nbytes,
                held_nbytes=self._held_nbytes,
                peak_held_nbytes=self._peak_held_nbytes,
            )

    def close(self) -> None:
        """Ends the threads, after what they were given."""
        self._outward.shutdown()
        self._inward.shutdown()

    def _take_slots(self, nbytes: int) -> list[Span]:
        num_slots = -(-nbytes // self._slots.slot_nbytes)
        spans = self._slots.try_acquire(num_slots)
        if len(spans) < num_slots and self._num_dropping:
            self._wait_until(lambda: not self._num_dropping)
            spans = self._slots.try_acquire(num_slots)
        if len(spans) < num_slots:
            raise ActivationMemoryError(
                f"no room for {nbytes} bytes of activations: {num_slots} slots of {self._slots.slot_nbytes} bytes are "
                f"needed, and {self._slots.statistics.in_use_nbytes} of {self._slots.statistics.held_nbytes} bytes are "
                "in use; raise host_activation_nbytes of the placement, or let fewer layers swap"
            )
        return sorted(spans, key=lambda span: span.offset)

    @property
    def _num_free(self) -> int:
        statistics = self._slots.statistics
        return (statistics.held_nbytes - statistics.in_use_nbytes) // self._slots.slot_nbytes

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        if condition():
            return
        start_s = time.monotonic()
        is_met = self._changed.wait_for(condition, self._deadline_s)
        self._watch.waited(start_s, time.monotonic())
        if not is_met:
            raise ActivationTimeoutError(
                f"{self._leaving_nbytes} bytes of activations did not reach host memory within {self._deadline_s:g} s; "
                "the copy is stuck, or the deadline is too short for this machine"
            )

    def _copy_out(self, tensor: torch.Tensor, spans: list[Span], owner: object, wait: Callable[[], None]) -> None:
        try:
            wait()
            start_s = time.monotonic()
            for host, device in _pieces(self._memory, spans, tensor):
                self._device.copy_out(host, device)
            self._watch.moved(owner, start_s, time.monotonic(), tensor.nbytes, is_out=True)
        finally:
            with self._changed:
                self._leaving_nbytes -= tensor.nbytes
                self._out_nbytes += tensor.nbytes
                self._changed.notify_all()

    def _copy_in(self, target: torch.Tensor, held: _Held, wait: Callable[[], None]) -> torch.Tensor:
        try:
            held.left.result(self._deadline_s)
            wait()
            start_s = time.monotonic()
            for host, device in _pieces(self._memory, held.spans, target):
                self._device.copy_in(device, host)
            self._watch.moved(held.owner, start_s, time.monotonic(), target.nbytes, is_out=False)
            with self._changed:
                self._in_nbytes += target.nbytes
            return target
        finally:
            if held.left.done():  # else the copy that hangs may still write there
                self._release(held.spans, target.nbytes)

    def _dropped(self, done: "Future[Any]") -> None:
        with self._changed:
            self._num_dropping -= 1
            self._changed.notify_all()

    def _release(self, spans: list[Span], nbytes: int) -> None:
        self._slots.release(spans)
        with self._changed:
            self._held_nbytes -= nbytes


def _pieces(memory: torch.Tensor, spans: list[Span], tensor: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of equal size, host and device: one for each run of neighbouring slots. `spans` are in order."""
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
