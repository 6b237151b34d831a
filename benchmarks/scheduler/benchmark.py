"""Measures the gain from the scheduler's queue order: `python -m benchmarks.scheduler [--quick]`

The same model is trained in windlass's real engine, with all actors in one process. Its queues are in order of arrival
(FIFO) or of priority. Steps overlap or not. Without clipping, updates start as gradients arrive. With clipping, they
start once all gradients are known.

Compute is throttled, and so is the optimizer or the SSD (`throttle.py`). The throttled optimizer or SSD takes a given
multiple of the compute time. Bytes, updates and operations are real, but delayed. The busy time of a throttled resource
is its work divided by the declared rate, never the length of a sleep. Other resources count the time in which they
worked.

The plan is that of a job with enough host memory. Without clipping, gradients of a third of the blocks have space while
they wait for their updates.

Last, half of the layers have their states in host memory: the first ones, or every second one (`places.py`).

Source: AutoHete, section 3.3.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from benchmarks.peers.workload import ModelShape, Workload
from benchmarks.reporting.machine import num_cores
from benchmarks.reporting.report import Report, parse_options, spread
from benchmarks.scheduler.cases import Bench, Bottleneck, Case, Reference, Result
from benchmarks.scheduler.places import add_places, first_over_spread, measure_places
from benchmarks.scratch_folder import scratch_folder
from benchmarks.step import describe
from windlass.actors.timeline import COMPUTE
from windlass.actors.worker_policy import QueueOrder

# Overlap efficiency that is expected if no dependency prevents it.
_EFFICIENCY = 0.92


def bottlenecks(*, quick: bool) -> list[Bottleneck]:
    """Returns the slow resources, from the one whose time is hidden by the compute."""
    if quick:
        return [Bottleneck(resource="optimizer", over_compute=1.0)]
    ratios = {"optimizer": (0.5, 1.0, 1.25, 1.5), "ssd": (1.0, 1.5)}
    return [Bottleneck(resource=name, over_compute=each) for name, found in ratios.items() for each in found]


def cases(*, quick: bool) -> Iterator[Case]:
    """Yields all cases. Cases that are compared follow each other."""
    for bottleneck, clips, overlaps in product(bottlenecks(quick=quick), (False, True), (True, False)):
        for queues in QueueOrder:
            yield Case(bottleneck=bottleneck, clips=clips, queues=queues, overlaps_steps=overlaps)


def workload_of(*, quick: bool) -> Workload:
    """Returns a model of many small blocks of one size. Without throttles they take a tenth of the throttled time."""
    return Workload(
        shape=ModelShape(hidden=64, num_layers=40, vocab=784, intermediate=176, num_heads=2),
        batch_size=2,
        sequence_length=32,
        num_warmup_steps=1,
        num_timed_steps=2 if quick else 3,
        num_threads=1,
        seed=1,
    )


def compute_s_of(*, quick: bool) -> float:
    """Returns the throttled compute seconds of a step."""
    return 1.5 if quick else 3.0


def priority_over_fifo(results: Mapping[Case, Result], case: Case) -> float:
    """Returns the speed-up of priority order over FIFO order for a case."""
    return results[replace(case, queues=QueueOrder.FIFO)].mean_step_s / results[case].mean_step_s


def bound_s(results: Mapping[Case, Result], case: Case, reference: Reference) -> float:
    """Returns the minimum step time that dependencies allow if steps overlap."""
    return max(results[case].cycle_s, reference.chain_s(case.bottleneck, clips=case.clips))


def add_table(
    report: Report, results: Mapping[Case, Result], reference: Reference, simulated: Mapping[Case, float]
) -> None:
    """Adds a table with each case's step time, its bound, its gain from the order, and its simulated time."""
    rows = []
    for case, result in results.items():
        bound = bound_s(results, case, reference)
        rows.append(
            (
                f"{case.bottleneck.resource} x {case.bottleneck.over_compute:g}",
                "on" if case.clips else "off",
                "overlapped" if case.overlaps_steps else "alone",
                str(case.queues),
                spread(result.step_s),
                f"{result.mean_step_s:.2f}",
                f"{result.busy_s[COMPUTE]:.2f}",
                f"{result.busy_s[case.bottleneck.actor]:.2f}",
                f"{result.efficiency:.3f}",
                f"{bound:.2f}" if case.overlaps_steps else "",
                f"{result.mean_step_s / bound:.3f}" if case.overlaps_steps else "",
                "" if case.queues is QueueOrder.FIFO else f"{priority_over_fifo(results, case):.3f}",
                f"{simulated[case]:.2f}",
            )
        )
    columns = ("throttled", "clipping", "steps", "queues", "step, s", "mean", "compute busy, s", "throttled busy, s")
    report.add_table(
        (*columns, "overlap efficiency", "bound, s", "step over bound", "priority over FIFO", "simulated, s"), rows
    )


