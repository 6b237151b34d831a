"""The comparisons of `benchmarks.simulator`, and its conclusions."""

from dataclasses import replace

import pytest

from benchmarks.simulator.benchmark import QUICK_CASES, add_table, ratios_of
from benchmarks.simulator.cases import CASES, Comparison, Run
from tests.unit.benchmarks.tables import Tables
from windlass.actors.messages import SpanKind

NBYTES = {(SpanKind.COPY_PARAMS_IN, 1, 2): 100}


def comparison(real_s: float, simulated_s: float, other_nbytes: int = 100) -> Comparison:
    real = Run(step_s=real_s, nbytes=NBYTES)
    return Comparison(real=real, simulated=Run(step_s=simulated_s, nbytes=dict.fromkeys(NBYTES, other_nbytes)))


def test_errors_are_shares_of_what_was_measured() -> None:
    found = {"short": comparison(2.0, 1.9), "long": comparison(4.0, 4.4), "other": comparison(1.0, 1.0, 99)}
    assert ratios_of(found) == {
        "simulated_over_real": {"short": 0.95, "long": pytest.approx(1.1), "other": 1.0},
        "simulator_error_max": pytest.approx(0.1),
        "simulator_error_mean": pytest.approx(0.05),
        "num_other_bytes": 1,
    }
    report = Tables()
    add_table(report, found)
    assert report.rows[0] == ("short", "2.000", "1.900", "-5.0", "the same")
    assert report.rows[2] == ("other", "1.000", "1.000", "+0.0", "others")


def test_cases_contain_every_option_each_with_a_slow_resource() -> None:
    assert set(QUICK_CASES) < set(CASES)
    swapping = [case for case in CASES.values() if any(each.swaps for each in case.placement.activations)]
    assert any(case.placement.ssd_activation_nbytes for case in swapping)
    assert any(case.placement.streamed_blocks for case in CASES.values())
    assert any(case.placement.group_size == 1 for case in CASES.values())
    for case in CASES.values():
        assert replace(case, layer_s=case.hurried().layer_s) != case.hurried()
