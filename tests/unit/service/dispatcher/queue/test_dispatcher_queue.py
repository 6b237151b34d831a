"""Jobs that share a machine, wait for each other and are preempted, by the needs in their plans."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.service.dispatcher_stage import PREPARED, Stage, planned
from windlass.actors.scheduler.scheduler import INTERRUPTED, PAUSED
from windlass.amounts import GIB
from windlass.service.dispatcher import queue as job_queue
from windlass.service.dispatcher.placement.capacity import MachineCapacity, SsdSpace
from windlass.storage.ids import Attempt, JobId
from windlass.storage.sql.database import Database
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.models import Job


@pytest.fixture
def two_gpus(tmp_path: Path, database: Database) -> Stage:
    return stage_of(tmp_path, database, num_gpus=2)


@pytest.fixture
def four_gpus(tmp_path: Path, database: Database) -> Stage:
    return stage_of(tmp_path, database, num_gpus=4)


def stage_of(tmp_path: Path, database: Database, *, num_gpus: int) -> Stage:
    stage = Stage(tmp_path / "home", database, num_gpus=num_gpus)
    stage.box = MachineCapacity(host_nbytes=10 * GIB, room_nbytes=10 * GIB)
    return stage


def started(stage: Stage) -> list[tuple[str, int]]:
    return [(spec.job, spec.attempt) for spec in stage.runners.started]


def train(stage: Stage, job_id: str, *steps: int) -> None:
    """Reports these steps as the job's runner does."""
    journal = stage.journal(job_id, stage.job(job_id).attempt)
    for step in steps:
        journal.append("metrics", f"Step {step}", step=step, total_steps=4, train_loss=1.0 / step)
    journal.close()
    stage.tick()


def end(stage: Stage, job_id: str, status: str = "cancelled") -> None:
    attempt = stage.job(job_id).attempt
    journal = stage.journal(job_id, attempt)
    journal.append_outcome(status, "over")
    journal.close()
    stage.tick()
    stage.end_runner(job_id, attempt)
    stage.tick(2)


# --- admission ----------------------------------------------------------------------------------------------------


def test_two_jobs_share_a_box_where_both_fit(two_gpus: Stage) -> None:
    first, second = (two_gpus.queue(prepared=planned(5.0)) for _ in range(2))
    two_gpus.tick()
    assert started(two_gpus) == [(first, 1), (second, 1)]


def test_a_job_that_does_not_fit_beside_another_waits_with_a_reason_in_numbers(two_gpus: Stage) -> None:
    first, second = two_gpus.queue(prepared=planned(6.0)), two_gpus.queue(prepared=planned(4.5))
    two_gpus.tick()
    assert two_gpus.status(second) is JobStatus.QUEUED
    reason = f"needs 4.5 GiB of host memory; 4.0 GiB are free beside job {first}"
    assert two_gpus.job(second).waiting_reason == reason
    end(two_gpus, first)
    assert two_gpus.status(second) is JobStatus.RUNNING


def test_memory_is_free_only_when_the_processes_that_had_it_are_gone(two_gpus: Stage) -> None:
    first, second = two_gpus.queue(prepared=planned(6.0)), two_gpus.queue(prepared=planned(6.0))
    two_gpus.tick()
    journal = two_gpus.journal(first, 1)
    journal.append_outcome("cancelled", "over")
    journal.close()
    two_gpus.tick(2)
    assert (two_gpus.status(first), two_gpus.status(second)) == (JobStatus.CANCELLED, JobStatus.QUEUED)
    two_gpus.end_runner(first)
    two_gpus.tick()
    assert two_gpus.status(second) is JobStatus.RUNNING


def test_without_a_gpu_what_the_device_holds_is_host_memory(stage: Stage) -> None:
    stage.box = MachineCapacity(host_nbytes=10 * GIB, room_nbytes=10 * GIB)
    prepared = planned(6.0)
    prepared["plan_job"]["plan"]["peak_gib"]["gpu"] = 5.0
    job_id = stage.queue(prepared=prepared)
    stage.tick()
    assert stage.job(job_id).waiting_reason == (
        "needs 11.0 GiB of host memory; 10.0 GiB are free, also with no other job here"
    )


