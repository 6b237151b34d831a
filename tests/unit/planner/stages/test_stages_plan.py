"""The plan of a job over several boxes as JSON."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from windlass.engine.memory_plan.activation_policy import BlockActivations
from windlass.engine.memory_plan.plan import Placement
from windlass.engine.memory_plan.update_order import UpdateOrder
from windlass.planner.stages.stages_plan import StagePlan, StagesPlan

FIRST = StagePlan(
    box="head",
    first_block=0,
    stop_block=3,
    placement=Placement(
        host_blocks=(1,), group_size=2, activations=(BlockActivations(recompute=True, kept=frozenset({"a"})),)
    ),
    num_optimizers=2,
    host_memory_nbytes=2**30,
    arena_nbytes=1000,
    planned_device_nbytes=2000,
    peak_gib={"gpu": 1.5, "host": 2},
)
LAST = StagePlan(
    box="attic",
    first_block=3,
    stop_block=6,
    placement=Placement(group_size=2),
    num_optimizers=1,
    peak_gib={},
)
PLAN = StagesPlan(
    num_ranks=2,
    num_microbatches=8,
    update_order=UpdateOrder.KEPT,
    step_s=1.25,
    stages=(FIRST, LAST),
    notes=("a note",),
)


def read(values: Any) -> StagesPlan:
    return StagesPlan.from_json(json.loads(json.dumps(values)))


def test_plan_survives_json() -> None:
    assert read(PLAN.to_json()) == PLAN
    assert read(replace(PLAN, step_s=None, notes=()).to_json()).step_s is None


def test_plan_has_its_first_attempt_in_json_only_if_it_replaces_another() -> None:
    assert "from_attempt" not in PLAN.to_json()
    later = replace(PLAN, layout_epoch=1, from_attempt=3)
    assert read(later.to_json()) == later


def test_plan_has_its_cut_of_matrices_in_json_only_if_there_is_one() -> None:
    assert "cut_matrices" not in PLAN.to_json()
    cut = replace(PLAN, cut_matrices=2**24)
    assert read(cut.to_json()) == cut


def test_plan_tells_its_groups_and_rounds() -> None:
    assert (PLAN.group_size, PLAN.num_rounds) == (2, 2)
    assert [tuple(stage) for stage in PLAN.engine_stages] == [(0, 3), (3, 6)]


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    values = json.loads(json.dumps(PLAN.to_json()))
    change(values)
    return dict(values)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda plan: plan.update(extra=1), id="an unknown field"),
        pytest.param(lambda plan: plan["stages"][0].update(extra=1), id="an unknown field of a stage"),
        pytest.param(lambda plan: plan["stages"][0]["placement"].update(extra=1), id="an unknown field of a placement"),
        pytest.param(lambda plan: plan.pop("num_microbatches"), id="a missing field"),
        pytest.param(lambda plan: plan.update(num_microbatches="8"), id="a text in place of a number"),
        pytest.param(lambda plan: plan.update(num_microbatches=0), id="no micro-batch"),
        pytest.param(lambda plan: plan.update(from_attempt=-1), id="an attempt before the first one"),
        pytest.param(lambda plan: plan.update(num_ranks=0), id="no GPU"),
        pytest.param(lambda plan: plan.update(step_s=math.nan), id="a step without a time"),
        pytest.param(lambda plan: plan.update(step_s=-1.0), id="a step that ends before it begins"),
        pytest.param(lambda plan: plan.update(update_order="sometimes"), id="an unknown order"),
        pytest.param(lambda plan: plan["stages"].clear(), id="no box"),
        pytest.param(lambda plan: plan["stages"].reverse(), id="another order of boxes"),
        pytest.param(lambda plan: plan["stages"][1].update(box="head"), id="a box twice"),
        pytest.param(lambda plan: plan["stages"][1].update(first_block=4), id="a block on no box"),
        pytest.param(lambda plan: plan["stages"][1].update(stop_block=3), id="a box without blocks"),
        pytest.param(lambda plan: plan["stages"][1].update(num_optimizers=0), id="no optimizer"),
        pytest.param(lambda plan: plan["stages"][1]["placement"].update(group_size=4), id="unequal groups"),
        pytest.param(lambda plan: plan["stages"][1]["placement"].update(group_size=None), id="unknown groups"),
    ],
)
def test_wrong_json_is_refused(change: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(ValueError):
        read(changed(change))


def test_json_of_something_else_is_refused() -> None:
    for values in ({}, [], None, "plan"):
        with pytest.raises(ValueError):
            read(values)
