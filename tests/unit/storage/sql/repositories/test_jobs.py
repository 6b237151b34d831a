"""Transitions, lists and cancellation."""

import json
import pickle
from collections.abc import Callable
from itertools import product

import pytest
from sqlalchemy import select

from windlass.storage.sql.database import Database
from windlass.storage.sql.errors import JournalError, NotFound, StatusConflict
from windlass.storage.sql.job_status import (
    ACTIVE_STATUSES,
    TERMINAL_STATUSES,
    TRANSITIONS,
    IllegalTransition,
    JobStatus,
    check_transition,
)
from windlass.storage.sql.models import Job, WebhookDelivery
from windlass.storage.sql.repositories.events import EventRepository
from windlass.storage.sql.repositories.jobs import JobRepository
from windlass.storage.sql.repositories.webhooks import EVENT_TYPES, WebhookRepository

PATHS = {
    JobStatus.VALIDATING_FILES: [],
    JobStatus.QUEUED: [JobStatus.QUEUED],
    JobStatus.RUNNING: [JobStatus.QUEUED, JobStatus.RUNNING],
    JobStatus.PAUSING: [JobStatus.QUEUED, JobStatus.RUNNING, JobStatus.PAUSING],
    JobStatus.PAUSED: [JobStatus.QUEUED, JobStatus.PAUSED],
    JobStatus.SUCCEEDED: [JobStatus.QUEUED, JobStatus.RUNNING, JobStatus.SUCCEEDED],
    JobStatus.FAILED: [JobStatus.FAILED],
    JobStatus.CANCELLED: [JobStatus.CANCELLED],
}


def bring_to(database: Database, job: Job, status: JobStatus) -> None:
    source = JobStatus.VALIDATING_FILES
    for target in PATHS[status]:
        with database.write() as session:
            JobRepository(session).transition(job.id, source, target, message=target)
        source = target


def test_only_listed_transitions_happen(database: Database, make_job: Callable[..., Job]) -> None:
    for source, target in product(JobStatus, JobStatus):
        assert_transition_happens_if_listed(database, make_job(), source, target)


def assert_transition_happens_if_listed(database: Database, job: Job, source: JobStatus, target: JobStatus) -> None:
    bring_to(database, job, source)
    if target in TRANSITIONS[source]:
        with database.write() as session:
            assert JobRepository(session).transition(job.id, source, target, message="go").status is target
        with database.read() as session:
            assert EventRepository(session).page(job.id, limit=1, after=None).rows[0].data == {"status": target.value}
    else:
        with (
            pytest.raises(IllegalTransition, match=f"{source} and cannot become {target}") as refused,
            database.write() as session,
        ):
            JobRepository(session).transition(job.id, source, target, message="go")
        assert str(refused.value).endswith(": it has ended") is (source in TERMINAL_STATUSES)


def test_every_status_has_a_row_and_the_final_ones_lead_nowhere() -> None:
    assert set(TRANSITIONS) == set(JobStatus)
    assert {status for status, targets in TRANSITIONS.items() if not targets} == TERMINAL_STATUSES
    assert ACTIVE_STATUSES.isdisjoint(TERMINAL_STATUSES)


def test_a_transition_from_a_status_the_job_has_left_writes_nothing(
    database: Database, make_job: Callable[..., Job]
) -> None:
    job = make_job()
    bring_to(database, job, JobStatus.CANCELLED)
    with pytest.raises(StatusConflict, match="expected to be validating_files but is cancelled"), database.write() as s:
        JobRepository(s).transition(job.id, JobStatus.VALIDATING_FILES, JobStatus.QUEUED, message="prepared")
    with database.read() as session:
        assert JobRepository(session).get(job.id).status is JobStatus.CANCELLED
        assert [event.message for event in EventRepository(session).since(0, limit=9)][1:] == ["cancelled"]


def test_an_older_attempt_is_fenced_off(database: Database, make_job: Callable[..., Job]) -> None:
    job = make_job()
    bring_to(database, job, JobStatus.QUEUED)
    first, second = (
        run_attempt(database, job, JobStatus.QUEUED, 1),
        run_attempt(database, job, JobStatus.QUEUED, 2, again=True),
    )
    assert (first.attempt, second.attempt) == (1, 2)
    with pytest.raises(StatusConflict, match="in attempt 1 but is running in attempt 2"), database.write() as session:
        JobRepository(session).transition(job.id, JobStatus.RUNNING, JobStatus.SUCCEEDED, message="late", seen=first)
    with pytest.raises(StatusConflict), database.write() as session:
        JobRepository(session).set_fields(job.id, seen=first, step=9)
    with pytest.raises(StatusConflict), database.write() as session:
        JobRepository(session).set_waiting_reason(job.id, "late", seen=first)
    with pytest.raises(StatusConflict), database.write() as session:
        JobRepository(session).check_held(first)
    with database.write() as session:
        jobs = JobRepository(session)
        jobs.check_held(second)
        jobs.transition(job.id, JobStatus.RUNNING, JobStatus.SUCCEEDED, message="done", seen=second)


