"""A plan in words."""

from dataclasses import replace

import pytest

from tests.support.planner.profiles import make_job, make_speeds
from windlass.amounts import GIB
from windlass.planner.hardware.named_machines import machine_of
from windlass.planner.question.report import PlanReport, choices_of, peak_limits_gib, report_of, with_limits
from windlass.planner.solver.memory_limits import limits_of
from windlass.planner.solver.placement_search import solve_job
from windlass.planner.solver.planned_job import Limits


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
    report = with_limits(report, limits_of(machine, num_ranks))
    assert peak_limits_gib(report, is_cpu=not gpus) == {"gpu": device, "host": host, "ssd": 1800.0}
