"""Jobs that are paused and resumed in any state, with any failure meanwhile."""

import pytest

from tests.support.service.dispatcher_stage import PREPARED, Stage
from windlass.actors.scheduler.scheduler import INTERRUPTED, PAUSED
from windlass.storage.sql.job_status import JobStatus


def end_paused(stage: Stage, job_id: str, *steps: int) -> None:
    """Reports steps, pauses as requested, and ends the runner."""
    attempt = stage.job(job_id).attempt
    journal = stage.journal(job_id, attempt)
    for step in steps:
        journal.append("metrics", f"Step {step}", step=step, total_steps=4, train_loss=1.0 / step)
    journal.append_outcome(PAUSED, "The attempt ended after a commit")
    journal.close()
    stage.tick()
    stage.end_runner(job_id, attempt)
    stage.tick()


def test_a_running_job_pauses_after_its_step_and_goes_on_when_it_is_resumed(stage: Stage) -> None:
    job_id, journal = stage.run()
    journal.close()
    stage.put_states(job_id)
    stage.request_pause(job_id)
    stage.tick(2)
    assert stage.status(job_id) is JobStatus.PAUSING
    assert stage.runners.paused == [(job_id, 1)]
    end_paused(stage, job_id, 1, 2)
    job = stage.job(job_id)
    assert (job.status, job.attempt, job.step, job.estimated_finish) == (JobStatus.PAUSED, 1, 2, None)
    assert stage.messages(job_id)[-1] == "Paused after step 2"
    stage.tick(3)
    assert len(stage.runners.started) == 1
    stage.request_resume(job_id)
    stage.tick()
    assert (stage.status(job_id), stage.job(job_id).attempt) == (JobStatus.RUNNING, 2)
    assert stage.jobs_on_ssds() == [{job_id}, {job_id}]
    assert stage.messages(job_id)[-2:] == ["Resumed", "Attempt 2 started"]


def test_a_paused_job_leaves_its_device_to_others_and_queues_again_when_it_is_resumed(stage: Stage) -> None:
    first, journal = stage.run()
    journal.close()
    second = stage.queue()
    stage.request_pause(first)
    stage.tick()
    assert stage.job(second).waiting_reason == f"the CPU is in use by job {first}"
    end_paused(stage, first, 1)
    assert (stage.status(first), stage.status(second)) == (JobStatus.PAUSED, JobStatus.RUNNING)
    stage.request_resume(first)
    stage.tick()
    assert stage.job(first).waiting_reason == f"the CPU is in use by job {second}"


def test_a_job_that_is_resumed_before_its_processes_are_gone_waits_for_them(stage: Stage) -> None:
    job_id, journal = stage.run()
    stage.request_pause(job_id)
    journal.append_outcome(PAUSED, "The attempt ended after a commit")
    journal.close()
    stage.tick()
    assert stage.status(job_id) is JobStatus.PAUSED
    stage.request_resume(job_id)
    stage.tick()
    assert stage.job(job_id).waiting_reason == "the processes of attempt 1 have not ended yet"
    stage.end_runner(job_id)
    stage.tick()
    assert stage.status(job_id) is JobStatus.RUNNING


@pytest.mark.parametrize("tells", [False, True])
def test_a_job_that_is_lost_while_it_pauses_is_paused_at_its_last_commit(stage: Stage, tells: bool) -> None:
    job_id, journal = stage.run()
    journal.append("metrics", "Step 1", step=1, total_steps=4, train_loss=1.0)
    stage.request_pause(job_id)
    stage.tick()
    if tells:
        error = {"code": "process_lost", "message": "the process of ssd-1 died", "param": None}
        journal.append_outcome(INTERRUPTED, "the process of ssd-1 died", error)
    journal.close()
    stage.end_runner(job_id)
    stage.tick()
    assert (stage.status(job_id), stage.job(job_id).step) == (JobStatus.PAUSED, 1)
    assert stage.messages(job_id)[-1].startswith("Paused at the last committed step: attempt 1 was lost: ")
    stage.request_resume(job_id)
    stage.tick()
    assert (stage.status(job_id), stage.job(job_id).attempt) == (JobStatus.RUNNING, 2)


def test_a_job_that_ends_before_it_gets_to_pause_has_ended(stage: Stage) -> None:
    job_id, journal = stage.run()
    stage.request_pause(job_id)
    stage.tick()
    stage.export_model()
    journal.append_outcome("succeeded", "The model is ready")
    journal.close()
    stage.tick()
    assert stage.status(job_id) is JobStatus.SUCCEEDED


