"""The interface of a store that holds activations while they are away from the device."""

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from windlass.engine.device import Device, Event


@dataclass(frozen=True, slots=True)
class SwapHandle:
    """Identifies the bytes of one `put` in a store."""

    index: int  # unique within its store
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapCounts:
    """The bytes that a store has moved and held since its creation."""

    out_nbytes: int  # left the device
    in_nbytes: int  # came back
    held_nbytes: int  # now in the store: put, and neither returned nor dropped
    peak_held_nbytes: int


@dataclass(slots=True)
class SwapCounter:
    """Mutable counts of a store. The store's own lock protects them."""

    out_nbytes: int = 0
    in_nbytes: int = 0
    held_nbytes: int = 0
    peak_held_nbytes: int = 0

    def hold(self, nbytes: int) -> None:
        """Adds the bytes of one put and updates the peak."""
        self.held_nbytes += nbytes
        self.peak_held_nbytes = max(self.peak_held_nbytes, self.held_nbytes)

    @property
    def counts(self) -> SwapCounts:
        """A snapshot of the counts."""
        return SwapCounts(
            out_nbytes=self.out_nbytes,
            in_nbytes=self.in_nbytes,
            held_nbytes=self.held_nbytes,
            peak_held_nbytes=self.peak_held_nbytes,
        )


class SwapWatch(Protocol):
    """Receives a store's measurements, on any of the store's threads. Times are those of `time.monotonic`."""

    def owner(self) -> object:
        """Returns the operation that is being computed. Each `put` and `get` calls it; bytes belong to their `put`."""

    def moved(self, owner: object, start_s: float, end_s: float, nbytes: int, *, is_out: bool) -> None:
        """Records a copy of an owner's bytes: from the device if `is_out`, else back to it."""

    def waited(self, owner: object, start_s: float, end_s: float) -> None:
        """Records that a call of `put` or `get` had to wait."""


class Unwatched:
    """A SwapWatch that ignores all measurements."""

    def owner(self) -> object:
        """See SwapWatch."""
        return None

    def moved(self, owner: object, start_s: float, end_s: float, nbytes: int, *, is_out: bool) -> None:
        """See SwapWatch."""

    def waited(self, owner: object, start_s: float, end_s: float) -> None:
        """See SwapWatch."""


def wait_on_device(device: Device, watch: SwapWatch, copied: Event) -> None:
    """Makes later work of the compute stream wait for a copy, and reports how long the stream waited.

    Raises the errors of `Stream.wait`.
    """
    if copied.is_over():
        return
    asked = device.compute.record()
    device.compute.wait(copied)
    device.compute.then(partial(_tell_wait, watch, watch.owner(), asked, device.compute.record()))


def _tell_wait(watch: SwapWatch, owner: object, asked: Event, granted: Event) -> None:
    watch.waited(owner, asked.time_s(), granted.time_s())


NOTHING_SWAPPED = SwapCounts(out_nbytes=0, in_nbytes=0, held_nbytes=0, peak_held_nbytes=0)


class ActivationStore(Protocol):
    """Holds bytes away from the device. `put` and `prefetch` return before the bytes have moved.

    One thread calls `put` and `prefetch`; another one may call `get`. A handle is invalid after `get` or `drop`.
    """

    def put(self, tensor: torch.Tensor) -> SwapHandle:
        """Copies a flat uint8 tensor from the device. The caller must not change it afterwards and need not hold it.

        The copy begins after all work that is queued on the current stream. The call may wait for earlier puts,
        because the bytes in flight still occupy device memory.
        """

    def prefetch(self, handle: SwapHandle) -> None:
        """Starts to copy the bytes back into new device memory. Copies run in the order of the calls."""

    def get(self, handle: SwapHandle) -> torch.Tensor:
        """Returns the bytes on the device, ready for the current stream, in a storage that the caller owns."""

    def drop(self, handle: SwapHandle) -> None:
        """Discards the bytes."""

    @property
    def counts(self) -> SwapCounts:
        """A snapshot of the bytes moved and held so far."""
