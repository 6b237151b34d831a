"""Measures the gain from computing each block for all micro-batches at once: `python -m benchmarks.vertical [--quick]`

The same batch is trained in 1, 4 and 16 micro-batches in windlass's real processes, with states on the SSDs.

- Vertical: each block is computed for all micro-batches of a step before the next block. So its params are fetched
  at most twice a step, and its gradient leaves the device once.
- Horizontal: each micro-batch passes through all blocks alone, as in ZeRO-Infinity. So params are fetched for each one,
  and gradient sums go to host memory and back between them.
- Groups of 4: of 16 micro-batches, the hidden states of 4 are kept at once.

All orders train the same model, bit for bit. The actors' timelines count the bytes by kind, and the SSD servers count
all bytes.
"""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.peers.contenders import Contender, ContenderRun, rounds, run_contender
from benchmarks.peers.workload import ModelShape, Workload
from benchmarks.reporting.machine import num_cores
from benchmarks.reporting.report import Report, parse_options, ratio, spread
from benchmarks.scratch_folder import scratch_folder
from benchmarks.step import contenders, describe
from windlass.actors.messages import SpanKind
from windlass.actors.timeline import held_steps, load_step

NUM_MICROBATCHES = (1, 4, 16)
_PARTIAL = (SpanKind.COPY_PARTIAL_OUT, SpanKind.COPY_PARTIAL_IN)


@dataclass(frozen=True, slots=True)
class Case:
    """One way to train: the number of micro-batches, and the number of them computed at once."""

    num_microbatches: int
    group_size: int
    order: str

    @property
    def name(self) -> str:
        """The name for files and tables."""
        return f"{self.order.replace(' ', '-')}-{self.num_microbatches}"


def vertical(num_microbatches: int) -> Case:
    """Returns the case that computes all micro-batches of a step at once."""
    return Case(num_microbatches, num_microbatches, "vertical")


def horizontal(num_microbatches: int) -> Case:
    """Returns the case that computes one micro-batch after the other."""
    return Case(num_microbatches, 1, "horizontal")


# With one micro-batch the two orders are the same, so their difference shows the noise of the machine.
CASES = [case(number) for number in NUM_MICROBATCHES for case in (vertical, horizontal)] + [Case(16, 4, "groups of 4")]


@dataclass(slots=True)
class Results:
    """The runs of all cases, and for each case the bytes moved in a step by kind."""

    runs: dict[Case, list[ContenderRun]]
    moved: dict[Case, Counter[SpanKind]]

    def step_s(self, case: Case) -> list[float]:
        """Returns the timed steps of all rounds."""
        return [step_s for run in self.runs[case] for step_s in run.step_s]

    def median_s(self, case: Case) -> float:
        """Returns the median step time."""
        return statistics.median(self.step_s(case))

    def check(self) -> None:
        """Raises RuntimeError if the order has changed a loss."""
        for case, runs in self.runs.items():
            others = self.runs[vertical(case.num_microbatches)]
            if {run.losses for run in runs} != {run.losses for run in others}:
                raise RuntimeError(f"{case.name} came to other losses than {vertical(case.num_microbatches).name}")


def workload_of(*, quick: bool) -> Workload:
    """Returns a model with few tokens per micro-batch, as if memory were short.

    Compute and updates take similar times.
    """
    if quick:
        shape = ModelShape(hidden=512, num_layers=4, vocab=4096, intermediate=1408, num_heads=8)
    else:
        shape = ModelShape(hidden=1024, num_layers=12, vocab=8192, intermediate=2816, num_heads=16)
    return Workload(
        shape=shape,
        batch_size=16,
        sequence_length=32 if quick else 64,
        num_warmup_steps=1 if quick else 2,
        num_timed_steps=2 if quick else 4,
        num_threads=num_cores(),
        seed=1,
    )


def contender_of(case: Case, folder: Path) -> Contender:
    """Returns windlass with one order. No params stay in host memory, so each use reads them."""
    ours = contenders(folder / "ssd")[0]
    options = ["--change", f"num_microbatches={case.num_microbatches}", "--timeline", str(folder / case.name)]
    options += ["--place", "num_cached_params=0", "--place", f"group_size={case.group_size}"]
    return replace(ours, name=case.name, title=case.name, arguments=(*ours.arguments, *options))


