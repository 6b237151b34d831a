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
    # With one SSD, because several are merged for a step, but not for its spans.
    hardware = with_part(server(), ssds=with_part(server().ssds, count=1))
    plan = best_of_choices(choices_of([box_plans(kind_of(hardware, 1))], 1))
    assert plan is not None
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
    """Returns a plan "best" with plans near it, whose simulated steps are given. Plans named "unlike" do not agree.

    By the formula all have a step of 8.9 s, and the busiest box needs as long.
    """
    monkeypatch.setattr(predicted, "simulated_step_s", lambda planned, **_: simulated_s[planned.name])
    monkeypatch.setattr(predicted, "agree", lambda plans: plans[0].name != "unlike")
    for changed in ("with_other_place", "with_more_gradients"):
        monkeypatch.setattr(predicted, changed, lambda _: None)
    monkeypatch.setattr(predicted, "with_ssds_that_idle", lambda _: ())
    best, *near = (fake(name) for name in simulated_s)
    best.near = tuple(near)
    return best


def fake(name: str, alone_s: float = 8.9, step_s: float = 8.9) -> SimpleNamespace:
    plans = [SimpleNamespace(name=name, times=SimpleNamespace(alone_s=each)) for each in (1.0, alone_s)]
    plan = SimpleNamespace(name=name, plans=plans, step_s=step_s, boxes="two", near=(), other_rounds=())
    plan.with_own_blocks = lambda: plan
    plan.find_other_cut = lambda below_s: None
    return plan


@pytest.mark.parametrize(
    ("step_s", "alone_s", "expected"),
    [
        pytest.param(10.1, 8.9, "near", id="longer-by-the-formula"),
        pytest.param(10.1, 9.6, "best", id="too-busy"),
    ],
)
def test_near_plans_are_simulated_where_the_best_one_is_faster_than_by_the_formula(
    step_s: float, alone_s: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = with_near(monkeypatch, {"best": 9.5, "near": 9.2})
    plan.step_s, plan.near = 10.0, (fake("near", alone_s, step_s),)
    found: Any
    found, _ = fastest_by_simulation(plan)
    assert found.name == expected


@pytest.mark.parametrize(
    ("simulated_s", "expected", "num_simulated"),
    [
        # The second one does not wait, so the third one is left out.
        ({"best": 10.0, "near": 10.5, "second": 9.0, "third": 8.0}, ("second", 9.0), 3),
        ({"best": 10.0, "near": 9.1, "second": 9.0, "third": 8.0}, ("near", 9.1), 2),
        ({"best": 10.0, "near": 10.5, "second": 10.2, "third": 9.5}, ("third", 9.5), 4),
    ],
)
def test_plans_with_other_rounds_are_tried_while_the_fastest_one_waits(
    monkeypatch: pytest.MonkeyPatch, simulated_s: dict[str, float], expected: tuple[str, float], num_simulated: int
) -> None:
    plan, names = with_near(monkeypatch, simulated_s), list[str]()
    plan.near, plan.other_rounds = plan.near[:1], (*plan.near[1:], fake("too busy", 10.1))

    def simulate(planned: Any, **_: Any) -> float:
        names.append(planned.name)
        return simulated_s[planned.name]

    monkeypatch.setattr(predicted, "simulated_step_s", simulate)
    found: Any
    found, step_s = fastest_by_simulation(plan)
    assert (found.name, step_s) == expected
    assert names == list(simulated_s)[:num_simulated]


@pytest.mark.parametrize("name", ["other_cut", "other_place", "more_gradients", "idle", "more idle"])
def test_plan_of_the_same_kind_that_waits_less_is_taken(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    names = ["best", "other_cut", "other_place", "more_gradients", "idle", "more idle"]
    plan = with_near(monkeypatch, {each: 10.0 if each == name else 11.0 for each in names})
    plan.near = ()
    plan.find_other_cut = lambda below_s: fake("other_cut") if below_s == 11.0 else None
    for changed in ("other_place", "more_gradients"):
        monkeypatch.setattr(predicted, f"with_{changed}", lambda _, changed=changed: fake(changed))
    monkeypatch.setattr(predicted, "with_ssds_that_idle", lambda _: map(fake, ("idle", "more idle")))
    found: Any
    found, step_s = fastest_by_simulation(plan)
    assert (found.name, step_s) == (name, 10.0)


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
    steps_s = [each.step_s for each in plan.other_rounds]
    assert steps_s == sorted(steps_s)
    rounds = [each.rounds for each in plan.other_rounds]
    assert 0 < len(rounds) == len({*rounds} - {each.rounds for each in (plan, *plan.near)}) <= 4
