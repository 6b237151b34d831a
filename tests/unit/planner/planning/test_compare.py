"""A plan beside the estimates of other systems."""

from dataclasses import replace

import pytest

from tests.support.planner.questions import MACHINE, question
from windlass.planner.baselines.system_stages import POLICIES, stage_times
from windlass.planner.hardware.model_shape import ModelShape
from windlass.planner.planning import planner as planning
from windlass.planner.planning.compare import comparison
from windlass.planner.profiling.model_profiler import config_of_shape
from windlass.planner.simulation.compared import simulate_policy
from windlass.storage.ids import Precision

ASKED = replace(
    question(batch_size=4),
    config=config_of_shape(ModelShape(num_layers=2, hidden_size=256, num_heads=4, vocab_size=1000), num_tokens=512),
)


def test_compute_is_as_fast_for_all_as_the_plan_counts_with() -> None:
    asked = ASKED.changed(num_microbatches=1)
    planned = planning.answer(asked)
    assert planned.solution is not None
    found = {each.system: each for each in comparison(asked, planned).systems}
    assert set(found) == set(POLICIES)
    costs, model = planned.solution.costs, planned.solution.costs.job.model
    compute_s = sum(sum(costs.compute_s(block)) for block in model.blocks)
    tflops = 3 * model.num_flops / compute_s / 1e12
    hardware = MACHINE.model_copy(update={"gpus": MACHINE.gpus.model_copy(update={"tflops": tflops})})
    times = stage_times(POLICIES["FlashNeuron"], hardware, model)
    assert times.forward.gpu_s + times.backward.gpu_s == pytest.approx(compute_s)  # nothing is recomputed
    simulated = simulate_policy(POLICIES["FlashNeuron"], hardware, model)
    assert found["FlashNeuron"].step_s == pytest.approx(simulated.step_s)
    assert found["FlashNeuron"].gpu_share == pytest.approx(compute_s / simulated.step_s)
    assert found["FlashNeuron"].tokens_per_s == pytest.approx(4 * 512 / simulated.step_s)
    assert simulated.step_s > times.iteration_s


@pytest.mark.long
def test_comparison_notes_systems_that_cannot_clip() -> None:
    planned = planning.answer(ASKED)
    assert any("clip" in note for note in comparison(ASKED, planned).notes)
    unclipped = ASKED.changed(clip_norm=None)
    assert not any("clip" in note for note in comparison(unclipped, planned).notes)


@pytest.mark.long
def test_system_that_cannot_be_compared_is_reported() -> None:
    planned = planning.answer(ASKED)
    fp32 = comparison(ASKED.changed(precision=Precision.FP32), planned)
    assert (fp32.systems, len(fp32.notes)) == ((), 1)
    assert "not in fp32" in fp32.notes[0]
    cpu = MACHINE.model_copy(update={"gpus": MACHINE.gpus.model_copy(update={"count": 0})})
    without = comparison(replace(ASKED, hardware=cpu), planned)
    assert (without.systems, len(without.notes)) == ((), 1)
    assert "this machine has none" in without.notes[0]
