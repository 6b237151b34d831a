"""What the scheduler's order is worth: `python -m benchmarks.scheduler [--quick]`

The same model in windlass's real processes, its queues in order of arrival (FIFO) or of priority, steps one after the
other or overlapped, without clipping (updates as gradients arrive) and with it (updates once all are known). The
optimizer or the SSD is throttled, so that its share of a step takes so many times what the compute takes: real bytes
and real updates, held back (`throttle.py`). A throttled resource's busy time is what it moved or updated over its rate;
that of the compute is measured. The bound is worked out from these; the job's own timeline tells of another, from what
was noted while it ran, throttled resources as slow as they were made. Gradients of a whole step have room in host
memory: without it the backward pass waits for the updates, nothing waits in the queues, and no order can be better than
another.
Source: AutoHete, section 3.3.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.contenders import Contender, run_contender
from benchmarks.machine import num_cores
from benchmarks.report import Report, ratio, spread
from benchmarks.step import contenders, describe
from benchmarks.workload import ModelShape, Workload
from windlass.actors.journal import METRICS, read_journal
from windlass.actors.policy.ordering import QueueOrder

# Every layer is recomputed: once forward, then again with a backward pass of twice the work.
_FORWARD_SHARE = 1 / 4
# What an update moves of a parameter with fp32 states: master and moments in, these and the params out.
_UPDATE_NBYTES = 12 + 14
_EVERYTHING = 1_000_000  # more blocks than any model here has


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """What is throttled, to how many times the compute's time."""

    resource: str  # "optimizer" or "ssd"
    over_compute: float

    @property
    def name(self) -> str:
        """For files and tables."""
        return f"{self.resource}-{self.over_compute:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to train; `max_updating`: blocks outstanding at the optimizer, None for the default."""

    bottleneck: Bottleneck
    clips: bool
    queues: QueueOrder = QueueOrder.PRIORITY
    overlaps_steps: bool = True
    max_updating: int | None = None

    @property
    def name(self) -> str:
        """For files."""
        steps = "overlapped" if self.overlaps_steps else "alone"
        clips = "clipped" if self.clips else "unclipped"
        return f"{self.bottleneck.name}-{clips}-{self.queues}-{steps}-{self.max_updating or 'default'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a step asks of each resource, in seconds at its rate."""

    compute_s: float
    optimizer_s: float  # 0 where it is not throttled: then it is far from binding
    ssd_s: float  # likewise
    update_io_s: float  # the part of `ssd_s` that updates move

    @property
    def busiest_s(self) -> float:
        """No step is shorter."""
        return max(self.compute_s, self.optimizer_s, self.ssd_s)

    def bound_s(self, *, clips: bool, num_blocks: int) -> float:
        """The shortest step that dependencies allow where steps overlap.

        All updates lie between the step's first gradient and the next forward pass of the block that is updated last,
        behind which is the head; with clipping also behind the whole backward pass.
        """
        update_s = max(self.optimizer_s, self.update_io_s)
        backward_s = (1 - _FORWARD_SHARE) * self.compute_s if clips else 0.0
        return max(self.busiest_s, backward_s + update_s + self.compute_s / num_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one case gave."""

    step_s: tuple[float, ...]
    demand: Demand
    noted_bound_s: float | None  # the timeline's; None where it tells of none

    @property
    def mean_step_s(self) -> float:
        """Of the timed steps: what one step borrows from the next is in it once."""
        return statistics.fmean(self.step_s)

    @property
    def efficiency(self) -> float:
        """The busiest resource's busy time over the step's."""
        return self.demand.busiest_s / self.mean_step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The job without throttles, from which the rates follow."""

    compute_s: float  # of a step
    ssd_nbytes: int  # read and written in a step
    num_params: int

    def rate(self, bottleneck: Bottleneck) -> float:
        """Bytes or parameters a second."""
        amount = self.num_params if bottleneck.resource == "optimizer" else self.ssd_nbytes
        return amount / (bottleneck.over_compute * self.compute_s)

    def demand(self, bottleneck: Bottleneck, compute_s: float, ssd_nbytes: int) -> Demand:
        """Of a case that computed so long and moved so much a step."""
        rate = self.rate(bottleneck)
        if bottleneck.resource == "optimizer":
            return Demand(compute_s=compute_s, optimizer_s=self.num_params / rate, ssd_s=0.0, update_io_s=0.0)
        update_io_s = _UPDATE_NBYTES * self.num_params / rate
        return Demand(compute_s=compute_s, optimizer_s=0.0, ssd_s=ssd_nbytes / rate, update_io_s=update_io_s)


def bottlenecks(*, quick: bool) -> list[Bottleneck]:
    """The slow resources, from the one that hides under the compute."""
    if quick:
        return [Bottleneck(resource="optimizer", over_compute=1.0)]
    ratios = {"optimizer": (0.5, 1.0, 1.25, 1.5), "ssd": (1.0, 1.5)}
    return [Bottleneck(resource=name, over_compute=each) for name, found in ratios.items() for each in found]


def cases(*, quick: bool) -> Iterator[Case]:
    """The ones that are compared, side by side in time; then the depths."""
    for bottleneck, clips in product(bottlenecks(quick=quick), (False, True)):
        for overlaps, queues in product((True, False), QueueOrder):
            yield Case(bottleneck=bottleneck, clips=clips, queues=queues, overlaps_steps=overlaps)
    if not quick:
        yield from depth_cases()


def depth_cases() -> list[Case]:
    """Priority with more or less outstanding at the optimizer, where it binds as much as the compute."""
    bottleneck = Bottleneck(resource="optimizer", over_compute=1.0)
    return [Case(bottleneck=bottleneck, clips=False, max_updating=depth) for depth in (1, 4, 16)]


def workload_of(*, quick: bool) -> Workload:
    """Many small blocks and many tokens: far more compute than updates or bytes, which throttles then make up for."""
    return Workload(
        shape=ModelShape(hidden=192, num_layers=40, vocab=1024, intermediate=528, num_heads=4),
        batch_size=8 if quick else 16,
        sequence_length=256,
        num_warmup_steps=1 if quick else 2,
        num_timed_steps=2 if quick else 5,
        num_threads=num_cores(),
        seed=1,
    )


def contender_of(folder: Path, case: Case | None, reference: Reference | None) -> Contender:
    """Windlass, training in one way; None: unthrottled."""
    ours = contenders(folder / "ssd")[0]
    name = "unthrottled" if case is None else case.name
    options = ["--place", f"num_host_grad_blocks={_EVERYTHING}", "--journal", str(folder / f"{name}.jsonl")]
    if case is not None and reference is not None:
        order = [f"queues={case.queues}", f"overlaps_steps={int(case.overlaps_steps)}"]
        order += [] if case.max_updating is None else [f"max_updating={case.max_updating}"]
        options += [option for each in order for option in ("--order", each)]
        kind = "optimizer_params_per_s" if case.bottleneck.resource == "optimizer" else "ssd_bytes_per_s"
        options += ["--throttle", f"{kind}={reference.rate(case.bottleneck)}"]
        options += ["--change", "clip_norm=1.0"] if case.clips else []
    return replace(ours, name=name, title=name, arguments=(ours.arguments[0], *options))


def timed_metrics(workload: Workload, journal: Path) -> list[dict[str, Any]]:
    """What the journal tells of the timed steps."""
    metrics = [each.data for each in read_journal(journal) if each.kind == METRICS and "compute_s" in each.data]
    return [data for data in metrics if data["step"] > workload.num_warmup_steps]


def compute_s_of(metrics: Sequence[Mapping[str, Any]]) -> float:
    """Of a step, as the GPU worker measured it."""
    return statistics.median(float(data["compute_s"]) for data in metrics)


def noted_bound_s_of(metrics: Sequence[Mapping[str, Any]]) -> float | None:
    """Of a step, as the timeline has it."""
    bounds = [data.get("timeline", {}).get("dependency_bound_s") for data in metrics]
    noted = [float(each) for each in bounds if each is not None]
    return statistics.median(noted) if noted else None


def measure_reference(workload: Workload, folder: Path) -> Reference:
    """Train without throttles."""
    run = run_contender(contender_of(folder, None, None), workload, folder)
    assert run.ssd_nbytes is not None, "windlass counts its bytes"
    return Reference(
        compute_s=compute_s_of(timed_metrics(workload, folder / "unthrottled.jsonl")),
        ssd_nbytes=sum(run.ssd_nbytes),
        num_params=workload.shape.num_params,
    )


def measure(case: Case, workload: Workload, folder: Path, reference: Reference) -> Result:
    """Train in one way."""
    run = run_contender(contender_of(folder, case, reference), workload, folder)
    assert run.ssd_nbytes is not None, "windlass counts its bytes"
    metrics = timed_metrics(workload, folder / f"{case.name}.jsonl")
    demand = reference.demand(case.bottleneck, compute_s_of(metrics), sum(run.ssd_nbytes))
    return Result(step_s=run.step_s, demand=demand, noted_bound_s=noted_bound_s_of(metrics))


def compare(results: dict[Case, Result], bottleneck: Bottleneck, clips: bool, num_blocks: int) -> dict[str, Any]:
    """The ratios of one bottleneck: of overlapped steps in order of priority, beside the others and the bound."""

    def step_s(queues: QueueOrder, *, overlaps: bool) -> float:
        return results[Case(bottleneck=bottleneck, clips=clips, queues=queues, overlaps_steps=overlaps)].mean_step_s

    best = results[Case(bottleneck=bottleneck, clips=clips)]
    return {
        "fifo_over_priority": ratio(step_s(QueueOrder.FIFO, overlaps=True), best.mean_step_s),
        "alone_over_overlapped": ratio(step_s(QueueOrder.PRIORITY, overlaps=False), best.mean_step_s),
        "overlap_efficiency": best.efficiency,
        "step_over_bound": ratio(best.mean_step_s, best.demand.bound_s(clips=clips, num_blocks=num_blocks)),
    }


def add_tables(report: Report, results: dict[Case, Result], num_blocks: int) -> None:
    """Every case, and what its step asks of each resource."""
    rows = []
    for case, result in results.items():
        demand = result.demand
        bound_s = demand.bound_s(clips=case.clips, num_blocks=num_blocks) if case.overlaps_steps else None
        rows.append(
            (
                f"{case.bottleneck.resource} x {case.bottleneck.over_compute:g}",
                "on" if case.clips else "off",
                "overlapped" if case.overlaps_steps else "alone",
                str(case.queues),
                str(case.max_updating or ""),
                spread(result.step_s),
                f"{result.mean_step_s:.2f}",
                f"{demand.compute_s:.2f}",
                f"{max(demand.optimizer_s, demand.ssd_s):.2f}",
                f"{result.efficiency:.2f}",
                "" if bound_s is None else f"{bound_s:.2f}",
                "" if result.noted_bound_s is None else f"{result.noted_bound_s:.2f}",
            )
        )
    columns = ("throttled", "clipping", "steps", "queues", "depth", "step, s", "mean", "compute, s", "throttled, s")
    report.add_table((*columns, "overlap efficiency", "bound, s", "noted bound, s"), rows)


def ratios_of(results: dict[Case, Result], *, quick: bool, num_blocks: int) -> dict[str, Any]:
    """All ratios, by clipping and bottleneck."""
    found: dict[str, Any] = {}
    for clips in (False, True):
        found["clipped" if clips else "unclipped"] = {
            each.name: compare(results, each, clips, num_blocks) for each in bottlenecks(quick=quick)
        }
    gains = [each["fifo_over_priority"] for by_name in found.values() for each in by_name.values()]
    binding = [
        found["unclipped"][each.name]["fifo_over_priority"]
        for each in bottlenecks(quick=quick)
        if each.resource == "optimizer" and each.over_compute >= 1
    ]
    found |= {"gain_where_optimizer_binds": statistics.fmean(binding), "least_gain": min(gains)}
    if not quick:
        default = results[replace(depth_cases()[0], max_updating=None)].mean_step_s
        found["depth"] = {str(c.max_updating): ratio(results[c].mean_step_s, default) for c in depth_cases()}
    return found


def main() -> None:
    """Measure, report, end with the line of ratios."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduler", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one bottleneck, few steps")
    parser.add_argument("--directory", type=Path, default=Path(), help="on an SSD (default: here)")
    options = parser.parse_args()
    workload = workload_of(quick=options.quick)
    num_blocks = workload.shape.num_layers + 2
    configuration = {"form": "quick" if options.quick else "full", "model": describe(workload)}
    report = Report("The scheduler's order, with throttled resources", options.directory, configuration)
    with tempfile.TemporaryDirectory(dir=options.directory, prefix=".bench-") as name:
        folder = Path(name).resolve()
        workload.write(folder)
        reference = measure_reference(workload, folder)
        results = {case: measure(case, workload, folder, reference) for case in cases(quick=options.quick)}
    report.add(
        f"Without throttles a step computes for {reference.compute_s:.2f} s and moves {reference.ssd_nbytes / 1e6:.0f} "
        "MB. A throttled resource takes so many times that, as its rate is set; its seconds below are its bytes or",
        "parameters over that rate, not time measured.",
    )
    add_tables(report, results, num_blocks)
    report.add(
        "Steps are median (smallest to largest); ratios are of means. The bound: all updates between a step's first "
        "gradient (with clipping: its last)",
        "and the forward pass, one step on, of what is updated last, with the head behind it; a quarter of the compute "
        "is taken to be forward.",
    )
    report.finish(ratios_of(results, quick=options.quick, num_blocks=num_blocks))


if __name__ == "__main__":
    main()