def run_attempt(database: Database, job: Job, source: JobStatus, attempt: int, *, again: bool = False) -> Job:
    with database.write() as session:
        jobs = JobRepository(session)
        if again:
            jobs.transition(job.id, JobStatus.RUNNING, source, message="lost")
        return jobs.transition(job.id, source, JobStatus.RUNNING, message="run", attempt=attempt)


def add_endpoint(database: Database) -> None:
    with database.write() as session:
        WebhookRepository(session).add(name="all", url="https://example.com", event_types=EVENT_TYPES, secret="sealed")


def test_final_status_queues_webhook_deliveries(database: Database, make_job: Callable[..., Job]) -> None:
    add_endpoint(database)
    done, gone, lives = make_job(), make_job(), make_job()
    bring_to(database, done, JobStatus.SUCCEEDED)
    bring_to(database, lives, JobStatus.PAUSED)
    with database.write() as session:
        JobRepository(session).request_cancel(gone.id)
    with database.read() as session:
        rows = session.scalars(select(WebhookDelivery).order_by(WebhookDelivery.ordinal)).all()
        bodies = [json.loads(row.body) for row in rows if row.delivered_at is None]
    told = [(body["data"]["id"], body["type"]) for body in bodies]
    assert told == [(done.id, "fine_tuning.job.succeeded"), (gone.id, "fine_tuning.job.cancelled")]


def test_change_that_is_rolled_back_queues_no_delivery(database: Database, make_job: Callable[..., Job]) -> None:
    add_endpoint(database)
    job = make_job()

    def fail_and_raise() -> None:
        with database.write() as session:
            JobRepository(session).transition(job.id, job.status, JobStatus.FAILED, message="failed")
            raise RuntimeError("undo")

    with pytest.raises(RuntimeError, match="undo"):
        fail_and_raise()
    with database.read() as session:
        assert session.scalars(select(WebhookDelivery)).all() == []


def test_times_reasons_and_errors_follow_the_status(database: Database, make_job: Callable[..., Job]) -> None:
    job = make_job()
    bring_to(database, job, JobStatus.QUEUED)
    with database.write() as session:
        jobs = JobRepository(session)
        jobs.set_waiting_reason(job.id, "job A holds the GPU")
        jobs.set_waiting_reason(job.id, "job A holds the GPU")
        assert jobs.get(job.id).waiting_reason == "job A holds the GPU"
        running = jobs.transition(job.id, JobStatus.QUEUED, JobStatus.RUNNING, message="run", attempt=1)
        assert (running.waiting_reason, running.finished_at) == (None, None)
        assert running.started_at is not None
        started_at = running.started_at
        error = {"code": "out_of_memory", "message": "needs 8 GiB", "param": None}
        failed = jobs.transition(
            job.id, JobStatus.RUNNING, JobStatus.FAILED, message="failed", level="error", error=error
        )
        assert (failed.started_at, failed.error) == (started_at, error)
        assert failed.finished_at is not None
        events = EventRepository(session).since(0, limit=99)
    assert [event.message for event in events].count("Waiting: job A holds the GPU") == 1
    assert events[-1].data == {"status": "failed", "error": error}
    assert events[-1].level == "error"


def test_the_queue_is_ordered_by_priority_then_age(database: Database, make_job: Callable[..., Job]) -> None:
    late_urgent, early, later = make_job(priority=-1), make_job(), make_job()
    done = make_job(priority=-9)
    bring_to(database, done, JobStatus.FAILED)
    with database.read() as session:
        queue = JobRepository(session).with_status(JobStatus.VALIDATING_FILES, JobStatus.QUEUED)
        assert [job.id for job in queue] == [late_urgent.id, early.id, later.id]


@pytest.mark.parametrize("status", [JobStatus.VALIDATING_FILES, JobStatus.QUEUED, JobStatus.PAUSED])
def test_a_job_without_a_runner_is_cancelled_at_once(
    database: Database, make_job: Callable[..., Job], status: JobStatus
) -> None:
    job = make_job()
    bring_to(database, job, status)
    with database.write() as session:
        assert JobRepository(session).request_cancel(job.id).status is JobStatus.CANCELLED


