"""Plans that are made again from measured steps: simulated jobs on machines that differ from their profile."""

import re
from dataclasses import replace

import pytest

from windlass.engine.training_config.training_config import TrainingConfig
from windlass.planner.hardware.hardware import Gpus, Hardware, Host, Pcie, Ssds
from windlass.planner.hardware.model_shape import ModelShape
from windlass.planner.planning.planner import Planned, answer
from windlass.planner.planning.replan import CorrectedPlan, RunningJob, correct
from windlass.planner.planning.simulated_search import best_plan
from windlass.planner.predictions.measured_steps import measured_step
from windlass.planner.profiling.model_profiler import config_of_shape
from windlass.planner.question.profiles import Profiles
from windlass.planner.question.question import PlanQuestion
from windlass.planner.simulation.planned_job import simulate_planned

SHAPE = ModelShape(num_layers=8, hidden_size=1024, num_heads=16, vocab_size=8000)
NUM_TOKENS = 512


def machine(*, ssd_gb_per_s: float = 8.0, tflops: float = 20.0, host_gib: float = 6.0, gpus: int = 1) -> Hardware:
    return Hardware(
        gpus=Gpus(count=gpus, memory_gib=2.7 if gpus else host_gib, tflops=tflops),
        host=Host(memory_gib=host_gib, memory_gb_per_s=40, adam_params_per_s=1e9),
        pcie=Pcie(h2d_gb_per_s=12, d2h_gb_per_s=12),
        ssds=Ssds(count=2, read_gb_per_s=ssd_gb_per_s, write_gb_per_s=ssd_gb_per_s, capacity_gib=100),
    )


def question(hardware: Hardware, *, host_mib: float, num_ranks: int = 1) -> PlanQuestion:
    return PlanQuestion(
        config=config_of_shape(SHAPE, num_tokens=NUM_TOKENS),
        hardware=hardware,
        training=TrainingConfig(
            batch_size=8, num_microbatches=num_ranks, sequence_length=NUM_TOKENS, clip_norm=None, total_steps=1
        ),
        num_ranks=num_ranks,
        host_memory_nbytes=int(host_mib * 2**20),
    )


def run(
    asked: PlanQuestion,
    real: Hardware,
    *,
    num_steps_left: int = 1000,
    restart_s: float = 10.0,
    other_numbers: tuple[int, ...] = (),
    may_change: bool = True,
) -> tuple[Planned, CorrectedPlan]:
    """Plans for one machine, and replans from the simulated steps of another."""
    planned = answer(asked)
    report, solution = planned.report, planned.solution
    assert solution is not None
    assert planned.layout is not None
    assert report.choices is not None
    assert report.busy_s is not None
    assert report.step_s is not None
    there = replace(solution, costs=replace(solution.costs, speeds=replace(asked, hardware=real).speeds))
    simulated = simulate_planned(there, planned.layout, num_cores=2)
    is_cpu = real.gpus.count == 0
    running = RunningJob(
        placement=solution.placement,
        arena_nbytes=solution.plan.arena_nbytes,
        spills_grads=report.choices["kept_grads_on_ssd"] > 0,
        step_s=report.step_s,
        compute_s=report.busy_s["compute"],
        num_steps_left=num_steps_left,
        restart_s=restart_s,
        may_change=may_change,
    )
    profiles = Profiles(asked)
    microbatches = solution.costs.microbatches_of_ranks
    steps = [
        measured_step(each, profiles.layout, shares_cores=is_cpu, read_to_write=1.0, microbatches=microbatches)
        for each in simulated.steps
    ]
    return planned, correct(asked, profiles, running, steps, other_numbers=other_numbers)


@pytest.mark.long
def test_a_machine_that_is_as_its_profile_says_keeps_its_plan() -> None:
    asked = question(machine(), host_mib=800)
    planned, corrected = run(asked, machine())
    assert not corrected.changes
    assert corrected.in_words.endswith("; no other plan is worth a change")
    before, after = planned.report, corrected.planned.report
    assert after.step_s == pytest.approx(before.step_s, rel=0.1)
    assert (after.peak_gib, after.choices) == (before.peak_gib, before.choices)


def test_plan_that_stays_keeps_its_exact_device_memory() -> None:
    small = config_of_shape(
        ModelShape(num_layers=2, hidden_size=256, num_heads=4, vocab_size=1000), num_tokens=NUM_TOKENS
    )
    asked = replace(question(machine(), host_mib=1350), config=small)
    planned, corrected = run(asked, machine(), may_change=False)
    assert not corrected.changes
    before, after = planned.report, corrected.planned.report
    assert (after.engine_gib, after.peak_gib) == (before.engine_gib, before.peak_gib)


