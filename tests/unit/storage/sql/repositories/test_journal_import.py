"""A journal's records reach the tables exactly once."""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import func, select

from windlass.actors.job.journal import JournalRecord
from windlass.storage.sql.database import Database
from windlass.storage.sql.errors import JournalError, NotFound
from windlass.storage.sql.models import Job, JobEvent
from windlass.storage.sql.repositories.events import EventRepository
from windlass.storage.sql.repositories.jobs import JobRepository
from windlass.storage.sql.repositories.journal_import import Imported, import_journal


def record(seq: int, kind: str = "message", attempt: int = 1, message: str = "", **data: Any) -> JournalRecord:
    return JournalRecord(
        attempt=attempt, seq=seq, created_at=1000.0 + seq, kind=kind, level="info", message=message, data=data
    )


def metrics(seq: int, step: int, loss: float, attempt: int = 1, **data: Any) -> JournalRecord:
    return record(seq, "metrics", attempt, f"Step {step}", step=step, train_loss=loss, **data)


def take(database: Database, job: Job, attempt: int, *records: JournalRecord) -> Imported:
    with database.write() as session:
        return import_journal(session, job.id, attempt, records)


def num_imported_events(database: Database) -> int:
    with database.read() as session:
        return session.scalar(select(func.count()).where(JobEvent.seq.is_not(None))) or 0


def test_a_batch_given_twice_counts_once(database: Database, make_job: Callable[..., Job]) -> None:
    job = make_job()
    batch = [record(1, message="loading"), metrics(2, 1, 3.0, total_steps=9, remaining_s=50.0, trained_tokens=640)]
    assert take(database, job, 1, *batch).num_records == 2
    assert take(database, job, 1, *batch).num_records == 0
    assert take(database, job, 1, *batch, metrics(3, 2, 2.5)).num_records == 1
    assert num_imported_events(database) == 3
    with database.read() as session:
        row = JobRepository(session).get(job.id)
        assert (row.step, row.total_steps, row.trained_tokens, row.estimated_finish) == (2, 9, 640, 1052.0)
        assert (row.journal_attempt, row.journal_seq) == (1, 3)
        newest = EventRepository(session).page(job.id, limit=9, after=None).rows
    assert [event.type for event in newest] == ["metrics", "metrics", "message", "message"]


def test_the_metrics_of_the_last_step_are_those_of_each_job(database: Database, make_job: Callable[..., Job]) -> None:
    first, second, untrained = make_job(), make_job(), make_job()
    take(database, first, 1, metrics(1, 1, 3.0), metrics(2, 2, 2.5))
    take(database, second, 1, metrics(1, 1, 2.0), metrics(2, 2, 1.5))
    with database.read() as session:
        found = EventRepository(session).last_metrics([first.id, untrained.id])
    assert {job_id: data["train_loss"] for job_id, data in found.items()} == {first.id: 2.5}


def test_the_last_step_that_told_the_time_left_is_found_behind_those_that_did_not(
    database: Database, make_job: Callable[..., Job]
) -> None:
    job = make_job()

    def last() -> int | None:
        with database.read() as session:
            found = EventRepository(session).last_paced_step(job.id)
            return None if found is None else found.step

    take(database, job, 1, record(1), metrics(2, 1, 3.0))
    assert last() is None
    take(database, job, 1, metrics(3, 2, 2.5, remaining_s=50.0), metrics(4, 3, 2.4, remaining_s=None))
    assert last() == 3, "that the time left is not known is told, too"
    take(database, job, 1, metrics(5, 4, 2.3, remaining_s=20.0))
    # The next attempt reports step 5 without a remaining time.
    take(database, job, 2, metrics(1, 5, 2.2, attempt=2))
    assert last() == 4


def test_an_import_that_is_undone_is_done_again(database: Database, make_job: Callable[..., Job]) -> None:
    job = make_job()

    def import_and_die() -> None:
        with database.write() as session:
            import_journal(session, job.id, 1, [record(1)])
            raise RuntimeError("the service was killed here")

    with pytest.raises(RuntimeError, match="killed"):
        import_and_die()
    assert num_imported_events(database) == 0
    assert take(database, job, 1, record(1)).num_records == 1


def test_a_resumed_attempt_replaces_the_metrics_it_trains_again(
    database: Database, make_job: Callable[..., Job]
) -> None:
    job = make_job()
    take(database, job, 1, *(metrics(step, step, 10.0 - step) for step in range(1, 7)))
    # The last commit was step 3; the second attempt reports every other step.
    take(database, job, 2, metrics(1, 4, 0.4, attempt=2))
    with database.read() as session:
        rows = EventRepository(session).metrics(job.id)
        assert [(row.step, row.attempt) for row in rows] == [(1, 1), (2, 1), (3, 1), (4, 2)]
        assert rows[-1].data["train_loss"] == 0.4
        assert JobRepository(session).get(job.id).step == 4
    assert take(database, job, 2, metrics(7, 7, 9.9)).num_records == 0  # a late record of the lost runner


def test_the_first_steps_and_the_first_event_of_an_attempt(database: Database, make_job: Callable[..., Job]) -> None:
    job = make_job()
    take(database, job, 1, record(1, message="loading"), *(metrics(seq, seq - 1, 3.0) for seq in (2, 3, 4)))
    take(database, job, 2, record(1, attempt=2, message="resuming"), metrics(2, 3, 2.0, 2), metrics(3, 4, 1.0, 2))
    with database.read() as session:
        events = EventRepository(session)
        assert [row.step for row in events.first_metrics(job.id, 1, limit=5)] == [1, 2]
        assert [row.step for row in events.first_metrics(job.id, 2, limit=1)] == [3]
        messages = [event.message for n in (1, 2) if (event := events.first(job.id, n)) is not None]
        assert messages == ["loading", "resuming"]
        assert events.first(job.id, 3) is None


