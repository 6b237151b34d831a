"""The memory that a job lacks, and the changes with which it fits."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.support.planner.questions import MACHINE, SHAPE, answer, machine, question
from windlass.amounts import GIB, least_text
from windlass.engine.memory_plan.memory_tier import MemoryTier
from windlass.engine.training_config.training_config import TrainingConfig
from windlass.planner.feasibility import remedies
from windlass.planner.feasibility.feasibility import fits, least_memory_of, with_part
from windlass.planner.feasibility.remedies import what_would_fit
from windlass.planner.feasibility.shortfall import (
    MEMORIES,
    Memory,
    Shortfall,
    least_gpu,
    shortfall_of,
    size_in_words,
)
from windlass.planner.hardware import ModelShape, load, machine_of, published_models
from windlass.planner.planning.simulated_search import best_plan
from windlass.planner.profiling.model_config import ShapeConfig
from windlass.planner.profiling.model_profiler import config_of_shape
from windlass.planner.question.profiles import Profiles
from windlass.planner.question.question import PlanQuestion
from windlass.planner.question.report import PlanReport
from windlass.planner.solver.memory_frontier import Bytes
from windlass.planner.solver.memory_limits import DRIVER_NBYTES
from windlass.planner.solver.placement_search import DoesNotFitError
from windlass.storage.ids import Precision


@pytest.mark.long
@pytest.mark.parametrize("num_gpus", [0, 1])
def test_answer_with_too_small_a_device_budget_says_what_takes_it_and_what_to_set(num_gpus: int) -> None:
    config = config_of_shape(ModelShape(num_layers=2, hidden_size=256, num_heads=4, vocab_size=1000), num_tokens=64)
    hardware = with_part(MACHINE, gpus=with_part(MACHINE.gpus, count=num_gpus))
    asked = question(hardware, config=config, batch_size=1, sequence_length=64, device_memory_nbytes=1 << 20)
    report = answer(asked)
    assert not report.feasible
    assert f"MiB of {'GPU' if num_gpus else 'device'} memory" in report.reasons[0]
    assert "the device's memory goes to: " in report.reasons[1]
    (words,) = (reason for reason in report.reasons if "(gpu_memory_gib, " in reason)
    gib = float(words.split("a budget of ")[1].split()[0])
    assert answer(replace(asked, device_memory_nbytes=int(gib * GIB))).feasible
    assert report.missing_bytes is not None
    assert report.missing_bytes["gpu"] > 0 == report.missing_bytes["host"]


@pytest.mark.parametrize(("num_gpus", "device"), [(2, "GPU"), (0, "device")])
def test_fewer_gpus_are_proposed_in_words_for_the_machine(
    num_gpus: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = question(machine(), num_ranks=3)
    asked = replace(asked, hardware=with_part(asked.hardware, gpus=with_part(MACHINE.gpus, count=num_gpus)))
    for most in (1, 2):
        monkeypatch.setattr(remedies, "fits", lambda asked, _, most=most: asked.num_ranks <= most)
        told = remedies._fewer_gpus(asked, Profiles(asked))
        assert told == f"{most} {device}{'s' if most > 1 else ''} (gpus), with the same results"


@pytest.mark.parametrize(
    ("batch_size", "words"),
    [(7, "7 in 6 micro-batches"), (3, "3 in 3 micro-batches"), (2, "2 in 2 micro-batches, with lanes=2")],
)
def test_smaller_batches_are_proposed_with_equal_lanes(
    batch_size: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[TrainingConfig] = []

    def largest(ask: Callable[[int], PlanQuestion], profiles: Profiles, *, most: int) -> int:
        tried.extend(ask(number).training for number in range(1, most + 1))
        return batch_size

    monkeypatch.setattr(remedies, "largest_fitting", largest)
    asked = question(num_microbatches=8, lanes=3)
    assert remedies._smaller(asked, Profiles(asked)) == f"a batch of {words} (batch_size, num_microbatches)"
    assert len(tried) == 7
    assert all(training.num_microbatches % training.lanes == 0 for training in tried)
    assert all(training.microbatch_size <= 2 for training in tried)


@pytest.mark.long
@pytest.mark.parametrize(("num_microbatches", "lanes"), [(1, 1), (2, 1), (2, 2)])
def test_smaller_sums_of_gradients_are_proposed_where_a_job_fits_with_them(num_microbatches: int, lanes: int) -> None:
    shape = ModelShape(num_layers=2, hidden_size=2048, num_heads=16, vocab_size=1000)
    asked = question(
        config=config_of_shape(shape, num_tokens=64),
        batch_size=2,
        num_microbatches=num_microbatches,
        lanes=lanes,
        sequence_length=64,
        device_memory_nbytes=(430 if num_microbatches > 1 else 200) << 20,
    )
    profiles = Profiles(asked).unmeasured()
    shortfall = shortfall_of(asked, least_memory_of(asked, profiles))
    proposed = [words for words in what_would_fit(asked, profiles, shortfall) if "(accumulation_precision)" in words]
    assert bool(proposed) == (num_microbatches > 1 and lanes == 1)
    if proposed:
        assert fits(asked.changed(accumulation_precision=Precision.BF16), profiles)


def planner_fits(asked: PlanQuestion, profiles: Profiles) -> bool:
    try:
        best_plan(asked, profiles)
    except DoesNotFitError:
        return False
    return True


def with_limit(question: PlanQuestion, memory: Memory, nbytes: int) -> PlanQuestion:
    """Returns the question with another limit of a memory: of the job's budget, if it has one, and of the machine.

    `nbytes`: as in `PlanQuestion.budgets`. A machine that has enough for a budget stays as it is.
    """
    hardware, is_budget = question.hardware, memory.is_budget(question)
    part = getattr(hardware, memory.part)
    gib = (nbytes + memory.others_nbytes(question.num_ranks)) / GIB
    if memory.tier is MemoryTier.SSD:
        gib /= part.count
    if memory.tier is MemoryTier.DEVICE and not question.has_gpu:
        gib = 0.0  # the memory is the host's
    if is_budget:
        gib = max(gib, getattr(part, memory.key))
        question = replace(question, **dict[str, Any]({str(memory.budget): nbytes}))
    part = part.model_copy(update={memory.key: gib})
    return replace(question, hardware=hardware.model_copy(update={memory.part: part}))


def grown(asked: PlanQuestion, shortfall: Shortfall, shares: dict[MemoryTier, float]) -> PlanQuestion:
    """The job with a share of what it needs of each of these kinds of memory."""
    for memory in MEMORIES:
        if memory.tier in shares:
            asked = with_limit(asked, memory, int(shortfall.needed(memory.tier) * shares[memory.tier]))
    return asked


def check_shortfall(asked: PlanQuestion) -> Shortfall:
    """With the missing memory a job fits, with 2 percent less of one of them it does not."""
    profiles = Profiles(asked)
    shortfall = shortfall_of(asked, least_memory_of(asked, profiles))
    lacking = [tier for tier, nbytes in shortfall.missing.items() if nbytes]
    assert lacking
    for tiers in [lacking] if shortfall.is_together else [[tier] for tier in lacking]:
        enough = dict.fromkeys(tiers, 1.0)
        assert planner_fits(grown(asked, shortfall, enough), profiles)
        for tier in tiers:
            assert not planner_fits(grown(asked, shortfall, enough | {tier: 0.98}), profiles)
    return shortfall


def small(
    num_layers: int = 2,
    *,
    gpus: float = 24.0,
    host: float = 64.0,
    ssds: float = 100.0,
    num_gpus: int = 1,
    **changes: Any,
) -> PlanQuestion:
    """A small model on a machine with so many GiB. `ssds`: of each of two."""
    hardware = machine(host=host, gpus=gpus, ssds=ssds)
    hardware = with_part(hardware, gpus=with_part(hardware.gpus, count=num_gpus))
    hardware = with_part(hardware, ssds=with_part(hardware.ssds, count=2, combined_gb_per_s=None))
    shape = ModelShape(num_layers=num_layers, hidden_size=256, num_heads=4, vocab_size=1000)
    job = {"batch_size": 2, "sequence_length": 64, "config": config_of_shape(shape, num_tokens=64)}
    return question(hardware, **(job | changes))


@pytest.mark.parametrize(
    ("asked", "lacking", "is_together"),
    [
        (small(gpus=1.55), ["gpu"], False),
        pytest.param(small(device_memory_nbytes=10 << 20), ["gpu"], False, marks=pytest.mark.long),
        pytest.param(small(host=1.502), ["host"], False, marks=pytest.mark.long),
        pytest.param(small(host_memory_nbytes=2 << 20, num_gpus=0), ["host"], False, marks=pytest.mark.long),
        pytest.param(small(ssds=0.005), ["ssd"], False, marks=pytest.mark.long),
        pytest.param(small(gpus=1.55, ssds=0.005), ["gpu", "ssd"], True, marks=pytest.mark.long),
        (small(gpus=1.55, host=1.502, ssds=0.005, clip_norm=None), ["gpu", "host", "ssd"], True),
    ],
)
def test_job_fits_with_what_it_lacks_and_not_with_2_percent_less(
    asked: PlanQuestion, lacking: list[str], is_together: bool
) -> None:
    shortfall = check_shortfall(asked)
    assert [tier.value for tier, nbytes in shortfall.missing.items() if nbytes] == lacking
    assert shortfall.is_together == is_together


def test_memory_with_which_a_job_does_not_fit_is_not_told() -> None:
    """With so little host memory, all states would have to be on the GPU, for which programs count too much."""
    config = ShapeConfig(shape=SHAPE.model_copy(update={"num_layers": 8}), num_tokens=512)
    budgets = {"host_memory_nbytes": int(0.6 * GIB), "device_memory_nbytes": 2 * GIB}
    asked = question(machine(), config=config, batch_size=4, num_microbatches=4, clip_norm=None, **budgets)
    assert [tier for tier, nbytes in check_shortfall(asked).missing.items() if nbytes] == [MemoryTier.HOST]


@pytest.mark.long
@settings(max_examples=40)
@given(data=st.data())
def test_what_a_job_lacks_is_exactly_that(data: st.DataObject) -> None:
    """The same for any machine and job."""
    num_gpus = data.draw(st.sampled_from([0, 1, 1]))
    budgets = {
        name: data.draw(st.sampled_from([None, 20 << 20, 200 << 20]))
        for name in ("device_memory_nbytes", "host_memory_nbytes")
    }
    asked = small(
        data.draw(st.sampled_from([2, 6, 24])),
        gpus=data.draw(st.floats(1.6, 3.0)),
        host=data.draw(st.floats(1.51, 4.0)),
        ssds=data.draw(st.floats(0.02, 2.0)),
        num_gpus=num_gpus,
        clip_norm=data.draw(st.sampled_from([None, 1.0])),
        batch_size=data.draw(st.sampled_from([1, 4, 12])),
        **budgets,
    )
    profiles = Profiles(asked)
    if not fits(asked, profiles):
        check_shortfall(asked)


@pytest.mark.parametrize(
    "changes",
    [{"gpus": 1.55}, *(pytest.param(each, marks=pytest.mark.long) for each in ({"host": 1.502}, {"ssds": 0.005}))],
)
def test_each_kind_of_memory_has_one_figure(changes: dict[str, Any]) -> None:
    asked = small(**changes)
    report = answer(asked)
    assert report.missing_bytes is not None
    assert report.missing_together is False
    ((tier, nbytes),) = ((tier, nbytes) for tier, nbytes in report.missing_bytes.items() if nbytes)
    assert report.reasons[0].startswith(f"no plan fits; it lacks {least_text(nbytes)} of ")
    (words,) = (reason for reason in report.reasons if " GiB o" in reason and reason.startswith("it fits with "))
    gib = float(words.partition(" GiB o")[0].split()[-1].strip("(")) * (2 if tier == "ssd" else 1)
    (before,) = changes.values()
    assert (gib - before * (2 if tier == "ssd" else 1)) * GIB == pytest.approx(nbytes, abs=gib * GIB / 1000)


@pytest.mark.parametrize(
    ("count", "told"),
    [(1, "6 SSDs like this one (or one of 580 GiB)"), (3, "6 SSDs like these (or 193.4 GiB on each SSD)")],
)
def test_space_on_ssds_is_told_as_a_number_of_such_ssds(count: int, told: str) -> None:
    asked = small(ssds=100)
    asked = replace(asked, hardware=with_part(asked.hardware, ssds=with_part(asked.hardware.ssds, count=count)))
    (memory,) = (memory for memory in MEMORIES if memory.tier is MemoryTier.SSD)
    assert size_in_words(asked, memory, 580 * GIB) == told


def test_job_fits_with_the_number_of_ssds_that_is_told() -> None:
    asked = small(24, ssds=0.24)
    told = next(reason for reason in answer(asked).reasons if "SSDs like these" in reason)
    number = int(told.removeprefix("it fits with ").split()[0])
    assert number > asked.hardware.ssds.count
    for count in (number, number - 1):
        other = replace(asked, hardware=with_part(asked.hardware, ssds=with_part(asked.hardware.ssds, count=count)))
        assert fits(other, Profiles(other)) == (count == number)


def test_changes_without_loss_of_exactness_come_first_and_memory_last() -> None:
    report = answer(small(24, ssds=0.24))
    told = [reason for reason in report.reasons if reason.startswith("it fits with ")]
    order = ["same results", "batch_size", "less exact", "GiB of host memory", "on each SSD", "GiB of GPU memory"]
    places = [next(place for place, words in enumerate(order) if words in reason) for reason in told]
    assert places == sorted(places)
    assert set(places) == {0, 2, 4}


@pytest.mark.long
def test_least_gpu_memory_is_enough_and_2_percent_less_is_not() -> None:
    asked = small(6)
    profiles = Profiles(asked)
    least = least_gpu(asked, least_memory_of(asked, profiles))
    assert least is not None
    (memory,) = (memory for memory in MEMORIES if memory.tier is MemoryTier.DEVICE)
    assert planner_fits(with_limit(asked, memory, least.nbytes - DRIVER_NBYTES), profiles)
    assert not planner_fits(with_limit(asked, memory, int(0.98 * (least.nbytes - DRIVER_NBYTES))), profiles)
    assert "the device's memory goes to: " in least.reason
    assert least.reason.endswith("; the GPU's driver takes 1.50 GiB more")


@pytest.mark.parametrize("num_tokens", [70_700, 76_000])
def test_least_gpu_memory_of_long_contexts_is_enough_and_2_percent_less_is_not(num_tokens: int) -> None:
    """Groups of many micro-batches, and activations that go to the SSDs, need more beside what the programs count."""
    shape = load(ModelShape, published_models()["qwen2.5-14b"])
    training = TrainingConfig(batch_size=16, sequence_length=num_tokens, total_steps=1)
    asked = PlanQuestion(
        config=ShapeConfig(shape=shape, num_tokens=num_tokens),
        hardware=machine_of("rtx4090:ram=128,ssds=4"),
        training=training,
        chooses_cut=True,
        chooses_microbatches=True,
    )
    profiles = Profiles(asked)
    search = least_memory_of(asked, profiles)
    shortfall, least = shortfall_of(asked, search), least_gpu(asked, search)
    assert least is not None
    needed = shortfall.needed(MemoryTier.DEVICE)
    assert least.nbytes == needed + DRIVER_NBYTES
    (memory,) = (memory for memory in MEMORIES if memory.tier is MemoryTier.DEVICE)
    assert planner_fits(with_limit(asked, memory, needed), profiles)
    assert not planner_fits(with_limit(asked, memory, int(0.98 * needed)), profiles)


def test_least_gpu_memory_of_cut_matrices_is_enough_and_2_percent_less_is_not() -> None:
    shape = ModelShape(num_layers=2, hidden_size=8192, num_heads=64, vocab_size=5000, intermediate_size=28672)
    asked = question(
        config=ShapeConfig(shape=shape, num_tokens=256), batch_size=2, sequence_length=256, num_microbatches=2
    )
    whole = least_gpu(asked, least_memory_of(asked, Profiles(asked)))
    cut = replace(asked, chooses_cut=True)
    found = least_gpu(cut, least_memory_of(cut, Profiles(cut)))
    assert whole is not None
    assert found is not None
    assert found.gib < whole.gib - 1
    assert f"in pieces of at most {2**24} elements (cut_matrices)" in found.reason

    def on(gib: float) -> PlanQuestion:
        return replace(cut, hardware=with_part(MACHINE, gpus=with_part(MACHINE.gpus, memory_gib=gib)))

    job, solution = best_plan(on(found.gib + 0.001), Profiles(cut))
    assert job.cut == job.training.cut_matrices == solution.costs.job.cut == 2**24
    costs = [best_plan(on(gib), Profiles(cut))[1].cost for gib in (found.gib + 0.001, whole.gib, whole.gib + 1)]
    assert costs[1] <= 1.001 * costs[0]
    assert costs[2] <= 1.001 * costs[1]
    with pytest.raises(DoesNotFitError):
        best_plan(on(0.98 * found.gib), Profiles(cut))
    tight = replace(on(found.gib + 0.001), chooses_cut=False)
    reasons = answer(tight).reasons
    assert any(
        "computed in parts (cut_matrices: auto), with the same results up to rounding" in each for each in reasons
    )


@pytest.mark.parametrize("num_lanes", [pytest.param(1, marks=pytest.mark.long), 4])
def test_several_gpus_need_hardly_more_memory_than_one(num_lanes: int) -> None:
    """Gradients leave in pieces with any number of GPUs. A sum that passes from one to the next takes no buffer."""
    shape = ModelShape(num_layers=4, hidden_size=1024, num_heads=8, intermediate_size=4096, vocab_size=30_000)
    config = config_of_shape(shape, num_tokens=64)
    least, without_limit = [], Bytes(device=math.inf, host=math.inf, ssd=math.inf)
    for num_ranks in (1, 2, 4):
        asked = question(
            machine(gpus=4, host=64),
            config=config,
            batch_size=8,
            num_microbatches=8,
            sequence_length=64,
            precision=Precision.BF16,
            lanes=num_lanes,
            num_ranks=num_ranks,
        )
        need = least_memory_of(asked, Profiles(asked)).least(MemoryTier.DEVICE, without_limit)
        assert need is not None
        assert need.placement.streams_grads
        least.append(need.nbytes.device)
    one, two, four = least
    assert max(two, four) <= 1.02 * one


def test_one_example_in_slices_of_the_head_needs_no_more_gpu_memory_than_two() -> None:
    """The sum over slices is in fp32, and the gradient of one micro-batch has 16 bits."""
    shape = ModelShape(num_layers=2, hidden_size=8192, num_heads=64, intermediate_size=28672, vocab_size=128_000)
    least, without_limit = [], Bytes(device=math.inf, host=math.inf, ssd=math.inf)
    for number in (1, 2):
        asked = question(
            machine(gpus=1, host=64),
            config=ShapeConfig(shape=shape, num_tokens=3000),
            batch_size=number,
            num_microbatches=number,
            sequence_length=3000,
            precision=Precision.BF16,
        )
        asked = replace(asked, chooses_cut=True)
        need = least_memory_of(asked, Profiles(asked)).least(MemoryTier.DEVICE, without_limit)
        assert need is not None
        assert need.placement.streams_ends
        least.append(need.nbytes.device)
    assert least[0] <= least[1]


@pytest.mark.long
def test_least_gpu_memory_is_told_with_each_plan_and_whatever_else_is_short() -> None:
    fitting, short = answer(small()), answer(small(host=1.502))
    for report in (fitting, short):
        assert report.least_gpu_gib is not None
        assert report.least_gpu_reason is not None
        assert 1.5 < report.least_gpu_gib < 1.7
    assert fitting.feasible
    assert fitting.least_gpu_gib <= fitting.peak_gib["gpu"]  # type: ignore[index, operator]
    assert "with enough of the other memory" in short.least_gpu_reason  # type: ignore[operator]
    assert answer(small(num_gpus=0)).least_gpu_gib is None


@pytest.mark.parametrize(("together", "expected"), [(True, 12), (False, 5), (None, 12)])
def test_least_missing_memory_is_one_of_the_figures_or_all(together: bool | None, expected: int) -> None:
    missing = {"gpu": 7, "host": 5, "ssd": 0}
    report = PlanReport(feasible=False, reasons=(), missing_bytes=missing, missing_together=together)
    assert report.least_missing_nbytes == expected
