"""Vector clocks of host threads, streams and SSD transfers.

Source: Flanagan and Freund, FastTrack: efficient and precise dynamic race detection, section 2.
"""

import bisect
from dataclasses import dataclass, field

# What a clock knows: by agent, the last of its periods that came before.
Periods = dict[int, int]


@dataclass(slots=True)
class Clock:
    """All that came before a point. `known` follows from all waits that were made.

    `intended` follows also from those that a test has dropped.
    """

    known: Periods = field(default_factory=dict)
    intended: Periods = field(default_factory=dict)

    def copy(self) -> "Clock":
        """Returns a snapshot."""
        return Clock(self.known.copy(), self.intended.copy())

    def join(self, other: "Clock", *, dropped: bool = False) -> None:
        """Adds what came before another point. `dropped`: the wait for that point was left out."""
        if not dropped:
            _join(self.known, other.known)
        _join(self.intended, other.intended)

    def join_hosts(self, other: "Clock") -> None:
        """Adds only what is known of host threads, because two threads that use one lock do not wait for a device."""
        _join(self.known, {agent: period for agent, period in other.known.items() if agent > 0})
        _join(self.intended, {agent: period for agent, period in other.intended.items() if agent > 0})

    def forgotten(self) -> "Clock":
        """Returns the clock of an event whose record was left out."""
        return Clock({}, self.intended.copy())


def _join(periods: Periods, others: Periods) -> None:
    for agent, period in others.items():
        if periods.get(agent, 0) < period:
            periods[agent] = period


class Agent:
    """A host thread, a stream, or a transfer of an SSD: its work has an order. Streams have negative numbers."""

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.default = self  # of a stream: the default stream of its device
        self.period = 1
        self.clock = Clock({number: 1}, {number: 1})
        self._ends: list[int] = []  # the periods that ended with an event, and the places of these events
        self._places: list[str] = []

    def renamed(self, name: str) -> "Agent":
        """Returns an agent that goes on where this one has ended."""
        agent = Agent(self.number, name)
        agent.period = self.period
        agent.clock = Clock({self.number: self.period}, {self.number: self.period})
        return agent

    @property
    def is_stream(self) -> bool:
        """True for work that the host does not wait for."""
        return self.number < 0

    def hand_on(self, place: str | None = None) -> Clock:
        """Ends a period; returns what another agent knows that waits for its end. `place`: where it was recorded."""
        clock = self.clock.copy()
        if place is not None:
            self._ends.append(self.period)
            self._places.append(place)
        self.period += 1
        self.clock.known[self.number] = self.clock.intended[self.number] = self.period
        return clock

    def end_of(self, period: int) -> str | None:
        """Returns where the first event after a period was recorded; None if there is none."""
        index = bisect.bisect_left(self._ends, period)
        return self._places[index] if index < len(self._places) else None
