"""A running job's prediction is made again if its steps take another time for long; the plan stays."""

import dataclasses
from typing import Any

import pytest

from tests.support.service.dispatcher_stage import Stage
from tests.unit.service.dispatcher.replanning.test_replanner_measured_steps import (
    BETTER,
    OLD,
    REPORT,
    SAME,
    corrected,
    end_paused,
)
from windlass.actors.job.journal import Journal
from windlass.planner.question.job_plan import JobPlan
from windlass.planner.question.plan_request import PlanRequest
from windlass.service.jobs.plan_files import load_plan
from windlass.service.preparation.pipeline import PreparationError
from windlass.storage.sql.job_status import JobStatus

RENEWED: dict[str, Any] = {
    "ok": True,
    **JobPlan(report=dataclasses.replace(REPORT, step_s=13.0), placement=OLD, arena_nbytes=1 << 20).to_json(),
    "changes": False,
    "told": "Measured: each SSD reads 0.2 GB/s, the profile said 2 GB/s. So a step takes 13 s; the plan said 10 s",
}


def train(stage: Stage, journal: Journal, step: int, recent_s: float, *, num_recent: int = 9, total: int = 400) -> None:
    """Reports one step, with the time of the last ones."""
    recent = {"step_s": recent_s, "num_steps": num_recent, "step_s_low": None, "step_s_high": None}
    measured = {"step_s": 10.0, "num_steps": step - 2, "recent": recent, "peak_bytes": {}}
    facts = {"step": step, "total_steps": total, "train_loss": 1.0, "step_s": recent_s, "measured": measured}
    journal.append("metrics", f"Step {step}", **facts)
    stage.tick(2)


def test_prediction_is_made_again_by_the_last_steps_without_another_attempt(stage: Stage) -> None:
    job_id, journal = corrected(stage, SAME)
    train(stage, journal, 80, 13.0)
    assert len(stage.planners) == 2
    request, running = stage.planners[1].request, stage.planners[1].request.running
    assert running is not None
    assert (running.may_change, running.first_step, running.num_steps_left) == (False, 76, 320)
    assert PlanRequest.from_json(request.to_json()) == request
    stage.planners[1].answer = RENEWED
    stage.tick(2)
    job = stage.job(job_id)
    assert (job.status, job.attempt, job.plan_number) == (JobStatus.RUNNING, 1, 2)
    assert stage.runners.paused == []
    told = "The last 9 steps took 13 s each; since step 5, 10 s were expected. "
    assert stage.messages(job_id)[-1] == told + RENEWED["told"]
    plan = load_plan(stage.settings, job)
    assert plan is not None
    assert (plan.report.step_s, plan.placement, plan.corrected, plan.from_attempt) == (13.0, OLD, True, None)
    assert (plan.expected_step_s, plan.expected_from_step) == (13.0, 80)
    train(stage, journal, 160, 13.5)
    assert len(stage.planners) == 2
    train(stage, journal, 161, 10.0)
    assert len(stage.planners) == 3, "it computes as before again"


@pytest.mark.parametrize(
    ("step", "recent_s", "num_recent", "total"),
    [
        (80, 11.0, 9, 400),  # little change
        (80, 9.0, 9, 400),
        (80, 13.0, 8, 400),  # too few steps
        (40, 13.0, 9, 400),  # too soon
        (80, 13.0, 9, 82),  # hardly anything is left
    ],
)
def test_prediction_stays_while_little_speaks_against_it(
    stage: Stage, step: int, recent_s: float, num_recent: int, total: int
) -> None:
    _, journal = corrected(stage, SAME)
    train(stage, journal, step, recent_s, num_recent=num_recent, total=total)
    assert len(stage.planners) == 1


def test_prediction_that_cannot_be_made_again_stays_and_is_not_asked_for_again(stage: Stage) -> None:
    job_id, journal = corrected(stage, SAME)
    train(stage, journal, 80, 13.0)
    stage.planners[1].answer = PreparationError("killed", "the planner was killed")
    stage.tick(2)
    assert stage.messages(job_id)[-1].endswith("could not be made again: the planner was killed")
    plan = load_plan(stage.settings, stage.job(job_id))
    assert plan is not None
    assert (plan.report.step_s, plan.expected_step_s) == (10.0, 13.0)
    train(stage, journal, 81, 13.0)
    assert len(stage.planners) == 2


def test_steps_of_another_plan_are_compared_with_what_it_says(stage: Stage) -> None:
    job_id, journal = corrected(stage, BETTER)
    stage.put_states(job_id)
    train(stage, journal, 80, 13.0)
    assert len(stage.planners) == 1, "its steps are those of the plan before"
    end_paused(stage, job_id, journal)
    stage.tick()
    plan = load_plan(stage.settings, stage.job(job_id))
    assert plan is not None
    assert (plan.expected_step_s, plan.from_attempt) == (20.0, 2)
    journal = stage.journal(job_id, 2)
    train(stage, journal, 81, 13.0)
    assert len(stage.planners) == 1, "the last steps are those of the attempt before"
    train(stage, journal, 95, 20.0)
    assert len(stage.planners) == 1
    train(stage, journal, 96, 28.0)
    assert len(stage.planners) == 2
