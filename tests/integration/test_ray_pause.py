"""Jobs that are paused and resumed, on real Ray and through the real dispatcher, without loss."""

import pytest

from tests.integration.resume_stage import NUM_STEPS, ResumeStage, Undisturbed
from windlass.service.jobs.spec_builder import ARENA_DIR
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.repositories.jobs import JobRepository


def pause(stage: ResumeStage, job_id: str) -> None:
    with stage.database.write() as session:
        assert JobRepository(session).request_pause(job_id).status is JobStatus.PAUSING


def resume(stage: ResumeStage, job_id: str) -> None:
    with stage.database.write() as session:
        assert JobRepository(session).request_resume(job_id).status is JobStatus.QUEUED


def wait_until_paused(stage: ResumeStage, job_id: str) -> None:
    stage.wait_for(lambda: stage.job(job_id).status is JobStatus.PAUSED, "pause", job_id)


@pytest.mark.long
def test_a_paused_job_holds_nothing_but_its_states_and_goes_on_after_its_step(
    stage: ResumeStage, undisturbed: Undisturbed
) -> None:
    job_id = stage.submit()
    stage.wait_for_step(job_id, attempt=1, step=5)
    pause(stage, job_id)
    told_before = max(stage.losses(job_id))
    wait_until_paused(stage, job_id)
    last_step = max(stage.losses(job_id))
    # Steps continue until the runner receives the request, one pass of the dispatcher later. The step at that time is
    # finished.
    assert told_before <= last_step < NUM_STEPS
    assert stage.messages(job_id)[-1] == f"Paused after step {last_step}"
    stage.wait_for(lambda: list(stage.folder(job_id).glob("attempt-*")) == [], "end of its processes", job_id)
    stage.wait_for(lambda: not any(job_id in path.name for path in ARENA_DIR.iterdir()), "free memory", job_id)
    assert stage.kill(job_id, "all") == []

    resume(stage, job_id)
    stage.finish(job_id)
    job = stage.job(job_id)
    assert (job.attempt, job.step) == (2, NUM_STEPS)
    told = {record.data["step"]: record.attempt for record in stage.journal(job_id) if "train_loss" in record.data}
    assert told == {step: 1 if step <= last_step else 2 for step in range(1, NUM_STEPS + 1)}
    assert Undisturbed(stage.losses(job_id), stage.model(job_id)) == undisturbed


@pytest.mark.long
def test_a_job_that_is_killed_while_it_pauses_is_paused_and_loses_nothing(
    stage: ResumeStage, undisturbed: Undisturbed
) -> None:
    job_id = stage.submit()
    stage.wait_for_step(job_id, attempt=1, step=5)
    pause(stage, job_id)
    stage.kill(job_id, "all")
    wait_until_paused(stage, job_id)
    resume(stage, job_id)
    stage.finish(job_id)
    assert stage.job(job_id).attempt == 2
    assert Undisturbed(stage.losses(job_id), stage.model(job_id)) == undisturbed


@pytest.mark.long
def test_a_paused_job_that_is_cancelled_leaves_nothing(stage: ResumeStage) -> None:
    job_id = stage.submit()
    stage.wait_for_step(job_id, attempt=1, step=2)
    pause(stage, job_id)
    wait_until_paused(stage, job_id)
    with stage.database.write() as session:
        assert JobRepository(session).request_cancel(job_id).status is JobStatus.CANCELLED
    stage.wait_for(lambda: stage.leftovers(job_id) == [], f"end of {stage.leftovers(job_id)}", job_id)


@pytest.mark.long
def test_a_job_is_paused_for_one_of_higher_priority_and_loses_nothing(
    stage: ResumeStage, undisturbed: Undisturbed
) -> None:
    low = stage.submit(priority=1)
    stage.wait_for_step(low, attempt=1, step=2)
    high = stage.submit()
    stage.wait_for(lambda: stage.job(high).status is JobStatus.RUNNING, "turn of the other", low)
    assert stage.job(low).status is JobStatus.QUEUED
    assert not any(low in path.name for path in ARENA_DIR.iterdir())
    assert list(stage.folder(low).glob("attempt-*")) == []
    last_step = max(stage.losses(low))
    assert 2 <= last_step < NUM_STEPS
    why = f"Paused after step {last_step} for job {high} of higher priority; it goes on by itself when there is room"
    assert why in stage.messages(low)

    stage.finish(high)
    stage.finish(low)
    assert (stage.job(low).attempt, stage.job(high).attempt) == (2, 1)
    told = {record.data["step"]: record.attempt for record in stage.journal(low) if "train_loss" in record.data}
    assert told == {step: 1 if step <= last_step else 2 for step in range(1, NUM_STEPS + 1)}
    for job_id in (high, low):
        assert Undisturbed(stage.losses(job_id), stage.model(job_id)) == undisturbed
