"""Which part of an installation is hurt in which run of `benchmarks.chaos`, when, and for how long: by a seed alone."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


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

# How many injuries a run has.
_NUM_INJURIES = (1, 1, 1, 2, 2, 3)
# Seconds: how long a disk stays full and a database away, now and then longer than anybody waits for it; how long
# nobody starts the service again.
_SHORT_S, _LONG_S, _SHARE_OF_LONG = (2.0, 20.0), (40.0, 60.0), 0.2
_DOWN_S = (0.0, 8.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Injury:
    """One thing that is done to the installation while a job is under way."""

    kind: Kind
    after_s: float  # since the job was submitted, or the injury before was over
    lasts_s: float  # 0: what is killed is not held down

    def __str__(self) -> str:
        return f"{self.kind} for {self.lasts_s:.0f} s" if self.lasts_s else str(self.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One job, and what is done to it."""

    number: int  # from 1
    database: DatabaseKind
    injuries: tuple[Injury, ...]


def plan_runs(
    num_runs: int, seed: int, databases: Sequence[DatabaseKind], job_s: float, *, disk_can_be_filled: bool
) -> list[Run]:
    """The runs of a seed, on the databases in turn; every kind comes as often as any other that is possible there.

    `job_s`: how long a job takes that is left alone, from its submission to its end.
    """
    generator = random.Random(seed)
    decks: dict[DatabaseKind, list[Kind]] = {database: [] for database in databases}
    runs = []
    for number in range(1, num_runs + 1):
        database = databases[(number - 1) % len(databases)]
        injuries = []
        for i in range(generator.choice(_NUM_INJURIES)):
            decks[database] = decks[database] or _shuffled(generator, database, disk_can_be_filled)
            kind = decks[database].pop()
            # At any moment of the job; later ones while it recovers, or after that.
            after_s = generator.uniform(0.0, job_s if i == 0 else job_s / 2)
            injuries.append(Injury(kind=kind, after_s=after_s, lasts_s=_lasts_s(generator, kind)))
        runs.append(Run(number=number, database=database, injuries=tuple(injuries)))
    return runs


def _shuffled(generator: random.Random, database: DatabaseKind, disk_can_be_filled: bool) -> list[Kind]:
    kinds = list(Kind)
    if database is DatabaseKind.SQLITE:
        kinds.remove(Kind.DATABASE_RESTARTED)
    if not disk_can_be_filled:
        kinds.remove(Kind.FULL_DISK)
    generator.shuffle(kinds)
    return kinds


def _lasts_s(generator: random.Random, kind: Kind) -> float:
    if kind in (Kind.DATABASE_AWAY, Kind.DATABASE_RESTARTED, Kind.FULL_DISK):
        return generator.uniform(*(_LONG_S if generator.random() < _SHARE_OF_LONG else _SHORT_S))
    return generator.uniform(*_DOWN_S) if kind in (Kind.SERVICE, Kind.EVERYTHING) else 0.0
