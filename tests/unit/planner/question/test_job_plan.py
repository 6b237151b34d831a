"""The JSON of a job's plan, also of plans that older releases stored."""

import json
from typing import Any

import pytest

from windlass.engine.memory_plan.activation_policy import BlockActivations
from windlass.engine.memory_plan.plan import Placement
from windlass.planner.hardware.hardware import Hardware, example_machines
from windlass.planner.hardware.yaml_files import load
from windlass.planner.question.job_plan import ChangedInputs, JobPlan, PlanBounds, SimulatedStep
from windlass.planner.question.report import ExampleTokens, PlanReport

PLACEMENT = Placement(
    host_blocks=(0, 2),
    num_cached_params=3,
    group_size=2,
    activations=(BlockActivations(swap_input=True, kept=frozenset({"aten.mm.default#0"})),),
    host_activation_nbytes=1 << 20,
)
REPORT = PlanReport(
    feasible=True,
    reasons=("a step is bound by the SSDs",),
    step_s=3.0,
    example_tokens=ExampleTokens(limit=2048, widest=16, mean=14.2, of_data=True),
)
# A corrected plan as an older release stored it.
STORED: dict[str, Any] = {
    "plan": {"feasible": True, "reasons": ["it fits"], "step_s": 2.5, "peak_gib": {"gpu": 1.5}},
    "placement": {"host_blocks": [0, 2], "activations": [{"swap_input": True, "kept": ["aten.mm.default#0"]}]},
    "arena_nbytes": 1048576,
    "told": "Measured: [...]",
    "corrected": True,
    "from_attempt": 2,
    "num_optimizers": 1,
    "host_memory_nbytes": None,
    "device_memory_nbytes": None,
}


def test_job_plan_of_all_fields_survives_json() -> None:
    hardware = load(Hardware, example_machines()["rtx4090-server"])
    plan = JobPlan(
        report=REPORT,
        placement=PLACEMENT,
        arena_nbytes=1 << 20,
        simulated=SimulatedStep(step_s=3.0, summary={"period_s": 3.0}),
        warnings=("train.jsonl: 1 example is cut",),
        changes=True,
        message="Measured: [...]",
        corrected=True,
        from_attempt=2,
        hardware=hardware,
        num_optimizers=2,
        host_memory_nbytes=None,
        device_memory_nbytes=1 << 30,
    )
    assert JobPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    bounds = PlanBounds(num_optimizers=2, host_memory_nbytes=None, device_memory_nbytes=1 << 30)
    assert plan.changed_inputs == ChangedInputs(hardware=hardware, bounds=bounds)
    assert JobPlan(report=REPORT).made_for(plan.changed_inputs).changed_inputs == plan.changed_inputs


def test_job_plan_of_older_release_is_read_and_keeps_its_fields() -> None:
    plan = JobPlan.from_json(STORED)
    assert plan is not None
    assert (plan.report.step_s, plan.report.engine_gib, plan.report.peak_gib) == (2.5, None, {"gpu": 1.5})
    assert plan.placement == Placement(host_blocks=(0, 2), activations=(PLACEMENT.activations[0],))
    assert (plan.message, plan.corrected, plan.from_attempt) == ("Measured: [...]", True, 2)
    again = plan.to_json()
    assert again.keys() == STORED.keys()
    assert again["plan"].items() >= STORED["plan"].items()
    assert {name: again[name] for name in STORED.keys() - {"plan", "placement"}}.items() <= STORED.items()


def test_job_plan_of_planners_answer_has_only_the_fields_that_were_set() -> None:
    plan = JobPlan(report=REPORT, placement=PLACEMENT, arena_nbytes=1 << 20)
    assert list(plan.to_json()) == ["plan", "placement", "arena_nbytes"]
    assert plan.changed_inputs == ChangedInputs(hardware=None, bounds=None)
    assert plan.made_for(plan.changed_inputs).to_json() == plan.to_json()
    assert JobPlan.from_json({"ok": True, "simulated": None, **plan.to_json()}) == plan


def test_from_json_answer_without_plan_is_none() -> None:
    assert JobPlan.from_json({"ok": True, "warnings": ["no plan was made: shapes"]}) is None


def test_from_json_wrong_placement_is_refused() -> None:
    with pytest.raises(ValueError, match="host_blocks"):
        JobPlan.from_json({**STORED, "placement": {"host_blocks": "all"}})