def test_buffers_go_into_what_is_free_now(two_gpus: Stage) -> None:
    first = two_gpus.queue(prepared=planned(1.0, buffers_gib=6.0))
    two_gpus.tick()
    second = two_gpus.queue(prepared=planned(1.0, buffers_gib=4.5))
    assert two_gpus.job(second).waiting_reason == (
        f"needs 4.5 GiB of memory for its buffers; 4.0 GiB are free beside job {first}"
    )
    # The first job's buffers are allocated by now, and other processes have freed memory.
    two_gpus.box = replace(two_gpus.box, room_nbytes=int(4.5 * GIB), buffers={first: 6 * GIB})
    two_gpus.now += 5
    two_gpus.tick()
    assert two_gpus.status(second) is JobStatus.RUNNING


def test_states_need_space_on_each_ssd_but_those_that_lie_there_need_no_more(two_gpus: Stage) -> None:
    fast, slow = (
        SsdSpace(disk=disk, free_nbytes=free * GIB, rate=rate) for disk, free, rate in (("/a", 9, 4e9), ("/b", 3, 1e9))
    )
    two_gpus.box = replace(two_gpus.box, ssds=(fast, slow))
    job_id = two_gpus.queue(prepared=planned(1.0, ssd_gib=20.0))
    two_gpus.tick()
    assert two_gpus.job(job_id).waiting_reason == (
        "needs 16.0 GiB of space on the SSD /a; 9.0 GiB are free; "
        "needs 4.0 GiB of space on the SSD /b; 3.0 GiB are free, also with no other job here"
    )
    held = {job_id: 12 * GIB}
    two_gpus.box = replace(two_gpus.box, ssds=(replace(fast, held=held), replace(slow, held=held)))
    two_gpus.now += 5
    two_gpus.tick()
    assert two_gpus.status(job_id) is JobStatus.RUNNING


def test_job_that_would_not_fit_alone_says_so_and_delays_no_other(two_gpus: Stage) -> None:
    huge, other = two_gpus.queue(prepared=planned(10.5)), two_gpus.queue(prepared=planned(6.0))
    two_gpus.tick()
    assert two_gpus.job(huge).waiting_reason == (
        "needs 10.5 GiB of host memory; 10.0 GiB are free, also with no other job here"
    )
    assert two_gpus.status(other) is JobStatus.RUNNING


def test_a_large_job_is_not_starved_by_small_ones(two_gpus: Stage) -> None:
    small = two_gpus.queue(prepared=planned(2.0))
    two_gpus.tick()
    large = two_gpus.queue(prepared=planned(9.0))
    others = [two_gpus.queue(prepared=planned(2.0)) for _ in range(3)]
    two_gpus.tick()
    assert [two_gpus.status(job_id) for job_id in others] == [JobStatus.QUEUED] * 3
    assert two_gpus.job(others[0]).waiting_reason == (
        "there is room for it, but a job before it would have to wait longer; 1 queued job is before this one"
    )
    end(two_gpus, small)
    assert started(two_gpus)[1:] == [(large, 1)]


def test_a_job_without_a_plan_needs_a_device(two_gpus: Stage) -> None:
    first, second = two_gpus.queue(prepared=planned(10.0)), two_gpus.queue(prepared=PREPARED)
    two_gpus.tick()
    assert started(two_gpus) == [(first, 1), (second, 1)]


def test_a_job_without_a_plan_needs_the_buffers_of_its_budget(tmp_path: Path, database: Database) -> None:
    stage = Stage(tmp_path / "home", database, num_gpus=2, host_memory_gib=6.0)
    stage.box = MachineCapacity(room_nbytes=10 * GIB)
    first, second = stage.queue(), stage.queue()
    stage.tick()
    assert stage.job(second).waiting_reason == (
        f"needs 6.0 GiB of memory for its buffers; 4.0 GiB are free beside job {first}"
    )


