"""windlass's plans for several GPUs of a published machine."""

import pytest

from benchmarks.papers.several_gpus import planned_step, simulated_step_s_of


def test_plans_have_as_many_examples_for_each_gpu() -> None:
    one, two = (planned_step(13, num_gpus) for num_gpus in (1, 2))
    assert (one.num_examples, two.num_examples) == (32, 64)
    assert two.solution.plan.num_ranks == 2
    assert two.solution.step_s == pytest.approx(one.solution.step_s, rel=0.1)
    assert simulated_step_s_of(one) == pytest.approx(one.solution.step_s, rel=0.25)
