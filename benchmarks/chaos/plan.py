"""Plans the injuries of `benchmarks.chaos` from a seed: which part of the installation, when, and for how long."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar


class Kind(StrEnum):
    """The kind of an injury."""

    SERVICE = "service"  # SIGKILL of the supervisor, which ends API and dispatcher; then `windlass up`
    API = "API"  # SIGKILL, as for all others up to GCS
    DISPATCHER = "dispatcher"
    RUNNER = "runner"
    GPU_WORKER = "gpu-0"
    OPTIMIZER = "optimizer-0"
    SSD_0 = "ssd-0"
    SSD_1 = "ssd-1"
    RAYLET = "raylet"
    GCS = "gcs_server"
    EVERYTHING = "everything"  # SIGKILL of all processes at once; then `windlass up`
    DATABASE_AWAY = "database away"  # SQLite: another process holds its lock; PostgreSQL: it does not answer
    DATABASE_RESTARTED = "database restarted"  # PostgreSQL is stopped and started again
    FULL_DISK = "full disk"  # the disk of the home, which has the SSD directories too
    # Of boxes that work for one service:
    AGENT = "agent"  # SIGKILL
    HEAD = "head"  # SIGKILL of all processes of the head; then `windlass up`
    POWER = "power"  # a box that is not the head is switched off and on; then `windlass up`
    CUT = "cut"  # the link of a box drops all packets
    SLOW = "slow"  # the link of a box is slow
    # Of one job over several boxes:
    APART = "cut to the next"  # a box and the next one do not reach each other; both reach all others
    STOPPED = "stopped"  # SIGSTOP of all processes of a box; then SIGCONT
    PAUSED = "paused"  # the user pauses the job, and resumes it
    DRAINED = "drained"  # a box is drained, and resumed


class DatabaseKind(StrEnum):
    """The database that stores jobs."""

    SQLITE = "sqlite"
    POSTGRESQL = "postgresql"


PROCESSES_OF_JOB = (Kind.RUNNER, Kind.GPU_WORKER, Kind.OPTIMIZER, Kind.SSD_0, Kind.SSD_1)
RAY = (Kind.RAYLET, Kind.GCS)
# The kinds of several boxes, each with whether it may hit the head.
KINDS_OF_BOXES = {
    Kind.AGENT: False,
    Kind.DISPATCHER: True,
    Kind.GPU_WORKER: True,
    Kind.SSD_0: True,
    Kind.RAYLET: True,
    Kind.EVERYTHING: False,
    Kind.HEAD: True,
    Kind.POWER: False,
    Kind.CUT: True,
    Kind.SLOW: True,
}
# The kinds of one job over several boxes, likewise.
KINDS_OF_SPREAD = {
    **KINDS_OF_BOXES,
    Kind.SERVICE: True,
    Kind.RUNNER: True,
    Kind.OPTIMIZER: True,
    Kind.FULL_DISK: True,
    Kind.APART: True,
    Kind.STOPPED: True,
    Kind.PAUSED: True,
    Kind.DRAINED: False,
}
_ONLY_HEAD = (Kind.HEAD, Kind.SERVICE, Kind.PAUSED)
ONLY_OF_BOXES = (
    Kind.AGENT,
    Kind.HEAD,
    Kind.POWER,
    Kind.CUT,
    Kind.SLOW,
    Kind.APART,
    Kind.STOPPED,
    Kind.PAUSED,
    Kind.DRAINED,
)

_Card = TypeVar("_Card")

# Numbers of injuries of the runs. With forty runs on two databases, each kind occurs three times on each.
_NUM_INJURIES = (1, 2, 2, 3, 3)
# Seconds for which a disk stays full or a database away. The long ones exceed the timeouts of the service.
_SHORT_S, _LONG_S, _SHARE_OF_LONG = (2.0, 20.0), (40.0, 60.0), 0.2
_DOWN_S = (0.0, 8.0)  # seconds between the end of a service and its restart
_NUM_INJURIES_OF_BOXES = (3, 4, 4, 5, 5)
# One job over several boxes costs some minutes to begin, so it has more of them, over more time.
_NUM_INJURIES_OF_SPREAD, _SPACING_OF_SPREAD = (9, 10, 11), 3.0
_CUT_S = (1.0, 20.0)  # seconds for which a link is cut or slow
# Seconds for which the link of boxes of one job is cut, or one of them stopped. The long one exceeds silence_s.
_CUTS_OF_SPREAD_S = (3.0, 10.0, 60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Injury:
    """One injury of an installation during a job."""

    kind: Kind
    # As a multiple of an undisturbed job's duration: time since the submission or the end of the last injury.
    # With several boxes: since the submission or the beginning of the last injury, so that injuries overlap.
    after: float
    by_step: int  # at the latest when the job has reported this step, because the machine may have become faster
    lasts_s: float  # 0: a killed process is not held down
    later: float = 0.0  # if the process did not exist yet: time since its start, as a multiple like `after`
    box: str = ""  # of several boxes that work for one service

    def __str__(self) -> str:
        where = f"{self.kind} of {self.box}" if self.box else str(self.kind)
        return f"{where} for {self.lasts_s:.0f} s" if self.lasts_s else where


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One job, or several of one service with several boxes, and its injuries."""

    number: int  # from 1
    database: DatabaseKind
    injuries: tuple[Injury, ...]


