"""Measures the cost of activations by the tier they go to: `python -m benchmarks.activations [--quick]`

The device is the CPU, and "device memory" is this process's private memory. So bytes are real, but a device's link is
not. There are three parts:

- step time over the swapped bytes at three batch sizes, with the rest recomputed
- the largest batch within one budget of device memory and one of host memory
- the longest context within such budgets

The limits are measured with full recomputation. The layers' inputs stay on the device, go to host memory, or go to host
memory and the SSD.

Sources: Ratel, figures 8 and 9b; MemAscend, section V-B.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.activations.run import ActivationResult, ActivationRun, run_in_process
from benchmarks.reporting.report import Report, parse_options, ratio
from benchmarks.scratch_folder import scratch_folder
from windlass.engine.memory_plan import ActivationChoice

MIB = 2**20
_CONTEXTS = (4096, 8192, 16384, 32768, 65536, 131072)  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """The place of the inputs of layers between forward and backward."""

    name: str
    choice: ActivationChoice
    goes_to_ssd: bool = False


WAYS = (
    Way(name="recompute", choice=ActivationChoice.RECOMPUTE),
    Way(name="host", choice=ActivationChoice.RECOMPUTE_SWAP_INPUT),
    Way(name="ssd", choice=ActivationChoice.RECOMPUTE_SWAP_INPUT, goes_to_ssd=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The bytes that a step's activations may take on each tier."""

    device_nbytes: int
    host_nbytes: int
    ssd_nbytes: int

    def room(self, run: ActivationRun, way: Way) -> ActivationRun:
        """Returns the run with the memory of this budget."""
        if way.choice is ActivationChoice.RECOMPUTE:
            return replace(run, choice=way.choice, host_nbytes=0)
        ssd_nbytes = self.ssd_nbytes if way.goes_to_ssd else 0
        return replace(run, choice=way.choice, host_nbytes=self.host_nbytes, ssd_nbytes=ssd_nbytes)

    def shortage(self, result: ActivationResult) -> str | None:
        """Returns why a run does not fit, or None if it fits."""
        if result.error is not None:
            return "no room"
        return "device" if result.device_nbytes > self.device_nbytes else None


