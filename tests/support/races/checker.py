"""The race checker: follows all waits, and compares each access with those that no wait has ordered."""

import _thread
import contextlib
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType

from tests.support.races.clocks import Agent, Clock
from tests.support.races.memory import Access, Cell, Region

ROOT = Path(__file__).parents[3]
_PACKAGE = f"{ROOT}/src/windlass/"
# Modules below the callers whose places say more.
INNER = ("engine/device/cuda_streams.py", "engine/device/device.py", "engine/device/streams.py")


class Kind(StrEnum):
    """The kinds of reports."""

    RACE = "unordered conflicting accesses"
    USE_AFTER_FREE = "memory is freed while a stream may still use it"
    EARLY_RELEASE = "host memory is released before its last transfer has ended"
    RELEASED_SLOT = "a released slot is used"
    HOST_READ = "the host reads before the event"
    INSTALLED = "params are changed while they are installed"
    EVENT_TIME = "the time of an event is read before the event is over"
    HOST_WAIT = "a thread waits for the device outside of the listed places"


@dataclass(frozen=True, slots=True)
class Report:
    """A fault. `missing` is the name of the wait, record, callback or hold that was left out, if that is known."""

    kind: Kind
    where: str  # the memory with its bytes, or the thread
    later: str
    earlier: str = ""
    hint: str = ""
    missing: str | None = None

    def __str__(self) -> str:
        lines = [f"{self.kind}: {self.where}", f"  {self.later}"]
        lines += [f"  is not ordered after {self.earlier}"] if self.earlier else []
        lines += [f"  {self.hint}"] if self.hint else []
        lines += [f"  missing: {self.missing}"] if self.missing else []
        return "\n".join(lines)


