"""The resources of a simulated machine, each of which does one thing at a time, and the work for them."""

import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from windlass.actors.messages import Phase, SpanKind, WorkSpan
from windlass.actors.timeline import WHOLE_BLOCK, Level
from windlass.engine.memory_plan import MemoryTier
from windlass.planner.simulation.clock import Clock, Future, Process
from windlass.planner.simulation.cores import SharedCores
from windlass.storage.priority_queue import PriorityQueue

# Share of a piece: a shorter rest of a transfer counts as nothing, because times are sums with rounding errors.
_ROUNDING = 1e-6

# Begins a piece of work of so many seconds. Its events, and the seconds that must pass, are waited for in order.
Spend = Callable[[float], Iterable[Future | float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The rate of each resource. Bytes and params are per second."""

    h2d_bytes: float
    d2h_bytes: float
    duplex_share: float = 1.0  # share of its rate that each direction keeps while both are busy
    ssd_read_bytes: tuple[float, ...]  # of each SSD
    ssd_write_bytes: tuple[float, ...]
    optimizer_params: float  # of each optimizer
    device_params: float  # updated on the device, for blocks resident there
    device_rounded_params: float = math.inf  # derived from their master on the device, for such blocks
    device_added_params: float = math.inf  # elements of a lane's gradient that are added to the total on the device
    message_s: float = 0.0  # of a message between two actors; those about params take no time
    host_memory_bytes: float = math.inf  # read and written in the host's memory by copies, SSD transfers and updates
    ssd_cpu_s_per_byte: float = 0.0  # time of shared cores for each byte moved
    commit_s: float = 0.0  # of one SSD, after all writes
    # The device queues an operation while it computes the previous one, as a GPU does and a CPU does not. Then the
    # first piece of a streamed layer is copied meanwhile.
    launches_ahead: bool = True
    # On a CPU: the cores that compute, copies and updates share. None: they share none.
    num_cores: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The compute time of operations, and their swapped and kept bytes."""

    # Seconds of compute of an operation for one whole group of micro-batches, by phase and block. A smaller last group
    # takes a proportional part.
    compute_s: Mapping[tuple[Phase, int], float]
    # By block, for layers that swap activations: bytes of each tensor of one micro-batch, in the order in which they
    # leave the device.
    swapped_nbytes: Mapping[int, Sequence[int]] = field(default_factory=dict)
    # For memory levels only, by block and for one micro-batch: bytes kept on the device from forward to backward, and
    # the maximum that an operation allocates. Missing blocks count as 0.
    held_nbytes: Mapping[int, int] = field(default_factory=dict)
    peak_nbytes: Mapping[int, int] = field(default_factory=dict)
    # By block: seconds for the norms of a complete gradient, once a step. For missing blocks they are part of an
    # operation's time.
    norms_s: Mapping[int, float] = field(default_factory=dict)
    # Hidden states of one micro-batch, and their gradient, that pass between two boxes.
    crossing_nbytes: int = 0
    head_slices: int = 1  # parts of a micro-batch that go through a head in pieces one after the other


class Stuck(RuntimeError):
    """A simulated job that cannot end, because it waits for an event that never comes."""


class TooLong(RuntimeError):
    """A simulation that exceeded its limit of time or of events."""


class Log:
    """The clock, the spans that real actors would report, and the memory levels."""

    def __init__(self, num_cores: int | None = None, *, keeps_spans: bool = True, clock: Clock | None = None) -> None:
        """`num_cores`: cores shared by the resources that use them; None: every resource has its own.

        `clock`: that of all machines of a job; None: a new one.
        """
        self.keeps_spans = keeps_spans
        self.clock = clock or Clock()
        self.spans: list[WorkSpan] = []
        self._allocated: dict[tuple[MemoryTier, str], int] = {}
        self._points: dict[tuple[MemoryTier, str], list[tuple[float, int]]] = {}
        self._cores = None if num_cores is None else SharedCores(self.clock, num_cores)

    @property
    def has_shared_cores(self) -> bool:
        """True if the resources share cores."""
        return self._cores is not None

    def spend(self, duration_s: float) -> Iterable[Future | float]:
        """Begins `duration_s` of work on all cores. Returns what to wait for, which takes longer if they are shared."""
        if self._cores is not None:
            return self._cores.work(duration_s, self._cores.num_cores)
        return (duration_s,) if duration_s else ()

    def note(
        self, resource: str, kind: SpanKind, step: int, block: int, chunk: int, start_s: float, nbytes: int = 0
    ) -> None:
        """Records a span that began at `start_s` and ends now."""
        if self.keeps_spans:
            self.spans.append(WorkSpan(resource, kind, step, block, chunk, start_s, self.clock.now, nbytes))

    def allocate(self, tier: MemoryTier, what: str, nbytes: int) -> None:
        """Records that `nbytes` more are reserved for a use of memory, from the start to the end."""
        if self.keeps_spans and nbytes:
            self._allocated[tier, what] = self._allocated.get((tier, what), 0) + nbytes
            self._points.setdefault((tier, what), [(0.0, 0)])

    def level(self, tier: MemoryTier, what: str, nbytes: int) -> None:
        """Changes the level of a use of memory by `nbytes` from now on."""
        if not self.keeps_spans or not nbytes:
            return
        points = self._points.setdefault((tier, what), [(0.0, 0)])
        now_s, (last_s, before) = self.clock.now, points[-1]
        if now_s == last_s:
            points.pop()
        if not points or points[-1][1] != before + nbytes:
            points.append((now_s, before + nbytes))

    @property
    def levels(self) -> list[Level]:
        """The memory levels so far; empty without `keeps_spans`."""
        return [
            Level(tier, what, self._allocated.get((tier, what)), tuple(points))
            for (tier, what), points in self._points.items()
        ]


class Resource:
    """A resource that does one thing after the other, in the order of the requests."""

    def __init__(self, log: Log, name: str, spend: Spend | None = None) -> None:
        """`spend(duration_s)` lets the time of a piece of work pass; None: the log's."""
        self._log = log
        self._clock = log.clock
        self._name = name
        # None: what takes the time of no shared resource, which is most of the work.
        self._spend = log.spend if spend is None and log.has_shared_cores else spend
        self._is_busy = False
        self._waiting: deque[Future] = deque()

    def work(
        self, duration_s: float, kind: SpanKind, step: int, block: int, chunk: int = WHOLE_BLOCK, nbytes: int = 0
    ) -> Process:
        """Occupies the resource for `duration_s`, or longer if the cores are shared."""
        if self._is_busy:
            yield self._turn()
        self._is_busy = True
        start_s = self._clock.now
        if self._spend is not None:
            yield from self._spend(duration_s)
        elif duration_s:
            yield duration_s
        self._end_turn()
        if self._log.keeps_spans:
            self._log.note(self._name, kind, step, block, chunk, start_s, nbytes)

    def carry_out(self, process: Process, kind: SpanKind, step: int, block: int) -> Process:
        """Occupies the resource while `process` runs, which takes its own time and may wait for others."""
        if self._is_busy:
            yield self._turn()
        self._is_busy = True
        start_s = self._clock.now
        yield from process
        self._end_turn()
        self._log.note(self._name, kind, step, block, WHOLE_BLOCK, start_s)

    def _turn(self) -> Future:
        """Returns the event of the caller's turn."""
        turn = Future(self._clock)
        self._waiting.append(turn)
        return turn

    def _end_turn(self) -> None:
        """Passes the turn to the next waiting process.

        The resource stays busy, because that process continues at once.
        """
        if self._waiting:
            self._waiting.popleft().set_done()
        else:
            self._is_busy = False


@dataclass(slots=True, eq=False)
class _Transfer:
    """A transfer to or from an SSD."""

    rank: tuple[int, int, int]  # its priority and its order of arrival, which it keeps when it is interrupted
    left_s: float
    piece_s: float
    cpu_s: float
    over: Future
    nbytes: int
    place: tuple[SpanKind, int, int, int]  # kind, step, block and chunk of its span
    in_memory: Future | None = None  # the end of the same transfer at the host's memory
    start_s: float | None = None


class Ssd:
    """An SSD that does one transfer after the other. A more urgent one interrupts at the end of a piece."""

    def __init__(
        self,
        log: Log,
        name: str,
        cpu_s_per_byte: float = 0.0,
        in_memory: Callable[[float, float], tuple[Future, ...]] | None = None,
    ) -> None:
        """`cpu_s_per_byte`: time of shared cores for each byte moved.

        `in_memory(duration_s, bytes_per_s)`: begins the same transfer at the host's memory, and returns its end; None:
        the memory is fast enough for all.
        """
        self._in_memory = in_memory
        self._log = log
        self._clock = log.clock
        self._name = name
        self._cpu_s_per_byte = cpu_s_per_byte
        self._waiting: PriorityQueue[_Transfer] = PriorityQueue()
        self._moving: _Transfer | None = None
        self._since_s = 0.0
        self._num_arrived = 0
        self._num_ends = 0  # number of ends scheduled so far; only the last one is valid
        self._ends_whole = True  # the end is that of the whole transfer, not of a piece

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
    ) -> Future:
        """Begins a transfer, or lets it wait for its turn. Returns the event of its end."""
        self._num_arrived += 1
        transfer = _Transfer(
            (*priority, self._num_arrived),
            duration_s,
            duration_s / num_pieces,
            nbytes * self._cpu_s_per_byte,
            Future(self._clock),
            nbytes,
            (kind, step, block, chunk),
        )
        if self._moving is None:
            self._begin(transfer)
        else:
            self._waiting.push(transfer.rank, transfer)
            if transfer.rank < self._moving.rank:
                self._cut_short(self._moving)
        return transfer.over

    @property
    def num_waiting(self) -> int:
        """The number of transfers that wait for their turn."""
        return len(self._waiting)

    def _begin(self, moving: _Transfer) -> None:
        self._moving = moving
        self._since_s = self._clock.now
        if moving.start_s is None:
            moving.start_s = self._since_s
            if moving.cpu_s:
                self._clock.soon(functools.partial(self._log.spend, moving.cpu_s))
            if self._in_memory is not None and moving.left_s:
                (moving.in_memory,) = self._in_memory(moving.left_s, moving.nbytes / moving.left_s)
        self._end_after(moving.left_s, is_whole=True)

    def _cut_short(self, moving: _Transfer) -> None:
        """Stops the current transfer at the end of its piece."""
        if not self._ends_whole:
            return  # it stops there already
        passed_s = self._clock.now - self._since_s
        piece_end_s = max(1, math.ceil(passed_s / moving.piece_s)) * moving.piece_s if moving.piece_s else 0.0
        is_whole = piece_end_s >= moving.left_s - _ROUNDING * moving.piece_s
        if not is_whole:
            self._end_after(max(0.0, piece_end_s - passed_s), is_whole=False)

    def _end_after(self, duration_s: float, *, is_whole: bool) -> None:
        self._num_ends += 1
        self._ends_whole = is_whole
        self._clock.after(duration_s, functools.partial(self._end, self._num_ends))

    def _end(self, number: int) -> None:
        moving = self._moving
        if number != self._num_ends or moving is None:
            return  # a more urgent transfer has changed the end
        # Do not compare remaining seconds: late in a long job the clock is too coarse for a short transfer.
        if not self._ends_whole:
            moving.left_s -= self._clock.now - self._since_s
            self._waiting.push(moving.rank, moving)
        elif moving.in_memory is None:
            self._over(moving)
        else:  # the next transfer begins, but this one's bytes are not all there yet
            moving.in_memory.then(functools.partial(self._over, moving))
        self._moving = None
        if self._waiting:
            self._begin(self._waiting.pop())

    def _over(self, transfer: _Transfer) -> None:
        if self._log.keeps_spans:
            assert transfer.start_s is not None, "it is over"
            self._log.note(self._name, *transfer.place, transfer.start_s, transfer.nbytes)
        transfer.over.set_done()
