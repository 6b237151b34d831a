"""The extreme numbers for which a job fits."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.planner.planning.test_planner import machine, question
from windlass.engine.memory_plan.memory_tier import MemoryTier
from windlass.planner.feasibility.feasibility import fits, with_part
from windlass.planner.hardware.model_shape import ModelShape
from windlass.planner.planning import limits
from windlass.planner.planning.limits import find
from windlass.planner.planning.simulated_search import best_plan
from windlass.planner.profiling.model_profiler import config_of_shape
from windlass.planner.question.profiles import Profiles
from windlass.planner.question.question import PlanQuestion
from windlass.planner.solver.bisection import Goal

# The SSDs are the limit here: model states, and activations that fit nowhere else.
SMALL = machine(gpus=3, host=5, ssds=3.2)


def with_number(asked: PlanQuestion, goal: Goal, number: int) -> PlanQuestion:
    match goal:
        case Goal.LARGEST_BATCH:
            return asked.changed(batch_size=number, num_microbatches=1)
        case Goal.LONGEST_CONTEXT:
            return asked.changed(sequence_length=number, num_microbatches=asked.training.batch_size)
        case _:
            return replace(asked, num_layers=number)


@pytest.mark.long
@pytest.mark.parametrize(
    ("goal", "step"), [(Goal.LARGEST_BATCH, 1), (Goal.LONGEST_CONTEXT, 256), (Goal.MOST_LAYERS, 1)]
)
def test_largest_number_fits_and_one_more_does_not(goal: Goal, step: int) -> None:
    asked = question(SMALL)
    found = find(asked, goal)
    assert found.number > 0
    assert found.planned is not None
    assert found.planned.report.feasible
    profiles = Profiles(asked)
    assert fits(with_number(asked, goal, found.number), profiles)
    assert not fits(with_number(asked, goal, found.number + step), profiles)


def few_layers(**changes: Any) -> PlanQuestion:
    """A job with two lanes that fits only in small micro-batches."""
    config = config_of_shape(ModelShape(num_layers=2, hidden_size=256, num_heads=4, vocab_size=1000), num_tokens=256)
    sizes = {"batch_size": 8, "num_microbatches": 4, "lanes": 2, "sequence_length": 256}
    return question(config=config, **({"device_memory_nbytes": 192 << 20} | sizes | changes))


@pytest.mark.long
@pytest.mark.parametrize("lanes", [2, 3])
def test_largest_batch_with_lanes_has_the_largest_micro_batch_in_each(lanes: int) -> None:
    asked = few_layers(lanes=lanes)
    found = find(asked, Goal.LARGEST_BATCH)
    training = found.question.training
    assert found.number == training.batch_size > lanes
    assert (training.lanes, training.num_microbatches, found.number % lanes) == (lanes, lanes, 0)
    profiles = Profiles(asked)
    assert fits(found.question, profiles)
    assert not fits(asked.changed(batch_size=found.number + lanes, num_microbatches=lanes), profiles)


@pytest.mark.short("2-2")
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 2), (2, 2), (3, 4)])
def test_search_for_the_largest_batch_keeps_lanes_and_gpus(
    num_ranks: int, num_microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "largest_fitting", lambda ask, profiles, *, most: 3)
    found = find(replace(few_layers(), num_ranks=num_ranks), Goal.LARGEST_BATCH)
    training = found.question.training
    assert found.number == training.batch_size == 3 * num_microbatches
    assert (training.num_microbatches, training.lanes) == (num_microbatches, 2)
    assert found.question.num_ranks == num_ranks
    assert found.planned is not None
    assert found.planned.report.feasible


@pytest.mark.long
def test_more_layers_are_more_params() -> None:
    found = find(question(SMALL), Goal.MOST_LAYERS)
    profile = Profiles(question(SMALL)).of(8, 512)
    assert found.num_params == profile.with_num_layers(found.number).numel


@pytest.mark.long
def test_no_more_ssds_than_are_worth_it() -> None:
    slow = machine(host=6, gpus=4)
    few = find(question(slow), Goal.FEWEST_SSDS, slack=0.02)
    fewer = find(question(slow), Goal.FEWEST_SSDS, slack=1.0)
    assert 1 <= fewer.number < few.number <= slow.ssds.count
    assert few.planned is not None
    _, best = best_plan(question(slow), Profiles(question(slow)))
    with_few = question(with_part(slow, ssds=with_part(slow.ssds, count=few.number)))
    _, enough = best_plan(with_few, Profiles(with_few))
    assert enough.step_s <= 1.02 * best.step_s


@pytest.mark.long
def test_no_more_memory_than_is_worth_it() -> None:
    found = find(question(), Goal.SMALLEST_RAM)
    assert found.planned is not None
    assert found.planned.report.peak_gib is not None
    assert found.planned.report.peak_gib["host"] <= found.number < 764
    _, best = best_plan(question(), Profiles(question()))
    with_little = question(machine(host=found.number))
    _, enough = best_plan(with_little, Profiles(with_little))
    assert enough.step_s <= 1.02 * best.step_s
    assert best.nbytes[MemoryTier.HOST] > 0


def test_find_for_job_that_never_fits_finds_nothing() -> None:
    found = find(question(machine(host=1.51)), Goal.LARGEST_BATCH)
    assert (found.number, found.planned) == (0, None)


def test_smallest_gpu_is_the_least_whole_gib_with_which_the_job_fits() -> None:
    asked = few_layers(device_memory_nbytes=None)
    found = find(asked, Goal.SMALLEST_GPU)
    assert found.number == 2
    assert found.question.hardware.gpus.memory_gib == 2
    assert found.planned is not None
    assert found.planned.report.feasible
    assert found.planned.report.least_gpu_gib is not None
    assert 1 < found.planned.report.least_gpu_gib <= 2
    assert not fits(replace(asked, hardware=machine(gpus=1)), Profiles(asked))
    short = replace(asked, hardware=machine(host=1.51))
    assert find(short, Goal.SMALLEST_GPU).number == 0