def simulator_errors(results: Mapping[Case, Result], simulated: Mapping[Case, float]) -> list[float]:
    """Returns the relative errors of simulated step times."""
    return [abs(simulated[case] / result.mean_step_s - 1) for case, result in results.items()]


def ratios_of(results: Mapping[Case, Result], reference: Reference, simulated: Mapping[Case, float]) -> dict[str, Any]:
    """Returns the ratios by clipping and bottleneck, and the best and worst of all."""
    by_clipping: dict[str, Any] = {"unclipped": {}, "clipped": {}}
    gains: dict[bool, list[float]] = {True: [], False: []}  # by `overlaps_steps`
    efficiencies, over_bounds = [], []
    for case, result in results.items():
        if case.queues is QueueOrder.FIFO:
            continue
        gain = priority_over_fifo(results, case)
        gains[case.overlaps_steps].append(gain)
        if not case.overlaps_steps:
            continue
        bound = bound_s(results, case, reference)
        if result.busy_s[result.busiest] / bound >= _EFFICIENCY:
            efficiencies.append(result.efficiency)
        else:
            over_bounds.append(result.mean_step_s / bound)
        by_clipping["clipped" if case.clips else "unclipped"][case.bottleneck.name] = {
            "priority_over_fifo": gain,
            "overlapped_over_alone": results[replace(case, overlaps_steps=False)].mean_step_s / result.mean_step_s,
            "overlap_efficiency": result.efficiency,
            "step_over_bound": result.mean_step_s / bound,
        }
    return {
        **by_clipping,
        "priority_over_fifo_best": max(gains[True]),
        "priority_over_fifo_min": min(gains[True]),
        "priority_over_fifo_alone_min": min(gains[False]),
        "overlap_efficiency_min": min(efficiencies, default=None),
        "step_over_bound_max": max(over_bounds, default=None),
        "simulator_error_max": max(simulator_errors(results, simulated)),
    }


def _priority() -> str:
    """Describes the scheduling priority of this process."""
    is_normal = os.sched_getscheduler(0) == os.SCHED_OTHER
    return f"nice {os.nice(0)}" if is_normal else "real-time priority, so that other programs did not hold it up"


def main() -> None:
    """Measures, reports, and prints the ratios as the last line."""
    options = parse_options("scheduler", __doc__, quick="one bottleneck, shorter steps")
    workload, compute_s = workload_of(quick=options.quick), compute_s_of(quick=options.quick)
    configuration = {
        "form": "quick" if options.quick else "full",
        "model": describe(workload),
        "compute": f"throttled to {compute_s:g} s a step: a quarter forward, as blocks are computed again",
        "beside": f"load average {os.getloadavg()[0]:.1f} on {num_cores()} cores when it began; {_priority()}",
    }
    report = Report("The scheduler's order, with throttled resources", options.directory, configuration)
    with scratch_folder(options.directory) as folder:
        bench = Bench(folder, workload)
        reference, free = bench.reference(compute_s)
        results = {case: bench.measure(case, reference) for case in cases(quick=options.quick)}
        simulated = {case: bench.simulate(case, reference) for case in results}
        places, simulated_places = measure_places(bench, reference, workload.shape.num_layers)
    busy = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in free.busy_s.items())
    report.add(
        f"Without throttles a step takes {free.mean_step_s:.2f} s (busy: {busy}) and moves "
        f"{reference.ssd_nbytes / 1e6:.0f} MB to and from the SSD."
    )
    add_table(report, results, reference, simulated)
    report.add(
        "Steps are median (smallest to largest); ratios are of means. Of steps that do not overlap one is timed, after",
        "another. The bound of overlapped steps is the longest cycle of a block, as the job's timeline tells it, or,",
        "where that is longer, the chain of all updates: from the first gradient (with clipping: from the last) to the",
        f"next step's head. `overlap_efficiency_min` is of those whose bound allows {_EFFICIENCY:g}, and",
        "`step_over_bound_max` of the others, both in order of priority. Where steps do not overlap (`alone`) no order",
        "can be better: there the ratio shows how far runs differ by themselves. The simulator runs the same policy on",
        "the throttles' rates and, for what is not throttled, on those measured without throttles.",
    )
    add_places(report, places, simulated_places)
    ratios = {
        f"first_over_spread{'_clipped' * clips}": first_over_spread(places, clips=clips) for clips in (False, True)
    }
    report.finish(ratios_of(results, reference, simulated) | ratios)


if __name__ == "__main__":
    main()