def test_a_reason_of_which_only_the_numbers_change_is_no_new_event(two_gpus: Stage) -> None:
    two_gpus.queue(prepared=planned(1.0, buffers_gib=6.0))
    two_gpus.tick()
    second = two_gpus.queue(prepared=planned(1.0, buffers_gib=8.0))
    for free_gib in (9.5, 9.0):
        two_gpus.box = replace(two_gpus.box, room_nbytes=int(free_gib * GIB))
        two_gpus.now += 30
        two_gpus.tick()
    assert "; 3.0 GiB are free" in str(two_gpus.job(second).waiting_reason)
    assert sum("of memory for its buffers" in message for message in two_gpus.messages(second)) == 1


@pytest.mark.parametrize("windlass", [{"gpus": 0}, {"unknown": 1}, {"batch_size": "many"}])
def test_unreadable_settings_affect_only_their_job(two_gpus: Stage, windlass: dict[str, object]) -> None:
    broken = two_gpus.queue_only()
    with two_gpus.database.write() as session:
        row = session.get_one(Job, broken)
        row.windlass = {**row.windlass, **windlass}
    sound = two_gpus.queue()
    two_gpus.tick()
    assert (sound, 1) in started(two_gpus)
    assert two_gpus.status(broken) is JobStatus.FAILED


def test_job_with_more_gpus_than_ray_was_started_with_is_told_so(tmp_path: Path, database: Database) -> None:
    stage = Stage(tmp_path / "home", database, cpu_ranks=2)
    job_id = stage.submit(gpus=2, num_microbatches=2)
    stage.tick()
    assert stage.status(job_id) is JobStatus.FAILED
    error = stage.job(job_id).error
    assert error is not None
    assert "Ray was started with 1 device, but cpu_ranks is 2 now" in error["message"]


# --- priorities ---------------------------------------------------------------------------------------------------


def test_jobs_go_by_priority_and_then_first_in_first_out(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_queue, "_STARTING_S", 0.0)  # so that no preparation waits for a start
    running = stage.queue(priority=-1)
    stage.tick()
    low, first, second, high = (stage.queue(priority=priority) for priority in (1, 0, 0, -1))
    for expected in (high, first, second, low):
        end(stage, started(stage)[-1][0])
        assert started(stage)[-1] == (expected, 1)
    assert running == started(stage)[0][0]


def test_a_job_of_lower_priority_is_paused_and_goes_on_by_itself(stage: Stage) -> None:
    low = stage.queue(priority=1)
    stage.tick()
    train(stage, low, 1)
    high = stage.queue()
    stage.tick()
    assert stage.runners.paused == [(low, 1)]
    assert stage.status(low) is JobStatus.RUNNING
    assert stage.messages(low)[-1] == (
        f"Pausing for job {high} of higher priority: the runner ends its attempt after its step; "
        "the job goes on by itself when there is room"
    )
    assert stage.job(high).waiting_reason == (
        f"the CPU is in use by job {low}; jobs of lower priority are paused for it after their step"
    )
    train(stage, low, 2)
    end(stage, low, PAUSED)
    assert (stage.status(low), stage.status(high)) == (JobStatus.QUEUED, JobStatus.RUNNING)
    paused = f"Paused after step 2 for job {high} of higher priority; it goes on by itself when there is room"
    assert paused in stage.messages(low)
    assert stage.job(low).waiting_reason == f"the CPU is in use by job {high}"
    end(stage, high)
    assert started(stage) == [(low, 1), (high, 1), (low, 2)]
    assert stage.job(low).yields_to is None
    assert (stage.job(low).step, stage.job(low).num_lost) == (2, 0)


def test_a_paused_job_goes_on_before_those_of_its_priority_that_came_later(stage: Stage) -> None:
    low = stage.queue(priority=1)
    stage.tick()
    train(stage, low, 1)
    high, other = stage.queue(), stage.queue(priority=1)
    stage.tick()
    end(stage, low, PAUSED)
    end(stage, high)
    assert started(stage)[2:] == [(low, 2)]
    assert stage.status(other) is JobStatus.QUEUED


def test_a_job_is_paused_once_its_attempt_has_a_step_and_not_before(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_queue, "_STARTING_S", 0.0)  # all attempts are older than that
    low = stage.queue(priority=1)
    stage.tick()
    high = stage.queue()
    stage.tick(3)
    assert stage.runners.paused == []
    train(stage, low, 1)
    stage.tick()
    assert stage.runners.paused == [(low, 1)]
    end(stage, low, PAUSED)
    end(stage, high)
    # The step was the previous attempt's.
    higher = stage.queue()
    stage.tick(3)
    assert stage.runners.paused == [(low, 1)]
    train(stage, low, 2)
    stage.tick()
    assert stage.runners.paused == [(low, 1), (low, 2)]
    assert stage.status(higher) is JobStatus.QUEUED


