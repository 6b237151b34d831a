"""Measured times in the profiles of micro-batches."""

import pytest

from tests.support.planner.pretend_measurement import pretend_to_measure
from tests.unit.planner.planning.test_planner import MACHINE, machine, question
from windlass.planner.feasibility.feasibility import with_part
from windlass.planner.question.profiles import Profiles


def test_large_micro_batches_have_the_times_of_smaller_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = pretend_to_measure(monkeypatch)
    cpu = with_part(MACHINE, gpus=with_part(MACHINE.gpus, count=0))
    asked = question(cpu, measures=True, num_microbatches=1)
    whole = Profiles(asked).job(asked, 1).model
    work = 3 * (whole.layers[0].num_flops + whole.head.num_flops)  # all layers are alike
    slow = with_part(cpu, gpus=with_part(cpu.gpus, tflops=work / 3.9 / 1e12))
    measured.clear()
    asked = question(slow, measures=True, num_microbatches=1)
    profile = Profiles(asked).job(asked, 1).model
    assert [shape.num_examples for shape in measured] == [4], "a pass of all 8 would take 3.9 seconds"
    assert (profile.num_examples, profile.layers[0].forward_s, profile.head.backward_s) == (8, 0.5, 1.0)
    assert profile.layers[0].num_flops == whole.layers[0].num_flops
    Profiles(asked).job(asked, 4)
    assert [shape.num_examples for shape in measured] == [4, 2]


def test_blocks_that_the_job_has_no_memory_for_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = pretend_to_measure(monkeypatch)
    small = machine(host=4)
    asked = question(with_part(small, gpus=with_part(small.gpus, count=0)), measures=True, device_memory_nbytes=1 << 20)
    assert Profiles(asked).job(asked, 8).model.layers[0].forward_s is None
    assert measured == []
