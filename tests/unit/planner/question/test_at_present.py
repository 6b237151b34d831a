"""A plan on a machine whose CPU is slower now than when the model's blocks were measured."""

from dataclasses import replace

import pytest

from tests.support.planner.profiles import make_job, make_speeds
from tests.support.planner.questions import question
from windlass.planner.cost.model_profile import TimesFacts
from windlass.planner.feasibility.feasibility import with_part
from windlass.planner.predictions.rate_correction import Correction
from windlass.planner.profiling import MachinePace, machine_pace, pace_of_an_answer
from windlass.planner.profiling.machine_pace import Pace
from windlass.planner.question.at_present import at_pace, told_of_others, told_of_pace, with_errors
from windlass.planner.question.report import PlanReport, report_of
from windlass.planner.solver.placement_search import solve_job
from windlass.planner.solver.planned_job import Limits
from windlass.planner.solver.solution import Solution
from windlass.planner.solver.step_bounds import Part


def plan_on_cpu(*, ssd_share: float) -> Solution:
    """A plan on a CPU, whose SSDs have a share of their usual rate."""
    usual = make_speeds()
    speeds = replace(
        usual,
        shares_cores=True,
        ssd_read_bytes=ssd_share * usual.ssd_read_bytes,
        ssd_write_bytes=ssd_share * usual.ssd_write_bytes,
    )
    return solve_job(make_job(), speeds, Limits(device_nbytes=1e12, host_nbytes=2e9, ssd_nbytes=1e12))


@pytest.mark.parametrize("slowdown", [1.3, 0.8])
def test_a_slower_cpu_takes_longer_for_its_own_parts_alone(slowdown: float) -> None:
    before = plan_on_cpu(ssd_share=1e-3)
    assert before.bottleneck == "ssd"
    after = at_pace(before, slowdown)
    assert after.step_s < 1.05 * before.step_s
    for part in (Part.FORWARD, Part.BACKWARD, Part.OPTIMIZER, Part.H2D_FORWARD):
        assert after.seconds[part] == pytest.approx(slowdown * before.seconds[part]), part
    for part in (Part.SSD_FORWARD, Part.SSD_BACKWARD, Part.SSD_UPDATE):
        assert after.seconds[part] == pytest.approx(before.seconds[part]), part
    assert (after.placement, after.plan, after.nbytes) == (before.placement, before.plan, before.nbytes)


def test_what_is_bound_by_the_cpu_is_slower_as_a_whole() -> None:
    before = plan_on_cpu(ssd_share=1e6)
    assert at_pace(before, 1.25).step_s == pytest.approx(1.25 * before.step_s, rel=0.01)
    assert at_pace(before, 1.0) is before


def test_another_pace_is_told() -> None:
    solution = plan_on_cpu(ssd_share=1.0)
    report = report_of(solution.costs.job, solution, is_cpu=True)
    assert told_of_pace(report, 1.0) == report
    told = "the machine computes 1.25 times slower now than when the model's blocks were measured"
    assert told_of_pace(report, 1.25).reasons[-1] == told
    assert "1.25 times faster" in told_of_pace(report, 0.8).reasons[-1]


def test_other_work_during_a_measurement_is_told_until_steps_are_measured() -> None:
    solution, asked = plan_on_cpu(ssd_share=1.0), question(num_microbatches=1)
    report = report_of(solution.costs.job, solution, is_cpu=True)

    def told(others: float, correction: Correction | None = None) -> PlanReport:
        model = replace(solution.costs.job.model, times=TimesFacts(standard_error=0.01, others=others))
        job = replace(solution.costs.job, model=model)
        then = replace(asked, correction=correction or asked.correction)
        return with_errors(then, job, told_of_others(then, job, report))

    alone, busy = told(0.0), told(0.6)
    assert busy.reasons[:-1] == alone.reasons == report.reasons
    assert busy.reasons[-1].startswith("other processes took 60% of the cores while the model's blocks were measured")
    assert busy.step_s_low == pytest.approx(0.4 * (alone.step_s_low or 0.0))
    assert told(0.6, Correction(block_s={0: (1.0, 1.0)})).reasons == report.reasons


def test_interval_by_a_cpus_rates_is_wider_without_one_in_fp32() -> None:
    solution, gpu = plan_on_cpu(ssd_share=1.0), question(num_microbatches=1)
    report = report_of(solution.costs.job, solution, is_cpu=True)

    def low_s(**gpus: object) -> float:
        hardware = with_part(gpu.hardware, gpus=with_part(gpu.hardware.gpus, **gpus))
        found = with_errors(replace(gpu, hardware=hardware), solution.costs.job, report)
        assert found.times_from == "rates"
        return found.step_s_low or 0.0

    assert low_s(count=0, fp32_tflops=None) < low_s(count=0, fp32_tflops=0.2) < low_s()


def test_pace_of_an_answer_stays_whatever_the_machine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = iter([Pace(seconds=2.0), Pace(seconds=2.5, others=0.4), Pace(seconds=3.0)])
    machine = MachinePace(lambda: next(measured), kept_s=0.0)
    monkeypatch.setattr(machine_pace, "this_machine", lambda: machine)
    first, second = pace_of_an_answer(), pace_of_an_answer()
    assert [first.now_s(), first.now_s()] == [2.0, 2.0]
    assert [second.now_s(), second.now_s()] == [None, None], "the machine was busy"
