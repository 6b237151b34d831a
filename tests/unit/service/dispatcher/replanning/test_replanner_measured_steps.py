"""Jobs that are planned again from their first measured steps, and continue with a better plan."""

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.service.dispatcher_stage import PREPARED, Stage
from tests.unit.service.dispatcher.replanning.test_replanner_changed_machine import machine, store_request
from windlass.actors.job.journal import Journal
from windlass.actors.job.pace import Pace
from windlass.actors.scheduler.scheduler import INTERRUPTED, PAUSED
from windlass.engine.memory_plan.plan import Placement
from windlass.planner.question.job_plan import JobPlan
from windlass.planner.question.plan_request import PlanRequest
from windlass.planner.question.report import PlanReport
from windlass.service.jobs.spec_builder import job_dir
from windlass.service.preparation.pipeline import PreparationError
from windlass.service.validation.hyperparameters import WindlassSettings
from windlass.storage.sql.database import Database
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.models import Job
from windlass.storage.sql.repositories.events import EventRepository

OLD, NEW = Placement(num_cached_params=1), Placement(host_blocks=(0, 2), num_cached_params=2)
REPORT = PlanReport(feasible=True, reasons=(), step_s=10.0, busy_s={"compute": 1.0}, peak_gib={"gpu": 1.0})
PLANNED = {"ok": True, **JobPlan(report=REPORT, placement=OLD, arena_nbytes=1 << 20).to_json()}
SLOWER = dataclasses.replace(REPORT, step_s=20.0)
BETTER: dict[str, Any] = {
    "ok": True,
    **JobPlan(report=SLOWER, placement=NEW, arena_nbytes=2 << 20).to_json(),
    "changes": True,
    "told": "Measured: each SSD reads 0.2 GB/s, the profile said 2 GB/s. [...]",
}
SAME: dict[str, Any] = {**PLANNED, "changes": False, "told": "Measured: the machine does what its profile says. [...]"}


def planned_job(stage: Stage, **windlass: Any) -> tuple[str, Journal]:
    """A planned, running job of 40 steps."""
    job_id = stage.submit(epochs=20, **windlass)
    stage.tick()
    folder = job_dir(stage.settings, job_id) / "prepare"
    folder.mkdir(parents=True)
    report = dataclasses.replace(REPORT, choices={"gpus": windlass["gpus"]}) if "gpus" in windlass else REPORT
    plan = JobPlan(report=report, placement=OLD, arena_nbytes=1 << 20)
    (folder / "plan_job.json").write_text(json.dumps({"ok": True, **plan.to_json()}))
    store_request(stage, job_id, machine(2.0), WindlassSettings(**windlass))
    stage.preparations[-1].ending = PREPARED
    stage.tick(2)
    assert stage.status(job_id) is JobStatus.RUNNING
    return job_id, stage.journal(job_id, 1)


def train(stage: Stage, journal: Journal, *steps: int, step_s: float = 10.0) -> None:
    for step in steps:
        facts = {"step": step, "total_steps": 40, "train_loss": 1.0 / step, "step_s": step_s}
        journal.append("metrics", f"Step {step}", **facts)
    stage.tick(2)


def asked(stage: Stage) -> tuple[str, Journal]:
    """A job for which the planner has been asked."""
    job_id, journal = planned_job(stage)
    train(stage, journal, 1, 2, 3, 4, 5)
    assert len(stage.planners) == 1
    return job_id, journal


def corrected(stage: Stage, answer: Any = BETTER) -> tuple[str, Journal]:
    job_id, journal = asked(stage)
    stage.planners[0].answer = answer
    stage.tick(2)
    return job_id, journal


def end_paused(stage: Stage, job_id: str, journal: Journal) -> None:
    """Pauses as requested, and ends the runner."""
    journal.append_outcome(PAUSED, "The attempt ended after a commit")
    journal.close()
    stage.tick()
    stage.end_runner(job_id, stage.job(job_id).attempt)


def state_of(job: Job) -> tuple[JobStatus, int, int]:
    return job.status, job.attempt, job.plan_number


