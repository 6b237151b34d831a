"""The choice of a number of GPUs by the plans for each."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from windlass.amounts import GIB
from windlass.engine.training_config.training_config import TrainingConfig
from windlass.planner.feasibility.feasibility import with_part
from windlass.planner.hardware.hardware import Hardware, example_machines
from windlass.planner.hardware.model_shape import ModelShape
from windlass.planner.hardware.yaml_files import load
from windlass.planner.planning import gpu_choice
from windlass.planner.planning.gpu_choice import choose_gpus, in_words, numbers_of_gpus, plan_without_advice
from windlass.planner.planning.planner import Planned
from windlass.planner.planning.simulated_search import fastest_plan
from windlass.planner.profiling.model_profiler import config_of_shape
from windlass.planner.question.job_plan import ChangedInputs, JobPlan, PlanBounds, fewest_of_fastest
from windlass.planner.question.profiles import Profiles
from windlass.planner.question.question import PlanQuestion
from windlass.planner.question.report import PlanReport

MACHINE = load(Hardware, example_machines()["rtx4090-server"])
SHAPE = ModelShape(num_layers=4, hidden_size=512, num_heads=4, vocab_size=1000)


def question(*, num_ranks: int, **gpus: Any) -> PlanQuestion:
    training = TrainingConfig(batch_size=8, num_microbatches=4, sequence_length=256, total_steps=1)
    hardware = with_part(MACHINE, gpus=with_part(MACHINE.gpus, count=4, **gpus))
    config = config_of_shape(SHAPE, num_tokens=256)
    return PlanQuestion(config=config, hardware=hardware, training=training, num_ranks=num_ranks, chooses_ranks=True)


@pytest.mark.parametrize(
    ("step_s", "expected"),
    [
        ({1: 10.0}, 1),
        ({1: 10.0, 2: 6.0, 4: 4.0}, 4),
        ({1: 10.0, 2: 6.0, 4: 5.9}, 2),  # equal within 2 %
        ({1: 10.0, 2: 9.99}, 1),
        ({2: 6.0, 3: 7.0}, 2),
    ],
)
def test_fewest_of_the_fastest_numbers_is_chosen(step_s: dict[int, float], expected: int) -> None:
    assert fewest_of_fastest(step_s) == expected


@pytest.mark.parametrize(
    ("most", "num_microbatches", "expected"),
    [
        (4, None, [1, 2, 3, 4]),
        (4, 4, [1, 2, 4]),  # three GPUs are as fast as two: one of them computes two micro-batches
        (8, 8, [1, 2, 3, 4, 8]),
        (3, 3, [1, 2, 3]),
        (1, 8, [1]),
    ],
)
def test_numbers_with_less_work_for_each_gpu_are_planned(
    most: int, num_microbatches: int | None, expected: list[int]
) -> None:
    assert list(numbers_of_gpus(most, num_microbatches)) == expected


@pytest.mark.parametrize(
    ("chosen", "rates", "most", "expected"),
    [
        (4, {1: 10.0, 2: 16.0, 4: 19.0}, 4, "4 GPUs: 1.9x of one; with 2 it would be 1.6x"),
        (1, {1: 10.0, 2: 10.1}, 2, "one GPU, because more would hardly be faster; with 2 it would be 1.01x"),
        (1, {1: 10.0}, 1, "one GPU, because the job can have no more here"),
        (4, {2: 16.0, 4: 24.0}, 4, "4 GPUs: 1.5x of 2; the job does not fit with fewer than 2"),
        (2, {2: 16.0}, 4, "2 GPUs: the job does not fit with fewer, and more would hardly be faster"),
    ],
)
def test_the_choice_is_told_with_what_other_numbers_would_give(
    chosen: int, rates: dict[int, float], most: int, expected: str
) -> None:
    assert in_words(chosen, rates, most=most) == expected


def test_the_choice_names_the_lanes_of_the_job_that_one_gpu_would_compute_too() -> None:
    rates = {1: 10.0, 2: 16.0, 4: 20.0}
    assert in_words(4, rates, most=4, lanes=3) == "4 GPUs: 2x of one with 3 lanes; with 2 it would be 1.6x"


@pytest.mark.parametrize(
    ("step_s", "chosen", "told"),
    [
        ({1: (9.0, 10.0), 2: (11.0, 9.9)}, 1, "one GPU, because more would hardly be faster; with 2 it would be 0.91x"),
        ({1: (9.0, 10.0), 2: (9.1, 7.0)}, 2, "2 GPUs: 1.3x of one"),
    ],
)
def test_one_gpu_is_chosen_where_it_is_faster_with_its_own_number_of_microbatches(
    step_s: dict[int, tuple[float, float]], chosen: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`step_s`: by number of GPUs, with the number of micro-batches that is best for one and with that for two."""

    def timed(asked: PlanQuestion, *_: object) -> Any:
        number = asked.num_ranks if asked.chooses_microbatches else asked.training.num_microbatches
        return SimpleNamespace(num_microbatches=number, cut=None), None, step_s[asked.num_ranks][number - 1]

    def planned(asked: PlanQuestion, job: Any, *_: object, step_s: float) -> Planned:
        choices = {"gpus": asked.num_ranks, "num_microbatches": job.num_microbatches}
        return Planned(report=PlanReport(feasible=True, reasons=("",), tokens_per_s=1 / step_s, choices=choices))

    monkeypatch.setattr(gpu_choice, "fastest_plan", timed)
    monkeypatch.setattr(gpu_choice, "planned", planned)
    monkeypatch.setattr(gpu_choice, "advised", lambda _asked, planned, _profiles: planned)
    asked = replace(question(num_ranks=2), chooses_microbatches=True)
    found = choose_gpus(asked)
    choices = found.planned.report.choices
    assert choices is not None
    assert (choices["gpus"], choices["num_microbatches"], found.planned.report.reasons[1]) == (chosen, chosen, told)
    assert plan_without_advice(asked, Profiles(asked)).report.choices == choices
    on_cpu = replace(asked, hardware=with_part(asked.hardware, gpus=with_part(asked.hardware.gpus, count=0)))
    assert choose_gpus(on_cpu).planned.report.reasons[1] == told.replace("GPU", "device")


