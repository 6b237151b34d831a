"""A plan in words."""

from dataclasses import replace

import pytest

from tests.support.planner.profiles import make_job, make_speeds
from windlass.amounts import GIB
from windlass.planner.hardware.named_machines import machine_of
from windlass.planner.question.choice_words import choices_in_words
from windlass.planner.question.report import PlanReport, choices_of, report_of, with_limits
from windlass.planner.solver.memory_limits import limits_of
from windlass.planner.solver.placement_search import solve_job
from windlass.planner.solver.planned_job import Limits
from windlass.planner.solver.step_bounds import Part


@pytest.mark.parametrize(
    ("num_microbatches", "lanes", "sizes", "equal"),
    [
        (4, 1, "", 0),
        (4, 2, "", 0),
        (4, 3, "1 or 2", 6),
        (8, 3, "2 or 3", 6),  # nine would be more than the batch has examples
        (8, 5, "1 or 2", 5),
    ],
)
def test_unequal_lanes_are_told_with_a_number_that_makes_them_equal(
    num_microbatches: int, lanes: int, sizes: str, equal: int
) -> None:
    job = make_job(num_microbatches=num_microbatches)
    job = replace(job, training=replace(job.training, batch_size=8, lanes=lanes))
    words = (
        f"the {lanes} lanes have {sizes} micro-batches, so GPUs that share them would not end together; with "
        f"num_microbatches {equal} they are equal"
    )
    solution = solve_job(job, make_speeds(), Limits(device_nbytes=1e12, host_nbytes=1e12, ssd_nbytes=1e12))
    bound, *others = report_of(job, solution, is_cpu=False).reasons
    assert "bound by" in bound
    assert others == ([words] if sizes else [])
    _, *others = report_of(job, solution, is_cpu=True).reasons
    assert others == ([words.replace("GPUs", "devices")] if sizes else [])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_swapped_activations_are_those_of_all_gpus(num_ranks: int) -> None:
    job = replace(make_job(num_microbatches=4), num_ranks=num_ranks)
    solution = solve_job(job, make_speeds(), Limits(device_nbytes=1e12, host_nbytes=1e12, ssd_nbytes=1e12))
    placement = replace(solution.placement, host_activation_nbytes=GIB, ssd_activation_nbytes=3 * GIB)
    choices = choices_of(job, replace(solution, placement=placement))
    assert choices["activations_on_host_gib"] == num_ranks
    assert choices["activations_on_ssd_gib"] == 3 * num_ranks


@pytest.mark.parametrize(
    ("gpus", "num_ranks", "host", "device"), [(1, 1, 64.0, 24.0), (2, 2, 64.0, 24.0), (0, 1, 64.0, 62.5)]
)
def test_peaks_without_budgets_may_be_all_of_a_machines_memory(
    gpus: int, num_ranks: int, host: float, device: float
) -> None:
    """The device of a machine without GPUs has the host's memory, less that of processes."""
    machine = machine_of("rtx4090:gpus=2,ram=68")
    machine = machine.model_copy(update={"gpus": machine.gpus.model_copy(update={"count": gpus})})
    report = PlanReport(feasible=True, reasons=(), choices={"gpus": num_ranks})
    report = with_limits(report, limits_of(machine, num_ranks), is_cpu=not gpus)
    assert report.peak_limit_gib == {"gpu": device, "host": host, "ssd": 1800.0}


def test_limits_of_peaks_are_told_only_of_a_job_that_fits() -> None:
    report = with_limits(PlanReport(feasible=False, reasons=()), limits_of(machine_of("rtx4090")), is_cpu=False)
    assert (report.peak_limit_gib, report.limit_gib) == (None, {"gpu": 22.5, "host": 58.5, "ssd": 1800.0})


def test_busiest_resource_is_told_with_what_a_step_takes_beside_it() -> None:
    job = make_job(num_microbatches=1)
    solution = solve_job(job, make_speeds(), Limits(device_nbytes=1e12, host_nbytes=1e12, ssd_nbytes=1e12))
    parts = dict.fromkeys(Part, 0.0) | {Part.SSD_UPDATE: 6.0, Part.FORWARD: 1.0, Part.BACKWARD: 3.0}
    solution = replace(solution, seconds=parts, step_s=8.0)

    def told(step_s: float | None) -> str:
        return report_of(job, solution, is_cpu=False, step_s=step_s).reasons[0]

    beside = "goes to other work that cannot overlap with that"
    second = "second is what is computed on the device"
    assert told(None) == (
        f"a step is bound by what the SSDs read and write: 6 s, 75% of the step; 25% {beside}; {second}, 50%"
    )
    assert told(10.0).endswith(f"60% of the step; 20% {beside}, 20% passes in waits; {second}, 40%")
    solution = replace(solution, step_s=6.0)
    assert told(8.0).endswith(f"75% of the step; 25% passes in waits; {second}, 50%")
    assert told(6.1).endswith("6 s, 98% of the step")


def test_choices_on_a_cpu_are_told_without_a_gpu() -> None:
    on_cpu, on_gpu = (choices_in_words(is_cpu=is_cpu) for is_cpu in (True, False))
    assert on_cpu.keys() == on_gpu.keys()
    assert not any("GPU" in text for words in on_cpu.values() for text in (words.label, words.meaning))
    assert (on_cpu["gpus"].label, on_cpu["states_on_gpu"].label) == ("devices", "blocks on the device")
