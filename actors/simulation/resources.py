"""What a simulated machine is made of: resources that do one thing at a time, and what they are told to do."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import simpy

from windlass.actors.messages import Phase, SpanKind, WorkSpan
from windlass.actors.simulation.cores import SharedCores
from windlass.actors.spans import WHOLE_BLOCK

_Found = TypeVar("_Found")
# What waits for events, and comes to something in the end.
Finding = Generator[simpy.Event, Any, _Found]
Process = Finding[None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Of each resource; bytes and params are per second."""

    h2d_bytes: float
    d2h_bytes: float
    ssd_read_bytes: tuple[float, ...]  # of each SSD
    ssd_write_bytes: tuple[float, ...]
    optimizer_params: float  # of each optimizer
    device_params: float  # updated on the device, for blocks that rest there
    message_s: float = 0.0  # to the scheduler or from it; those between workers take no time
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


class Stuck(RuntimeError):
    """A simulated job that does not end: what it waits for never comes."""


class TooLong(RuntimeError):
    """A simulation that has taken as long as it may."""


class Log:
    """The clock, and the spans that the real actors would tell."""

    def __init__(self, num_cores: int | None = None) -> None:
        """`num_cores`: that those resources share which use them; None: each has what it needs."""
        self.env = simpy.Environment()
        self.spans: list[WorkSpan] = []
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
        self.spans.append(WorkSpan(resource, kind, step, block, chunk, start_s, self.env.now, nbytes))


class Signal:
    """What several processes may wait for, again and again."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self.next = env.event()

    def tell(self) -> None:
        """Something has changed: who waits looks again."""
        told, self.next = self.next, self._env.event()
        told.succeed()

    def until(self, condition: Callable[[], bool]) -> Process:
        """Waits until it holds."""
        while not condition():
            yield self.next


class Resource:
    """Does one thing after the other, the most urgent first."""

    def __init__(self, log: Log, name: str, *, uses_cores: bool = False) -> None:
        self._log = log
        self._name = name
        self._uses_cores = uses_cores
        self._turns = simpy.PriorityResource(log.env, capacity=1)

    def work(
        self,
        duration_s: float,
        kind: SpanKind,
        step: int,
        block: int,
        chunk: int = WHOLE_BLOCK,
        nbytes: int = 0,
        priority: tuple[int, int] = (0, 0),
        num_pieces: int = 1,
    ) -> Process:
        """`num_pieces`: after each of them something more urgent may go first."""
        start_s = None
        for _ in range(num_pieces):
            with self._turns.request(priority=priority) as turn:  # type: ignore[arg-type]
                yield turn
                start_s = self._log.env.now if start_s is None else start_s
                if self._uses_cores:
                    yield from self._log.spend(duration_s / num_pieces)
                else:
                    yield self._log.env.timeout(duration_s / num_pieces)
        assert start_s is not None, "there is at least one piece"
        self._log.note(self._name, kind, step, block, chunk, start_s, nbytes)

    def carry_out(self, process: Process, kind: SpanKind, step: int, block: int) -> Process:
        """Something that takes its own time, and waits for others, while nothing else has its turn."""
        with self._turns.request(priority=(0, 0)) as turn:  # type: ignore[arg-type]
            yield turn
            start_s = self._log.env.now
            yield from process
        self._log.note(self._name, kind, step, block, WHOLE_BLOCK, start_s)