def test_the_planner_is_asked_again_once_the_first_steps_are_measured(stage: Stage) -> None:
    job_id, journal = planned_job(stage)
    train(stage, journal, 1, 2, 3, 4)
    assert stage.planners == []
    train(stage, journal, 5)
    (planner,) = stage.planners
    request, running = planner.request, planner.request.running
    # The same request, except that nothing is measured while a job computes.
    assert (request.training.batch_size, request.compute_threads, request.may_measure) == (5, 4, False)
    assert running is not None
    assert running.timeline_dir == job_dir(stage.settings, job_id) / "timeline"
    assert (running.first_step, running.num_steps_left) == (3, 35)
    assert {"ok": True, **running.plan.to_json()} == PLANNED
    assert running.restart_s >= 0
    stored = json.loads(json.dumps(request.to_json()))
    assert {"ok": True, **stored["running"]["plan"]} == PLANNED, "without the fields that were not set"
    assert PlanRequest.from_json(stored) == request


def test_a_plan_that_stays_is_corrected_and_told(stage: Stage) -> None:
    job_id, journal = corrected(stage, SAME)
    assert state_of(stage.job(job_id)) == (JobStatus.RUNNING, 1, 1)
    assert stage.messages(job_id)[-1] == SAME["told"]
    assert stage.runners.paused == []
    train(stage, journal, 6, 7, 8, 9, 10)
    assert len(stage.planners) == 1
    stage.lose(job_id)
    assert stage.runners.started[1].placement == OLD


def test_the_job_goes_on_with_another_plan_after_a_commit(stage: Stage) -> None:
    job_id, journal = corrected(stage)
    stage.put_states(job_id)
    assert state_of(stage.job(job_id)) == (JobStatus.RUNNING, 1, 1)
    assert stage.messages(job_id)[-1] == BETTER["told"]
    assert stage.runners.paused == [(job_id, 1)]
    train(stage, journal, 6)
    other = stage.queue()
    journal.append_outcome(PAUSED, "The attempt ended after a commit")
    journal.close()
    stage.tick()
    assert state_of(stage.job(job_id)) == (JobStatus.QUEUED, 1, 1)
    assert stage.messages(job_id)[-2] == "Attempt 1 ended after step 6, so that another goes on with the new plan"
    assert stage.job(job_id).waiting_reason == "the processes of attempt 1 have not ended yet"
    stage.end_runner(job_id)
    stage.tick()
    assert state_of(stage.job(job_id)) == (JobStatus.RUNNING, 2, 1)
    assert stage.status(other) is JobStatus.QUEUED
    assert stage.jobs_on_ssds() == [{job_id}, {job_id}]
    first, second = stage.runners.started
    assert (first.placement, first.host_memory_nbytes) == (OLD, 1 << 20)
    assert (second.placement, second.host_memory_nbytes) == (NEW, 2 << 20)
    assert second.expected_pace == Pace(step_s=20.0, is_measured=False), "earlier steps were made by another plan"
    same = {
        "expected_pace": first.expected_pace,
        "attempt": first.attempt,
        "placement": OLD,
        "host_memory_nbytes": first.host_memory_nbytes,
    }
    assert dataclasses.replace(second, **same) == first


def test_plan_is_corrected_only_once(stage: Stage) -> None:
    job_id, journal = corrected(stage)
    end_paused(stage, job_id, journal)
    stage.tick()
    again = stage.journal(job_id, 2)
    train(stage, again, *range(6, 20))
    assert len(stage.planners) == 1
    assert stage.runners.paused == [(job_id, 1)]


def test_a_runner_that_does_not_end_is_asked_again(stage: Stage) -> None:
    job_id, _ = corrected(stage)
    stage.now += 9.9
    stage.tick(2)
    assert len(stage.runners.paused) == 1
    stage.now += 0.1
    stage.tick(2)
    assert stage.runners.paused == [(job_id, 1)] * 2


# --- jobs that are left alone -----------------------------------------------------------------------------------------


def test_a_job_without_a_plan_is_left_alone(stage: Stage) -> None:
    job_id, journal = stage.run()
    train(stage, journal, *range(1, 10))
    assert stage.planners == []
    assert stage.status(job_id) is JobStatus.RUNNING


def test_plan_for_several_gpus_is_corrected(tmp_path: Path, database: Database) -> None:
    stage = Stage(tmp_path / "home", database, num_gpus=3)
    _, journal = planned_job(stage, gpus=2, num_microbatches=2)
    train(stage, journal, 1, 2, 3, 4, 5)
    (planner,) = stage.planners
    assert planner.request.running is not None