def test_chosen_gpus_have_the_fastest_plan_and_the_others_are_kept() -> None:
    found = choose_gpus(question(num_ranks=2, tflops=0.5))
    plans = {plan.report.choices["gpus"]: plan.report for plan in (found.planned, *found.others) if plan.report.choices}
    step_s = {number: report.step_s for number, report in plans.items() if report.step_s is not None}
    assert found.planned.report is plans[2]
    assert step_s[2] < 0.6 * step_s[1]
    assert found.planned.report.reasons[1] == "2 GPUs: 1.8x of one"


@pytest.mark.long
def test_chosen_number_of_microbatches_is_that_of_all_numbers_of_gpus() -> None:
    asked = question(num_ranks=2, tflops=0.5)
    found = choose_gpus(replace(asked, chooses_microbatches=True))
    reports = [plan.report for plan in (found.planned, *found.others)]
    choices = [report.choices for report in reports if report.choices is not None]
    assert [each["gpus"] for each in choices] == [2, 1]
    assert len({each["num_microbatches"] for each in choices}) == 1
    alone = fastest_plan(replace(asked, num_ranks=1, chooses_ranks=False, chooses_microbatches=True), Profiles(asked))
    assert alone[0].num_microbatches == 1 < choices[0]["num_microbatches"], "one GPU alone would have another number"


@pytest.mark.long
def test_job_that_fits_with_no_number_is_reported_for_one() -> None:
    found = choose_gpus(question(num_ranks=2, memory_gib=0.61))
    assert not found.planned.report.feasible
    assert found.others == ()


def plan_for(gpus: int, step_s: float) -> JobPlan:
    report = PlanReport(feasible=True, reasons=(), step_s=step_s, choices={"gpus": gpus})
    return JobPlan(report=report, arena_nbytes=gpus * GIB)


def test_a_plan_for_another_number_is_among_the_others_until_it_is_taken() -> None:
    bounds = PlanBounds(
        num_ranks=4, chooses_ranks=True, num_optimizers=1, host_memory_nbytes=None, device_memory_nbytes=None
    )
    plan = plan_for(4, 1.0).model_copy(update={"others": (plan_for(1, 3.0), plan_for(2, 1.8))})
    plan = plan.made_for(ChangedInputs(hardware=MACHINE, bounds=bounds))
    two = plan.for_gpus(2)
    assert (two.num_gpus, two.arena_nbytes, two.changed_inputs) == (2, 2 * GIB, plan.changed_inputs)
    assert two.step_s_by_gpus == plan.step_s_by_gpus == {4: 1.0, 1: 3.0, 2: 1.8}
    stored = JobPlan.from_json(json.loads(json.dumps(two.to_json())))
    assert stored is not None
    assert stored.for_gpus(4).arena_nbytes == 4 * GIB
    assert stored.for_gpus(2) == stored
    assert all(other.others == () for other in stored.for_gpus(4).others)
    with pytest.raises(KeyError):
        plan.for_gpus(3)
