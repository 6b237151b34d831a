"""Which part of an installation is hurt in which run of `benchmarks.chaos`, when, and for how long: by a seed alone."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar


class Kind(StrEnum):
    """What is done."""

    SERVICE = "service"  # SIGKILL of the supervisor, with which API and dispatcher end; `windlass up` again
    API = "API"  # SIGKILL, as all that follow
    DISPATCHER = "dispatcher"
    RUNNER = "runner"
    GPU_WORKER = "gpu-0"
    OPTIMIZER = "optimizer-0"
    SSD_0 = "ssd-0"
    SSD_1 = "ssd-1"
    RAYLET = "raylet"
    GCS = "gcs_server"
    EVERYTHING = "everything"  # the whole tree at once; `windlass up` again
    DATABASE_AWAY = "database away"  # SQLite: another process has it locked; PostgreSQL: it does not answer
    DATABASE_RESTARTED = "database restarted"  # PostgreSQL is ended, and started again
    FULL_DISK = "full disk"  # of the home, where the SSD directories are too


class DatabaseKind(StrEnum):
    """Where jobs are kept."""

    SQLITE = "sqlite"
    POSTGRESQL = "postgresql"


PROCESSES_OF_JOB = (Kind.RUNNER, Kind.GPU_WORKER, Kind.OPTIMIZER, Kind.SSD_0, Kind.SSD_1)
RAY = (Kind.RAYLET, Kind.GCS)

_Card = TypeVar("_Card")

# How many injuries runs have: so that forty of them on both databases bring each kind three times to each.
_NUM_INJURIES = (1, 2, 2, 3, 3)
# Seconds: how long a disk stays full and a database away, now and then longer than anybody waits for it; how long
# nobody starts the service again.
_SHORT_S, _LONG_S, _SHARE_OF_LONG = (2.0, 20.0), (40.0, 60.0), 0.2
_DOWN_S = (0.0, 8.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Injury:
    """One thing that is done to the installation while a job is under way."""

    kind: Kind
    after: float  # in times of a job left alone: since the job was submitted, or the injury before was over
    by_step: int  # once the job has told this step it comes at once: the machine may be faster by now
    lasts_s: float  # 0: what is killed is not held down
    later: float = 0.0  # as `after`, for a process of the job that had to be waited for: since it was there

    def __str__(self) -> str:
        return f"{self.kind} for {self.lasts_s:.0f} s" if self.lasts_s else str(self.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One job, and what is done to it."""

    number: int  # from 1
    database: DatabaseKind
    injuries: tuple[Injury, ...]


def plan_runs(
    num_runs: int, seed: int, databases: Sequence[DatabaseKind], *, num_steps: int, disk_can_be_filled: bool
) -> list[Run]:
    """The runs of a seed, on the databases in turn; every kind comes as often as any other that is possible there.

    The longer plan of a seed begins as its shorter ones do.
    """
    generator = random.Random(seed)
    kinds = {each: _dealt(generator, _possible(each, disk_can_be_filled)) for each in databases}
    numbers = {each: _dealt(generator, _NUM_INJURIES) for each in databases}
    runs = []
    for number in range(1, num_runs + 1):
        database = databases[(number - 1) % len(databases)]
        # Moments of a job that goes on as if nothing had happened: each comes before the end of one that loses time.
        num_injuries = next(numbers[database])
        moments = sorted(generator.random() for _ in range(num_injuries))
        steps = sorted(generator.randint(1, num_steps) for _ in range(num_injuries))
        injuries, before = [], 0.0
        for moment, by_step in zip(moments, steps, strict=True):
            kind = next(kinds[database])
            later = generator.uniform(0.0, 0.5) if kind in PROCESSES_OF_JOB else 0.0
            lasts_s = _lasts_s(generator, kind)
            injuries.append(Injury(kind=kind, after=moment - before, by_step=by_step, lasts_s=lasts_s, later=later))
            before = moment
        runs.append(Run(number=number, database=database, injuries=tuple(injuries)))
    return runs


def _dealt(generator: random.Random, cards: Sequence[_Card]) -> Iterator[_Card]:
    """In a random order; each comes again when all others have come."""
    while True:
        yield from generator.sample(cards, len(cards))


def _possible(database: DatabaseKind, disk_can_be_filled: bool) -> list[Kind]:
    kinds = list(Kind)
    if database is DatabaseKind.SQLITE:
        kinds.remove(Kind.DATABASE_RESTARTED)
    if not disk_can_be_filled:
        kinds.remove(Kind.FULL_DISK)
    return kinds


def _lasts_s(generator: random.Random, kind: Kind) -> float:
    if kind in (Kind.DATABASE_AWAY, Kind.DATABASE_RESTARTED, Kind.FULL_DISK):
        return generator.uniform(*(_LONG_S if generator.random() < _SHARE_OF_LONG else _SHORT_S))
    return generator.uniform(*_DOWN_S) if kind in (Kind.SERVICE, Kind.EVERYTHING) else 0.0
