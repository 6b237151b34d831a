"""Measures the gain from several GPUs on one machine: `python -m benchmarks.scaling [--quick]`

The same model is trained in windlass's real engine on 1, 2, 3 and 4 pretend GPUs, with all actors in one process. Each
GPU worker's compute is throttled to the same rate (`scheduler/throttle.py`): its operations are real, and sleep until
they would be done at that rate. So the compute binds, and GPU workers hardly disturb each other on few cores. The model
states are on an SSD, and params are read from there for each use.

A step has twelve micro-batches. Each GPU worker computes an equal part of them, as one group. In the backward pass the
gradient sum of a block passes from one GPU worker to the next. So each begins one block after the one before.

The simulator gets the throttle's rate. What is not throttled has the rates that were measured without throttles. In one
more case, one of two GPUs computes half as fast.
"""

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.peers.workload import ModelShape, Workload
from benchmarks.reporting.machine import load_of_last_minute
from benchmarks.reporting.report import Report, parse_options, ratio, spread
from benchmarks.scheduler.cases import Bench, Reference, Result
from benchmarks.scheduler.throttle import Throttle
from benchmarks.step import describe
from windlass.actors.job import JobSpec
from windlass.actors.messages import Message, SpansReported, WorkSpan
from windlass.engine.memory_plan import Placement
from windlass.storage.ids import ActorName

_NUM_MICROBATCHES = 12
_HALF = (1.0, 0.5)  # the shares of the throttle's rate of two unequal GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The steps on a number of GPUs."""

    num_ranks: int
    step_s: Sequence[float]
    ssd_nbytes: float  # read and written in a step
    predicted_s: float | None  # None: not simulated

    @property
    def mean_step_s(self) -> float:
        """The mean step time. It is exact even if one step shifts work to the next."""
        return statistics.fmean(self.step_s)


def workload_of(*, quick: bool) -> Workload:
    """Returns a model of many small blocks of one size, so that a block is a small part of a step."""
    return Workload(
        shape=ModelShape(hidden=64, num_layers=16 if quick else 40, vocab=784, intermediate=176, num_heads=2),
        batch_size=_NUM_MICROBATCHES,
        sequence_length=32,
        num_warmup_steps=1,
        num_timed_steps=2,
        num_threads=1,
        seed=1,
    )


def compute_s_of(*, quick: bool) -> float:
    """Returns the throttled compute seconds of a step on one GPU."""
    return 4.0 if quick else 36.0


def ranked(spec: JobSpec, num_ranks: int) -> JobSpec:
    """Returns the job on a number of GPUs. All params are read from the SSD for each use."""
    return replace(
        spec.with_training(num_microbatches=_NUM_MICROBATCHES),
        num_ranks=num_ranks,
        placement=Placement(num_cached_params=0),
    )


def ssd_nbytes_of(spans: Sequence[WorkSpan], num_steps: int) -> float:
    """Returns the mean bytes of a step on the SSDs.

    A transfer belongs to the step under which the SSD stores what it moves. The first step's and the last one's are
    left out, because the first one has the model's import, and no step follows the last one.
    """
    inner = range(1, num_steps)
    nbytes = sum(span.nbytes for span in spans if span.resource.startswith("ssd-") and span.step in inner)
    return nbytes / len(inner)


def measure(
    bench: Bench, workload: Workload, num_ranks: int, throttle: Throttle, predict: Callable[[JobSpec], float | None]
) -> Measured:
    """Trains the model on a number of GPUs, and predicts its step."""
    spec, spans = ranked(bench.spec(), num_ranks), list[WorkSpan]()

    def look(_: ActorName, message: Message) -> None:
        if isinstance(message, SpansReported):
            spans.extend(message.spans)

    metrics = bench.train(spec, throttle, look)
    return Measured(
        num_ranks=num_ranks,
        step_s=[data["timeline"]["period_s"] for data in metrics],
        ssd_nbytes=ssd_nbytes_of(spans, workload.num_steps),
        predicted_s=predict(spec),
    )