def test_an_attempt_that_has_just_begun_ends_at_once_and_counts_as_no_loss(stage: Stage) -> None:
    low = stage.queue(priority=1)
    stage.tick()
    high = stage.queue()
    stage.tick(3)
    assert stage.runners.paused == []
    assert started(stage) == [(low, 1), (high, 1)]
    assert f"Pausing for job {high} of higher priority: its attempt has only just begun" in stage.messages(low)[-3]
    assert stage.messages(low)[-2] == (
        f"Attempt 1 ended as it began, for job {high} of higher priority; the job goes on by itself when there is room"
    )
    assert (stage.job(low).num_lost, stage.job(low).yields_to) == (0, None)
    end(stage, high)
    assert started(stage)[-1] == (low, 2)


def test_an_attempt_that_was_ended_as_it_began_is_no_loss_to_the_next_dispatcher(stage: Stage) -> None:
    low = stage.queue(priority=1)
    stage.tick()
    stage.queue()
    while stage.runners.is_alive(JobId(low), Attempt(1)):
        stage.tick()
    stage.new_dispatcher()
    stage.let_leases_expire()
    stage.tick()
    assert stage.messages(low)[-2].startswith("Attempt 1 ended as it began")
    assert stage.job(low).num_lost == 0


def test_a_job_lets_one_of_higher_priority_be_prepared_before_it_begins(stage: Stage) -> None:
    (stage.settings.models_dir / "tiny").mkdir()
    urgent = stage.submit()
    stage.tick()
    low, same = stage.queue_only(priority=1), stage.queue_only()
    stage.tick()
    assert started(stage) == [(same, 1)], "jobs of the same priority do not wait"
    end(stage, same)
    assert (stage.status(low), stage.job(low).waiting_reason) == (
        JobStatus.QUEUED,
        "a job of higher priority that is being prepared",
    )
    stage.prepare_at_once(urgent, PREPARED)
    stage.tick(2)
    assert started(stage)[-1] == (urgent, 1)


@pytest.mark.parametrize(("urgent_gpus", "windlass", "begins"), [(1, {}, True), (2, {}, False), (2, {"gpus": 0}, True)])
def test_a_job_leaves_the_devices_to_one_that_is_being_prepared(
    two_gpus: Stage, urgent_gpus: int, windlass: dict[str, object], begins: bool
) -> None:
    (two_gpus.settings.models_dir / "tiny").mkdir()
    urgent = two_gpus.submit(gpus=urgent_gpus, num_microbatches=2)
    with two_gpus.database.write() as session:
        row = session.get_one(Job, urgent)
        row.windlass = {**row.windlass, **windlass}
    two_gpus.tick()
    low = two_gpus.queue_only(priority=1)
    two_gpus.tick()
    assert started(two_gpus) == [(low, 1)] * begins
    two_gpus.now += 30
    two_gpus.tick(2)
    assert started(two_gpus) == [(low, 1)]


def test_a_job_lets_others_be_prepared_for_a_moment_only(stage: Stage) -> None:
    (stage.settings.models_dir / "tiny").mkdir()
    stage.submit()
    stage.tick()
    low = stage.queue_only(priority=1)
    stage.tick()
    assert started(stage) == []
    stage.now += 21.0
    stage.submit()
    stage.tick()
    assert started(stage) == [(low, 1)]


def test_a_job_does_not_wait_for_one_that_has_another_device(two_gpus: Stage) -> None:
    (two_gpus.settings.models_dir / "tiny").mkdir()
    two_gpus.submit()
    two_gpus.tick()
    first, second = (two_gpus.queue_only(priority=1, prepared=planned(1.0)) for _ in range(2))
    two_gpus.tick()
    assert started(two_gpus) == [(first, 1)]
    assert two_gpus.status(second) is JobStatus.QUEUED