def test_a_job_with_a_runner_waits_for_it(database: Database, make_job: Callable[..., Job]) -> None:
    job = make_job()
    bring_to(database, job, JobStatus.RUNNING)
    for _ in range(2):
        with database.write() as session:
            assert JobRepository(session).request_cancel(job.id).status is JobStatus.RUNNING
    with database.write() as session:
        jobs = JobRepository(session)
        assert jobs.get(job.id).cancel_requested
        events = [event.message for event in EventRepository(session).since(0, limit=99)]
        assert events.count("Cancelling: the runner is asked to stop") == 1
        jobs.transition(job.id, JobStatus.RUNNING, JobStatus.CANCELLED, message="stopped")
    with pytest.raises(IllegalTransition), database.write() as session:
        JobRepository(session).request_cancel(job.id)


def test_pages_join_to_the_whole_list(database: Database, make_job: Callable[..., Job]) -> None:
    made = [make_job(metadata={"team": "a b" if index % 2 else "it's"}).id for index in range(7)]
    seen: list[str] = []
    with database.read() as session:
        jobs = JobRepository(session)
        after, has_more = None, True
        while has_more:
            page = jobs.page(limit=3, after=after, metadata={})
            seen += [job.id for job in page.rows]
            after, has_more = seen[-1], page.has_more
        odd = jobs.page(limit=9, after=None, metadata={"team": "a b"})
        with pytest.raises(NotFound, match="ftjob-none"):
            jobs.page(limit=3, after="ftjob-none", metadata={})
    assert seen == made[::-1]
    assert [job.id for job in odd.rows] == made[1::2][::-1]


def test_jobs_are_found_by_what_they_use(database: Database, make_job: Callable[..., Job]) -> None:
    training, validating = make_job(training_file="file-9"), make_job(validation_file="file-9", model="org/big")
    with database.read() as session:
        jobs = JobRepository(session)
        assert {job.id for job in jobs.active_using_file("file-9")} == {training.id, validating.id}
        assert [job.id for job in jobs.active_using_models(["org/big"])] == [validating.id]
    bring_to(database, training, JobStatus.FAILED)
    with database.read() as session:
        assert [job.id for job in JobRepository(session).active_using_file("file-9")] == [validating.id]


@pytest.mark.parametrize(
    "error",
    [
        IllegalTransition("ftjob-1", JobStatus.FAILED, JobStatus.RUNNING),
        StatusConflict("ftjob-1", "queued", "running in attempt 2"),
        NotFound("file", "file-1"),
        JournalError("ftjob-1", "record 3 is missing"),
    ],
)
def test_errors_pickle(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (type(error), str(error))


def test_check_transition_names_what_is_allowed() -> None:
    with pytest.raises(IllegalTransition, match="it may become cancelled, queued"):
        check_transition("ftjob-1", JobStatus.PAUSED, JobStatus.RUNNING)


def test_a_running_job_is_asked_to_yield_until_its_status_changes(
    database: Database, make_job: Callable[..., Job]
) -> None:
    def ask(seen: Job) -> None:
        with database.write() as session:
            JobRepository(session).ask_to_yield(seen.id, "ftjob-2", message="make room", seen=seen)

    job = make_job()
    bring_to(database, job, JobStatus.QUEUED)
    with pytest.raises(StatusConflict):
        ask(job)
    with database.write() as session:
        running = JobRepository(session).transition(
            job.id, JobStatus.QUEUED, JobStatus.RUNNING, message="go", attempt=1
        )
    with pytest.raises(StatusConflict):
        ask(job)  # unchanged
    ask(running)
    with database.read() as session:
        assert JobRepository(session).get(job.id).yields_to == "ftjob-2"
        assert [event.message for event in EventRepository(session).since(0, limit=9)][-1] == "make room"
    with database.write() as session:
        queued = JobRepository(session).transition(job.id, JobStatus.RUNNING, JobStatus.QUEUED, message="paused")
        assert queued.yields_to is None


@pytest.mark.parametrize("words", ["a\0b", "\ud800", "a\udfff\0"])
def test_error_with_any_characters_is_stored(database: Database, make_job: Callable[..., Job], words: str) -> None:
    """A chat template can refuse a conversation with a message of any characters."""
    job, error = make_job(), {"code": "x", "message": words, "param": None}
    with database.write() as session:
        jobs = JobRepository(session)
        jobs.set_waiting_reason(job.id, words)
        jobs.transition(job.id, job.status, JobStatus.FAILED, message=words, error=error)
    with database.read() as session:
        assert JobRepository(session).get(job.id).error == error
        (event, *_) = EventRepository(session).page(job.id, limit=1, after=None).rows
        assert (event.message.isprintable(), event.data["error"]) == (True, error)


def test_metadata_is_found_by_keys_of_any_script(database: Database, make_job: Callable[..., Job]) -> None:
    job = make_job(metadata={"équipe": "ñ", "e\u0301": "👾"})
    with database.read() as session:
        for key, value in job.job_metadata.items():
            (found,) = JobRepository(session).page(limit=9, after=None, metadata={key: value}).rows
            assert found.id == job.id