Measure = Callable[[ActivationRun], ActivationResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The sizes of one form of the benchmark."""

    curve: ActivationRun
    batches: tuple[int, ...]
    many: ActivationRun  # finds the largest batch
    many_budget: Budget
    long: ActivationRun  # finds the longest context
    long_budget: Budget
    contexts: tuple[int, ...]


def form_of(*, quick: bool) -> Form:
    """Returns sizes with many layers, whose inputs are small compared with a layer's other activations."""
    run = ActivationRun(hidden=256, num_layers=8, batch_size=1, sequence_length=256, choice=ActivationChoice.SWAP)
    return Form(
        curve=replace(run, num_layers=4 if quick else 16, num_steps=2 if quick else 4),
        batches=(2,) if quick else (4, 16, 64),
        many=replace(run, num_layers=8 if quick else 64),
        many_budget=Budget(
            device_nbytes=(16 if quick else 256) * MIB,
            host_nbytes=(8 if quick else 128) * MIB,
            ssd_nbytes=(32 if quick else 4096) * MIB,
        ),
        long=run,
        long_budget=Budget(
            device_nbytes=(64 if quick else 1536) * MIB,
            host_nbytes=(8 if quick else 256) * MIB,
            ssd_nbytes=(32 if quick else 1024) * MIB,
        ),
        contexts=_CONTEXTS[:1] if quick else _CONTEXTS,
    )


def add_curve(report: Report, form: Form, measure: Measure) -> None:
    """Adds the step time over the swapped amount. A growing number of layers swap all their activations."""
    num_layers = form.curve.num_layers
    rows = []
    for batch_size in form.batches:
        runs = [
            replace(form.curve, batch_size=batch_size, choice=ActivationChoice.RECOMPUTE),
            *(
                replace(form.curve, batch_size=batch_size, num_swapping=number)
                for number in sorted({0, num_layers // 4, num_layers // 2, 3 * num_layers // 4, num_layers})
            ),
            replace(form.curve, batch_size=batch_size, choice=ActivationChoice.KEEP),
        ]
        for run in runs:
            result = measure(run)
            assert result.error is None, result.error
            if run.num_swapping is not None and not result.out_nbytes:
                raise RuntimeError(f"{run} swaps, and no bytes left the device")
            rows.append(
                (
                    str(batch_size),
                    _title(run),
                    f"{result.out_nbytes / MIB:.0f}",
                    f"{result.step_s:.2f}",
                    f"{result.device_nbytes / MIB:.0f}",
                )
            )
    columns = ("batch", "activations", "swapped, MiB a step", "step, s", "device memory, MiB")
    report.add_table(columns, rows)


def _title(run: ActivationRun) -> str:
    if run.num_swapping is None:
        return "all computed again, inputs stay" if run.choice is ActivationChoice.RECOMPUTE else "all kept"
    return f"{run.num_swapping} of {run.num_layers} layers swap all, the others their inputs"


def largest(
    sizes: Iterator[int], budget: Budget, way: Way, measure: Callable[[int, Way], ActivationResult]
) -> tuple[int, list[tuple[str, ...]]]:
    """Returns the largest of growing sizes that fits (0: none), and a table row for each size that was tried."""
    best, rows = 0, []
    for size in sizes:
        result = measure(size, way)
        shortage = budget.shortage(result)
        figures = [f"{result.device_nbytes / MIB:.0f}", f"{result.out_nbytes / MIB:.0f}"]
        figures += [f"{result.written_nbytes / MIB:.0f}", f"{result.step_s:.2f}"]
        if result.error is not None:
            figures = [""] * len(figures)
        rows.append((way.name, str(size), *figures, "fits" if shortage is None else f"does not fit: {shortage}"))
        if shortage is not None:
            break
        best = size
    return best, rows


def add_limits(
    report: Report, what: str, base: ActivationRun, budget: Budget, sizes: Callable[[], Iterator[int]], measure: Measure
) -> dict[str, int]:
    """Adds a table of the tried sizes. Returns the largest size that fits, for each way."""

    def measure_size(size: int, way: Way) -> ActivationResult:
        run = replace(base, batch_size=size) if what == "batch" else replace(base, sequence_length=size)
        return measure(budget.room(run, way))

    sizes_by_way, rows = {}, []
    for way in WAYS:
        sizes_by_way[way.name], tried = largest(sizes(), budget, way, measure_size)
        rows += tried
    report.add(
        "",
        f"Largest {what} of {base.num_layers} layers within {budget.device_nbytes / MIB:.0f} MiB of device memory, "
        f"{budget.host_nbytes / MIB:.0f} MiB of host memory and, for `ssd`, {budget.ssd_nbytes / MIB:.0f} MiB of SSD:",
    )
    columns = ("inputs", what, "device memory, MiB", "swapped, MiB a step", "of them to the SSD", "step, s", "")
    report.add_table(columns, rows)
    return sizes_by_way


def main() -> None:
    """Measures, reports, and prints the ratios as the last line."""
    options = parse_options("activations", __doc__, quick="few layers, short contexts")
    form = form_of(quick=options.quick)
    configuration = {"form": "quick" if options.quick else "full", "model": _describe(form.curve)}
    report = Report("Activations: computed again, kept, or swapped", options.directory, configuration)
    with scratch_folder(options.directory) as directory:

        def measure(run: ActivationRun) -> ActivationResult:
            return run_in_process(run, directory)

        add_curve(report, form, measure)
        batches = add_limits(report, "batch", form.many, form.many_budget, lambda: _doubled(1), measure)
        contexts = add_limits(report, "context", form.long, form.long_budget, lambda: iter(form.contexts), measure)
    report.finish(ratios_of(batches, contexts))


def _doubled(first: int) -> Iterator[int]:
    return (first * 2**i for i in itertools.count())


def _describe(run: ActivationRun) -> str:
    return f"Qwen3 shape, hidden {run.hidden}, one head of 32; batches of {run.sequence_length} tokens an example; bf16"


def ratios_of(batches: dict[str, int], contexts: dict[str, int]) -> dict[str, Any]:
    """Returns the ratios. `choice_over_best_max` is None, because the planner makes no choice in this benchmark."""
    return {
        "choice_over_best_max": None,
        "max_batch_ssd_over_recompute": ratio(batches["ssd"], batches["recompute"]),
        "context_128k_fits": contexts["ssd"] >= _CONTEXTS[-1],
        "max_batch": batches,
        "longest_context": contexts,
    }


if __name__ == "__main__":
    main()
