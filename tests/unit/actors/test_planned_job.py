"""Planned jobs, simulated as they are and in larger pieces."""

from dataclasses import replace

import pytest

from tests.unit.actors.test_planning import machine, question
from windlass.actors import planned_job
from windlass.actors.planned_job import simulate_planned
from windlass.actors.planning import PlanQuestion, Profiles, best_plan
from windlass.engine.layout import ModelLayout
from windlass.planner.depths import Depths
from windlass.planner.hardware import Hardware
from windlass.planner.solver import Solution
from windlass.storage.ids import Formats, Precision, StatePrecision

FORMATS = Formats(Precision.BF16, StatePrecision.FP32)
# Activations and states go on to the SSDs.
SMALL = machine(host=7, gpus=6)


def simulated_step_s(solution: Solution, layout: ModelLayout) -> float:
    return simulate_planned(solution, layout, FORMATS, num_cores=2).step_s


def planned(hardware: Hardware, **changes: object) -> tuple[Solution, ModelLayout]:
    asked: PlanQuestion = question(hardware, **changes)
    profiles = Profiles(asked)
    return best_plan(asked, profiles)[1], profiles.layout


@pytest.mark.long
def test_larger_slots_and_chunks_take_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    solution, layout = planned(SMALL, batch_size=32)
    assert solution.plan.num_ssd_activations > 0
    assert solution.plan.host_blocks or solution.plan.num_cached_params
    exact_s = simulated_step_s(solution, layout)
    assert exact_s >= 0.99 * solution.step_s
    monkeypatch.setattr(planned_job, "_MAX_ACTIVATION_SLOTS", solution.plan.num_ssd_activations // 8)
    assert simulated_step_s(solution, layout) == pytest.approx(exact_s, rel=0.02)


@pytest.mark.long
def test_with_many_ssds_deeper_buffers_are_faster() -> None:
    solution, layout = planned(machine(host=6, gpus=6))
    assert solution.placement.depths.states > Depths().states
    shallow = replace(solution, placement=replace(solution.placement, depths=Depths()))
    assert simulated_step_s(solution, layout) < 0.8 * simulated_step_s(shallow, layout)