def moved_a_step(timeline: Path, first_step: int) -> Counter[SpanKind]:
    """Returns the mean bytes of each kind per step, from `first_step` on.

    A transfer counts in the step in which it ends.
    """
    steps = [step for step in held_steps(timeline) if step >= first_step]
    total = Counter[SpanKind]()
    for step in steps:
        kept = load_step(timeline, step)
        assert kept is not None, "it is held"
        for span in kept.spans:
            if kept.start_s < span.end_s <= kept.end_s:
                total[span.kind] += span.nbytes
    return Counter({kind: nbytes // len(steps) for kind, nbytes in total.items()})


def measure(workload: Workload, cases: Sequence[Case], num_rounds: int, folder: Path) -> Results:
    """Trains in every way, in alternating order."""
    results = Results(runs={case: [] for case in cases}, moved={})
    by_name = {case.name: case for case in cases}
    for contender in rounds([contender_of(case, folder) for case in cases], num_rounds):
        case = by_name[contender.name]
        results.runs[case].append(run_contender(contender, workload, folder))
        results.moved[case] = moved_a_step(folder / case.name, workload.num_warmup_steps + 1)
    results.check()
    return results


def add_table(report: Report, results: Results) -> None:
    """Adds a table with a row for each case."""
    rows = []
    for case, runs in results.runs.items():
        moved, ssd_nbytes = results.moved[case], runs[0].ssd_nbytes
        assert ssd_nbytes is not None, "windlass counts its bytes"
        kinds = (SpanKind.READ_PARAMS, SpanKind.COPY_PARAMS_IN, *_PARTIAL, SpanKind.COPY_GRAD_OUT)
        figures = [*(moved[kind] for kind in kinds), sum(ssd_nbytes)]
        row = (str(case.num_microbatches), case.order, spread(results.step_s(case)))
        rows.append((*row, *(f"{nbytes / 1e6:.0f}" for nbytes in figures)))
    columns = ("micro-batches", "order", "step, s", "params read, MB", "to the device", "sums out", "sums in")
    report.add_table((*columns, "gradients out", "SSDs, all"), rows)


def ratios_of(results: Results, num_params: int) -> dict[str, Any]:
    """Returns the speed-ups of vertical order, and the bytes per parameter and step."""

    def by_number(figure: Any) -> dict[str, Any]:
        return {str(number): figure(number) for number in NUM_MICROBATCHES}

    def bytes_of(*kinds: SpanKind) -> dict[str, Any]:
        return {
            order.__name__: by_number(
                lambda number, order=order: sum(results.moved[order(number)][kind] for kind in kinds) / num_params
            )
            for order in (vertical, horizontal)
        }

    return {
        "vertical_over_horizontal": by_number(
            lambda number: ratio(results.median_s(horizontal(number)), results.median_s(vertical(number)))
        ),
        "groups_of_4_over_horizontal": ratio(results.median_s(horizontal(16)), results.median_s(CASES[-1])),
        "fetched_bytes_per_param": bytes_of(SpanKind.READ_PARAMS),
        "partial_bytes_per_param": bytes_of(*_PARTIAL),
    }


def main() -> None:
    """Measures, reports, and prints the ratios as the last line."""
    options = parse_options("vertical", __doc__, quick="a small model, one round")
    workload = workload_of(quick=options.quick)
    num_rounds = 1 if options.quick else 2
    configuration = {"form": "quick" if options.quick else "full", "rounds": num_rounds, "model": describe(workload)}
    report = Report("Vertical and horizontal order of micro-batches", options.directory, configuration)
    with scratch_folder(options.directory) as folder:
        workload.write(folder)
        results = measure(workload, CASES, num_rounds, folder)
    add_table(report, results)
    report.add(
        "Steps are median (smallest to largest) over all rounds; bytes are of a step. The losses of all orders of"
    )
    report.add("one number of micro-batches are the same to the last bit. In the line below: speed-ups, and bytes a")
    report.add("parameter and step of params from the SSDs, and of sums that one group leaves to the next, both ways.")
    report.finish(ratios_of(results, workload.shape.num_params))


if __name__ == "__main__":
    main()
