"""Solutions for one kind of plan, and how often their jobs commit."""

import math
from dataclasses import replace
from typing import Any

import pytest

from tests.support.planner.profiles import MIB, PLENTY, limits, make_job, make_speeds
from windlass.engine.memory_plan.plan import COMMIT_EVERY
from windlass.planner.solver import solution as solutions
from windlass.planner.solver.placement_search import solve_job
from windlass.planner.solver.planned_job import PlannedJob
from windlass.planner.solver.solution import DoesNotFitError, commit_every_of, solution_of, solved
from windlass.planner.solver.step_bounds import Part
from windlass.planner.solver.step_cost import StepCosts


@pytest.mark.parametrize("below", [math.inf, 1e6])
def test_solved_with_an_arena_that_always_exceeds_the_count_has_no_plan(
    below: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below a cost, that is no error, because the caller has a plan."""
    given = limits(4000, 2000)
    costs = StepCosts(job=make_job(), speeds=make_speeds(), limits=given, group_size=1)
    monkeypatch.setattr(solutions, "_least_arena_nbytes", lambda *_: given.host_nbytes + 1)
    if below < math.inf:
        assert solved(costs, below) is None
    else:
        with pytest.raises(DoesNotFitError, match=r"lacks 1 bytes of host"):
            solved(costs, below)


def test_states_in_memory_are_written_at_commits_only() -> None:
    solution = solve_job(make_job(), make_speeds(), PLENTY)
    every = solution.costs.commit_every
    assert every > COMMIT_EVERY
    assert solution.plan.commit_every == every
    assert solution.seconds[Part.SSD_FLUSH] == pytest.approx(56 * MIB * 14 / every / 1e9)


def test_commits_are_as_rare_as_the_lost_computing_allows() -> None:
    job, minutes = make_job(), 4.0
    costs = StepCosts(job=with_training(job, commit_minutes=minutes), speeds=make_speeds(), limits=PLENTY, group_size=1)
    assert costs.commit_every == int(60 * minutes / costs._likely_step_s())
    assert COMMIT_EVERY < costs.commit_every < 1000
    more_often = replace(costs, job=with_training(job, commit_minutes=minutes, checkpoint_minutes=minutes / 2))
    assert more_often.commit_every == costs.commit_every // 2
    assert replace(costs, job=with_training(job, commit_minutes=0.0)).commit_every == COMMIT_EVERY
    assert replace(costs, job=with_training(job, commit_minutes=1e6)).commit_every == 1000


def test_commits_are_as_rare_as_the_slowest_of_all_that_a_step_needs_allows() -> None:
    usual, job = make_speeds(), with_training(make_job(), commit_minutes=4.0)
    costs = StepCosts(job=job, speeds=usual, limits=PLENTY, group_size=1)
    for slower in (
        {"device_flops": usual.device_flops / 1e3},
        {"optimizer_params": usual.optimizer_params / 1e3},
        {"h2d_bytes": usual.h2d_bytes / 1e3},
    ):
        assert replace(costs, speeds=replace(usual, **slower)).commit_every < costs.commit_every / 2
    on_ssds = replace(costs, limits=replace(PLENTY, host_nbytes=1e6), speeds=replace(usual, ssd_read_bytes=1e6))
    assert on_ssds.commit_every < costs.commit_every / 2


def test_an_existing_plan_is_costed_with_its_own_commits() -> None:
    solution = solve_job(make_job(), make_speeds(), PLENTY)
    older = solution_of(solution.costs, replace(solution.placement, commit_every=None))
    assert older.plan.commit_every == COMMIT_EVERY < solution.plan.commit_every
    flushed_s = solution.seconds[Part.SSD_FLUSH] * solution.plan.commit_every
    assert older.seconds[Part.SSD_FLUSH] == pytest.approx(flushed_s / COMMIT_EVERY)


def test_boxes_of_a_job_commit_as_often_as_the_one_that_needs_it_most_often() -> None:
    plan = solve_job(make_job(), make_speeds(), PLENTY).plan
    assert commit_every_of([replace(plan, commit_every=every) for every in (100, 1, 1000)]) == 100
    assert commit_every_of([replace(plan, commit_every=1)] * 2) == 1


def with_training(job: PlannedJob, **changes: Any) -> PlannedJob:
    return replace(job, training=replace(job.training, **changes))
