"""Measures the planner's speed and the accuracy of its predictions: `python -m benchmarks.planner [--quick]`

It takes long. With `--keep FOLDER` its parts are kept as they end, and another run goes on from there.

- The time of `windlass plan` for Ratel's shapes (its table IV), and of the same plans in a running service after a
  setting was changed; the time of their integer programs.
- Jobs on this machine. The machine is measured right before each plan. The job's own blocks are measured and the plan
  is simulated. The prediction is written to disk before the job runs, in its own process, with the planned memory. A
  virtual machine's pace changes within seconds, and a prediction holds for the pace at which it was made. So the job is
  stopped every few seconds, and its blocks are measured again meanwhile (`benchmarks/planner/pace.py`). Peaks are those
  of the kernel. The device is the CPU, so its memory is that process's private memory.
- For three batch sizes, whether another amount of swapped activations would have been faster
  (`benchmarks/planner/swaps.py`).
"""

import argparse
import functools
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.papers.published.models import RATEL_SHAPES
from benchmarks.planner.case import MIB, Case, Predicted, predict, question_of
from benchmarks.planner.cases import CASES, QUICK_CASES
from benchmarks.planner.pace import Pace, PaceProbe
from benchmarks.planner.plan_times import PlanTime, service_times, shell_times
from benchmarks.planner.run import Measured, run_timed, with_memory
from benchmarks.planner.swaps import QUICK_SWAPS, SWAPS, Swap, add_swaps, sweep
from benchmarks.reporting.kept import KeptResults
from benchmarks.reporting.machine import num_cores
from benchmarks.reporting.report import Report, parse_options
from benchmarks.scratch_folder import scratch_folder
from windlass.engine.device import retain_freed_memory
from windlass.engine.training_config import TrainingConfig
from windlass.planner.cost import AgainTimes, LayerProfile, Speeds, speeds_of
from windlass.planner.hardware import Hardware, example_machines, load
from windlass.planner.profiling import config_of_shape
from windlass.planner.question import PlanQuestion, Profiles
from windlass.planner.solver import Limits, PlannedJob, limits_of, solve_job
from windlass.service.installation import Settings
from windlass.service.machine import measure_hardware

_NUM_TOKENS = 1024
_BATCH_SIZE = 8
_AGAIN_SIZES = (13, 70, 175, 412)  # billions of parameters of the models that a service plans again
_NUM_SOLVES = 3  # repetitions, of which the median counts


# Recomputation times as shares of a layer's forward pass: all recomputed, one output held, all useful outputs held. The
# values are typical for CPUs, but invented. They show that measured layers do not slow down the solver.
_AGAIN_SHARES = ((0.85, 0.8, 0.1), (0.8, 0.75, 0.2), (0.7, 0.6, 0.1))


def solve_times(*, quick: bool) -> dict[str, tuple[float, float]]:
    """Returns the seconds to solve a job's programs, by billions of parameters and whether gradients are kept.

    The first number is with the machine's rates, the second one the maximum with times of layers.
    """
    machine = load(Hardware, example_machines()["rtx4090-server"])
    speeds, limits = speeds_of(machine), limits_of(machine)
    sizes = sorted(RATEL_SHAPES)[: 1 if quick else None]
    seconds = {}
    for size in sizes:
        config = config_of_shape(RATEL_SHAPES[size], num_tokens=_NUM_TOKENS)
        for clips in (False, True):
            training = TrainingConfig(
                batch_size=_BATCH_SIZE, sequence_length=_NUM_TOKENS, clip_norm=1.0 if clips else None, total_steps=1
            )
            question = PlanQuestion(config=config, hardware=machine, training=training)
            job = Profiles(question).job(question, 1)
            timed = (_with_times(job, speeds, shares) for shares in _AGAIN_SHARES)
            taken = (_solve_s(job, speeds, limits), max(_solve_s(each, speeds, limits) for each in timed))
            seconds[f"{size}B{', clipping' if clips else ''}"] = taken
    return seconds


