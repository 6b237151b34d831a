"""Measures the queue over several boxes: `python -m benchmarks.cluster [--quick]`

1,000 jobs of six users come at random to eight boxes of different sizes and speeds. The real policy decides in a
simulation, and the real dispatcher decides against an SQLite database. A plain first fit decides for comparison. There
each job begins, in the order of the queue, on the first box that has room for it.

The times that jobs really take differ from those of their plans by a fifth (standard deviation).

Then a real box joins a real head, in namespaces of this machine.
"""

from collections.abc import Sequence

from benchmarks.cluster.dispatching import Passes, run_dispatcher
from benchmarks.cluster.joining import join_s
from benchmarks.cluster.simulation import Outcome, by_first_fit, by_windlass, simulate
from benchmarks.cluster.workload import make_workload
from benchmarks.reporting.report import Report, parse_options, ratio
from benchmarks.scratch_folder import scratch_folder

_LOAD = 0.7


def main() -> None:
    """Runs both and prints the report."""
    options = parse_options("cluster", __doc__, quick="60 jobs, three boxes")
    num_jobs, num_boxes = (60, 3) if options.quick else (1000, 8)
    workload = make_workload(num_jobs=num_jobs, num_boxes=num_boxes, load=_LOAD, seed=1)
    report = Report(
        title="The queue over several boxes",
        directory=options.directory,
        configuration={
            "jobs": f"{num_jobs}, with 1 to {max(box.num_devices for box in workload.boxes)} GPUs, of 6 users",
            "boxes": ", ".join(f"{box.num_devices} GPUs of speed {box.speed:g}" for box in workload.boxes),
            "load": f"{_LOAD:g} of what all GPUs can do",
        },
    )
    ours, first_fit = simulate(workload, by_windlass), simulate(workload, by_first_fit)
    with scratch_folder(options.directory) as folder:
        passes = run_dispatcher(folder, workload)
    joined_s = None
    if not options.quick:
        with scratch_folder(options.directory) as folder:
            joined_s = join_s(folder)
    _tell(report, ours, first_fit, passes, joined_s=joined_s)


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value that at least this share of all values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _tell(report: Report, ours: Outcome, first_fit: Outcome, passes: Passes, *, joined_s: float | None) -> None:
    report.add("", "Waiting times in the simulation:")
    rows = [
        (name, *(f"{value:,.0f}" for value in (each.mean_wait_s, max(each.wait_s), each.mean_turnaround_s)))
        for name, each in (("windlass", ours), ("first fit", first_fit))
    ]
    report.add_table(("policy", "mean wait, s", "longest wait, s", "mean time to the end, s"), rows)
    report.add("", f"Passes of the dispatcher, {len(passes.pass_s):,} against SQLite:")
    rows = [
        (name, *(f"{1e3 * percentile(values, share):.1f}" for share in (0.5, 0.99, 1.0)))
        for name, values in (
            ("the policy alone, in the simulation", ours.decision_s),
            ("decision: boxes, queue and demands are read, and every job is decided", passes.decision_s),
            ("whole pass, with all writes", passes.pass_s),
        )
    ]
    report.add_table(("part", "median, ms", "99 percent, ms", "longest, ms"), rows)
    report.finish(
        {
            "idle_while_fitting": ours.num_idle,
            "decision_ms_p99": 1e3 * percentile(passes.decision_s, 0.99),
            "pass_ms_p99": 1e3 * percentile(passes.pass_s, 0.99),
            "join_s": joined_s,
            "mean_wait_over_first_fit": ratio(ours.mean_wait_s, first_fit.mean_wait_s),
            "longest_wait_over_first_fit": ratio(max(ours.wait_s), max(first_fit.wait_s)),
            "mean_time_to_end_over_first_fit": ratio(ours.mean_turnaround_s, first_fit.mean_turnaround_s),
        }
    )
