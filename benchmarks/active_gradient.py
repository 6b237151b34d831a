"""Measures the gain from active gradient offloading: `python -m benchmarks.active_gradient [--quick]`

The same model is trained in windlass's real processes with four update orders:

- after the backward pass, with no other work in parallel
- active, naive: as gradients arrive, one chunk after the other
- active: as gradients arrive, with reads, updates and writes in parallel
- kept: once all gradients are known, as clipping needs it, during the next step's forward pass

Each order runs with fp32, split and bf16 states, and reads from the SSDs all that it needs. Further runs use host
memory to save I/O: params stay there between uses, gradients wait there or on the SSDs, or all states are there. The
SSD servers count the bytes.

Source: Ratel, section IV-C and figure 3.
"""

import statistics
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.peers.contenders import Contender, ContenderRun, rounds, run_contender
from benchmarks.peers.workload import ModelShape, Workload
from benchmarks.reporting.machine import num_cores
from benchmarks.reporting.report import Report, parse_options, ratio, spread
from benchmarks.scratch_folder import scratch_folder
from benchmarks.step import contenders, describe
from windlass.engine.memory_plan import UpdateOrder
from windlass.storage.ids import StatePrecision

ORDERS = {
    UpdateOrder.AFTER_BACKWARD: ("after backward", ("update_order=after_backward",)),
    UpdateOrder.NAIVE: ("active, naive", ("update_order=naive",)),
    UpdateOrder.ACTIVE: ("active", ("update_order=active",)),
    UpdateOrder.KEPT: ("kept for clipping", ("clip_norm=1.0", "update_order=kept")),
}
_EVERYTHING = 1_000_000  # more chunks or blocks than any model here has
PLACES = {
    "": ("num_cached_params=0",),
    "some params stay": (),
    "params stay": (f"num_cached_params={_EVERYTHING}",),
    "gradients on SSDs": ("num_cached_params=0", "num_host_grad_blocks=0"),
    "states in host memory": (f"host_blocks={_EVERYTHING}",),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One way to train the model."""

    order: UpdateOrder
    states: StatePrecision
    place: str = ""

    @property
    def name(self) -> str:
        """The name for files and tables."""
        return "-".join((self.order, self.states, *self.place.split()))


CASES = [
    *(Case(order, states) for states in StatePrecision for order in ORDERS),
    *(
        Case(order, StatePrecision.SPLIT, place)
        for order in (UpdateOrder.ACTIVE, UpdateOrder.KEPT)
        for place in ("some params stay", "params stay")
    ),
    Case(UpdateOrder.KEPT, StatePrecision.FP32, "gradients on SSDs"),
    Case(UpdateOrder.ACTIVE, StatePrecision.FP32, "states in host memory"),
    Case(UpdateOrder.KEPT, StatePrecision.FP32, "states in host memory"),
]


def workload_of(*, quick: bool) -> Workload:
    """Returns a model whose updates take about as long as its backward pass."""
    if quick:
        shape = ModelShape(hidden=512, num_layers=4, vocab=4096, intermediate=1408, num_heads=8)
    else:
        shape = ModelShape(hidden=1024, num_layers=12, vocab=8192, intermediate=2816, num_heads=16)
    return Workload(
        shape=shape,
        batch_size=1 if quick else 2,
        sequence_length=128 if quick else 256,
        num_warmup_steps=1 if quick else 2,
        num_timed_steps=2 if quick else 4,
        num_threads=num_cores(),
        seed=1,
    )


def contender_of(case: Case, ssd_dir: Path) -> Contender:
    """Returns windlass as a contender that trains in one way."""
    title, changes = ORDERS[case.order]
    options = [option for each in (*changes, f"state_precision={case.states}") for option in ("--change", each)]
    options += [option for each in PLACES[case.place] for option in ("--place", each)]
    ours = contenders(ssd_dir)[0]
    title = ", ".join(filter(None, (title, f"{case.states} states", case.place)))
    return replace(ours, name=case.name, title=title, arguments=(*ours.arguments, *options))


def bytes_per_param(run: ContenderRun, num_params: int) -> tuple[float, float]:
    """Returns the bytes read and written in a step, as the SSD servers count them, per parameter."""
    assert run.ssd_nbytes is not None, "windlass counts its bytes"
    read, written = run.ssd_nbytes
    return read / num_params, written / num_params


def main() -> None:
    """Measures, reports, and prints the ratios as the last line."""
    options = parse_options("active_gradient", __doc__, quick="a small model, one round")
    workload = workload_of(quick=options.quick)
    num_rounds = 1 if options.quick else 2
    configuration = {"form": "quick" if options.quick else "full", "rounds": num_rounds, "model": describe(workload)}
    report = Report("Active gradient offloading", options.directory, configuration)
    runs: dict[str, list[ContenderRun]] = {}
    with scratch_folder(options.directory) as folder:
        workload.write(folder)
        for contender in rounds([contender_of(case, folder / "ssd") for case in CASES], num_rounds):
            runs.setdefault(contender.name, []).append(run_contender(contender, workload, folder))
    num_params = workload.shape.num_params
    rows, median, moved = [], {}, {}
    for case in CASES:
        mine = runs[case.name]
        step_s = [each for run in mine for each in run.step_s]
        median[case] = statistics.median(step_s)
        read, written = bytes_per_param(mine[0], num_params)
        moved[case] = read + written
        figures = (f"{read:.1f}", f"{written:.1f}", f"{moved[case]:.1f}")
        rows.append((ORDERS[case.order][0], str(case.states), case.place, spread(step_s), *figures))
    columns = ("updates", "states", "in host memory", "step, s", "bytes read a parameter", "written", "together")
    report.add_table(columns, rows)
    report.add(
        "Spreads are median (smallest to largest) over all rounds. States that rest in host memory are written every"
    )
    report.add("tenth step and at a job's end: here in one of the timed steps of each run.")
    report.add("In the line below: speed-ups with fp32 states over updates after the backward pass, or naive ones; the")
    report.add("bytes of bf16 states over those of fp32 states; those of split states over them where all params stay.")
    fp32 = {order: Case(order, StatePrecision.FP32) for order in ORDERS}
    active, off = median[fp32[UpdateOrder.ACTIVE]], median[fp32[UpdateOrder.AFTER_BACKWARD]]
    moved_fp32 = moved[fp32[UpdateOrder.ACTIVE]]
    report.finish(
        {
            "optimized_over_off": ratio(off, active),
            "optimized_over_naive": ratio(median[fp32[UpdateOrder.NAIVE]], active),
            "deferred_over_off": ratio(off, median[fp32[UpdateOrder.KEPT]]),
            "bf16_state_io_share": ratio(moved[Case(UpdateOrder.ACTIVE, StatePrecision.BF16)], moved_fp32),
            "split_kept_params_io_share": ratio(
                moved[Case(UpdateOrder.KEPT, StatePrecision.SPLIT, "params stay")], moved_fp32
            ),
        }
    )


if __name__ == "__main__":
    main()
