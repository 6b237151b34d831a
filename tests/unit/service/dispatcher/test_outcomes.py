"""The status of a job after the end of its attempt, with a real database."""

import functools
from pathlib import Path

import pytest
from sqlalchemy.orm import Session

from windlass.actors.job.journal import JournalRecord
from windlass.actors.scheduler.scheduler import INTERRUPTED
from windlass.service.dispatcher.outcomes import handle_loss, import_records, pause_job
from windlass.service.installation.settings import Settings
from windlass.storage.sql.database import Database
from windlass.storage.sql.errors import StatusConflict
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.models import Job
from windlass.storage.sql.repositories.jobs import JobRepository, NewJob

SETTINGS = Settings(home=Path("/nonexistent"))


@pytest.fixture
def running(database: Database) -> Job:
    """A job in its first attempt."""
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
        jobs = JobRepository(session)
        job = jobs.create(new)
        jobs.transition(job.id, JobStatus.VALIDATING_FILES, JobStatus.QUEUED, message="")
        return jobs.transition(job.id, JobStatus.QUEUED, JobStatus.RUNNING, message="", attempt=1)


class Losses:
    """Records lost attempts instead of handling them."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def __call__(self, session: Session, job: Job, reason: str) -> None:
        self.reasons.append(reason)


def record(kind: str, attempt: int = 1, seq: int = 1, **data: object) -> JournalRecord:
    return JournalRecord(attempt=attempt, seq=seq, created_at=1.0, kind=kind, level="info", message="told", data=data)


def take(database: Database, job: Job, *records: JournalRecord, lost: str | None) -> tuple[bool, list[str]]:
    losses = Losses()
    return import_records(database, SETTINGS, job, records, lost=lost, when_lost=losses), losses.reasons


def status(database: Database, job: Job) -> JobStatus:
    with database.read() as session:
        return JobRepository(session).get(job.id).status


def test_job_without_outcome_has_not_ended(database: Database, running: Job) -> None:
    assert take(database, running, lost=None) == (False, [])
    assert take(database, running, record("message"), lost=None) == (False, [])


def test_ended_runner_is_a_loss_unless_it_left_an_outcome(database: Database, running: Job) -> None:
    assert take(database, running, lost="killed") == (True, ["killed"])
    assert take(database, running, record("message"), lost="killed") == (True, ["killed"])
    error = {"code": "training_failed", "message": "the disk is broken", "param": None}
    outcome = record("outcome", seq=2, status="failed", error=error)
    assert take(database, running, outcome, lost="killed") == (True, [])
    assert status(database, running) is JobStatus.FAILED


@pytest.mark.parametrize("lost", [None, "killed"])
def test_an_interruption_is_a_loss_with_a_reason_of_its_own(database: Database, running: Job, lost: str | None) -> None:
    error = {"code": "process_lost", "message": "the process of ssd-0 died", "param": None}
    outcome = record("outcome", status=INTERRUPTED, error=error)
    assert take(database, running, outcome, lost=lost) == (True, ["the process of ssd-0 died"])


def test_failed_handling_imports_no_records(database: Database, running: Job) -> None:
    with database.write() as session:
        JobRepository(session).transition(running.id, JobStatus.RUNNING, JobStatus.QUEUED, message="")
    with pytest.raises(StatusConflict):
        import_records(
            database,
            SETTINGS,
            running,
            [record("message")],
            lost="killed",
            when_lost=functools.partial(handle_loss, SETTINGS),
        )
    with database.read() as session:
        job = JobRepository(session).get(running.id)
    assert (job.journal_attempt, job.journal_seq) == (0, 0)


def test_a_lost_attempt_leaves_no_estimate(database: Database, running: Job) -> None:
    metrics = record("metrics", step=1, train_loss=1.0, remaining_s=50.0)
    with database.write() as session:
        JobRepository(session).set_fields(running.id, estimated_finish=51.0)
    assert import_records(
        database, SETTINGS, running, [metrics], lost="killed", when_lost=functools.partial(handle_loss, SETTINGS)
    )
    with database.read() as session:
        job = JobRepository(session).get(running.id)
    assert (job.status, job.attempt, job.step, job.estimated_finish) == (JobStatus.QUEUED, 1, 1, None)


def test_a_cancellation_that_came_meanwhile_counts(database: Database, running: Job) -> None:
    """`running` is the job's state when the dispatcher read it."""
    with database.write() as session:
        JobRepository(session).request_cancel(running.id)
    with database.write() as session:
        handle_loss(SETTINGS, session, running, "killed")
    assert status(database, running) is JobStatus.CANCELLED


def test_a_pausing_job_that_is_lost_is_paused_at_its_last_commit(database: Database, running: Job) -> None:
    with database.write() as session:
        pausing = JobRepository(session).transition(running.id, JobStatus.RUNNING, JobStatus.PAUSING, message="")
    with database.write() as session:
        handle_loss(SETTINGS, session, pausing, "killed")
    assert status(database, running) is JobStatus.PAUSED


def test_records_of_job_of_another_dispatcher_are_not_imported(database: Database, running: Job) -> None:
    with database.write() as session:
        row = JobRepository(session).get(running.id)
        row.lease_holder = "dispatcher-other"
    with pytest.raises(StatusConflict, match="in attempt 1 but is in attempt 1 of dispatcher-other"):
        take(database, running, record("message"), lost=None)
    with database.read() as session:
        assert JobRepository(session).get(running.id).journal_seq == 0


def test_job_that_was_resumed_with_other_settings_meanwhile_is_not_paused(database: Database, running: Job) -> None:
    """The reason to pause it was about the settings that it had."""
    with database.write() as session:
        jobs = JobRepository(session)
        seen = jobs.transition(running.id, JobStatus.RUNNING, JobStatus.QUEUED, message="")
    with database.write() as session:
        jobs = JobRepository(session)
        jobs.request_pause(running.id)
        jobs.request_resume(running.id, gpus=2)
        jobs.transition(running.id, JobStatus.VALIDATING_FILES, JobStatus.QUEUED, message="")
    with pytest.raises(StatusConflict), database.write() as session:
        pause_job(session, seen, "it has no plan")
    with database.read() as session:
        assert JobRepository(session).get(running.id).status is JobStatus.QUEUED
