"""The promises of `benchmarks.planner`, and the comparison with the results."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.planner.benchmark import CASES, QUICK_CASES, add_choices, add_promises, errors_of, solve_times
from benchmarks.planner.case import Predicted, predict, question_of
from benchmarks.planner.run import JOB_FILE, Measured, planned_spec
from benchmarks.planner.swaps import QUICK_SWAPS, SWAPS, Swap, add_swaps, only
from tests.unit.benchmarks.tables import Tables
from windlass.planner.hardware.hardware import Hardware
from windlass.planner.hardware.yaml_files import parse
from windlass.planner.planning.planner import best_plan
from windlass.planner.planning.profiles import Profiles

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
    ratios = add_promises(report, [(CASES[0], PREDICTED, measured)])
    assert ratios == {"step_error_max": pytest.approx(0.1), "peak_error_max": pytest.approx(0.05)}
    assert report.rows[0][:6] == (CASES[0].title, "1.500", "2.000", "2.000", "2.200", "+10.0%")


def test_planned_tiers_are_counted_by_blocks_and_layers() -> None:
    report = Tables()
    add_choices(report, [(CASES[0], PREDICTED)])
    assert report.rows == [(CASES[0].title, "1 / 2 / 7", "3", "0", "2 of 4", "6 / 2 / 0", "5", "5")]


def test_a_job_that_failed_is_told_and_keeps_no_promise() -> None:
    report = Tables()
    ratios = add_promises(report, [(CASES[0], PREDICTED, Measured(error="no room"))])
    assert ratios == {"step_error_max": 1.0, "peak_error_max": 1.0}
    assert report.rows[0][1] == "failed: no room"


@pytest.mark.long
def test_prediction_is_on_disk_before_its_plan_runs(tmp_path: Path) -> None:
    (case,), folder = QUICK_CASES, tmp_path / "0"
    case.workload(num_timed_steps=2).write(folder)
    question = question_of(case, MACHINE)
    found = predict(case, question, Profiles(question), folder, tmp_path / "kernels")
    planned = json.loads((folder / JOB_FILE).read_text())
    assert planned["predicted"]["step_s"] == found.step_s == max(found.bound_s, found.simulated_s)
    add_choices(Tables(), [(case, found)])
    spec = planned_spec(folder)
    assert spec.host_memory_nbytes == found.arena_nbytes
    assert len(spec.placement.activations) == case.num_layers
    assert spec.training.total_steps == 4


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


def test_at_least_eight_jobs_of_different_kinds_are_promised() -> None:
    assert len(CASES) >= 8
    assert len({(case.hidden, case.num_layers) for case in CASES}) >= 6
    assert {case.clip_norm is None for case in CASES} == {True, False}
    assert {case.num_microbatches for case in CASES} > {1, 2}


@pytest.mark.long
def test_programs_are_timed() -> None:
    times = solve_times(quick=True)
    assert set(times) == {"6B", "6B, clipping"}
    assert all(seconds > 0.0 for both in times.values() for seconds in both)
