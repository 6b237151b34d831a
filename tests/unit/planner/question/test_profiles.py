"""Measured times in the profiles of micro-batches."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.planner.pretend_measurement import pretend_to_measure
from tests.support.planner.profiles import make_profile
from tests.support.planner.questions import MACHINE, machine, question
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
    slow = with_part(cpu, gpus=with_part(cpu.gpus, tflops=work / 3.3 / 1e12))
    measured.clear()
    asked = question(slow, measures=True, num_microbatches=1)
    profile = Profiles(asked).job(asked, 1).model
    assert [shape.num_examples for shape in measured] == [4], (
        "a pass of all 8 would take more than 3.3 seconds, and with recomputation less than 4"
    )
    assert (profile.num_examples, profile.layers[0].forward_s, profile.head.backward_s) == (8, 0.5, 1.0)
    assert profile.layers[0].num_flops == whole.layers[0].num_flops
    Profiles(asked).job(asked, 4)
    assert [shape.num_examples for shape in measured] == [4, 2]


def test_time_of_a_measurement_counts_all_that_it_computes_and_the_params_that_it_makes() -> None:
    cpu = with_part(MACHINE, gpus=with_part(MACHINE.gpus, count=0))
    asked = question(cpu, measures=True, num_microbatches=1)
    (need,) = Profiles(asked).lacking_times(asked, [1])
    layer, head = need.profile.layers[0], need.profile.head
    assert need.pass_s > 3 * (layer.num_flops + head.num_flops) / asked.speeds.device_flops
    long = replace(need, pass_s=2.0)
    assert long.measuring_s > 9 * long.pass_s
    half = replace(long.profile, layers=(replace(layer, numel=layer.numel // 2),) * len(long.profile.layers))
    assert replace(long, profile=half).measuring_s < long.measuring_s


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
    times, need = TimesOfBlocks(), TimesNeed(question=asked, profile=make_profile(1), num_microbatches=1, pass_s=1.0)
    assert [times.known(need) for _ in range(3)] == [None, stored, stored]


def test_searches_for_a_question_share_its_job_and_what_is_known_of_it() -> None:
    asked = question(num_microbatches=2)
    profiles = Profiles(asked)
    job = profiles.job(asked, 2)
    assert profiles.unmeasured().job(asked, 2) is job
    other = asked.changed(accumulation_precision="bf16")
    assert profiles.job(other, 2).training.accumulation_precision == "bf16"
    job = replace(job, chooses_order=True, cuts=(1 << 24,))
    counted = job.leaving_out(lambda costs: 1.0)
    assert counted.known is job.known
    for one, same in zip(job.by_order, counted.by_order, strict=True):
        assert one.known is same.known
        assert one.by_cut[0].known is same.by_cut[0].known
    known = [job.known, *(one.known for one in job.by_order), *(one.by_cut[0].known for one in job.by_order)]
    assert len({id(each) for each in known}) == len(known), "other choices have other costs"
    assert replace(job, ways=lambda layer: ()).known is not job.known
