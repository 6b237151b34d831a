"""Where activations are while they are away from the device."""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class SwapHandle:
    """Bytes in a store."""

    index: int  # unique within its store
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapCounts:
    """What a store moved, in bytes, since it was made."""

    out_nbytes: int  # left the device
    in_nbytes: int  # came back
    held_nbytes: int  # put and neither back nor dropped
    peak_held_nbytes: int


@dataclass(slots=True)
class SwapCounter:
    """Counts for a store, under whatever lock the store has."""

    out_nbytes: int = 0
    in_nbytes: int = 0
    held_nbytes: int = 0
    peak_held_nbytes: int = 0

    def hold(self, nbytes: int) -> None:
        """So much was put."""
        self.held_nbytes += nbytes
        self.peak_held_nbytes = max(self.peak_held_nbytes, self.held_nbytes)

    @property
    def counts(self) -> SwapCounts:
        """As they are now."""
        return SwapCounts(
            out_nbytes=self.out_nbytes,
            in_nbytes=self.in_nbytes,
            held_nbytes=self.held_nbytes,
            peak_held_nbytes=self.peak_held_nbytes,
        )


class SwapWatch(Protocol):
    """Is told of a store's work, by whichever of its threads did it. Times are those of `time.monotonic`."""

    def owner(self) -> object:
        """What is being computed; asked in each `put` and `get`. Bytes belong to what puts them."""

    def moved(self, owner: object, start_s: float, end_s: float, nbytes: int, *, is_out: bool) -> None:
        """Bytes of an owner have left the device, or come back."""

    def waited(self, owner: object, start_s: float, end_s: float) -> None:
        """What called `put` or `get` had to wait."""


class Unwatched:
    """A SwapWatch that does not look."""

    def owner(self) -> object:
        """See SwapWatch."""
        return None

    def moved(self, owner: object, start_s: float, end_s: float, nbytes: int, *, is_out: bool) -> None:
        """See SwapWatch."""

    def waited(self, owner: object, start_s: float, end_s: float) -> None:
        """See SwapWatch."""


NOTHING_SWAPPED = SwapCounts(out_nbytes=0, in_nbytes=0, held_nbytes=0, peak_held_nbytes=0)


class ActivationStore(Protocol):
    """Holds bytes away from the device. `put` and `prefetch` return before the bytes have moved.

    One thread puts and prefetches; `get` may come from another one. A handle is used up by `get` or by `drop`.
    """

    def put(self, tensor: torch.Tensor) -> SwapHandle:
        """Takes a flat uint8 tensor of the device, which the caller changes no more and need not hold.

        It is read after all that the current stream was given before. May wait for earlier puts, so that what is on
        its way does not pile up on the device.
        """

    def prefetch(self, handle: SwapHandle) -> None:
        """Begins to bring the bytes back, into device memory of their own. They come in the order of the calls."""

    def get(self, handle: SwapHandle) -> torch.Tensor:
        """The bytes on the device, ready for the current stream, in a storage of their own; now the caller's."""

    def drop(self, handle: SwapHandle) -> None:
        """Forgets bytes that nobody needs."""

    @property
    def counts(self) -> SwapCounts:
        """What was moved so far."""
