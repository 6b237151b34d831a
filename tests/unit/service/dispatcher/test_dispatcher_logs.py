"""The dispatcher's log lines about a job: each with the job, and with the attempt if it concerns one."""

import logging

import pytest

from tests.support.service.dispatcher_stage import Stage
from windlass.actors.scheduler.scheduler import INTERRUPTED, PAUSED
from windlass.service.dispatcher.outcomes import fail_job
from windlass.service.preparation.pipeline import PreparationError
from windlass.storage.sql.database import Database
from windlass.storage.sql.job_status import JobStatus


@pytest.fixture(autouse=True)
def level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def told(caplog: pytest.LogCaptureFixture, job_id: str) -> list[tuple[int | None, str]]:
    """Attempt and text of all lines about a job."""
    fields = [vars(record) for record in caplog.records]
    return [(each.get("attempt"), each["message"]) for each in fields if each.get("job") == job_id]


def test_a_jobs_life_is_told_with_job_and_attempt(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    job_id, journal = stage.run()
    journal.append("metrics", "Step 1", step=1, total_steps=4, train_loss=1.0)
    journal.append_outcome(INTERRUPTED, "a process died", {"code": "process_lost", "message": "ssd-1 died"})
    journal.close()
    stage.end_runner(job_id, 1)
    stage.tick(2)
    stage.request_pause(job_id)
    stage.tick()
    journal = stage.journal(job_id, 2)
    journal.append_outcome(PAUSED, "The attempt ended after a commit")
    journal.close()
    stage.end_runner(job_id, 2)
    stage.tick(2)
    stage.request_resume(job_id)
    stage.tick()
    stage.export_model()
    journal = stage.journal(job_id, 3)
    journal.append_outcome("succeeded", "Trained")
    journal.close()
    stage.tick()
    assert told(caplog, job_id) == [
        (None, "claimed"),
        (1, "launched on the CPU"),
        (1, "lost: ssd-1 died"),
        (1, "ended: queued"),
        (2, "launched on the CPU"),
        (2, "sent pause to the runner"),
        (2, "ended: paused"),
        (3, "launched on the CPU"),
        (3, "ended: succeeded"),
    ]


def test_a_failure_is_told_by_its_code_and_quotes_nothing(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    job_id = stage.submit()
    stage.tick()
    stage.preparations[0].ending = PreparationError("invalid_file", "train.jsonl:1: 'my diary' has no role")
    stage.tick()
    assert stage.status(job_id) is JobStatus.FAILED
    assert told(caplog, job_id) == [(None, "claimed"), (None, "ended: failed (invalid_file)")]
    assert "diary" not in caplog.text


def test_trouble_with_a_job_is_told_with_its_attempt(
    stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, _ = stage.run()
    monkeypatch.setattr(stage.runners, "is_alive", lambda *_: 1 / 0)
    stage.tick()
    assert told(caplog, job_id)[-1] == (1, "Dispatcher._watch failed; it will be tried again")


def test_an_end_that_is_undone_is_not_told(stage: Stage, database: Database, caplog: pytest.LogCaptureFixture) -> None:
    job_id, _ = stage.run()

    def fail_and_raise() -> None:
        with database.write() as session:
            fail_job(session, stage.job(job_id), "broken", "broken")
            raise RuntimeError("undo")

    with pytest.raises(RuntimeError, match="undo"):
        fail_and_raise()
    assert told(caplog, job_id)[-1] == (1, "launched on the CPU")