def _solve_s(job: PlannedJob, speeds: Speeds, limits: Limits) -> float:
    taken = []
    for _ in range(_NUM_SOLVES):
        start_s = time.perf_counter()
        solve_job(job, speeds, limits)
        taken.append(time.perf_counter() - start_s)
    return statistics.median(taken)


def _with_times(job: PlannedJob, speeds: Speeds, shares: tuple[float, float, float]) -> PlannedJob:
    """Returns the job with invented times of its layers."""

    def timed(layer: LayerProfile) -> LayerProfile:
        forward_s = layer.num_flops / speeds.device_flops
        all_s, one_held_s, most_held_s = (share * forward_s for share in shares)
        again = AgainTimes(all_s=all_s, one_held_s=one_held_s, most_held_s=most_held_s)
        return replace(layer, forward_s=forward_s, backward_s=2 * forward_s, again=again)

    return replace(job, model=replace(job.model, layers=tuple(map(timed, job.model.layers))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One job: its prediction, what was measured, and the machine's pace meanwhile."""

    case: Case
    predicted: Predicted
    measured: Measured
    pace: Pace


def errors_of(predicted: Predicted, measured: Measured) -> dict[str, float]:
    """Returns the relative errors: measured / predicted - 1."""
    names = ("step_s", "device_nbytes", "arena_nbytes", "ssd_nbytes")
    return {name: getattr(measured, name) / getattr(predicted, name) - 1 for name in names}


def add_promises(report: Report, results: Sequence[Result]) -> dict[str, float]:
    """Adds the table of predicted and measured values. Returns the largest errors."""
    rows, step_errors, raw_errors, peak_errors = [], [], [], []
    for result in results:
        predicted, measured, slowdown = result.predicted, result.measured, result.pace.slowdown
        if measured.error is not None:
            rows.append((result.case.title, f"failed: {measured.error}", *[""] * 12))
            continue
        errors = errors_of(predicted, measured)
        at_pace = (1 + errors["step_s"]) / slowdown - 1
        step_errors.append(abs(at_pace))
        raw_errors.append(abs(errors["step_s"]))
        peak_errors += [abs(error) for name, error in errors.items() if name != "step_s"]
        cells = [
            f"{predicted.bound_s:.3f}",
            f"{predicted.simulated_s:.3f}",
            f"{predicted.step_s:.3f}",
            f"{measured.step_s:.3f}",
            f"{errors['step_s']:+.1%}",
            f"{slowdown:.3f}",
            f"{at_pace:+.1%}",
        ]
        for name in ("device_nbytes", "arena_nbytes", "ssd_nbytes"):
            sizes = (getattr(predicted, name) / MIB, getattr(measured, name) / MIB)
            cells += [f"{sizes[0]:.0f} / {sizes[1]:.0f}", f"{errors[name]:+.1%}"]
        rows.append((result.case.title, *cells))
    header = (
        "job",
        "bound, s",
        "simulated, s",
        "predicted, s",
        "measured, s",
        "error",
        "slowdown",
        "error at this pace",
        "device, MiB",
        "error",
        "arena, MiB",
        "error",
    )
    report.add_table((*header, "SSD, MiB", "error"), rows)
    if not step_errors or len(step_errors) < len(results):  # a job that failed keeps no promise
        step_errors, raw_errors, peak_errors = [*step_errors, 1.0], [*raw_errors, 1.0], [*peak_errors, 1.0]
    return {
        "step_error_max": max(step_errors),
        "step_error_median": statistics.median(step_errors),
        "step_error_raw_max": max(raw_errors),
        "step_error_raw_median": statistics.median(raw_errors),
        "peak_error_max": max(peak_errors),
    }


def add_paces(report: Report, results: Sequence[Result]) -> None:
    """Adds the table of the seconds of a micro-batch in all blocks, measured independently of the jobs."""
    rows = [
        (
            result.case.title,
            f"{result.pace.planned_s:.3f}",
            f"{result.pace.meanwhile_s:.3f}",
            f"{result.pace.standard_error:.1%}",
            str(result.pace.num_rounds),
        )
        for result in results
    ]
    report.add("", "Seconds of one micro-batch in all blocks, for the plan, and while the job was stopped:")
    report.add_table(("job", "for the plan", "meanwhile", "standard error", "measurements"), rows)


def add_plan_times(report: Report, title: str, times: Sequence[PlanTime]) -> float:
    """Adds the table of how long plans took. Returns the longest wall time."""
    report.add("", title)
    rows = [
        (
            each.title,
            "" if each.first_s is None else f"{each.first_s:.2f}",
            f"{each.wall_s:.2f}",
            "" if each.advised_s is None else f"{each.advised_s:.2f}",
            f"{each.cpu_s:.2f}" if each.cpu_s else "",
            "yes" if each.fits else "no",
        )
        for each in times
    ]
    report.add_table(("plan", "estimate, s", "wall, s", "with advice, s", "CPU, s", "fits"), rows)
    return max(each.wall_s for each in times)


def add_choices(report: Report, cases: Sequence[tuple[Case, Predicted]]) -> None:
    """Adds the table of the planner's decisions."""
    rows = []
    for case, predicted in cases:
        chosen = predicted.choices
        layers: Counter[str] = Counter()
        for run in chosen["activations"]:
            first, _, last = run["layers"].partition("-")
            number = int(last or first) - int(first) + 1
            layers[run["rest"]] += number
            layers["holding"] += number * ("kept" in run or "swapped" in run)
            layers["input swapped"] += number * (run["input"] == "swapped")
        rows.append(
            (
                case.title,
                " / ".join(str(chosen[f"states_on_{tier}"]) for tier in ("gpu", "host", "ssd")),
                str(chosen["kept_grads_on_ssd"]),
                str(chosen["layers_in_pieces"]),
                f"{chosen['group_size']} of {chosen['num_microbatches']}",
                " / ".join(str(layers[rest]) for rest in ("recomputed", "kept", "swapped")),
                str(layers["holding"]),
                str(layers["input swapped"]),
            )
        )
    report.add(
        "",
        "What was planned, in blocks and layers. Layers that are recomputed may hold what some operators put out,",
        "on the device or swapped; those are counted once more beside.",
    )
    states = ("states on device / host / SSD", "kept gradients on SSD", "in pieces", "micro-batches in a group")
    report.add_table(
        ("job", *states, "layers recomputed / kept / swapped", "recomputed, holding some", "input swapped"), rows
    )


def _measured(folder: Path) -> Hardware:
    """Measures this machine's current rates."""
    return measure_hardware(Settings(home=folder, ssd_dirs=(folder / "measured",)), tell=lambda _: None)


def _add_machines(report: Report, cases: Sequence[Case], machines: Sequence[Hardware]) -> None:
    rows = [
        (
            case.title,
            f"{machine.gpus.tflops * 1000:.0f}",
            f"{machine.host.memory_gb_per_s:.1f}",
            f"{machine.host.adam_params_per_s / 1e6:.0f}",
            f"{machine.pcie.h2d_gb_per_s:.1f} / {machine.pcie.d2h_gb_per_s:.1f}",
            f"{machine.ssds.read_gb_per_s:.2f} / {machine.ssds.write_gb_per_s:.2f}",
        )
        for case, machine in zip(cases, machines, strict=True)
    ]
    report.add("", "This machine, as it was measured before each of the jobs that follow:")
    columns = ("GFLOPS", "memory, GB/s", "Adam, M params/s", "copies in / out, GB/s", "SSD read / write, GB/s")
    report.add_table(("before", *columns), rows)


def _run(case: Case, folder: Path, kernels: Path, *, num_timed_steps: int) -> tuple[Result, Hardware]:
    """Predicts a job, runs it, and measures the machine's pace meanwhile."""
    case.workload(num_timed_steps=num_timed_steps).write(folder)
    machine = _measured(folder)
    question = question_of(case, machine)
    predicted, job = predict(case, question, Profiles(question), folder, kernels)
    probe = PaceProbe(question, job)
    timed = run_timed(folder, probe.measure)
    pace = probe.pace(timed.start_s, timed.end_s)
    measured = timed if timed.error is not None else with_memory(timed, folder)
    return Result(case=case, predicted=predicted, measured=measured, pace=pace), machine


def _sweep(case: Case, directory: Path) -> list[Swap]:
    return sweep([case], _measured(directory), directory)


def _add_jobs(report: Report, options: argparse.Namespace, kept: KeptResults) -> dict[str, float]:
    """Predicts jobs and runs them. Returns the errors."""
    num_timed_steps = 2 if options.quick else 7
    results, machines = [], []
    with scratch_folder(options.directory) as directory:
        for i, case in enumerate(QUICK_CASES if options.quick else CASES):
            run = functools.partial(
                _run, case, directory / str(i), directory / "kernels", num_timed_steps=num_timed_steps
            )
            result, machine = kept.of(case.title, run)
            results.append(result)
            machines.append(machine)
            shutil.rmtree(directory / str(i), ignore_errors=True)
    _add_machines(report, [result.case for result in results], machines)
    add_choices(report, [(result.case, result.predicted) for result in results])
    add_paces(report, results)
    errors = add_promises(report, results)
    report.add(
        "Predicted / measured. What is predicted of a step is the larger of its bound, by the cost model, and of the",
        "simulated step. Each prediction was on disk before its job ran. Slowdown: the blocks' time while it was",
        "stopped, over that for the plan. The error at this pace is the planner's; the one before it is also the",
        "machine's.",
        "Arena and SSD: what the kernel has given them in the last step.",
    )
    return errors


def _add_swaps(report: Report, options: argparse.Namespace, kept: KeptResults) -> dict[str, float]:
    """Runs jobs with other amounts of swapped activations. Returns how good the planner's choice is."""
    swaps: list[Swap] = []
    with scratch_folder(options.directory) as directory:
        for case in QUICK_SWAPS if options.quick else SWAPS:
            swaps += kept.of(f"swaps {case.title}", functools.partial(_sweep, case, directory))
    return add_swaps(report, swaps)


def _add_plans(report: Report, options: argparse.Namespace, kept: KeptResults) -> dict[str, float]:
    """Makes plans. Returns how long they take."""
    times = kept.of("solving", functools.partial(solve_times, quick=options.quick))
    sizes = sorted(RATEL_SHAPES)[: 1 if options.quick else None]
    with scratch_folder(options.directory) as directory:
        of_shell = kept.of("plans", lambda: shell_times(sizes, directory))
        again = kept.of("plans again", lambda: service_times(sizes[:1] if options.quick else _AGAIN_SIZES, directory))
    plan_s = add_plan_times(report, "`windlass plan`, each in a process and a home of its own:", of_shell)
    again_s = add_plan_times(report, "A running service, asked again with one setting changed:", again)
    report.add("", f"Solving, seconds (Ratel's shapes, batch {_BATCH_SIZE} x {_NUM_TOKENS}, its server):")
    report.add_table(
        ("model", "from rates, s", "from times of layers, s"),
        [(name, *(f"{seconds:.3f}" for seconds in both)) for name, both in times.items()],
    )
    report.add("The times are made up, by a layer's FLOPs; the longest of three with what computing again takes.")
    return {
        "plan_s_max": plan_s,
        "plan_again_s_max": again_s,
        "estimate_again_s_max": max(each.first_s or each.wall_s for each in again),
        "advised_again_s_max": max(each.advised_s or each.wall_s for each in again),
        "solve_s_max": max(map(max, times.values())),
    }


_PARTS = {"plans": _add_plans, "jobs": _add_jobs, "swaps": _add_swaps}


def main() -> None:
    """Solves, predicts, runs, reports, and prints the ratios as the last line."""
    options = parse_options("planner", __doc__, quick="one small model, one small job", keeps=True, parts=tuple(_PARTS))
    form = "quick" if options.quick else "full"
    report = Report("The planner", options.directory, {"form": form, "training": "bf16"})
    kept = KeptResults.in_folder(options.keep, form=form)
    torch.set_num_threads(num_cores())
    retain_freed_memory()  # as in jobs
    ratios: dict[str, float] = {}
    for part in options.only:
        ratios |= _PARTS[part](report, options, kept)
    report.finish(ratios)


if __name__ == "__main__":
    main()
