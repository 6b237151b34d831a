"""Plans the injuries of `benchmarks.chaos` from a seed: which part of the installation, when, and for how long."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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


class DatabaseKind(StrEnum):
    """The database that stores jobs."""

    SQLITE = "sqlite"
    POSTGRESQL = "postgresql"


PROCESSES_OF_JOB = (Kind.RUNNER, Kind.GPU_WORKER, Kind.OPTIMIZER, Kind.SSD_0, Kind.SSD_1)
RAY = (Kind.RAYLET, Kind.GCS)

_Card = TypeVar("_Card")

# Numbers of injuries of the runs. With forty runs on two databases, each kind occurs three times on each.
_NUM_INJURIES = (1, 2, 2, 3, 3)
# Seconds for which a disk stays full or a database away. The long ones exceed the timeouts of the service.
_SHORT_S, _LONG_S, _SHARE_OF_LONG = (2.0, 20.0), (40.0, 60.0), 0.2
_DOWN_S = (0.0, 8.0)  # seconds between the end of a service and its restart


@dataclass(frozen=True, slots=True, kw_only=True)
class Injury:
    """One injury of an installation during a job."""

    kind: Kind
    # As a multiple of an undisturbed job's duration: time since the submission or the end of the last injury.
    after: float
    by_step: int  # at the latest when the job has reported this step, because the machine may have become faster
    lasts_s: float  # 0: a killed process is not held down
    later: float = 0.0  # if the process did not exist yet: time since its start, as a multiple like `after`

    def __str__(self) -> str:
        return f"{self.kind} for {self.lasts_s:.0f} s" if self.lasts_s else str(self.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One job and its injuries."""

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
        # Moments of an undisturbed job: a job that loses time lasts longer, so all of them come before its end.
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
    """Yields the cards in random order. A card is repeated only after all others."""
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
