"""A finished job's prediction is stored for later ones, if its steps say something about it."""

import json
from pathlib import Path
from typing import Any

import pytest

from windlass.actors.job.journal import METRICS, JournalRecord
from windlass.planner.predictions import PastPredictions
from windlass.planner.predictions.confidence import TimesFrom
from windlass.service.installation.settings import Settings
from windlass.service.jobs.prediction_record import record_prediction
from windlass.service.jobs.spec_builder import job_dir, kept_times_dir
from windlass.storage.sql.database import Database
from windlass.storage.sql.models import Job
from windlass.storage.sql.repositories.jobs import JobRepository, NewJob
from windlass.storage.sql.repositories.journal_import import import_journal

PLAN = {"feasible": True, "reasons": [], "step_s": 2.0, "times_from": "blocks"}


@pytest.fixture
def job(database: Database) -> Job:
    new = NewJob(
        model="tiny",
        training_file="file-train",
        validation_file=None,
        suffix=None,
        seed=7,
        method={},
        windlass={},
        metadata={},
        priority=0,
        idempotency_key=None,
        request_digest=None,
    )
    with database.write() as session:
        return JobRepository(session).create(new)


@pytest.mark.parametrize(
    ("plan", "num_steps", "errors"),
    [
        ({}, 10, [1.25]),
        ({}, 9, []),  # too few
        ({"step_s": 0.5}, 10, []),  # too short
        ({"times_from": None}, 10, []),  # of an older release
    ],
)
def test_prediction_is_stored_beside_the_measured_steps(
    database: Database, job: Job, tmp_path: Path, plan: dict[str, Any], num_steps: int, errors: list[float]
) -> None:
    settings = Settings(home=tmp_path)
    folder = job_dir(settings, job.id) / "prepare"
    folder.mkdir(parents=True)
    (folder / "plan_job.json").write_text(json.dumps({"plan": PLAN | plan}))
    measured = {"step_s": 2.5, "num_steps": num_steps, "recent": None, "peak_bytes": {}}
    data = {"step": num_steps, "measured": measured}
    record = JournalRecord(attempt=1, seq=1, created_at=1.0, kind=METRICS, level="info", message="", data=data)
    past = PastPredictions(folder=kept_times_dir(settings))
    record_prediction(database, settings, job)
    assert past.errors(TimesFrom.BLOCKS) == []
    with database.write() as session:
        import_journal(session, job.id, 1, [record])
    record_prediction(database, settings, job)
    record_prediction(database, settings, job)  # a later attempt
    assert past.errors(TimesFrom.BLOCKS) == errors


def test_a_job_that_ran_by_several_plans_tells_nothing(database: Database, job: Job, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    folder = job_dir(settings, job.id) / "prepare"
    folder.mkdir(parents=True)
    (folder / "plan_job.json").write_text(json.dumps({"plan": PLAN, "from_attempt": 2}))
    data = {"step": 50, "measured": {"step_s": 2.5, "num_steps": 48, "recent": None, "peak_bytes": {}}}
    record = JournalRecord(attempt=1, seq=1, created_at=1.0, kind=METRICS, level="info", message="", data=data)
    with database.write() as session:
        import_journal(session, job.id, 1, [record])
    record_prediction(database, settings, job)
    assert not kept_times_dir(settings).exists()
