"""The extreme numbers for which a job fits."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.support.planner.questions import machine, question
from windlass.planner.feasibility.feasibility import fits
from windlass.planner.hardware.model_shape import ModelShape
from windlass.planner.hardware.named_machines import machine_of, with_more_ssds
from windlass.planner.planning import limits
from windlass.planner.planning.limits import find
from windlass.planner.planning.simulated_search import NOBODY, Watcher, fastest_plan
from windlass.planner.profiling.model_profiler import config_of_shape
from windlass.planner.question.profiles import Profiles
from windlass.planner.question.question import PlanQuestion
from windlass.planner.solver.bisection import Goal
from windlass.planner.solver.placement_search import DoesNotFitError

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


@pytest.mark.parametrize(
    ("steps", "slack", "expected"),
    [
        ({1: 16.84, 2: 16.67, 3: 16.83, 4: 17.03}, 0.02, 1),  # more SSDs may make a simulated step a little longer
        ({1: 20.0, 2: 17.2, 3: 17.5, 4: 17.0}, 0.02, 2),
        ({1: math.inf, 2: 18.0, 3: 17.5, 4: 17.0}, 0.02, 4),
        ({1: math.inf, 2: 18.0, 3: 17.5, 4: 17.0}, 0.1, 2),
        ({1: 17.0, 2: 17.0, 3: 17.0, 4: math.inf}, 0.02, 0),
    ],
)
def test_fewest_ssds_are_found_where_steps_do_not_become_shorter_with_each(
    steps: dict[int, float], slack: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(asked: PlanQuestion, _: Profiles, _watcher: Watcher = NOBODY) -> Any:
        step_s = steps[asked.hardware.ssds.count]
        if step_s == math.inf:
            raise DoesNotFitError(dict)
        bound_s = min(step_s for number, step_s in steps.items() if number <= asked.hardware.ssds.count)
        return None, SimpleNamespace(step_s=bound_s), step_s

    monkeypatch.setattr(limits, "fastest_plan", step)
    monkeypatch.setattr(limits, "best_plan", lambda asked, profiles: step(asked, profiles)[:2])
    hardware = machine_of("rtx4090:ssds=4")
    asked = question(hardware)
    ssds = limits._Part(
        question=asked,
        profiles=Profiles(asked),
        with_number=lambda number: with_more_ssds(hardware, number - 4),
        most=4,
        slack=slack,
    )
    found, then, _ = ssds.fewest(limits._first_of_each)
    assert found == expected
    assert then.hardware == (machine_of(f"rtx4090:ssds={expected}") if expected else hardware)


@given(least=st.integers(1, 20), num_more=st.integers(0, 60), enough=st.sets(st.integers(1, 80)))
def test_search_in_many_numbers_ends_at_one_that_is_enough_after_one_that_is_not(
    least: int, num_more: int, enough: set[int]
) -> None:
    most, tried = least + num_more, set[int]()

    def is_enough(number: int) -> bool:
        tried.add(number)
        return number in enough

    found = limits._first_of_many(is_enough, least, most)
    assert least <= found <= most
    assert found in enough or found == most
    assert found - 1 not in enough or found == least
    assert not tried or max(tried) < most
    assert len(tried) <= 2 * num_more.bit_length()


def test_search_for_a_part_ends_plans_that_are_fast_enough_early(monkeypatch: pytest.MonkeyPatch) -> None:
    began, ended = list[int](), list[int]()

    def plan(asked: PlanQuestion, _: Profiles, watcher: Watcher = NOBODY) -> Any:
        number = int(asked.hardware.host.memory_gib)
        began.append(number)
        step_s = 1.0 if number >= 43 else 2.0
        watcher.see_step(step_s)
        ended.append(number)
        return None, SimpleNamespace(step_s=1.0), step_s

    monkeypatch.setattr(limits, "fastest_plan", plan)
    monkeypatch.setattr(limits, "best_plan", lambda *_: (None, SimpleNamespace(step_s=1.0)))
    asked = question(machine())
    ram = limits._Part(
        question=asked, profiles=Profiles(asked), with_number=lambda gib: machine(host=gib), most=60, slack=0.02
    )
    assert ram.fewest(limits._first_of_many)[0] == 43
    assert ended[0] == 60  # the time to compare with
    assert 43 in began
    assert all(number < 43 for number in ended[1:])


@pytest.mark.long
def test_no_more_ssds_than_are_worth_it() -> None:
    slow = machine(host=6, gpus=4)
    few = find(question(slow), Goal.FEWEST_SSDS, slack=0.02)
    fewer = find(question(slow), Goal.FEWEST_SSDS, slack=1.0)
    assert 1 <= fewer.number < few.number <= slow.ssds.count
    assert few.planned is not None
    assert few.planned.report.step_s is not None
    assert few.planned.report.step_s <= 1.02 * simulated_s(question(slow))
    one_less = question(with_more_ssds(slow, few.number - 1 - slow.ssds.count))
    assert simulated_s(one_less) > 1.02 * simulated_s(question(slow))


@pytest.mark.long
def test_no_more_memory_than_is_worth_it() -> None:
    found = find(question(), Goal.SMALLEST_RAM)
    assert found.planned is not None
    assert found.planned.report.peak_gib is not None
    assert found.planned.report.peak_gib["host"] <= found.number < 764
    assert found.planned.report.step_s is not None
    assert found.planned.report.step_s <= 1.02 * simulated_s(question())
    assert simulated_s(question(machine(host=found.number - 1))) > 1.02 * simulated_s(question())


def simulated_s(asked: PlanQuestion) -> float:
    step_s = fastest_plan(asked, Profiles(asked))[2]
    assert step_s is not None
    return step_s


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