def test_plan_for_several_devices_of_a_cpu_is_not_corrected_and_its_steps_are_not_read(
    tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, reads = Stage(tmp_path / "home", database), list[str]()
    stage._resources = replace(stage._resources, cpu_ranks=3)
    stage.new_dispatcher()
    first_metrics = EventRepository.first_metrics

    def recorded(events: EventRepository, job_id: str, *args: Any, **options: Any) -> Any:
        reads.append(job_id)
        return first_metrics(events, job_id, *args, **options)

    monkeypatch.setattr(EventRepository, "first_metrics", recorded)
    _, journal = planned_job(stage, gpus=2, num_microbatches=2)
    train(stage, journal, 1, 2, 3, 4, 5)
    assert (stage.planners, reads) == ([], [])
    alone, journal = planned_job(stage)
    train(stage, journal, 1, 2, 3, 4, 5)
    assert len(stage.planners) == 1
    assert set(reads) == {alone}


def test_a_job_that_is_soon_over_is_left_alone(stage: Stage) -> None:
    _, journal = planned_job(stage)
    train(stage, journal, 1, 2, 3, 4, 5, step_s=59 / 35)
    assert stage.planners == []


def test_a_job_that_is_to_be_cancelled_is_not_paused(stage: Stage) -> None:
    job_id, journal = asked(stage)
    stage.request_cancel(job_id)
    stage.planners[0].answer = BETTER
    stage.tick(2)
    assert (stage.runners.paused, stage.runners.cancelled) == ([], [(job_id, 1)])
    assert stage.job(job_id).plan_number == 0
    journal.append_outcome("cancelled", "The job was cancelled")
    stage.tick()
    assert stage.status(job_id) is JobStatus.CANCELLED
    stage.tick()
    assert stage.planners[0].stopped


def test_a_job_that_is_cancelled_while_it_pauses_is_told_at_once_and_ends(stage: Stage) -> None:
    job_id, journal = corrected(stage)
    stage.put_states(job_id)
    stage.request_cancel(job_id)
    stage.tick()
    assert stage.runners.cancelled == [(job_id, 1)]
    end_paused(stage, job_id, journal)
    assert stage.status(job_id) is JobStatus.CANCELLED
    stage.tick()
    assert stage.jobs_on_ssds() == [set(), set()]
    assert len(stage.runners.started) == 1


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (
            PreparationError("plan_job_timeout", "plan_job did not end within 600 s"),
            "did not end within 600 s",
        ),
        (
            {"ok": True, "warnings": ["no plan was made: 2 are held"]},
            "no plan was made: 2 are held",
        ),
    ],
    ids=["an error", "nothing"],
)
def test_a_planner_that_fails_changes_nothing_and_is_not_asked_again(stage: Stage, answer: Any, why: str) -> None:
    job_id, journal = corrected(stage, answer)
    train(stage, journal, 6, 7)
    assert len(stage.planners) == 1
    assert stage.runners.paused == []
    assert why in stage.messages(job_id)[-3]
    stage.lose(job_id)
    assert stage.runners.started[1].placement == OLD


# --- crashes ----------------------------------------------------------------------------------------------------------


def test_a_dispatcher_killed_while_the_planner_thinks_lets_the_next_one_ask(stage: Stage) -> None:
    job_id, _ = asked(stage)
    stage.new_dispatcher().tick()
    stage.tick()
    assert len(stage.planners) == 2
    stage.planners[1].answer = BETTER
    stage.tick(2)
    assert stage.messages(job_id).count(BETTER["told"]) == 1
    assert stage.runners.paused == [(job_id, 1)]


def test_a_dispatcher_killed_before_the_runner_is_told_lets_the_next_one_tell(stage: Stage) -> None:
    job_id, _ = asked(stage)
    stage.planners[0].answer = BETTER
    stage.tick()
    assert (stage.job(job_id).plan_number, stage.runners.paused) == (1, [])
    stage.new_dispatcher().tick()
    stage.tick()
    assert stage.runners.paused == [(job_id, 1)]
    assert stage.messages(job_id).count(BETTER["told"]) == 1


