"""Simulations free at once what they drop, because no collector of cycles runs meanwhile."""

import gc
from dataclasses import replace

import pytest

from tests.support.planner.simulated_boxes import job_over
from tests.unit.planner.simulation.test_memory_levels import JOBS, SLOW, made
from windlass.planner.simulation.job import SimulatedJob

pytestmark = pytest.mark.usefixtures("small_activation_slots")


def num_in_cycles(job: SimulatedJob) -> int:
    """The objects that the second step leaves to the collector."""
    job.next_period_s()
    gc.collect()
    gc.disable()
    try:
        job.next_period_s()
        return gc.collect()
    finally:
        gc.enable()


@pytest.mark.parametrize("name", JOBS)
def test_a_simulated_step_leaves_no_cycles(name: str) -> None:
    found = made(**JOBS[name], machine=replace(SLOW, host_memory_bytes=2e5))
    assert num_in_cycles(SimulatedJob(found.context, found.shape, found.machine, found.work, keeps_spans=False)) == 0


def test_a_simulated_step_over_boxes_leaves_no_cycles() -> None:
    assert num_in_cycles(job_over(3, 6, num_groups=3, machine=SLOW, is_tied=True).started(keeps_spans=False)) == 0


def test_the_collector_runs_again_after_a_simulation() -> None:
    found = made(**JOBS["on SSDs"])
    assert found.steady_step_s() > 0
    assert gc.isenabled()
    gc.disable()
    try:
        found.steady_step_s()
        assert not gc.isenabled()
    finally:
        gc.enable()