def test_a_job_that_fails_while_it_pauses_has_failed(stage: Stage) -> None:
    job_id, journal = stage.run()
    stage.request_pause(job_id)
    stage.tick()
    journal.append_outcome("failed", "broken", {"code": "x", "message": "broken", "param": None})
    journal.close()
    stage.tick()
    assert stage.status(job_id) is JobStatus.FAILED


def test_a_job_is_cancelled_while_it_pauses(stage: Stage) -> None:
    job_id, journal = stage.run()
    journal.close()
    stage.put_states(job_id)
    stage.request_pause(job_id)
    stage.tick()
    stage.request_cancel(job_id)
    stage.tick()
    assert (stage.runners.paused, stage.runners.cancelled) == ([(job_id, 1)], [(job_id, 1)])
    end_paused(stage, job_id, 1)
    assert stage.status(job_id) is JobStatus.CANCELLED
    assert stage.jobs_on_ssds() == [set(), set()]


@pytest.mark.parametrize("after_a_crash", [False, True])
def test_a_paused_job_that_is_cancelled_leaves_nothing(stage: Stage, after_a_crash: bool) -> None:
    job_id, journal = stage.run()
    journal.close()
    stage.put_states(job_id)
    stage.request_pause(job_id)
    stage.tick()
    end_paused(stage, job_id, 1)
    if after_a_crash:
        stage.new_dispatcher()
        stage.tick()
    assert stage.jobs_on_ssds() == [{job_id}, {job_id}]
    stage.request_cancel(job_id)
    assert stage.status(job_id) is JobStatus.CANCELLED
    stage.tick()
    assert stage.jobs_on_ssds() == [set(), set()]


def test_a_job_that_is_paused_while_it_is_prepared_is_prepared_when_it_is_resumed(stage: Stage) -> None:
    job_id = stage.submit()
    stage.tick()
    stage.request_pause(job_id)
    stage.tick()
    assert stage.preparations[0].stopped
    stage.request_resume(job_id)
    stage.tick()
    stage.preparations[1].ending = PREPARED
    stage.tick(2)
    assert stage.status(job_id) is JobStatus.RUNNING


def test_a_dispatcher_that_is_killed_meanwhile_asks_the_runner_again(stage: Stage) -> None:
    job_id, journal = stage.run()
    journal.close()
    stage.request_pause(job_id)
    stage.tick()
    stage.new_dispatcher()
    stage.tick()
    assert stage.runners.paused == [(job_id, 1)] * 2
    end_paused(stage, job_id, 1)
    stage.new_dispatcher()
    stage.tick(2)
    assert stage.status(job_id) is JobStatus.PAUSED


def test_pausing_often_is_no_loss(stage: Stage) -> None:
    job_id, journal = stage.run()
    journal.close()
    for _ in range(stage.settings.max_attempts):
        stage.request_pause(job_id)
        stage.tick()
        end_paused(stage, job_id)
        stage.request_resume(job_id)
        stage.tick()
    stage.lose(job_id)
    assert stage.status(job_id) is JobStatus.RUNNING
    assert stage.job(job_id).num_lost == 1


def test_a_job_that_is_resumed_before_its_runner_was_told_to_pause_trains_on(stage: Stage) -> None:
    job_id, journal = stage.run()
    stage.request_pause(job_id)
    stage.request_resume(job_id)
    stage.tick(2)
    assert stage.runners.paused == []
    assert (stage.status(job_id), stage.job(job_id).attempt) == (JobStatus.RUNNING, 1)
    assert stage.messages(job_id)[-1] == "Resumed before it had paused"
    journal.close()


def test_a_job_that_is_resumed_while_its_runner_pauses_goes_on_with_another_attempt(stage: Stage) -> None:
    job_id, journal = stage.run()
    journal.close()
    stage.request_pause(job_id)
    stage.tick()
    assert stage.runners.paused == [(job_id, 1)]
    stage.request_resume(job_id)
    assert stage.status(job_id) is JobStatus.RUNNING
    end_paused(stage, job_id, 1)
    stage.tick(2)
    assert (stage.status(job_id), stage.job(job_id).attempt) == (JobStatus.RUNNING, 2)
    (told,) = (each for each in stage.messages(job_id) if "ended after step" in each)
    assert told.endswith(", and was resumed before: it goes on")
    assert stage.job(job_id).num_lost == 0