def measure_all(
    bench: Bench, workload: Workload, reference: Reference, *, quick: bool
) -> tuple[list[Measured], Measured]:
    """Returns the measurements on equal GPUs, and on two of which one is half as fast."""
    throttle = Throttle(compute_flop_per_s=sum(reference.flop) / reference.compute_s)

    def predict(spec: JobSpec) -> float:
        return bench.predict(spec, reference, throttle)

    equal = [measure(bench, workload, number, throttle, predict) for number in ((1, 2) if quick else (1, 2, 3, 4))]
    slower = replace(throttle, gpu_shares=_HALF)
    return equal, measure(bench, workload, len(_HALF), slower, lambda _: None)


def speedup(equal: Sequence[Measured], measured: Measured) -> float:
    """Returns how many times faster a step is than on one GPU."""
    return equal[0].mean_step_s / measured.mean_step_s


def add_table(report: Report, equal: Sequence[Measured], unequal: Measured) -> None:
    """Adds a table with a row for each number of GPUs, and one for two unequal ones."""
    rows = []
    for measured in (*equal, unequal):
        gain = speedup(equal, measured)
        predicted_s = measured.predicted_s
        rows.append(
            (
                f"{measured.num_ranks}{', one half as fast' if measured is unequal else ''}",
                spread(measured.step_s),
                f"{gain:.2f}",
                f"{gain / measured.num_ranks:.3f}",
                f"{measured.ssd_nbytes / 1e6:.2f}",
                "" if predicted_s is None else f"{predicted_s:.2f}",
                "" if predicted_s is None else f"{100 * (predicted_s / measured.mean_step_s - 1):+.1f}",
            )
        )
    columns = (
        "GPUs (throttled)",
        "step, s",
        "speed-up",
        "over GPUs",
        "SSD MB a step",
        "predicted, s",
        "error, percent",
    )
    report.add_table(columns, rows)


def ratios_of(equal: Sequence[Measured], unequal: Measured) -> dict[str, Any]:
    """Returns the growth of SSD bytes, the smallest speed-up over the number of GPUs, and the largest error."""
    one, *several = equal
    return {
        "ssd_bytes_growth": max(measured.ssd_nbytes / one.ssd_nbytes for measured in equal) - 1,
        "speedup_over_ranks_min": min(speedup(equal, measured) / measured.num_ranks for measured in several),
        "simulator_error_max": max(
            abs(measured.predicted_s / measured.mean_step_s - 1)
            for measured in equal
            if measured.predicted_s is not None
        ),
        "speedup_by_ranks": {str(measured.num_ranks): speedup(equal, measured) for measured in several},
        "unequal_over_one": ratio(one.mean_step_s, unequal.mean_step_s),
    }


def add_remarks(report: Report, reference: Reference, free: Result, busy_s: Mapping[str, float]) -> None:
    """Adds what a step takes without throttles."""
    busy = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in busy_s.items())
    report.add(
        f"Throttled, the compute of a step takes {reference.compute_s:g} s on one GPU. Without throttles a step takes "
        f"{free.mean_step_s:.2f} s there (busy: {busy})."
    )


def main() -> None:
    """Measures, reports, and prints the ratios as the last line."""
    options = parse_options("scaling", __doc__, quick="fewer blocks, shorter steps, up to two GPUs")
    workload, compute_s = workload_of(quick=options.quick), compute_s_of(quick=options.quick)
    configuration = {
        "form": "quick" if options.quick else "full",
        "model": describe(workload),
        "micro-batches": f"{_NUM_MICROBATCHES}; each GPU computes an equal part as one group",
        "compute": f"throttled to {compute_s:g} s a step on one GPU",
        "beside": load_of_last_minute(),
    }
    report = Report("Several GPUs of one machine, each throttled to the same rate", options.directory, configuration)
    with tempfile.TemporaryDirectory(dir=options.directory, prefix=".bench-") as name:
        bench = Bench(Path(name).resolve(), workload)
        reference, free = bench.reference(compute_s, ranked(bench.spec(), 1))
        equal, unequal = measure_all(bench, workload, reference, quick=options.quick)
    add_remarks(report, reference, free, free.busy_s)
    add_table(report, equal, unequal)
    report.add(
        "Steps are median (smallest to largest); ratios are of means. The compute of every GPU is throttled to a",
        "declared rate, so these are no times of real GPUs. In the last row both GPUs have as many micro-batches, and",
        "the step waits for the slower one.",
    )
    report.finish(ratios_of(equal, unequal))


if __name__ == "__main__":
    main()
