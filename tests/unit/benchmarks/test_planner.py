"""The promises of `benchmarks.planner`, and the comparison with the results."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.planner import pace as pace_module
from benchmarks.planner.benchmark import (
    Result,
    add_choices,
    add_paces,
    add_plan_times,
    add_promises,
    errors_of,
    solve_times,
)
from benchmarks.planner.case import Predicted, only, predict, question_of
from benchmarks.planner.cases import CASES, QUICK_CASES
from benchmarks.planner.pace import Pace, PaceProbe
from benchmarks.planner.plan_times import PlanTime, shell_times
from benchmarks.planner.run import JOB_FILE, Measured, planned_spec, stopped, without_pauses
from benchmarks.planner.swaps import QUICK_SWAPS, SWAPS, Swap, add_swaps
from tests.support.planner.profiles import make_job
from tests.unit.benchmarks.tables import Tables
from windlass.planner.hardware.hardware import Hardware
from windlass.planner.hardware.yaml_files import parse
from windlass.planner.planning.simulated_search import best_plan
from windlass.planner.question.profiles import Profiles

CHOICES = {
    "num_microbatches": 4,
    "group_size": 2,
    "states_on_gpu": 1,
    "states_on_host": 2,
    "states_on_ssd": 7,
    "kept_grads_on_ssd": 3,
    "layers_in_pieces": 0,
    "activations": [
        {"layers": "0-4", "input": "swapped", "rest": "recomputed", "kept": ["aten.mm.default#0"]},
        {"layers": "5", "input": "kept", "rest": "recomputed"},
        {"layers": "6-7", "input": "kept", "rest": "kept"},
    ],
}
PREDICTED = Predicted(
    step_s=2.0,
    bound_s=1.5,
    simulated_s=2.0,
    device_nbytes=100,
    arena_nbytes=200,
    ssd_nbytes=400,
    swapped_nbytes=0,
    choices=CHOICES,
)
MACHINE = parse(
    Hardware,
    {
        "gpus": {"count": 0, "memory_gib": 4, "tflops": 0.1},
        "host": {"memory_gib": 4, "memory_gb_per_s": 10, "adam_params_per_s": 1e8},
        "pcie": {"h2d_gb_per_s": 5, "d2h_gb_per_s": 5},
        "ssds": {"count": 1, "read_gb_per_s": 1, "write_gb_per_s": 1, "capacity_gib": 10},
    },
    "here",
)


def test_errors_are_of_what_was_predicted() -> None:
    measured = Measured(step_s=2.2, device_nbytes=95, arena_nbytes=200, ssd_nbytes=404)
    errors = errors_of(PREDICTED, measured)
    assert errors == pytest.approx(
        {"step_s": 0.1, "device_nbytes": -0.05, "arena_nbytes": 0.0, "ssd_nbytes": 0.01}, abs=1e-9
    )
    report = Tables()
    ratios = add_promises(report, [result_of(measured, slowdown=1.0)])
    assert ratios == pytest.approx(
        {
            "step_error_max": 0.1,
            "step_error_median": 0.1,
            "step_error_raw_max": 0.1,
            "step_error_raw_median": 0.1,
            "peak_error_max": 0.05,
        }
    )
    assert report.rows[0][:6] == (CASES[0].title, "1.500", "2.000", "2.000", "2.200", "+10.0%")


def result_of(measured: Measured, *, slowdown: float) -> Result:
    pace = Pace(planned_s=1.0, meanwhile_s=slowdown, standard_error=0.02, num_rounds=7)
    return Result(case=CASES[0], predicted=PREDICTED, measured=measured, pace=pace)


def test_errors_of_steps_are_told_at_the_pace_of_the_job_and_as_they_are() -> None:
    measured = Measured(step_s=2.5, device_nbytes=100, arena_nbytes=200, ssd_nbytes=400)
    report = Tables()
    results = [result_of(measured, slowdown=1.25), result_of(measured, slowdown=1.0)]
    ratios = add_promises(report, results)
    assert ratios["step_error_median"] == pytest.approx(0.125)
    assert ratios["step_error_max"] == ratios["step_error_raw_max"] == pytest.approx(0.25)
    assert report.rows[0][5:8] == ("+25.0%", "1.250", "+0.0%")
    add_paces(report, results)
    assert report.rows[-1] == (CASES[0].title, "1.000", "1.000", "2.0%", "7")


def test_time_in_which_a_job_is_stopped_does_not_count() -> None:
    measured = Measured(start_s=10.0, end_s=20.0, step_s=5.0)
    pauses = [(5.0, 9.0), (9.5, 11.0), (12.0, 14.0), (19.0, 23.0)]  # four seconds of them within the steps
    assert without_pauses(measured, pauses).step_s == pytest.approx(3.0)
    assert without_pauses(measured, []).step_s == 5.0


def wait_until(is_so: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_nothing_of_a_job_goes_on_while_the_pace_is_measured(tmp_path: Path) -> None:
    counting = "import sys\nnumber = 0\nwhile True:\n    number += 1\n    open(sys.argv[1], 'w').write(str(number))"
    file = tmp_path / "number"
    with subprocess.Popen([sys.executable, "-c", counting, str(file)], text=True) as process:
        try:
            wait_until(lambda: file.exists() and file.read_text() > "1")
            seen: list[str] = []

            def look_twice() -> None:
                for _ in range(2):
                    time.sleep(0.05)
                    seen.append(file.read_text())

            since_s, until_s = stopped(process, look_twice)
            assert seen[0] == seen[1]
            assert until_s - since_s >= 0.1
            wait_until(lambda: file.read_text() not in ("", seen[1]))
        finally:
            process.kill()


def test_pace_of_a_job_that_ended_before_it_was_measured_is_that_before_and_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Bench:
        """Blocks that take one second more in each round."""

        def __init__(self, *_: object, **__: object) -> None:
            self._num_rounds = 0

        def round(self) -> float:
            self._num_rounds += 1
            return float(self._num_rounds)

        def times_of(self, rounds: list[float]) -> Any:
            times = SimpleNamespace(forward_s=fmean(rounds), backward_s=0.0)
            return SimpleNamespace(times={0: times}, standard_error=0.0)

    monkeypatch.setattr(pace_module, "BlockBench", Bench)
    question = question_of(QUICK_CASES[0], MACHINE)
    monkeypatch.setattr(pace_module, "_planned_s", lambda _: 2.0)
    probe = PaceProbe(question, make_job())
    assert probe.pace(1.0, 2.0) == Pace(planned_s=2.0, meanwhile_s=2.5, standard_error=0.0, num_rounds=2)
    probe.measure()
    within = probe.pace(0.0, float("inf"))
    assert (within.meanwhile_s, within.num_rounds) == (4.0, 1)


def test_planned_tiers_are_counted_by_blocks_and_layers() -> None:
    report = Tables()
    add_choices(report, [(CASES[0], PREDICTED)])
    assert report.rows == [(CASES[0].title, "1 / 2 / 7", "3", "0", "2 of 4", "6 / 2 / 0", "5", "5")]


def test_a_job_that_failed_is_told_and_keeps_no_promise() -> None:
    report = Tables()
    ratios = add_promises(report, [result_of(Measured(error="no room"), slowdown=1.0)])
    assert set(ratios.values()) == {1.0}
    assert report.rows[0][1] == "failed: no room"


@pytest.mark.long
def test_prediction_is_on_disk_before_its_plan_runs(tmp_path: Path) -> None:
    (case,), folder = QUICK_CASES, tmp_path / "0"
    case.workload(num_timed_steps=2).write(folder)
    question = question_of(case, MACHINE)
    found, job = predict(case, question, Profiles(question), folder, tmp_path / "kernels")
    planned = json.loads((folder / JOB_FILE).read_text())
    assert planned["predicted"]["step_s"] == found.step_s == max(found.bound_s, found.simulated_s)
    add_choices(Tables(), [(case, found)])
    spec = planned_spec(folder)
    assert spec.host_memory_nbytes == found.arena_nbytes
    assert len(spec.placement.activations) == case.num_layers
    assert spec.training.total_steps == 4
    probe = PaceProbe(question, job)
    probe.measure()
    probe.measure()
    pace = probe.pace(0.0, float("inf"))
    assert pace.num_rounds == 2
    assert pace.slowdown == pytest.approx(1.0, rel=2.0)


def test_longest_plan_counts() -> None:
    times = [
        PlanTime(title="6B", wall_s=2.0, cpu_s=1.5, fits=True),
        PlanTime(title="13B", wall_s=3.0, cpu_s=0.0, fits=True, first_s=0.25, advised_s=3.5),
    ]
    report = Tables()
    assert add_plan_times(report, "plans", times) == 3.0
    assert report.rows == [("6B", "", "2.00", "", "1.50", "yes"), ("13B", "0.25", "3.00", "3.50", "", "yes")]


@pytest.mark.long
def test_plans_from_the_shell_are_timed(tmp_path: Path) -> None:
    times = shell_times([6], tmp_path)
    assert [each.title for each in times] == ["6B, clipping", "6B"]
    assert all(each.fits and each.wall_s > 0.0 and each.cpu_s > 0.0 for each in times)


@pytest.mark.parametrize(("exit_code", "fits"), [(0, True), (3, False)])
def test_plan_that_does_not_fit_is_timed_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exit_code: int, *, fits: bool
) -> None:
    done = SimpleNamespace(returncode=exit_code, stdout=json.dumps({"feasible": fits}), stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_arguments, **_options: done)
    assert [each.fits for each in shell_times([6], tmp_path)] == [fits, fits]


def test_plan_with_wrong_options_is_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = SimpleNamespace(returncode=2, stdout="", stderr="Usage: windlass plan")
    monkeypatch.setattr(subprocess, "run", lambda *_arguments, **_options: done)
    with pytest.raises(RuntimeError, match="Usage: windlass plan"):
        shell_times([6], tmp_path)


@pytest.mark.long
def test_all_layers_of_a_sweep_swap_equally() -> None:
    (case,) = QUICK_SWAPS
    question = replace(question_of(case, MACHINE), measures=False)
    profiles = Profiles(question)
    swapped = []
    for number in (0, 2, None):
        _, solution = best_plan(replace(question, ways=only(number)), profiles)
        choices = solution.placement.activations
        assert len({choice.swapped for choice in choices}) == 1
        assert {choice.recompute for choice in choices} == {number is not None}
        swapped.append(solution.placement.host_activation_nbytes)
    assert swapped == sorted(set(swapped))


def test_chosen_plan_is_compared_with_best_of_its_case() -> None:
    swaps = [
        Swap(case=case, title=title, predicted=PREDICTED, step_s=step_s)
        for case, seconds in zip(SWAPS, ((1.0, 2.0, 1.0), (1.1, 1.0, 1.2), (0.9, 1.0, 1.2)), strict=True)
        for title, step_s in zip(("chosen", "0 operators", "everything"), seconds, strict=True)
    ]
    report = Tables()
    assert add_swaps(report, swaps) == {"choice_over_best_max": pytest.approx(1.1)}
    assert len(report.rows) == 9


def test_at_least_twelve_jobs_of_different_kinds_are_promised() -> None:
    assert len(CASES) >= 12
    assert len({(case.hidden, case.num_layers) for case in CASES}) >= 10
    assert len([case for case in CASES if case.clip_norm is not None]) >= 4
    assert {case.num_microbatches for case in CASES} > {1, 2}
    assert len([case for case in CASES if case.num_swapped]) >= 2


@pytest.mark.long
def test_programs_are_timed() -> None:
    times = solve_times(quick=True)
    assert set(times) == {"6B", "6B, clipping"}
    assert all(seconds > 0.0 for both in times.values() for seconds in both)
