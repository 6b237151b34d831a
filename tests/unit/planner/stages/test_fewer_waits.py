"""Plans of the same boxes and blocks that may wait less than the best one by the cost model."""

from functools import cache

import pytest

from tests.support.planner.stage_jobs import box_plans, server
from windlass.engine.training_config import TrainingConfig
from windlass.planner.feasibility.feasibility import with_part
from windlass.planner.hardware import ModelShape, load, published_models
from windlass.planner.profiling.model_config import ShapeConfig
from windlass.planner.question.question import PlanQuestion
from windlass.planner.stages.box_plans import BoxKind
from windlass.planner.stages.box_search import best_of_choices, choices_of
from windlass.planner.stages.fewer_waits import with_more_gradients, with_other_place, with_ssds_that_idle
from windlass.planner.stages.predicted import fastest_by_simulation, simulated_step_s
from windlass.planner.stages.splits import PlannedStages

pytestmark = pytest.mark.long


@cache
def planned(*, clips: bool) -> PlannedStages:
    """Llama 3.1 8B on two servers with 32 GiB of host memory each."""
    hardware = with_part(server(), host=with_part(server().host, memory_gib=32))
    question = PlanQuestion(
        config=ShapeConfig(shape=load(ModelShape, published_models()["llama-3.1-8b"]), num_tokens=1024),
        hardware=hardware,
        training=TrainingConfig(batch_size=64, sequence_length=1024, total_steps=1, clip_norm=1.0 if clips else None),
        chooses_microbatches=True,
    )
    found = best_of_choices(choices_of([box_plans(BoxKind(name="a", number=2, question=question))], 2))
    assert found is not None
    return found


def spills(plan: PlannedStages) -> list[bool]:
    return [box.solution.costs.spills for box in plan.plans]


def swapped_nbytes(plan: PlannedStages) -> int:
    return sum(box.solution.placement.ssd_activation_nbytes for box in plan.plans)


def test_kept_gradients_get_the_other_place_on_all_boxes_and_their_own_again() -> None:
    plan = planned(clips=True)
    other = with_other_place(plan)
    assert other is not None
    again = with_other_place(other)
    assert again is not None
    assert len({*spills(plan)}) == 1
    assert spills(plan) == spills(again) != spills(other)
    assert len({*spills(other)}) == 1
    for each in (other, again):
        assert (each.rounds, each.division) == (plan.rounds, plan.division)
        assert [box.solution.costs.job.model.own for box in each.plans] == [set(range(*run)) for run in runs_of(plan)]


def runs_of(plan: PlannedStages) -> list[tuple[int, int]]:
    return [(run.first, run.stop) for run in plan.runs]


def test_gradients_that_are_not_kept_have_no_other_place_and_more_may_wait() -> None:
    plan = planned(clips=False)
    assert with_other_place(plan) is None
    more = with_more_gradients(plan)
    assert more is not None
    for before, after in zip(plan.plans, more.plans, strict=True):
        one, other = (each.solution.placement.num_passing_blocks for each in (before, after))
        assert one is not None
        assert other is not None
        assert one < other
    assert with_more_gradients(more) is None


def test_ssds_that_idle_get_less_and_less() -> None:
    plan = planned(clips=False)
    idle = list(with_ssds_that_idle(plan))
    nbytes = [swapped_nbytes(each) for each in (plan, *idle)]
    assert len(nbytes) > 1
    assert nbytes[0] > nbytes[-1]
    for each in idle:
        assert each.step_s >= plan.step_s
        assert all(box.solution.costs.speeds == plan.plans[0].solution.costs.speeds for box in each.plans)


def test_plan_that_waits_less_than_those_near_the_best_one_is_found() -> None:
    plan = planned(clips=False)
    near_s = [step_s for each in (plan, *plan.near) if (step_s := simulated_step_s(each)) is not None]
    fastest, step_s = fastest_by_simulation(plan)
    assert step_s is not None
    assert step_s == simulated_step_s(fastest)
    assert step_s < 0.97 * min(near_s)
