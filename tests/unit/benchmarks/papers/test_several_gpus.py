"""windlass's plans for several GPUs of a published machine."""

import pytest

from benchmarks.papers.several_gpus import plan_for_gpus


@pytest.mark.long
def test_plans_have_as_many_examples_for_each_gpu() -> None:
    one, two = (plan_for_gpus(13, num_gpus) for num_gpus in (1, 2))
    assert (one.num_examples, two.num_examples) == (32, 64)
    assert two.report.choices is not None
    assert two.report.choices["gpus"] == 2
    assert two.report.bound_s == pytest.approx(one.report.bound_s, rel=0.1)
    assert 1.5 * one.tokens_per_s < two.tokens_per_s < 2.05 * one.tokens_per_s
