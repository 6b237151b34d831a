"""The benchmark of the queue over boxes, in its quick form."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.cluster.benchmark import main, percentile
from benchmarks.cluster.simulation import by_first_fit, by_windlass, simulate
from benchmarks.cluster.workload import make_workload


@pytest.mark.long
def test_quick_form_prints_its_ratios(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["cluster", "--quick", "--directory", str(tmp_path)])
    main()
    ratios = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (ratios["idle_while_fitting"], ratios["join_s"]) == (0, None)
    assert 0 < ratios["decision_ms_p99"] <= ratios["pass_ms_p99"]


def test_no_box_is_idle_while_a_job_waits_that_fits_it() -> None:
    workload = make_workload(num_jobs=150, num_boxes=8, load=0.9, seed=2)
    ours, first_fit = simulate(workload, by_windlass), simulate(workload, by_first_fit)
    assert ours.num_idle == 0
    assert len(ours.wait_s) == len(first_fit.wait_s) == 150
    assert ours.mean_turnaround_s > ours.mean_wait_s >= 0


def test_percentile_is_one_of_the_values() -> None:
    assert [percentile([3.0, 1.0, 2.0], share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 2.0, 3.0, 3.0]