def places(frame: FrameType | None) -> Iterator[tuple[str, str]]:
    """Yields the places in the product, innermost first: each with its path and line, and its function."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_PACKAGE):
            yield f"{name[len(_PACKAGE) :]}:{frame.f_lineno}", frame.f_code.co_qualname
        frame = frame.f_back


def place_of(frame: FrameType | None, skipped: tuple[str, ...] = ()) -> tuple[str, str]:
    """Returns the innermost place that is not in a skipped module."""
    found = (place for place in places(frame) if not place[0].startswith(skipped))
    return next(found, ("a test", ""))


class _Context(threading.local):
    """The agents of the calling thread: itself, and the streams and transfers for which it works now."""

    def __init__(self) -> None:
        self.stack: list[Agent] = []
        self.dropping: str | None = None  # the name of what is left out in the present call
        self.is_inside = False  # the checker itself works


class RaceChecker:
    """All agents, all memory, and the reports of one run. Thread-safe."""

    def __init__(self, *, host_waits: Sequence[str] = ()) -> None:
        """`host_waits`: the functions that may wait for the device."""
        self.reports: list[Report] = []
        self.arena: Region | None = None  # the region whose slots pools hand out
        self.num_accesses = 0
        self.dropped: str | None = None  # the name of what this run leaves out
        self.num_dropped = 0
        self._host_waits = frozenset(host_waits)
        self._known: set[tuple[str, ...]] = set()
        # Reentrant, and not one of those that are followed.
        self.lock = _thread.RLock()
        self.context = _Context()
        self._num_agents = 0
        self._idle: dict[Agent, int] = {}  # of transfers that are over, with the period of their last access
        self._freed: deque[tuple[Region, Clock, str]] = deque()

    # --- agents -----------------------------------------------------------------------------------------------------

    def new_agent(self, name: str, *, is_stream: bool = False) -> Agent:
        """Creates an agent."""
        with self.lock:
            self._num_agents += 1
            return Agent(-self._num_agents if is_stream else self._num_agents, name)

    def begin_transfer(self, name: str) -> Agent:
        """Returns the agent of a transfer that the calling thread requests.

        Clocks would grow with each new agent. So it is one of an earlier transfer that the thread knows to be over.
        """
        with self.lock:
            known = self.host.clock.known
            agent = next((old for old, last in self._idle.items() if known.get(old.number, 0) >= last), None)
            if agent is None:
                agent = self.new_agent(name)
            else:
                del self._idle[agent]
                agent = agent.renamed(name)
            agent.clock.join(self.host.hand_on())
            return agent

    def end_transfer(self, agent: Agent, last: int) -> None:
        """Notes that a transfer is reported. `last`: the period of its last access."""
        with self.lock:
            agent.hand_on()
            self._idle[agent] = last

    @property
    def host(self) -> Agent:
        """The agent of the calling thread, or of the transfer whose end it reports."""
        stack = self.context.stack
        if not stack:
            # Not `current_thread`, because a thread that starts is not known yet.
            thread = threading._active.get(_thread.get_ident())  # type: ignore[attr-defined]
            stack.append(self.new_agent(thread.name if thread is not None else "a new thread"))
        return next(agent for agent in reversed(stack) if not agent.is_stream)

    @property
    def current(self) -> Agent:
        """The agent that does the thread's present work."""
        return self.context.stack[-1] if self.context.stack else self.host

    @contextlib.contextmanager
    def acting_as(self, agent: Agent) -> Iterator[None]:
        """Lets the thread work for an agent. What a stream does comes after what its host thread has done."""
        if agent.is_stream:
            with self.lock:
                agent.clock.join(self.host.clock)
        self.context.stack.append(agent)
        try:
            yield
        finally:
            self.context.stack.pop()

    def snapshot(self) -> Clock:
        """Ends a period of the calling thread; returns its clock."""
        with self.lock:
            return self.host.hand_on()

    def learn(self, clock: Clock, *, dropped: bool = False) -> None:
        """Adds to what the calling thread knows."""
        with self.lock:
            self.host.clock.join(clock, dropped=dropped)

    def learn_of_hosts(self, clock: Clock) -> None:
        """Adds what the last holder of a lock knew of host threads."""
        with self.lock:
            self.host.clock.join_hosts(clock)

    # --- accesses ---------------------------------------------------------------------------------------------------

    def access(
        self,
        agent: Agent,
        what: str,
        reads: Sequence[tuple[Region, int, int]],
        writes: Sequence[tuple[Region, int, int]],
        place: str | None = None,
    ) -> None:
        """Notes accesses, each of a range of bytes in a region."""
        if place is None:
            place = place_of(sys._getframe(1), INNER)[0]
        with self.lock:
            self._check_freed()
            if agent.is_stream:
                agent.clock.join(self.host.clock)
            self.num_accesses += len(reads) + len(writes)
            access = Access.now(agent, what, place)
            for region, start, stop in reads:
                for cell in region.cells(start, stop):
                    self._check_slot(region, start, stop, cell, access)
                    if cell.write is not None:
                        self._compare(region, start, stop, cell.write, access, is_read=True)
                    cell.reads[agent.number] = access
            for region, start, stop in writes:
                self._check_installed(region, start, stop, access)
                for cell in region.cells(start, stop):
                    self._check_slot(region, start, stop, cell, access)
                    for earlier in cell.accesses():
                        self._compare(region, start, stop, earlier, access, is_read=False)
                    cell.write, cell.reads = access, {}

    def allocated(self, region: Region, nbytes: int, place: str) -> None:
        """Notes that a stream got memory, which its earlier work may still use under another name."""
        assert region.allocated_by is not None
        with self.lock:
            region.allocated_by.clock.join(self.host.clock)
            access = Access.now(region.allocated_by, "the allocation", place)
            for cell in region.cells(0, nbytes):
                cell.write = access

    def freed(self, region: Region) -> None:
        """Notes that a storage is freed. It may be called at any point of any thread."""
        clock = self.host.clock.copy()
        clock.join(region.let_go)
        if region.allocated_by is not None:
            clock.join(region.allocated_by.clock.copy())
        self._freed.append((region, clock, place_of(sys._getframe(1))[0]))

    def let_go(self, region: Region) -> None:
        """Notes that the calling thread no longer holds a storage. The last one that lets go of it frees it."""
        with self.lock:
            region.let_go.join(self.host.hand_on())

    def acquire_slot(self, start: int, stop: int, released: Clock | None) -> None:
        """Notes that the calling thread owns a slot, which another one released with that clock."""
        if self.arena is None:
            return
        with self.lock:
            if released is not None:
                self.host.clock.join(released)
            for cell in self.arena.cells(start, stop):
                cell.released = None

    def release_slot(self, start: int, stop: int, told: Clock | None = None) -> Clock | None:
        """Notes that the calling thread releases a slot; returns its clock for the next owner.

        `told`: what others knew who have told that they do not use the slot any more.
        """
        if self.arena is None:
            return None
        with self.lock:
            agent = self.host
            clock = agent.hand_on()
            if told is not None:
                clock.join(told)
            access = Access.now(agent, "the release", place_of(sys._getframe(1), ("storage/memory/arena.py",))[0])
            for cell in self.arena.cells(start, stop):
                for earlier in cell.accesses():
                    self._compare(self.arena, start, stop, earlier, access, kind=Kind.EARLY_RELEASE, clock=clock)
                cell.write, cell.reads, cell.released = None, {}, access
            return clock

    def host_waits(self, frame: FrameType | None, what: str) -> None:
        """Notes that the calling thread waits for the device."""
        place, function = place_of(frame, INNER)
        if function and not any(each in self._host_waits for _, each in places(frame)):
            where = f"thread {self.host.name!r}"
            self._report(Report(Kind.HOST_WAIT, where, f"{what} in {function} at {place}"))

    def unpinned(self, region: Region) -> None:
        """Notes that the device may no longer access host memory."""
        with self.lock:
            agent = self.host
            access = Access.now(agent, "the unpinning", place_of(sys._getframe(1), INNER)[0])
            for start, cell in region.all_cells():
                for earlier in cell.accesses():
                    if earlier.agent.is_stream:
                        self._compare(region, start, cell.stop, earlier, access, kind=Kind.EARLY_RELEASE)

    def needs_end_of(self, event: Access, frame: FrameType | None, dropped: bool) -> None:
        """Notes that the calling thread reads an event's time. `dropped`: its record was left out."""
        with self.lock:
            clock = self.host.clock
            if event.is_before(clock) and not dropped:
                return
            missing = self.dropped if dropped else self._missing(event, clock)
            place, _ = place_of(frame, INNER)
            later = f"thread {self.host.name!r} at {place}"
            self._report(Report(Kind.EVENT_TIME, f"an event of {event.agent.name}", later, str(event), missing=missing))

    def lacks_earlier_event(self, frame: FrameType | None) -> None:
        """Notes that an event's time is read before the clock has seen an earlier event."""
        place, _ = place_of(frame, INNER)
        later = f"thread {self.host.name!r} at {place}"
        self._report(Report(Kind.EVENT_TIME, "the clock has seen no earlier event", later, missing=self.dropped))

    def finish(self) -> list[Report]:
        """Returns all reports of the run."""
        with self.lock:
            self._check_freed()
            return self.reports

    # --- inside: with the lock --------------------------------------------------------------------------------------

    def _check_freed(self) -> None:
        while self._freed:
            region, clock, place = self._freed.popleft()
            for _, cell in region.all_cells():
                for access in cell.accesses():
                    if not access.is_before(clock):
                        missing = region.hold_dropped or self._missing(access, clock)
                        self._report(
                            Report(Kind.USE_AFTER_FREE, region.name, f"freed at {place}", str(access), missing=missing)
                        )

    def _check_slot(self, region: Region, start: int, stop: int, cell: Cell, access: Access) -> None:
        if cell.released is not None:
            where = f"bytes {start} to {stop} of {region.name}"
            self._report(Report(Kind.RELEASED_SLOT, where, str(access), hint=f"after {cell.released}"))

    def _check_installed(self, region: Region, start: int, stop: int, access: Access) -> None:
        for first, last in region.installed:
            if start < last and first < stop:
                self._report(Report(Kind.INSTALLED, f"bytes {start} to {stop} of {region.name}", str(access)))

    def _compare(
        self,
        region: Region,
        start: int,
        stop: int,
        earlier: Access,
        later: Access,
        *,
        is_read: bool = False,
        kind: Kind = Kind.RACE,
        clock: Clock | None = None,
    ) -> None:
        """Reports two accesses that are not ordered. `clock`: what is known at the later one; None: by its agent."""
        clock = clock or later.agent.clock
        if earlier.is_before(clock):
            return
        if kind is Kind.RACE and is_read and earlier.agent.is_stream and not later.agent.is_stream:
            kind = Kind.HOST_READ
        end = earlier.agent.end_of(earlier.period)
        self._report(
            Report(
                kind,
                f"bytes {start} to {stop} of {region.name}",
                str(later),
                str(earlier),
                hint=f"a wait for the event recorded at {end} would order them" if end else "",
                missing=self._missing(earlier, clock),
            )
        )

    def _missing(self, earlier: Access, clock: Clock) -> str | None:
        return self.dropped if earlier.was_meant_before(clock) else None

    def _report(self, report: Report) -> None:
        key = (report.kind, report.later, report.earlier, report.missing or "")
        with self.lock:
            if key not in self._known:
                self._known.add(key)
                self.reports.append(report)