@pytest.mark.long
def test_prediction_alone_is_made_again_where_the_plan_may_not_change() -> None:
    fast, slow = (
        each.model_copy(update={"gpus": each.gpus.model_copy(update={"memory_gib": 4.0})})
        for each in (machine(), machine(ssd_gb_per_s=0.4))
    )
    asked = question(fast, host_mib=1350)
    planned, corrected = run(asked, slow, may_change=False)
    assert not corrected.changes
    assert corrected.in_words.endswith(f"the plan said {planned.report.step_s:.3g} s")
    before, after = planned.report, corrected.planned.report
    assert before.step_s is not None
    assert after.step_s is not None
    assert after.step_s > 1.15 * before.step_s
    assert (after.choices, after.times_from) == (before.choices, "steps")


@pytest.mark.long
def test_ssds_that_are_slower_than_said_get_less_to_do() -> None:
    real = machine(ssd_gb_per_s=0.4)
    asked = question(machine(), host_mib=1350)
    planned, corrected = run(asked, real)
    assert corrected.changes
    # Work that continues beyond a step's end is not counted, so the rates are not exactly the machine's.
    rates = re.findall(r"each SSD (reads|writes) ([\d.]+) GB/s, the profile said 8 GB/s", corrected.in_words)
    assert {kind: float(rate) for kind, rate in rates} == pytest.approx({"reads": 0.4, "writes": 0.4}, rel=0.1)
    new = corrected.planned
    assert new.solution is not None
    assert planned.solution is not None
    assert new.solution.placement != planned.solution.placement
    assert new.report.ssd_write_gb_per_step is not None
    assert planned.report.ssd_write_gb_per_step is not None
    assert new.report.ssd_write_gb_per_step < planned.report.ssd_write_gb_per_step
    # As it would have been planned if the profile had been right.
    as_real = question(real, host_mib=1350)
    right = answer(as_real).report
    assert right.step_s is not None
    assert new.report.step_s == pytest.approx(right.step_s, rel=0.1)


@pytest.mark.long
def test_another_plan_must_save_more_than_a_restart_costs() -> None:
    asked = question(machine(), host_mib=1350)
    planned, corrected = run(asked, machine(ssd_gb_per_s=0.4), num_steps_left=2, restart_s=100.0)
    assert not corrected.changes
    assert "and a restart costs 100 s" in corrected.in_words
    # The estimate of the plan that stays is corrected all the same.
    assert planned.report.step_s is not None
    assert corrected.planned.report.step_s is not None
    assert corrected.planned.report.step_s > 2 * planned.report.step_s


@pytest.mark.long
def test_what_a_plan_comes_to_is_corrected_where_no_other_is_better() -> None:
    asked = question(machine(), host_mib=800)
    planned, corrected = run(asked, machine(ssd_gb_per_s=0.4))
    assert not corrected.changes
    assert "each SSD reads" in corrected.in_words
    assert "each SSD writes" in corrected.in_words
    assert corrected.in_words.count("the profile said 8 GB/s") == 2
    assert planned.report.step_s is not None
    assert corrected.planned.report.step_s is not None
    assert corrected.planned.report.step_s > 2 * planned.report.step_s


@pytest.mark.parametrize("gpus", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_device_that_computes_slower_than_said_is_given_less_to_compute_again(gpus: int) -> None:
    asked = question(machine(gpus=gpus), host_mib=2400 if gpus == 0 else 800)
    planned, corrected = run(asked, machine(gpus=gpus, tflops=2.0))
    told, report = corrected.in_words, corrected.planned.report
    assert "a step computes for" in told
    assert report.busy_s is not None
    assert planned.report.busy_s is not None
    assert report.busy_s["compute"] > 3 * planned.report.busy_s["compute"]
    as_real = question(machine(gpus=gpus, tflops=2.0), host_mib=2400 if gpus == 0 else 800)
    assert report.bound_s == pytest.approx(best_plan(as_real, Profiles(as_real))[1].step_s, rel=0.15)


@pytest.mark.long
def test_plan_of_several_gpus_is_corrected_with_those_for_other_numbers() -> None:
    real = machine(gpus=2, ssd_gb_per_s=0.4)
    asked = question(machine(gpus=2), host_mib=1600, num_ranks=2)
    planned, corrected = run(asked, real, other_numbers=(1,))
    assert "each SSD reads" in corrected.in_words
    assert planned.report.step_s is not None
    assert corrected.planned.report.step_s is not None
    assert corrected.planned.report.choices is not None
    assert corrected.planned.report.choices["gpus"] == 2
    as_real = question(real, host_mib=1600, num_ranks=2)
    assert corrected.planned.report.bound_s == pytest.approx(best_plan(as_real, Profiles(as_real))[1].step_s, rel=0.15)
    (alone,) = corrected.others
    assert alone.report.choices is not None
    assert alone.report.choices["gpus"] == 1
    as_real = question(real, host_mib=1600).changed(num_microbatches=2)
    assert alone.report.bound_s == pytest.approx(best_plan(as_real, Profiles(as_real))[1].step_s, rel=0.15)