def plan_runs(
    num_runs: int, seed: int, databases: Sequence[DatabaseKind], *, num_steps: int, disk_can_be_filled: bool
) -> list[Run]:
    """Plans the runs of a seed, on the databases in turn. Every possible kind of injury occurs equally often.

    A longer plan of a seed begins with its shorter ones.
    """
    generator = random.Random(seed)
    kinds = {each: _dealt(generator, _possible(each, disk_can_be_filled)) for each in databases}
    numbers = {each: _dealt(generator, _NUM_INJURIES) for each in databases}
    runs = []
    for number in range(1, num_runs + 1):
        database = databases[(number - 1) % len(databases)]
        drawn = _injuries(generator, next(numbers[database]), kinds[database], num_steps=num_steps, lasts_s=_lasts_s)
        runs.append(Run(number=number, database=database, injuries=tuple(drawn)))
    return runs


def plan_runs_of_boxes(
    num_runs: int,
    seed: int,
    boxes: Sequence[str],
    *,
    num_steps: int,
    is_spread: bool = False,
    disk_can_be_filled: bool = False,
) -> list[Run]:
    """Plans the runs of a seed for several boxes of one service; the first is the head.

    Every kind of injury occurs equally often, and each hits the boxes that it may hit equally often. A longer plan of a
    seed begins with its shorter ones.

    `is_spread`: for one job over all boxes.
    """
    generator = random.Random(seed)
    possible = dict(KINDS_OF_SPREAD if is_spread else KINDS_OF_BOXES)
    if not disk_can_be_filled:
        possible.pop(Kind.FULL_DISK, None)
    kinds = _dealt(generator, list(possible))
    numbers = _dealt(generator, _NUM_INJURIES_OF_SPREAD if is_spread else _NUM_INJURIES_OF_BOXES)
    head, *others = boxes
    victims = {kind: _dealt(generator, boxes if may_hit_head else others) for kind, may_hit_head in possible.items()}
    victims |= {kind: _dealt(generator, [head]) for kind in _ONLY_HEAD if kind in possible}
    lasts_s = _lasting(generator) if is_spread else _lasts_s
    runs = []
    for number in range(1, num_runs + 1):
        # Half of the injuries wait for no step, so that checkpoints and transfers are hit, too. Those of one job over
        # all boxes come at the latest by a step of it, because they are later.
        by_steps, spacing = (num_steps, _SPACING_OF_SPREAD) if is_spread else (2 * num_steps, 1.0)
        drawn = _injuries(generator, next(numbers), kinds, num_steps=by_steps, lasts_s=lasts_s)
        injuries = tuple(
            replace(injury, box=next(victims[injury.kind]), after=spacing * injury.after) for injury in drawn
        )
        runs.append(Run(number=number, database=DatabaseKind.SQLITE, injuries=injuries))
    return runs


def _injuries(
    generator: random.Random,
    num_injuries: int,
    kinds: Iterator[Kind],
    *,
    num_steps: int,
    lasts_s: Callable[[random.Random, Kind], float],
) -> Iterator[Injury]:
    # Moments of an undisturbed job: a job that loses time lasts longer, so all of them come before its end.
    moments = sorted(generator.random() for _ in range(num_injuries))
    steps = sorted(generator.randint(1, num_steps) for _ in range(num_injuries))
    before = 0.0
    for moment, by_step in zip(moments, steps, strict=True):
        kind = next(kinds)
        later = generator.uniform(0.0, 0.5) if kind in PROCESSES_OF_JOB else 0.0
        yield Injury(kind=kind, after=moment - before, by_step=by_step, lasts_s=lasts_s(generator, kind), later=later)
        before = moment


def _dealt(generator: random.Random, cards: Sequence[_Card]) -> Iterator[_Card]:
    """Yields the cards in random order. A card is repeated only after all others."""
    while True:
        yield from generator.sample(cards, len(cards))


def _possible(database: DatabaseKind, disk_can_be_filled: bool) -> list[Kind]:
    kinds = [kind for kind in Kind if kind not in ONLY_OF_BOXES]
    if database is DatabaseKind.SQLITE:
        kinds.remove(Kind.DATABASE_RESTARTED)
    if not disk_can_be_filled:
        kinds.remove(Kind.FULL_DISK)
    return kinds


def _lasts_s(generator: random.Random, kind: Kind) -> float:
    if kind in (Kind.DATABASE_AWAY, Kind.DATABASE_RESTARTED, Kind.FULL_DISK):
        return generator.uniform(*(_LONG_S if generator.random() < _SHARE_OF_LONG else _SHORT_S))
    if kind in (Kind.CUT, Kind.SLOW):
        return generator.uniform(*_CUT_S)
    is_down = kind in (Kind.SERVICE, Kind.EVERYTHING, Kind.HEAD, Kind.POWER)
    return generator.uniform(*_DOWN_S) if is_down else 0.0


def _lasting(generator: random.Random) -> Callable[[random.Random, Kind], float]:
    """Returns the function that draws how long an injury of one job over several boxes lasts."""
    cuts_s = _dealt(generator, _CUTS_OF_SPREAD_S)

    def lasts_s(generator: random.Random, kind: Kind) -> float:
        if kind in (Kind.CUT, Kind.APART, Kind.STOPPED):
            return next(cuts_s)
        if kind in (Kind.FULL_DISK, Kind.PAUSED, Kind.DRAINED):
            return generator.uniform(*_SHORT_S)
        return _lasts_s(generator, kind)

    return lasts_s
