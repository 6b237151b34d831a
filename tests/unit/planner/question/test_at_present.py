"""A plan on a machine whose CPU is slower now than when the model's blocks were measured."""

from dataclasses import replace

import pytest

from tests.support.planner.profiles import make_job, make_speeds
from windlass.planner.profiling import MachinePace, machine_pace, pace_of_an_answer
from windlass.planner.question.at_present import at_pace, told_of_pace
from windlass.planner.question.report import report_of
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


def test_pace_of_an_answer_stays_whatever_the_machine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = iter([2.0, None, 3.0])
    machine = MachinePace(lambda: next(measured), kept_s=0.0)
    monkeypatch.setattr(machine_pace, "this_machine", lambda: machine)
    first, second = pace_of_an_answer(), pace_of_an_answer()
    assert [first.now_s(), first.now_s()] == [2.0, 2.0]
    assert [second.now_s(), second.now_s()] == [None, None], "the machine was busy"
