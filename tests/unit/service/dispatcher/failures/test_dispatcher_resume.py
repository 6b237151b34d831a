"""Jobs whose attempts are lost: another attempt follows once no process of the old one is left, up to a limit."""

import os
import signal
from pathlib import Path

import pytest

from tests.support.service.dispatcher_stage import Stage
from windlass.actors.scheduler.scheduler import INTERRUPTED
from windlass.service.dispatcher.runners import RunnerLostError
from windlass.storage.sql.database import Database
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.models import Job


def interrupt(stage: Stage, job_id: str) -> None:
    """The runner reports a lost process; it has not ended yet."""
    journal = stage.journal(job_id, stage.job(job_id).attempt)
    error = {"code": "process_lost", "message": "the process of ssd-1 died", "param": None}
    journal.append_outcome(INTERRUPTED, "the process of ssd-1 died", error)
    journal.close()
    stage.tick()


def error_of(job: Job) -> tuple[str, str]:
    assert job.error is not None
    return job.error["code"], job.error["message"]


def test_a_runner_that_is_gone_without_an_outcome_is_followed_by_another(stage: Stage) -> None:
    job_id, journal = stage.run()
    journal.close()
    stage.put_states(job_id)
    stage.lose(job_id, 1)
    job = stage.job(job_id)
    assert (job.status, job.attempt, job.step, job.error) == (JobStatus.RUNNING, 2, 1, None)
    assert [spec.attempt for spec in stage.runners.started] == [1, 2]
    assert stage.jobs_on_ssds() == [{job_id}, {job_id}]
    lost, started = stage.messages(job_id)[-2:]
    assert lost.startswith("Attempt 1 was lost: the job's processes ended without an outcome: ")
    assert lost.endswith("; going on from the last committed step")
    assert started == "Attempt 2 started"


def test_an_interrupted_attempt_is_followed_by_another_once_its_runner_is_gone(stage: Stage) -> None:
    job_id, journal = stage.run()
    journal.close()
    interrupt(stage, job_id)
    other = stage.queue()
    stage.tick(2)
    job = stage.job(job_id)
    assert (job.status, job.attempt) == (JobStatus.QUEUED, 1)
    assert job.waiting_reason == "the processes of attempt 1 have not ended yet"
    assert stage.status(other) is JobStatus.QUEUED
    reason = "Attempt 1 was lost: the process of ssd-1 died; going on from the last committed step"
    assert stage.messages(job_id).count(reason) == 1
    stage.end_runner(job_id)
    stage.tick()
    assert stage.job(job_id).waiting_reason == "attempt 1 was lost; the next one begins about 2 s later"
    stage.now += 1.9
    stage.tick()
    assert stage.status(job_id) is JobStatus.QUEUED
    stage.now += 0.1
    stage.tick()
    assert (stage.status(job_id), stage.job(job_id).attempt) == (JobStatus.RUNNING, 2)


def test_a_runner_that_stays_long_after_its_interruption_is_killed(stage: Stage) -> None:
    job_id, journal = stage.run()
    journal.close()
    interrupt(stage, job_id)
    stage.now += 180
    stage.tick(2)
    assert stage.runners.alive == {(job_id, 2)}


def test_a_runner_that_hangs_is_killed_and_followed_by_another(stage: Stage) -> None:
    """Ray considers it alive. The modification time of its attempt's file is its sign of life."""
    job_id, journal = stage.run()
    journal.close()
    file = stage.settings.jobs_dir / job_id / "attempt-1.lock"
    for sign in range(3):
        os.utime(file, (sign, sign))
        stage.tick()
        stage.now += 60
        stage.tick()
        assert stage.status(job_id) is JobStatus.RUNNING
    stage.now += 0.1
    stage.tick()
    reason = "its runner hung: it gave no sign of life for 60 s"
    assert f"Attempt 1 was lost: {reason}; going on from the last committed step" in stage.messages(job_id)
    assert stage.runners.alive == set()
    stage.sit_out_the_pause()
    assert (stage.status(job_id), stage.job(job_id).attempt) == (JobStatus.RUNNING, 2)
    stage.now += 60
    stage.tick()
    assert stage.status(job_id) is JobStatus.RUNNING


def test_a_job_that_goes_on_keeps_its_place(stage: Stage) -> None:
    first, journal = stage.run()
    journal.close()
    other = stage.queue()
    interrupt(stage, first)
    stage.tick()
    assert str(stage.job(other).waiting_reason).endswith("; 1 queued job is before this one")
    stage.end_runner(first)
    stage.tick(2)
    assert stage.job(other).waiting_reason == f"the CPU is in use by job {first}; 1 queued job is before this one"
    stage.sit_out_the_pause()
    assert [(spec.job, spec.attempt) for spec in stage.runners.started] == [(first, 1), (first, 2)]
    assert stage.status(other) is JobStatus.QUEUED


