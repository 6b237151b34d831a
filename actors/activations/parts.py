"""Splits offloaded tensors into parts and decides which part gets the next staging buffer. No I/O, no clock."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from windlass.actors.activations.scratch_slots import ScratchSlots
from windlass.engine.memory_plan import ACTIVATION_PART_SLOTS
from windlass.storage.ids import BlockIndex, Span, Step
from windlass.storage.priority_queue import PriorityQueue

if TYPE_CHECKING:  # the simulator uses this module without torch
    import torch

    from windlass.engine.device import Event


# A write goes before the updates of blocks that are needed later than so many operations after its own one. With less,
# updates lack the SSDs that writes could leave to them; with more, compute waits for writes.
_OPERATIONS_UNTIL_WRITTEN = 8
_READ = 2**31  # more than the number of a block


class Moment(NamedTuple):
    """An operation of the block loop."""

    step: Step = Step(0)
    block: BlockIndex = BlockIndex(0)


class At(Enum):
    """The places of a part."""

    DEVICE = auto()  # waits for a buffer
    LEAVING = auto()  # has a buffer: is copied into it, and written from it to the SSD
    SSD = auto()
    RETURNING = auto()  # has a buffer: is read from the SSD into it, and copied from it to the device
    GONE = auto()  # back on the device, or dropped; holds neither slots nor a buffer


@dataclass(slots=True, eq=False)
class Part:
    """A part of a tensor, in slots of one SSD."""

    swap: "SsdSwap"
    range: slice  # of the tensor, in bytes
    ssd: int
    slots: tuple[int, ...]
    at: At = At.DEVICE
    buffer: Span | None = None

    @property
    def nbytes(self) -> int:
        """The size of the part in bytes."""
        return int(self.range.stop - self.range.start)

    @property
    def asked_in(self) -> Moment:
        """The operation for which the part is transferred."""
        moment = self.swap.wanted_in if self.at is At.RETURNING else self.swap.left_in
        assert moment is not None, "a part returns only after a prefetch"
        return moment

    @property
    def priority(self) -> tuple[int, int]:
        """The priority of the SSD request.

        A write is as urgent as the update of a block some operations later: until then, compute does not wait for the
        memory that the part occupies. A read comes after all of them, as it does in a step, and before the updates that
        follow from its own step.
        """
        # The params that a step uses are stored under the step before, as are the states that they follow from.
        step, block = self.asked_in
        return (step - 1, _READ if self.at is At.RETURNING else block + _OPERATIONS_UNTIL_WRITTEN)


@dataclass(slots=True, eq=False)
class SsdSwap:
    """An offloaded tensor. The caller of `put` uses it only as a handle."""

    nbytes: int
    left_in: Moment  # the operation that offloaded it
    source: "torch.Tensor | None" = None  # None once all of it has left the device
    source_ready: "Event | None" = None  # from then on the source may be read; None in the simulator
    wanted_in: Moment | None = None  # the operation that prefetched it; None before that
    target: "torch.Tensor | None" = None  # set by the prefetch
    turn: int = 0  # number of the last put or prefetch, in the order of the calls
    parts: list[Part] = field(default_factory=list)
    num_on_device: int = 0  # parts that have not left the device
    num_missing: int = 0  # parts that are not back on the device
    num_to_return: int = 0  # parts whose copies back are not queued
    returned: "Event | None" = None  # after the last copy back; None until it is queued
    is_demanded: bool = False  # the caller is waiting for it
    is_dropped: bool = False


class BufferQueue:
    """The queue of parts that wait for a staging buffer.

    Parts that the caller waits for go first. Next are parts that leave the device, because they occupy its memory.
    Prefetched parts are last. Each group is in the order of the calls.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        # By turn and place in the tensor. An entry is stale once its part has changed its place.
        self._demanded: PriorityQueue[Part] = PriorityQueue()
        self._leaving: PriorityQueue[Part] = PriorityQueue()
        self._ahead: PriorityQueue[Part] = PriorityQueue()
        # With the place of parts that are not stale.
        self._groups = ((self._demanded, At.SSD), (self._leaving, At.DEVICE), (self._ahead, At.SSD))

    def begin(self, swap: SsdSwap) -> None:
        """Gives a tensor the next turn: its parts queue behind those of all earlier calls."""
        swap.turn = next(self._numbers)

    def wait(self, part: Part) -> None:
        """Queues a part for a buffer, if it needs one in its present place."""
        if part.at is At.DEVICE:
            self._leaving.push((part.swap.turn, part.range.start), part)
        elif part.at is At.SSD and part.swap.wanted_in is not None:
            waiting = self._demanded if part.swap.is_demanded else self._ahead
            waiting.push((part.swap.turn, part.range.start), part)

    def first(self) -> Part | None:
        """Returns the next part, without removing it; None if none waits. It stays first until its place changes."""
        for waiting, at in self._groups:
            while (part := waiting.first_or_none) is not None:
                if part.at is at:
                    return part
                waiting.pop()
        return None


def slots_of_part(num_staged: int, num_ssds: int) -> int:
    """Returns the largest number of slots in a part, for `num_staged` staging slots.

    There must be buffers for two parts per SSD, one in transfer and one queued, and for one copy in each direction.
    """
    return max(1, min(ACTIVATION_PART_SLOTS, num_staged // (2 * num_ssds + 2)))


def cut(swap: SsdSwap, slots: ScratchSlots, slot_nbytes: int, part_slots: int) -> Iterator[Part]:
    """Yields the parts of a tensor and acquires scratch slots for each."""
    start = 0
    while start < swap.nbytes:
        num_missing = -(-(swap.nbytes - start) // slot_nbytes)
        ssd, taken = slots.take(min(num_missing, part_slots))
        stop = min(start + len(taken) * slot_nbytes, swap.nbytes)
        yield Part(swap, slice(start, stop), ssd, taken)
        start = stop
