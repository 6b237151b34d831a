"""A head that was restored from an older backup, and calls that arrive late: nothing is lost, doubled or undone."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import select

from tests.support.storage.mirrored_pair import HEAD, Pair, add_job, messages
from windlass.storage.sql import Database, JobStatus
from windlass.storage.sql.models import File, WebhookDelivery
from windlass.storage.sql.repositories import (
    BoxRepository,
    EventRepository,
    FileRepository,
    Instruction,
    JobRepository,
    WebhookRepository,
)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.close()


@pytest.fixture
def job_id(pair: Pair) -> str:
    with pair.head.write() as session:
        return add_job(session, idempotency_key="once").id


def back_up(pair: Pair, folder: Path) -> None:
    pair.head.close()  # the last connection moves all changes to the main file
    shutil.copyfile(folder / "head.db", folder / "backup.db")


def restore(pair: Pair, folder: Path) -> None:
    pair.head.close()
    for path in folder.glob("head.db*"):
        path.unlink()
    shutil.copyfile(folder / "backup.db", folder / "head.db")
    pair.head = Database(f"sqlite:///{folder / 'head.db'}")


def begun(pair: Pair, job_id: str) -> None:
    pair.give(job_id)
    pair.call()
    pair.begin(job_id)
    pair.call()


def say(pair: Pair, job_id: str, message: str) -> None:
    with pair.box.write() as session:
        EventRepository(session).add(job_id, attempt=1, message=message)


def watch_webhooks(pair: Pair) -> None:
    with pair.head.write() as session:
        kinds = ["fine_tuning.job.succeeded", "fine_tuning.job.cancelled"]
        WebhookRepository(session).add(name="a", url="https://a.example", event_types=kinds, secret="s")


def num_webhooks(pair: Pair) -> int:
    with pair.head.read() as session:
        return len(session.scalars(select(WebhookDelivery)).all())


def test_events_after_a_restored_cursor_are_not_passed_over(pair: Pair, job_id: str, tmp_path: Path) -> None:
    begun(pair, job_id)
    back_up(pair, tmp_path)
    say(pair, job_id, "Told before the restore")
    pair.call()
    known = pair._cursors()  # the box's agent lives on, and knows only this
    restore(pair, tmp_path)
    say(pair, job_id, "Told after the restore")
    pair.arrive(pair.reports(known), pair.done)
    pair.call()
    told = messages(pair.head, job_id)
    assert told[-3:] == ["Begun", "Told before the restore", "Told after the restore"]


def test_an_instruction_after_a_restore_is_not_taken_for_one_that_was_carried_out(
    pair: Pair, job_id: str, tmp_path: Path
) -> None:
    begun(pair, job_id)
    back_up(pair, tmp_path)
    for _ in range(3):
        with pair.of_head() as (_session, mirror, _box):
            mirror.request(Instruction.PAUSE, job_id, here=HEAD)
        with pair.of_head() as (_session, mirror, _box):
            mirror.request(Instruction.RESUME, job_id, here=HEAD)
        pair.call()
    restore(pair, tmp_path)
    with pair.of_head() as (_session, mirror, _box):
        mirror.request(Instruction.CANCEL, job_id, here=HEAD)
    pair.call()
    taken = pair.box_row(job_id)
    assert taken is not None
    assert taken.cancel_requested


def test_a_late_call_does_not_undo_the_columns_of_a_later_one(pair: Pair, job_id: str) -> None:
    begun(pair, job_id)
    late = pair.reports(pair._cursors())
    pair.end(job_id, JobStatus.QUEUED)
    pair.call()
    pair.arrive(late, pair.done)
    row = pair.row(job_id)
    assert row is not None
    assert row.status is JobStatus.QUEUED


def test_an_ended_job_that_is_adopted_has_its_webhook_and_its_result_file(pair: Pair, tmp_path: Path) -> None:
    watch_webhooks(pair)
    back_up(pair, tmp_path)
    with pair.head.write() as session:
        job = add_job(session).id  # after the backup
    begun(pair, job)
    restore(pair, tmp_path)
    with pair.box.write() as session:
        FileRepository(session).add(file_id="file-result", filename="m.csv", purpose="fine-tune-results", nbytes=3)
        JobRepository(session).set_fields(job, result_files=["file-result"])
    pair.end(job, JobStatus.SUCCEEDED)
    pair.call()
    row = pair.row(job)
    assert row is not None
    assert (row.status, row.node) == ("succeeded", HEAD)
    assert num_webhooks(pair) == 1
    with pair.head.read() as session:
        assert session.get(File, "file-result") is not None


def test_a_job_is_adopted_although_its_request_was_sent_again(pair: Pair, tmp_path: Path) -> None:
    back_up(pair, tmp_path)
    with pair.head.write() as session:
        job = add_job(session, idempotency_key="again").id
    begun(pair, job)
    restore(pair, tmp_path)
    with pair.head.write() as session:
        add_job(session, idempotency_key="again")  # the client sends its request again
    pair.call()
    row = pair.row(job)
    assert row is not None
    assert row.status is JobStatus.RUNNING


def test_a_cancelled_job_that_had_begun_has_the_attempt_of_its_box(pair: Pair, job_id: str) -> None:
    pair.give(job_id)
    pair.call()
    pair.begin(job_id)  # the head does not know yet
    with pair.of_head() as (_session, mirror, _box):
        mirror.request(Instruction.CANCEL, job_id, here=HEAD)
    pair.call()
    pair.end(job_id, JobStatus.CANCELLED)
    pair.call()
    row = pair.row(job_id)
    assert row is not None
    assert (row.status, row.attempt, row.node) == ("cancelled", 1, HEAD)


def test_an_instruction_has_a_greater_ordinal_than_those_that_were_confirmed(pair: Pair, job_id: str) -> None:
    with pair.head.write() as session:
        first = BoxRepository(session).instruct(pair.box_id, job_id, Instruction.PAUSE)
        BoxRepository(session).withdraw(first)
        assert BoxRepository(session).instruct(pair.box_id, job_id, Instruction.PAUSE) > first