def test_an_evaluation_joins_the_metrics_of_its_step(database: Database, make_job: Callable[..., Job]) -> None:
    job = make_job()
    take(database, job, 1, metrics(1, 5, 1.5), record(2, "metrics", step=5, full_valid_loss=1.7))
    with database.read() as session:
        (row,) = EventRepository(session).metrics(job.id)
    assert row.data == {"step": 5, "train_loss": 1.5, "full_valid_loss": 1.7}


def test_an_evaluation_that_a_resumed_attempt_repeats_keeps_the_training_loss(
    database: Database, make_job: Callable[..., Job]
) -> None:
    job = make_job()
    take(database, job, 1, *(metrics(step, step, 10.0 - step) for step in range(1, 6)))
    take(database, job, 2, record(1, "metrics", attempt=2, step=3, full_valid_loss=1.7))
    with database.read() as session:
        rows = EventRepository(session).metrics(job.id)
    assert [row.step for row in rows] == [1, 2, 3]
    assert rows[-1].data == {"step": 3, "train_loss": 7.0, "full_valid_loss": 1.7}


def test_checkpoints_keep_their_id_when_passed_again(database: Database, make_job: Callable[..., Job]) -> None:
    job = make_job()

    def checkpoint(seq: int, step: int, attempt: int, loss: float) -> JournalRecord:
        data = {"step_number": step, "fine_tuned_model_checkpoint": f"ft-step-{step}", "path": f"/m/{step}"}
        return record(seq, "checkpoint", attempt, "saved", **data, metrics={"train_loss": loss})

    take(database, job, 1, checkpoint(1, 10, 1, 2.0), checkpoint(2, 20, 1, 1.5))
    with database.read() as session:
        first = EventRepository(session).checkpoints(job.id, limit=9, after=None).rows
    take(database, job, 2, checkpoint(1, 20, 2, 1.4))
    with database.read() as session:
        events = EventRepository(session)
        again = events.checkpoints(job.id, limit=9, after=None).rows
        assert [row.id for row in again] == [row.id for row in first]
        assert [(row.step_number, row.metrics["train_loss"]) for row in again] == [(20, 1.4), (10, 2.0)]
        assert [row.step_number for row in events.checkpoints(job.id, limit=9, after=again[0].id).rows] == [10]
        assert events.checkpoints(job.id, limit=1, after=None).has_more


def test_checkpoint_missing_in_a_later_record_is_deleted(database: Database, make_job: Callable[..., Job]) -> None:
    job = make_job()

    def checkpoint(seq: int, step: int, kept: list[tuple[int, list[str]]], attempt: int = 1) -> JournalRecord:
        data = {"step_number": step, "fine_tuned_model_checkpoint": f"ft-step-{step}", "path": f"/m/{step}"}
        reasons = dict(kept)[step]
        return record(seq, "checkpoint", attempt, "saved", **data, reasons=reasons, nbytes=10 * step, kept=kept)

    def rows() -> list[tuple[int, list[str], int | None]]:
        with database.read() as session:
            found = EventRepository(session).checkpoints(job.id, limit=9, after=None).rows
        return [(row.step_number, row.reasons, row.nbytes) for row in found]

    take(
        database,
        job,
        1,
        checkpoint(1, 2, [(2, ["best", "interval"])]),
        checkpoint(2, 3, [(2, ["interval"]), (3, ["best"])]),
    )
    assert rows() == [(3, ["best"], 30), (2, ["interval"], 20)]
    last = [(2, ["interval"]), (4, ["best"])]
    take(database, job, 1, checkpoint(3, 4, last))
    assert rows() == [(4, ["best"], 40), (2, ["interval"], 20)]
    take(database, job, 2, checkpoint(1, 4, last, attempt=2))  # an attempt that was lost after it
    assert rows() == [(4, ["best"], 40), (2, ["interval"], 20)]


def test_the_outcome_is_handed_out_once(database: Database, make_job: Callable[..., Job]) -> None:
    job = make_job()
    done = record(1, "outcome", message="done", status="succeeded", model_dir="/m")
    outcome = take(database, job, 1, done).outcome
    assert outcome is not None
    assert (outcome.attempt, outcome.message, outcome.data["status"]) == (1, "done", "succeeded")
    assert take(database, job, 1, done).outcome is None


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([record(1), record(3)], "goes on with record 3 where 2 was expected"),
        ([record(2)], "goes on with record 2 where 1 was expected"),
        ([record(1, attempt=2)], "of attempt 2, which is after 1"),
        ([record(1), record(2, "metrics", train_loss=1.0)], "names no step"),
    ],
)
def test_a_journal_that_cannot_be_right_is_refused_whole(
    database: Database, make_job: Callable[..., Job], records: list[JournalRecord], reason: str
) -> None:
    job = make_job()
    with pytest.raises(JournalError, match=reason):
        take(database, job, 1, *records)
    assert num_imported_events(database) == 0


def test_an_unknown_job_is_named(database: Database) -> None:
    with pytest.raises(NotFound, match="ftjob-none"), database.write() as session:
        import_journal(session, "ftjob-none", 1, [record(1)])
