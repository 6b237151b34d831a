"""The last accesses to each byte of the device's and the host's memory."""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.support.races.clocks import Agent, Clock


@dataclass(frozen=True, slots=True, eq=False)
class Access:
    """A read or a write of an agent."""

    agent: Agent
    period: int
    what: str  # the operator, or another name of the work
    place: str  # of the code that queued it

    @classmethod
    def now(cls, agent: Agent, what: str, place: str) -> "Access":
        """Returns an access in the agent's present period."""
        return cls(agent, agent.period, what, place)

    def is_before(self, clock: Clock) -> bool:
        """Checks whether the access is over at a point."""
        return clock.known.get(self.agent.number, 0) >= self.period

    def was_meant_before(self, clock: Clock) -> bool:
        """Checks whether it would be over, had no wait been left out."""
        return clock.intended.get(self.agent.number, 0) >= self.period

    def __str__(self) -> str:
        return f"{self.what} by {self.agent.name} at {self.place}"


@dataclass(slots=True, eq=False)
class Cell:
    """A range of bytes that were always accessed together."""

    stop: int
    write: Access | None = None
    reads: dict[int, Access] = field(default_factory=dict)  # the last of each agent since the write
    released: Access | None = None  # the bytes belong to a slot that is free

    def accesses(self) -> Iterator[Access]:
        """Yields the last write and all reads since."""
        if self.write is not None:
            yield self.write
        yield from self.reads.values()

    def split(self, at: int) -> "Cell":
        """Cuts the cell; returns the later part."""
        later = Cell(self.stop, self.write, self.reads.copy(), self.released)
        self.stop = at
        return later


class Region:
    """A storage or an arena: cells in the order of their bytes, without those that were never accessed."""

    def __init__(self, name: str, *, on_device: Agent | None = None, allocated_by: Agent | None = None) -> None:
        self.name = name
        self.on_device = on_device  # the default stream of the device; None: host memory
        self.allocated_by = allocated_by  # the stream whose allocations may get the memory once it is freed
        self.hold_dropped: str | None = None  # the name of a hold that a test has left out
        self.let_go = Clock()  # of those that held the memory for their copies
        self.installed: list[tuple[int, int]] = []  # ranges that are a module's params now
        self._starts: list[int] = []
        self._cells: list[Cell] = []

    def cells(self, start: int, stop: int) -> list[Cell]:
        """Returns the cells of a range, cut at its ends."""
        starts, cells = self._starts, self._cells
        index = bisect.bisect_right(starts, start) - 1
        if index >= 0 and start < cells[index].stop:
            if starts[index] < start:
                self._insert(index + 1, start, cells[index].split(start))
                index += 1
        else:
            index += 1
        found, at = [], start
        while at < stop:
            if index == len(starts) or starts[index] > at:
                end = stop if index == len(starts) else min(stop, starts[index])
                self._insert(index, at, Cell(end))
            elif cells[index].stop > stop:
                self._insert(index + 1, stop, cells[index].split(stop))
            found.append(cells[index])
            at = cells[index].stop
            index += 1
        return found

    def all_cells(self) -> list[tuple[int, Cell]]:
        """Returns the cells of all bytes that were accessed, each with its first byte."""
        return list(zip(self._starts, self._cells, strict=True))

    def _insert(self, index: int, start: int, cell: Cell) -> None:
        self._starts.insert(index, start)
        self._cells.insert(index, cell)