def test_the_time_that_a_job_lets_others_be_prepared_is_counted_in_all(stage: Stage) -> None:
    (stage.settings.models_dir / "tiny").mkdir()
    running = stage.queue()
    low = stage.queue_only(priority=1)
    for _ in range(3):
        urgent = stage.submit()
        stage.now += 60.0  # while another job trains, the wait for this one does not count
        stage.tick()
        end(stage, running)
        stage.now += 6.0
        stage.prepare_at_once(urgent, PREPARED)
        stage.tick()
        assert started(stage)[-1] == (urgent, 1)
        running = urgent
    stage.submit()
    stage.tick()
    end(stage, running)
    stage.now += 6.0
    stage.tick()
    assert started(stage)[-1] == (low, 1)


def test_starting_attempt_is_preempted_only_a_few_times(stage: Stage) -> None:
    """However many urgent jobs arrive, the job makes progress."""
    low = stage.queue(priority=1)
    stage.tick()
    for number in range(1, 4):
        urgent = stage.queue()
        stage.tick(3)
        assert started(stage)[-1] == (urgent, 1)
        end(stage, urgent)
        assert started(stage)[-1] == (low, number + 1)
    urgent = stage.queue()
    stage.tick(3)
    assert stage.status(urgent) is JobStatus.QUEUED
    train(stage, low, 1)
    stage.tick()
    assert stage.runners.paused == [(low, 4)]
    end(stage, low, PAUSED)
    end(stage, urgent)
    stage.queue()
    stage.tick(3)
    assert started(stage)[-2:][0] == (low, 5), "its count begins anew after a step"
    assert stage.status(low) is JobStatus.QUEUED


def test_no_job_is_preempted_for_one_that_still_would_not_fit(two_gpus: Stage) -> None:
    first, low = two_gpus.queue(prepared=planned(6.0)), two_gpus.queue(priority=1, prepared=planned(2.0))
    two_gpus.tick()
    for job_id in (first, low):
        train(two_gpus, job_id, 1)
    two_gpus.queue(prepared=planned(5.0))
    two_gpus.tick(3)
    assert two_gpus.runners.paused == []


def test_only_as_many_are_paused_as_it_takes(two_gpus: Stage) -> None:
    lower, low = (two_gpus.queue(priority=priority, prepared=planned(4.0)) for priority in (2, 1))
    two_gpus.tick()
    for job_id in (lower, low):
        train(two_gpus, job_id, 1)
    high = two_gpus.queue(prepared=planned(6.0))
    two_gpus.tick(3)
    assert two_gpus.runners.paused == [(lower, 1)]
    end(two_gpus, lower, PAUSED)
    assert two_gpus.status(high) is JobStatus.RUNNING
    assert two_gpus.status(low) is JobStatus.RUNNING


def test_an_owner_may_pause_or_cancel_a_job_that_makes_room(stage: Stage) -> None:
    low = stage.queue(priority=1)
    stage.tick()
    train(stage, low, 1)
    high = stage.queue()
    stage.tick()
    stage.request_pause(low)
    stage.tick()
    end(stage, low, PAUSED)
    assert stage.status(low) is JobStatus.PAUSED
    assert stage.messages(low)[-1] == "Paused after step 1"
    assert stage.status(high) is JobStatus.RUNNING


def test_a_job_that_is_lost_as_it_makes_room_goes_on_when_there_is_room(stage: Stage) -> None:
    low = stage.queue(priority=1)
    stage.tick()
    train(stage, low, 1)
    high = stage.queue()
    stage.tick()
    end(stage, low, INTERRUPTED)
    assert (stage.status(low), stage.status(high)) == (JobStatus.QUEUED, JobStatus.RUNNING)
    end(stage, high)
    assert started(stage)[-1] == (low, 2)


def test_a_dispatcher_that_is_killed_meanwhile_pauses_the_same_job(stage: Stage) -> None:
    low = stage.queue(priority=1)
    stage.tick()
    train(stage, low, 1)
    high = stage.queue()
    stage.tick()
    stage.new_dispatcher()
    stage.tick(2)
    assert stage.runners.paused == [(low, 1)] * 2
    assert sum(message.startswith("Pausing for") for message in stage.messages(low)) == 1
    end(stage, low, PAUSED)
    assert stage.status(high) is JobStatus.RUNNING


