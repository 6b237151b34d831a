"""Tensors on their way to the SSDs and back, in parts that take turns with the staging buffers. No I/O, no clock."""

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from windlass.actors.activations.scratch_slots import ScratchSlots
from windlass.engine.memory_plan import ACTIVATION_PART_SLOTS
from windlass.storage.ids import BlockIndex, Span, Step

if TYPE_CHECKING:  # the simulator swaps no tensors
    import torch


class Moment(NamedTuple):
    """An operation of the block loop."""

    step: Step = Step(0)
    op: int = 0
    block: BlockIndex = BlockIndex(0)


class At(Enum):
    """Where a part is."""

    DEVICE = auto()  # waits for a buffer
    LEAVING = auto()  # has one: is copied there, and written from there
    SSD = auto()
    RETURNING = auto()  # has a buffer: is read into it, and copied from there
    GONE = auto()  # back, or dropped: holds nothing


@dataclass(slots=True, eq=False)
class Part:
    """Some slots' worth of a tensor, on one SSD."""

    swap: "SsdSwap"
    range: slice  # of the tensor, in bytes
    ssd: int
    slots: tuple[int, ...]
    at: At = At.DEVICE
    buffer: Span | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return int(self.range.stop - self.range.start)

    @property
    def asked_in(self) -> Moment:
        """The operation for which the SSD is asked to move it."""
        moment = self.swap.wanted_in if self.at is At.RETURNING else self.swap.left_in
        assert moment is not None, "what returns is wanted"
        return moment

    @property
    def priority(self) -> tuple[int, int]:
        """For the SSD. The operation that needs the bytes is running or comes next: its params are no more urgent. What
        leaves has until the next operation, whose params come first where they were asked for before.
        """
        step, op, _ = self.asked_in
        # Params of a step are read as those of the step before.
        return (step - 1, op if self.at is At.RETURNING else op + 1)


@dataclass(slots=True, eq=False)
class SsdSwap:
    """A tensor that was put; nothing in it is for its owner."""

    nbytes: int
    left_in: Moment
    source: "torch.Tensor | None" = None  # until all of it has left the device
    source_ready: Callable[[], None] = lambda: None  # returns when it may be read
    wanted_in: Moment | None = None  # since it is to come back
    target: "torch.Tensor | None" = None  # since then
    target_ready: Callable[[], None] = lambda: None
    turn: int = 0  # since then
    parts: list[Part] = field(default_factory=list)
    num_on_device: int = 0  # parts that have not left it
    num_missing: int = 0  # parts that are not back
    is_demanded: bool = False
    is_dropped: bool = False
    error: Exception | None = None


class BufferQueue:
    """Who gets the next free buffer: first what is being waited for, then what is to leave the device, which is in the
    way there, then what is read ahead; each in the order of the calls.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        # Heaps of (turn, place in the tensor, number, part). Parts that have gone on since count no more.
        self._demanded: list[tuple[int, int, int, Part]] = []
        self._leaving: list[tuple[int, int, int, Part]] = []
        self._ahead: list[tuple[int, int, int, Part]] = []

    def begin(self, swap: SsdSwap) -> None:
        """What is to be done with a tensor next is done after all that was begun before."""
        swap.turn = next(self._numbers)

    def wait(self, part: Part) -> None:
        """It waits for a buffer, if it can use one where it is."""
        if part.at is At.DEVICE:
            self._push(self._leaving, part)
        elif part.at is At.SSD and part.swap.wanted_in is not None:
            self._push(self._demanded if part.swap.is_demanded else self._ahead, part)

    def first(self) -> Part | None:
        """Whose turn it is; the same until it goes on."""
        for waiting, at in ((self._demanded, At.SSD), (self._leaving, At.DEVICE), (self._ahead, At.SSD)):
            while waiting and waiting[0][-1].at is not at:
                heapq.heappop(waiting)
            if waiting:
                return waiting[0][-1]
        return None

    def _push(self, waiting: list[tuple[int, int, int, Part]], part: Part) -> None:
        heapq.heappush(waiting, (part.swap.turn, part.range.start, next(self._numbers), part))


def slots_of_part(num_staged: int, num_ssds: int) -> int:
    """How many slots' worth a part is at most, where so many slots are for staging.

    Each SSD moves one part while it is asked for the next, and one is copied each way.
    """
    return max(1, min(ACTIVATION_PART_SLOTS, num_staged // (2 * num_ssds + 2)))


def cut(swap: SsdSwap, slots: ScratchSlots, slot_nbytes: int, part_slots: int) -> Iterator[Part]:
    """The parts of a tensor, each in slots that it takes."""
    start = 0
    while start < swap.nbytes:
        num_missing = -(-(swap.nbytes - start) // slot_nbytes)
        ssd, taken = slots.take(min(num_missing, part_slots))
        stop = min(start + len(taken) * slot_nbytes, swap.nbytes)
        yield Part(swap, slice(start, stop), ssd, taken)
        start = stop
