"""From a job's submission to its first training step, and where the time goes: by its events and its files."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.api_service import Running
from windlass.service.job_specs import job_dir
from windlass.storage.sql.database import Database
from windlass.storage.sql.events import EventRepository
from windlass.storage.sql.jobs import JobRepository

_PROGRESS = re.compile(r"Loaded \d+%")
_PREPARED = {
    "check_model.json": "the model was checked, in a process of its own",
    "prepare_data.json": "the data was prepared, in another",
    "question.json": "the planner was asked",
    "plan_job.json": "the job was planned, in another",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """What had happened when."""

    what: str
    at_s: float  # since the job was there


def phases_to_first_step(running: Running, job_id: str) -> Sequence[Phase]:
    """All that a job's events and its preparation's files tell, to the end of its first step."""
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
    told = next(at_s for at_s, _, kind in events if kind == "metrics")
    found = [
        (at_s, message.split(": ")[0])
        for at_s, message, kind in events
        if kind == "message" and not _PROGRESS.match(message)
    ]
    folder = job_dir(running.settings, job_id) / "prepare"
    found += [(path.stat().st_mtime, what) for name, what in _PREPARED.items() if (path := folder / name).exists()]
    found.append((told, "the first step was trained and committed"))
    return [Phase(what=what, at_s=at_s - created_s) for at_s, what in sorted(found) if created_s <= at_s <= told]