def test_a_lost_job_leaves_its_place_to_one_of_higher_priority(stage: Stage) -> None:
    low = stage.queue(priority=1)
    stage.tick()
    end(stage, low, INTERRUPTED)
    high = stage.queue()
    stage.tick()
    assert stage.status(high) is JobStatus.RUNNING
    stage.sit_out_the_pause()
    assert stage.status(low) is JobStatus.QUEUED


# --- several GPUs a job -----------------------------------------------------------------------------------------------


def test_jobs_begin_while_there_are_gpus_for_them(four_gpus: Stage) -> None:
    first = four_gpus.queue(gpus=3, batch_size=4)
    second = four_gpus.queue(gpus=2, batch_size=4)
    third = four_gpus.queue()  # the second job will have room beside it
    assert four_gpus.job(second).waiting_reason == f"needs 2 GPUs; 1 is free beside job {first}"
    assert started(four_gpus) == [(first, 1), (third, 1)]
    end(four_gpus, first)
    assert [(spec.job, spec.num_ranks) for spec in four_gpus.runners.started] == [(first, 3), (third, 1), (second, 2)]


def test_job_that_would_keep_gpus_from_one_before_it_waits(four_gpus: Stage) -> None:
    first = four_gpus.queue(gpus=3, batch_size=4)
    second = four_gpus.queue(gpus=4, batch_size=4)
    third = four_gpus.queue()
    assert four_gpus.job(second).waiting_reason == f"needs 4 GPUs; 1 is free beside job {first}"
    assert "there is room for it, but a job before it would have to wait longer" in four_gpus.job(third).waiting_reason
    end(four_gpus, first)
    assert started(four_gpus) == [(first, 1), (second, 1)]


def test_job_with_more_gpus_than_a_machine_lost_some_of_says_that_it_cannot_begin(four_gpus: Stage) -> None:
    running = four_gpus.queue()
    waiting = four_gpus.queue(gpus=4, batch_size=4)
    four_gpus._resources = replace(four_gpus._resources, num_gpus=2)
    four_gpus.new_dispatcher().tick()
    assert four_gpus.status(running) is JobStatus.RUNNING
    assert four_gpus.job(waiting).waiting_reason == "needs 4 GPUs; 2 are free, also with no other job here"


def test_job_with_more_gpus_than_the_machine_has_fails_before_it_is_prepared(four_gpus: Stage) -> None:
    job_id = four_gpus.submit(gpus=5)
    four_gpus.tick()
    job = four_gpus.job(job_id)
    assert job.status is JobStatus.FAILED
    assert job.error == {
        "code": "invalid_value",
        "message": "windlass.gpus is 5, and the machine has 4 GPUs",
        "param": "windlass.gpus",
    }
    assert not four_gpus.preparations


# --- visible to an owner -------------------------------------------------------------------------------------------


def test_other_users_jobs_are_counted_and_not_named(
    two_gpus: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_queue, "_STARTING_S", 0.0)  # so that no preparation waits for a start
    mine = two_gpus.queue(priority=2, owner="ada")
    theirs = two_gpus.queue(priority=1, owner="bob")
    two_gpus.tick()
    for job_id in (mine, theirs):
        train(two_gpus, job_id, 1)
    waiting = two_gpus.queue(priority=2, owner="ada")
    assert two_gpus.job(waiting).waiting_reason == f"every GPU is in use by job {mine} and 1 job of others"
    with caplog.at_level(logging.INFO):
        urgent = two_gpus.queue(owner="bob")
        two_gpus.tick()
    (line,) = [each for each in caplog.records if "makes room" in each.message]
    assert line.message == f"of priority 2, it makes room for job {urgent}, of priority 0"
    assert (vars(line)["job"], vars(line)["attempt"]) == (mine, 1)
    end(two_gpus, mine, PAUSED)
    assert two_gpus.job(mine).waiting_reason == "every GPU is in use by 2 jobs of others"
    told = " ".join([*two_gpus.messages(mine), *two_gpus.messages(waiting)])
    assert "Pausing for a job of higher priority" in told
    assert "Paused after step 1 for a job of higher priority" in told
    assert theirs not in told
    assert urgent not in told
