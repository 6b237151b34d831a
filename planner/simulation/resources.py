"""What a simulated machine is made of: resources that do one thing at a time, and what they are told to do."""

import heapq
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import simpy

from windlass.actors.messages import Phase, SpanKind, WorkSpan
from windlass.actors.timeline import WHOLE_BLOCK, Level, Tier
from windlass.planner.simulation.cores import SharedCores
from windlass.planner.simulation.waiting import Process

# Of a piece: what is left of a transfer beside that is nothing, as times are sums.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Of each resource; bytes and params are per second."""

    h2d_bytes: float
    d2h_bytes: float
    duplex_share: float = 1.0  # of its rate that each of these two ways has while both are busy
    ssd_read_bytes: tuple[float, ...]  # of each SSD
    ssd_write_bytes: tuple[float, ...]
    optimizer_params: float  # of each optimizer
    device_params: float  # updated on the device, for blocks that rest there
    device_rounded_params: float = math.inf  # made of their master on the device, for such blocks
    message_s: float = 0.0  # to the scheduler or from it; those between workers take no time
    ssd_cpu_s_per_byte: float = 0.0  # that shared cores spend meanwhile
    commit_s: float = 0.0  # of an SSD, once everything is written
    # The device is given an operation while it computes the one before, as a GPU is and a CPU is not: then the first
    # piece of a layer that comes in pieces is copied meanwhile.
    gives_ahead: bool = True
    # Of a machine whose device is the CPU: compute, copies and updates share so many; None: none of them does.
    num_cores: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What operations take, and what they leave for others."""

    # Seconds of compute of one operation, by phase and block: of one whole group of micro-batches. Where a step has one
    # group, that is all of its micro-batches. A smaller last group takes its share.
    compute_s: Mapping[tuple[Phase, int], float]
    # Of each layer that swaps activations, by its block: the bytes of each tensor of one micro-batch that leaves the
    # device, in the order in which they leave it.
    swapped_nbytes: Mapping[int, Sequence[int]] = field(default_factory=dict)
    # For levels of memory alone, by block and for one micro-batch; of blocks that are not named nothing is known. What
    # stays on the device from the forward pass to the backward pass, and the most that an operation has there beside
    # what was there before.
    held_nbytes: Mapping[int, int] = field(default_factory=dict)
    peak_nbytes: Mapping[int, int] = field(default_factory=dict)


class Stuck(RuntimeError):
    """A simulated job that does not end: what it waits for never comes."""


class TooLong(RuntimeError):
    """A simulation that has taken as long as it may."""


class Log:
    """The clock, the spans that the real actors would tell, and the levels of memory."""

    def __init__(self, num_cores: int | None = None, *, keeps_spans: bool = True) -> None:
        """`num_cores`: that those resources share which use them; None: each has what it needs."""
        self._keeps_spans = keeps_spans
        self.env = simpy.Environment()
        self.spans: list[WorkSpan] = []
        self._allocated: dict[tuple[Tier, str], int] = {}
        self._points: dict[tuple[Tier, str], list[tuple[float, int]]] = {}
        self._cores = None if num_cores is None else SharedCores(self.env, num_cores)

    def spend(self, duration_s: float) -> Process:
        """Time in which somebody computes, copies or updates, as long as it takes with all cores."""
        if self._cores is None:
            yield self.env.timeout(duration_s)
        else:
            yield from self._cores.work(duration_s, self._cores.num_cores)

    def note(
        self, resource: str, kind: SpanKind, step: int, block: int, chunk: int, start_s: float, nbytes: int = 0
    ) -> None:
        """Something that began then is over."""
        if self._keeps_spans:
            self.spans.append(WorkSpan(resource, kind, step, block, chunk, start_s, self.env.now, nbytes))

    def allocate(self, tier: Tier, what: str, nbytes: int) -> None:
        """So much more is set aside for a kind of things at all times."""
        if self._keeps_spans and nbytes:
            self._allocated[tier, what] = self._allocated.get((tier, what), 0) + nbytes
            self._points.setdefault((tier, what), [(0.0, 0)])

    def level(self, tier: Tier, what: str, nbytes: int) -> None:
        """A kind of things takes so much more of a tier from now on, or less."""
        if not self._keeps_spans or not nbytes:
            return
        points = self._points.setdefault((tier, what), [(0.0, 0)])
        now_s, (last_s, before) = self.env.now, points[-1]
        if now_s == last_s:
            points.pop()
        if not points or points[-1][1] != before + nbytes:
            points.append((now_s, before + nbytes))

    @property
    def levels(self) -> list[Level]:
        """So far, where spans are kept."""
        return [
            Level(tier, what, self._allocated.get((tier, what)), tuple(points))
            for (tier, what), points in self._points.items()
        ]


class Resource:
    """Does one thing after the other, in the order in which they come."""

    def __init__(self, log: Log, name: str, spend: Callable[[float], Process] | None = None) -> None:
        """`spend`: lets the time of something pass, which by itself takes so long; None: as the log does."""
        self._log = log
        self._name = name
        self._spend = log.spend if spend is None else spend
        self._is_busy = False
        self._waiting: deque[simpy.Event] = deque()

    def work(
        self, duration_s: float, kind: SpanKind, step: int, block: int, chunk: int = WHOLE_BLOCK, nbytes: int = 0
    ) -> Process:
        """Takes so long with all cores, where these are shared."""
        yield from self._take_turn()
        start_s = self._log.env.now
        yield from self._spend(duration_s)
        self._end_turn()
        self._log.note(self._name, kind, step, block, chunk, start_s, nbytes)

    def carry_out(self, process: Process, kind: SpanKind, step: int, block: int) -> Process:
        """Something that takes its own time, and waits for others, while nothing else has its turn."""
        yield from self._take_turn()
        start_s = self._log.env.now
        yield from process
        self._end_turn()
        self._log.note(self._name, kind, step, block, WHOLE_BLOCK, start_s)

    def _take_turn(self) -> Process:
        if self._is_busy:
            turn = self._log.env.event()
            self._waiting.append(turn)
            yield turn
        self._is_busy = True

    def _end_turn(self) -> None:
        """It stays busy where somebody waits, who goes on in the same moment."""
        if self._waiting:
            self._waiting.popleft().succeed()
        else:
            self._is_busy = False


@dataclass(slots=True, eq=False)
class _Transfer:
    """Bytes on their way to an SSD or from it."""

    urgency: tuple[tuple[int, int], int]  # and, of those that are as urgent, the order in which they came
    left_s: float
    piece_s: float
    cpu_s: float
    over: simpy.Event
    start_s: float | None = None

    def __lt__(self, other: "_Transfer") -> bool:
        return self.urgency < other.urgency


class Ssd:
    """Moves one thing after the other, the most urgent first; something more urgent goes first after each piece."""

    def __init__(self, log: Log, name: str, cpu_s_per_byte: float = 0.0) -> None:
        """`cpu_s_per_byte`: that cores which others share spend beside what is moved."""
        self._log = log
        self._name = name
        self._cpu_s_per_byte = cpu_s_per_byte
        self._waiting: list[_Transfer] = []  # heap
        self._moving: _Transfer | None = None
        self._since_s = 0.0
        self._num_arrived = 0
        self._num_ends = 0  # that were set: the last one counts
        self._ends_whole = True  # it is the end of all that was left, not of a piece

    def move(
        self,
        duration_s: float,
        num_pieces: int,
        priority: tuple[int, int],
        kind: SpanKind,
        step: int,
        block: int,
        chunk: int,
        nbytes: int,
    ) -> Process:
        """Returns when all pieces are moved."""
        self._num_arrived += 1
        over = self._log.env.event()
        cpu_s = nbytes * self._cpu_s_per_byte
        transfer = _Transfer((priority, self._num_arrived), duration_s, duration_s / num_pieces, cpu_s, over)
        heapq.heappush(self._waiting, transfer)
        if self._moving is None:
            self._begin()
        elif transfer < self._moving:
            self._cut_short(self._moving)
        yield over
        assert transfer.start_s is not None, "it is over"
        self._log.note(self._name, kind, step, block, chunk, transfer.start_s, nbytes)

    def _begin(self) -> None:
        self._moving = moving = heapq.heappop(self._waiting)
        self._since_s = self._log.env.now
        if moving.start_s is None:
            moving.start_s = self._since_s
            if moving.cpu_s:
                self._log.env.process(self._log.spend(moving.cpu_s))
        self._end_after(moving.left_s, is_whole=True)

    def _cut_short(self, moving: _Transfer) -> None:
        """What is moving stops at the end of a piece."""
        passed_s = self._log.env.now - self._since_s
        piece_end_s = max(1, math.ceil(passed_s / moving.piece_s)) * moving.piece_s if moving.piece_s else 0.0
        is_whole = piece_end_s >= moving.left_s - _ROUNDING * moving.piece_s
        end_s = moving.left_s if is_whole else piece_end_s
        self._end_after(max(0.0, end_s - passed_s), is_whole=is_whole)

    def _end_after(self, duration_s: float, *, is_whole: bool) -> None:
        self._num_ends += 1
        self._ends_whole = is_whole
        end = self._log.env.timeout(duration_s, self._num_ends)
        end.callbacks.append(self._end)

    def _end(self, end: simpy.Event) -> None:
        moving = self._moving
        if end.value != self._num_ends or moving is None:
            return  # something more urgent has come meanwhile
        # Not by what is left: late in a long job the clock has too few digits for a short transfer.
        if self._ends_whole:
            moving.over.succeed()
        else:
            moving.left_s -= self._log.env.now - self._since_s
            heapq.heappush(self._waiting, moving)
        self._moving = None
        if self._waiting:
            self._begin()