def test_the_next_attempt_waits_until_every_process_of_the_old_one_is_gone(stage: Stage) -> None:
    job_id, journal = stage.run()
    journal.close()
    with stage.worker(job_id, 1) as worker:
        stage.end_runner(job_id)
        stage.tick()
        stage.now += 4.9
        stage.tick(2)
        assert (stage.status(job_id), stage.job(job_id).attempt) == (JobStatus.QUEUED, 1)
        assert worker.poll() is None
        worker.kill()
        worker.wait()
        stage.tick()
        stage.sit_out_the_pause()
        assert (stage.status(job_id), stage.job(job_id).attempt) == (JobStatus.RUNNING, 2)


def test_processes_that_outlive_their_runner_are_killed(stage: Stage) -> None:
    job_id, journal = stage.run()
    journal.close()
    with stage.worker(job_id, 1) as worker:
        stage.end_runner(job_id)
        stage.tick()
        stage.now += 5
        stage.tick()
        assert worker.wait() == -signal.SIGKILL
        stage.sit_out_the_pause()
        assert stage.runners.alive == {(job_id, 2)}


def test_no_other_device_is_used_while_the_old_attempt_lives(tmp_path: Path, database: Database) -> None:
    stage = Stage(tmp_path / "home", database, num_gpus=2)
    job_id, journal = stage.run()
    journal.close()
    interrupt(stage, job_id)
    other = stage.queue()
    stage.tick()
    assert stage.status(job_id) is JobStatus.QUEUED
    assert stage.status(other) is JobStatus.RUNNING


def test_states_are_not_freed_while_a_process_may_still_write(stage: Stage) -> None:
    job_id, journal = stage.run()
    stage.put_states(job_id)
    with stage.worker(job_id, 1) as worker:
        journal.append_outcome("cancelled", "The job was cancelled")
        journal.close()
        stage.end_runner(job_id)
        stage.tick(2)
        assert stage.status(job_id) is JobStatus.CANCELLED
        assert stage.jobs_on_ssds() == [{job_id}, {job_id}]
        worker.kill()
        worker.wait()
        stage.tick()
        assert stage.jobs_on_ssds() == [set(), set()]


def test_five_attempts_in_a_row_without_a_new_step_fail_the_job(stage: Stage) -> None:
    job_id, journal = stage.run()
    journal.close()
    stage.put_states(job_id)
    for steps in ((1, 2), (), (), (), (3,), (), (), (), ()):
        stage.lose(job_id, *steps)
        assert stage.status(job_id) is JobStatus.RUNNING
    interrupt(stage, job_id)
    job = stage.job(job_id)
    assert (job.status, job.attempt) == (JobStatus.FAILED, 10)
    code, message = error_of(job)
    assert code == "runner_lost"
    assert message.startswith("the process of ssd-1 died; 5 attempts in a row brought no newly committed step; ")
    assert message.endswith("submit the job again")
    stage.end_runner(job_id, 10)
    stage.tick()
    assert stage.jobs_on_ssds() == [set(), set()]


@pytest.mark.parametrize("max_attempts", [1, 3])
def test_a_job_that_never_gets_anywhere_has_as_many_attempts_as_the_settings_say(
    tmp_path: Path, database: Database, max_attempts: int
) -> None:
    stage = Stage(tmp_path / "home", database, max_attempts=max_attempts)
    job_id, journal = stage.run()
    journal.close()
    for _ in range(max_attempts):
        stage.lose(job_id)
    assert (stage.status(job_id), stage.job(job_id).attempt) == (JobStatus.FAILED, max_attempts)


def test_each_pause_is_longer_than_the_one_before_until_a_step_is_committed(stage: Stage) -> None:
    job_id, journal = stage.run()
    journal.close()
    for steps, pause_s in (((), 2), ((), 8), ((), 32), ((), 128), ((1,), None), ((), 2)):
        attempt = stage.job(job_id).attempt
        stage.lose(job_id, *steps)
        assert stage.status(job_id) is JobStatus.RUNNING
        reason = f"Waiting: attempt {attempt} was lost; the next one begins about {pause_s} s later"
        assert (reason in stage.messages(job_id)) == (pause_s is not None)


def test_an_evaluation_told_again_is_no_progress(stage: Stage) -> None:
    """It comes before the first new step of an attempt that resumes after a step with an evaluation."""
    job_id, journal = stage.run()
    journal.close()
    stage.lose(job_id, 1)
    for attempt in (2, 3, 4, 5, 6):
        journal = stage.journal(job_id, attempt)
        journal.append("metrics", "Step 1: validation", step=1, valid_loss=2.0)
        journal.close()
        assert stage.status(job_id) is JobStatus.RUNNING
        stage.lose(job_id)
    assert stage.status(job_id) is JobStatus.FAILED


def test_a_cancelled_job_does_not_go_on(stage: Stage) -> None:
    job_id, journal = stage.run()
    journal.close()
    stage.put_states(job_id)
    stage.request_cancel(job_id)
    stage.lose(job_id)
    assert stage.status(job_id) is JobStatus.CANCELLED
    assert stage.jobs_on_ssds() == [set(), set()]
    assert len(stage.runners.started) == 1