def test_a_dispatcher_killed_while_the_attempt_ends_finds_that_it_has(stage: Stage) -> None:
    job_id, journal = corrected(stage)
    journal.append_outcome(PAUSED, "The attempt ended after a commit")
    journal.close()
    stage.end_runner(job_id)
    stage.new_dispatcher().tick()
    stage.tick(2)
    assert state_of(stage.job(job_id)) == (JobStatus.RUNNING, 2, 1)
    stage.new_dispatcher().tick()
    stage.tick(2)
    assert [(spec.attempt, spec.placement) for spec in stage.runners.started] == [(1, OLD), (2, NEW)]
    assert stage.runners.paused == [(job_id, 1)]


@pytest.mark.parametrize("status", [None, INTERRUPTED])
def test_an_attempt_lost_before_it_pauses_is_followed_by_one_with_the_new_plan(stage: Stage, status: Any) -> None:
    job_id, journal = corrected(stage)
    if status:
        journal.append_outcome(status, "the process of ssd-1 died")
    journal.close()
    stage.end_runner(job_id)
    stage.tick(2)
    assert state_of(stage.job(job_id)) == (JobStatus.RUNNING, 2, 1)
    assert stage.runners.started[1].placement == NEW
    stage.tick()
    assert stage.runners.paused == [(job_id, 1)]


def test_another_attempt_is_measured_anew(stage: Stage) -> None:
    job_id, journal = asked(stage)
    journal.close()
    stage.lose(job_id)
    stage.tick()
    assert stage.planners[0].stopped
    stage.planners[0].answer = BETTER
    again = stage.journal(job_id, 2)
    train(stage, again, 6, 7, 8, 9)
    assert (len(stage.planners), stage.job(job_id).plan_number) == (1, 0)
    train(stage, again, 10)
    running = stage.planners[1].request.running
    assert running is not None
    assert running.first_step == 8


def test_a_plan_that_does_not_start_makes_room_for_the_one_before(stage: Stage) -> None:
    """Other processes may have taken memory meanwhile."""
    job_id, journal = corrected(stage)
    end_paused(stage, job_id, journal)
    stage.tick()
    second = stage.journal(job_id, 2)
    error = {"code": "start_failed", "message": "it needs 2 MiB of host memory", "param": None}
    second.append_outcome("failed", error["message"] or "", error)
    second.close()
    stage.end_runner(job_id, 2)
    stage.tick(2)
    assert state_of(stage.job(job_id)) == (JobStatus.RUNNING, 3, 2)
    assert stage.runners.started[2].placement == OLD
    assert (
        "Attempt 2 failed: it needs 2 MiB of host memory; going on by the plan before, from the last committed "
        "step" in stage.messages(job_id)
    )
    third = stage.journal(job_id, 3)
    third.append_outcome("failed", error["message"] or "", error)
    third.close()
    stage.end_runner(job_id, 3)
    stage.tick()
    assert stage.status(job_id) is JobStatus.PAUSED  # its committed steps would be lost if it failed


def test_a_plan_whose_runner_cannot_even_be_made_makes_room_for_the_one_before(stage: Stage) -> None:
    job_id, journal = corrected(stage)
    stage.runners.refusal = RuntimeError("/dev/shm has 1 MiB left")
    end_paused(stage, job_id, journal)
    stage.tick()
    assert state_of(stage.job(job_id)) == (JobStatus.QUEUED, 2, 2)
    stage.runners.refusal = None
    stage.tick(2)
    assert stage.runners.started[-1].placement == OLD
    assert state_of(stage.job(job_id)) == (JobStatus.RUNNING, 3, 2)


def test_a_plan_whose_attempts_are_lost_makes_room_for_the_one_before(stage: Stage) -> None:
    job_id, journal = corrected(stage)
    end_paused(stage, job_id, journal)
    stage.tick()
    stage.lose(job_id)
    assert stage.runners.started[-1].placement == NEW
    stage.lose(job_id)
    assert stage.runners.started[-1].placement == OLD
    assert state_of(stage.job(job_id)) == (JobStatus.RUNNING, 4, 2)
    for _ in range(3):
        stage.lose(job_id)
    assert state_of(stage.job(job_id)) == (JobStatus.FAILED, 6, 2)


def test_a_plan_that_has_brought_a_step_stays_whatever_is_lost(stage: Stage) -> None:
    job_id, journal = corrected(stage)
    end_paused(stage, job_id, journal)
    stage.tick()
    stage.lose(job_id, 6)
    stage.lose(job_id)
    stage.lose(job_id)
    assert state_of(stage.job(job_id)) == (JobStatus.RUNNING, 5, 1)
    assert stage.runners.started[-1].placement == NEW
