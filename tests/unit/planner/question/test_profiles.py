"""Measured times in the profiles of micro-batches."""

from pathlib import Path

import pytest

from tests.support.planner.pretend_measurement import pretend_to_measure
from tests.support.planner.profiles import make_profile
from tests.unit.planner.planning.test_planner import MACHINE, machine, question
from windlass.planner.feasibility.feasibility import with_part
from windlass.planner.profiling.block_times import BlockTimes
from windlass.planner.profiling.timing_cache import TimingCache
from windlass.planner.question.profiles import Profiles
from windlass.planner.question.times_of_blocks import TimesNeed, TimesOfBlocks


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


def test_stored_times_that_were_used_hold_for_the_whole_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a busy machine may cease to hold while a plan is made."""
    stored = {0: BlockTimes(forward_s=1.0, backward_s=2.0)}
    answers = iter([None, stored, None])
    monkeypatch.setattr(TimingCache, "known", lambda *_: next(answers))
    asked = question(kept_times=TimingCache(folder=tmp_path, machine={}, is_alone=lambda: True), num_microbatches=1)
    times, need = TimesOfBlocks(), TimesNeed(question=asked, profile=make_profile(1), num_microbatches=1)
    assert [times.known(need) for _ in range(3)] == [None, stored, stored]