def test_a_job_cancelled_before_its_next_attempt_leaves_nothing(stage: Stage) -> None:
    job_id, journal = stage.run()
    journal.close()
    stage.put_states(job_id)
    interrupt(stage, job_id)
    stage.request_cancel(job_id)
    assert stage.status(job_id) is JobStatus.CANCELLED
    stage.tick()
    assert stage.jobs_on_ssds() == [{job_id}, {job_id}]
    stage.end_runner(job_id)
    stage.tick()
    assert stage.jobs_on_ssds() == [set(), set()]
    assert len(stage.runners.started) == 1


def test_a_job_cancelled_while_it_waits_for_a_device_leaves_nothing(tmp_path: Path, database: Database) -> None:
    stage = Stage(tmp_path / "home", database, num_gpus=2)
    jobs = [stage.queue() for _ in range(2)]
    stage.tick()
    for job_id in jobs:
        stage.put_states(job_id)
        interrupt(stage, job_id)
    stage.end_runner(jobs[0])
    one_gpu = Stage(tmp_path / "home", database)  # its processes have ended, and it waits for those of the other job
    one_gpu.runners = stage.runners
    one_gpu.new_dispatcher().tick()
    one_gpu.now += 2
    one_gpu.tick()
    assert one_gpu.job(jobs[0]).waiting_reason == f"the CPU is in use by job {jobs[1]}"
    one_gpu.request_cancel(jobs[0])
    one_gpu.tick()
    assert one_gpu.jobs_on_ssds() == [{jobs[1]}, {jobs[1]}]


def test_a_new_dispatcher_waits_for_the_old_attempt_too(stage: Stage) -> None:
    job_id, journal = stage.run()
    journal.close()
    interrupt(stage, job_id)
    stage.new_dispatcher().tick()
    stage.tick(2)
    assert stage.status(job_id) is JobStatus.QUEUED
    stage.end_runner(job_id)
    stage.tick()
    stage.sit_out_the_pause()
    assert (stage.status(job_id), stage.job(job_id).attempt) == (JobStatus.RUNNING, 2)


def test_a_dispatcher_killed_while_it_launched_a_job_leaves_it_to_the_next(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner was made and never told to begin; it would wait forever."""
    monkeypatch.setattr(
        stage.runners, "start", lambda spec: stage.runners.alive.add((spec.job, spec.attempt)), raising=True
    )
    job_id = stage.queue()
    stage.tick()
    assert stage.runners.alive == {(job_id, 1)}
    monkeypatch.undo()
    stage.new_dispatcher().tick()
    stage.tick()
    stage.sit_out_the_pause()
    assert stage.runners.alive == {(job_id, 2)}
    stage.new_dispatcher().tick()
    stage.tick()
    assert stage.runners.alive == {(job_id, 2)}


def test_a_runner_lost_while_it_starts_is_followed_by_another(stage: Stage) -> None:
    stage.runners.refusal = RunnerLostError("its runner did not start (Ray has ended)")
    job_id = stage.queue()
    assert stage.messages(job_id)[-1] == (
        "Attempt 1 was lost: its runner did not start (Ray has ended); going on from the last committed step"
    )
    stage.tick()
    stage.sit_out_the_pause()
    stage.tick()
    stage.runners.refusal = None
    stage.sit_out_the_pause()
    assert (stage.status(job_id), stage.job(job_id).attempt) == (JobStatus.RUNNING, 3)


def fail_to_start(stage: Stage, job_id: str, code: str) -> None:
    attempt = stage.job(job_id).attempt
    journal = stage.journal(job_id, attempt)
    journal.append_outcome("failed", "no room", {"code": code, "message": "no room", "param": None})
    journal.close()
    stage.end_runner(job_id, attempt)
    stage.tick()


@pytest.mark.parametrize("code", ["start_failed", "does_not_fit"])
def test_job_with_committed_steps_that_cannot_start_is_paused_and_goes_on_when_it_is_resumed(
    stage: Stage, code: str
) -> None:
    job_id, _ = stage.run()
    stage.put_states(job_id)
    stage.lose(job_id, 1, 2)
    stage.tick()
    assert stage.job(job_id).attempt == 2
    fail_to_start(stage, job_id, code)
    job = stage.job(job_id)
    assert (job.status, job.error, job.estimated_finish) == (JobStatus.PAUSED, None, None)
    told = "Paused with the states of attempt 1, because attempt 2 could not start: no room."
    assert stage.messages(job_id)[-1].startswith(told)
    stage.tick(2)
    assert stage.jobs_on_ssds() == [{job_id}, {job_id}]
    stage.request_resume(job_id)
    stage.tick(2)
    assert (stage.status(job_id), stage.job(job_id).attempt) == (JobStatus.RUNNING, 3)


def test_job_that_cannot_start_and_has_no_states_fails(stage: Stage) -> None:
    job_id, _ = stage.run()
    fail_to_start(stage, job_id, "does_not_fit")
    assert stage.status(job_id) is JobStatus.FAILED


def test_job_that_is_being_cancelled_is_cancelled_if_it_cannot_start(stage: Stage) -> None:
    job_id, _ = stage.run()
    stage.lose(job_id, 1, 2)
    stage.tick()
    stage.request_cancel(job_id)
    fail_to_start(stage, job_id, "start_failed")
    assert stage.status(job_id) is JobStatus.CANCELLED
