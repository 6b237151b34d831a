"""Predicted steps of jobs over boxes: simulated where that is quick, with the plans that the boxes get."""

from collections.abc import Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.planner.stage_jobs import box_plans, kind_of, server
from windlass.planner.feasibility.feasibility import with_part
from windlass.planner.simulation.boxes.planned_stages import StagesToSimulate, simulate_stages, simulated_stages_step_s
from windlass.planner.simulation.network import NetworkRates
from windlass.planner.simulation.planned_job import simulated_step_s as simulated_step_s_of_one
from windlass.planner.stages import predicted
from windlass.planner.stages.box_search import best_of_choices, best_plans, choices_of
from windlass.planner.stages.predicted import fastest_by_simulation, simulated_step_s
from windlass.planner.stages.splits import PlannedStages

SLOW_GB_PER_S = 0.02  # a network that bounds the step


@cache
def planned(number: int, gb_per_s: float = 1.0) -> PlannedStages:
    boxes = [box_plans(kind_of(with_part(server(), network_gb_per_s=gb_per_s), number))]
    found = best_of_choices(choices_of(boxes, number))
    assert found is not None
    return found


def test_one_box_is_simulated_as_a_job_on_one_box() -> None:
    plan = planned(1)
    (only,), layout = plan.plans, plan.boxes[0].profiles.layout
    job = StagesToSimulate(
        plans=[only.solution], stages=(), layout=layout, network=NetworkRates(card_bytes=(1e9,)), num_cores=1
    )
    alone_s = simulated_step_s_of_one(only.solution, layout, num_cores=1)
    assert simulated_stages_step_s(job) == alone_s
    assert simulate_stages(job).step_s == pytest.approx(alone_s, rel=0.02)


@pytest.mark.short("2")
@pytest.mark.parametrize("number", [2, 3])
def test_each_box_is_simulated_with_a_plan_of_its_own_blocks(number: int) -> None:
    plan = planned(number, SLOW_GB_PER_S)
    for run, box in zip(plan.runs, plan.plans, strict=True):
        own = set(range(run.first, run.stop))
        assert box.solution.costs.job.model.own == own
        assert own >= {*box.solution.placement.host_blocks, *box.solution.placement.device_blocks}
    step_s = simulated_step_s(plan)
    # The network bounds the step: messages, and what queues in a box, are small beside it.
    assert step_s is not None
    assert 0.9 <= step_s / plan.step_s <= 1.25


@pytest.mark.long
def test_a_simulation_that_would_take_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predicted, "MOST_EVENTS", 100)
    assert simulated_step_s(planned(2)) is None
    (two, one) = sorted(
        best_plans([box_plans(kind_of(server(), 2))], simulates=True), key=lambda each: -len(each.boxes)
    )
    assert not two.is_simulated
    assert not one.is_simulated
    assert (two.step_s, one.step_s) == (two.formula_step_s, one.formula_step_s)


def with_near(monkeypatch: pytest.MonkeyPatch, simulated_s: Mapping[str, float | None]) -> Any:
    """Returns a plan "best" with plans near it, whose simulated steps are given. Plans named "unlike" do not agree."""
    monkeypatch.setattr(predicted, "simulated_step_s", lambda planned, **_: simulated_s[planned.name])
    monkeypatch.setattr(predicted, "agree", lambda plans: plans != "unlike")
    best, *near = (SimpleNamespace(name=name, plans=name, near=()) for name in simulated_s)
    best.near = tuple(near)
    return best


@pytest.mark.parametrize(
    ("simulated_s", "expected"),
    [
        ({"best": 10.0, "other": 9.0, "third": 9.5}, ("other", 9.0)),
        ({"best": 10.0, "other": 11.0}, ("best", 10.0)),
        ({"best": 10.0, "unlike": 9.0, "other": None}, ("best", 10.0)),
        ({"best": None, "other": 9.0}, ("best", None)),
    ],
)
def test_plan_with_the_shortest_simulated_step_is_taken(
    monkeypatch: pytest.MonkeyPatch, simulated_s: Mapping[str, float | None], expected: tuple[str, float | None]
) -> None:
    plan: Any
    plan, step_s = fastest_by_simulation(with_near(monkeypatch, simulated_s))
    assert (plan.name, step_s) == expected


def test_plans_near_the_best_one_are_others_and_nearly_as_short() -> None:
    plan = planned(2)
    assert 0 < len(plan.near) <= 2
    # The search does not move blocks for less than a thousandth.
    assert 0.999 * plan.step_s <= plan.near[0].step_s <= plan.near[-1].step_s <= 1.1 * plan.step_s
    choices = {(each.rounds, each.division) for each in (plan, *plan.near)}
    assert len(choices) == 1 + len(plan.near)
