"""Measures the time from a job's submission to its first step, and its phases, by events, files and processes."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.api.service import Running
from windlass.service.jobs import job_dir
from windlass.storage.sql import Database
from windlass.storage.sql.repositories import EventRepository, JobRepository

_PROGRESS = re.compile(r"Loaded \d+%")
_PREPARED = {
    "check_model.json": "the model was checked",
    "prepare_data.json": "the data was prepared",
    "question.json": "the planner was asked",
    "plan_job.json": "the job was planned",
}
_STEP_SERVER = "windlass.service.preparation.sandbox.fork_server"


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """An event on the way to the first step."""

    what: str
    at_s: float  # seconds since the job was created


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStep:
    """The phases of a job up to its first step."""

    phases: Sequence[Phase]
    computed_s: Mapping[str, float]  # processor seconds, by process

    @property
    def after_s(self) -> float:
        """The seconds from the job's submission to the end of its first step."""
        return self.phases[-1].at_s


def first_step(running: Running) -> tuple[str, FirstStep]:
    """Submits a job and waits for its first step. The job continues. Returns its id and the phases."""
    before = _service_s(running)
    job_id = running.submit()
    running.wait_for_step(job_id)
    actors = list(_holders(job_dir(running.settings, job_id).resolve() / "attempt-1.lock"))
    computed_s = {who: s - before[who] for who, s in _service_s(running).items()}
    computed_s |= {f"the job's {len(actors)} processes": sum(map(_computed_s, actors))}
    return job_id, FirstStep(phases=_phases(running, job_id, actors), computed_s=computed_s)


def _service_s(running: Running) -> dict[str, float]:
    """Returns the processor seconds of the service's processes so far."""
    dispatcher = running.dispatcher
    servers = [each for each in dispatcher.children() if _STEP_SERVER in each.cmdline()]
    steps = [each.cpu_times() for each in servers]
    return {
        "the API": _computed_s(running.api),
        "the dispatcher": _computed_s(dispatcher),
        "steps of the preparation": sum(times.children_user + times.children_system for times in steps),
    }


def _computed_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _holders(path: Path) -> Iterator[psutil.Process]:
    """Yields the processes that have a file open."""
    for folder in Path("/proc").glob("[0-9]*"):
        # The process ends meanwhile, or belongs to another user.
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if any(_leads_to(link, path) for link in (folder / "fd").iterdir()):
                yield psutil.Process(int(folder.name))


def _leads_to(link: Path, path: Path) -> bool:
    try:
        return link.readlink() == path
    except FileNotFoundError:  # closed meanwhile
        return False


def _phases(running: Running, job_id: str, actors: Sequence[psutil.Process]) -> Sequence[Phase]:
    """Returns all phases up to the first step, from the job's events, its preparation's files and its processes."""
    database = Database(running.settings.database_url)
    try:
        with database.read() as session:
            created_s = JobRepository(session).get(job_id).created_at
            events = [
                (row.created_at, row.message, row.type)
                for row in EventRepository(session).since(0, limit=10_000, job_id=job_id)
            ]
    finally:
        database.close()
    trained_s = next(at_s for at_s, _, kind in events if kind == "metrics")
    moments = [
        (at_s, message.split(": ")[0])
        for at_s, message, kind in events
        if kind == "message" and not _PROGRESS.match(message)
    ]
    folder = job_dir(running.settings, job_id) / "prepare"
    moments += [(path.stat().st_mtime, what) for name, what in _PREPARED.items() if (path := folder / name).exists()]
    if actors:
        moments.append((max(each.create_time() for each in actors), "the last of the job's processes was there"))
    moments.append((trained_s, "the first step was trained and committed"))
    return [Phase(what=what, at_s=at_s - created_s) for at_s, what in sorted(moments) if created_s <= at_s <= trained_s]
