"""The benchmark of the link: its ratios, and its quick form."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.network.benchmark import SHAPES, Measured, main, ratios
from benchmarks.network.contenders import IPERF3, LINK, PLAIN_LINK, Run
from benchmarks.network.steps import CASES, StepRun


def runs(*rates: float, link_nbytes: int = 102) -> list[Run]:
    return [Run(gb_per_s=rate, cpu_s_per_gb=1.0, link_nbytes=link_nbytes, nbytes=100) for rate in rates]


def test_ratios_are_medians_over_rounds_and_the_smallest_of_the_limited_rates() -> None:
    one, ten, unshaped = (Measured(shape) for shape in SHAPES)
    one.runs = {LINK: runs(9, 8, 10), PLAIN_LINK: runs(10, 10, 10), IPERF3: runs(10, 10, 10)}
    ten.runs = {LINK: runs(40), PLAIN_LINK: runs(50, link_nbytes=104), IPERF3: runs(50)}
    unshaped.runs = {LINK: runs(1), PLAIN_LINK: runs(2), IPERF3: runs(4)}
    steps = [
        StepRun(case=case, network_bytes=1.0, steps_s=steps_s, formula_s=4.0, simulated_s=3.0)
        for case, steps_s in zip(CASES, ((3.0, 5.0), (2.5, 2.5)), strict=True)
    ]
    found = ratios((one, ten, unshaped), steps)
    assert found["step_over_bound_max"] == 1.0
    assert found["simulator_error_max"] == 0.25
    assert found["link_over_iperf3"] == 0.8
    assert found["link_over_iperf3, 1 Gbit/s"] == 0.9
    assert found["tls_over_plain"] == 0.8
    assert found["bytes_over_minimum_max"] == 1.04
    assert found["link_over_iperf3, no limit"] == 0.25
    assert found["tls_over_plain_unshaped"] == 0.5


def test_ratios_without_measurements_are_missing() -> None:
    found = ratios((), ())
    assert found["link_over_iperf3"] is None
    assert found["step_over_bound_max"] is None


@pytest.mark.long
def test_quick_form_prints_its_ratios(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["network", "--quick", "--directory", str(tmp_path)])
    main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"link_over_iperf3", "tls_over_plain", "bytes_over_minimum_max"} <= found.keys()
    # A busy machine makes steps longer; none is much shorter than the formula.
    assert found["step_over_bound_max"] > 0.9
    assert found["simulator_error_max"] >= 0.0
