"""What active gradient offloading is worth: `python -m benchmarks.active_gradient [--quick]`

The same model in windlass's real processes, updated in four ways: after the backward pass, with nothing else running;
as gradients arrive, one chunk after the other (naive); as they arrive, reading, updating and writing overlapped; and,
as clipping needs it, once all are known, under the next step's forward pass. Each with fp32, split and bf16 states.
The SSD servers count the bytes.
Source: Ratel, section IV-C and figure 3.
"""

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.contenders import Contender, ContenderRun, rounds, run_contender
from benchmarks.machine import num_cores
from benchmarks.report import Report, ratio, spread
from benchmarks.step import contenders, describe
from benchmarks.workload import ModelShape, Workload
from windlass.actors.job_spec import UpdateOrder
from windlass.storage.ids import StatePrecision

ORDERS = {
    UpdateOrder.AFTER_BACKWARD: ("after backward", ("update_order=after_backward",)),
    UpdateOrder.NAIVE: ("active, naive", ("update_order=naive",)),
    UpdateOrder.ACTIVE: ("active", ("update_order=active",)),
    UpdateOrder.KEPT: ("kept for clipping", ("clip_norm=1.0", "update_order=kept")),
}


def workload_of(*, quick: bool) -> Workload:
    """A model whose updates take about as long as its backward pass."""
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


def contender_of(order: UpdateOrder, states: StatePrecision, ssd_dir: Path) -> Contender:
    """Windlass with an order of updates and a format of states."""
    title, changes = ORDERS[order]
    options = [option for change in (*changes, f"state_precision={states}") for option in ("--change", change)]
    ours = contenders(ssd_dir)[0]
    name = f"{order}-{states}"
    return replace(ours, name=name, title=f"{title}, {states} states", arguments=(*ours.arguments, *options))


def bytes_per_param(run: ContenderRun, num_params: int) -> tuple[float, float]:
    """Read and written in a step, as the SSD servers count them."""
    assert run.ssd_nbytes is not None, "windlass counts its bytes"
    read, written = run.ssd_nbytes
    return read / num_params, written / num_params


def main() -> None:
    """Measure, report, end with the line of ratios."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.active_gradient", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, one round")
    parser.add_argument("--directory", type=Path, default=Path(), help="on an SSD (default: here)")
    options = parser.parse_args()
    workload = workload_of(quick=options.quick)
    num_rounds = 1 if options.quick else 3
    configuration = {"form": "quick" if options.quick else "full", "rounds": num_rounds, "model": describe(workload)}
    report = Report("Active gradient offloading", options.directory, configuration)
    cases = [(order, states) for states in StatePrecision for order in ORDERS]
    runs: dict[str, list[ContenderRun]] = {}
    with tempfile.TemporaryDirectory(dir=options.directory, prefix=".bench-") as name:
        folder = Path(name).resolve()
        workload.write(folder)
        for contender in rounds([contender_of(*case, folder / "ssd") for case in cases], num_rounds):
            runs.setdefault(contender.name, []).append(run_contender(contender, workload, folder))
    num_params = workload.shape.num_params
    rows, step_s, moved = [], {}, {}
    for order, states in cases:
        mine = runs[f"{order}-{states}"]
        step_s[(order, states)] = [each for run in mine for each in run.step_s]
        read, written = bytes_per_param(mine[0], num_params)
        moved[(order, states)] = read + written
        figures = (f"{read:.1f}", f"{written:.1f}", f"{read + written:.1f}")
        rows.append((ORDERS[order][0], str(states), spread(step_s[(order, states)]), *figures))
    report.add_table(("updates", "states", "step, s", "bytes read a parameter", "written", "together"), rows)
    report.add("Spreads are median (smallest to largest) over all rounds.")
    report.add(
        "In the line below: speed-ups with fp32 states over updates after the backward pass, or naive ones; then"
    )
    report.add("the bytes of bf16 states over those of fp32 states.")
    median = {order: statistics.median(step_s[(order, StatePrecision.FP32)]) for order in ORDERS}
    bf16, fp32 = (moved[(UpdateOrder.ACTIVE, states)] for states in (StatePrecision.BF16, StatePrecision.FP32))
    report.finish(
        {
            "optimized_over_off": ratio(median[UpdateOrder.AFTER_BACKWARD], median[UpdateOrder.ACTIVE]),
            "optimized_over_naive": ratio(median[UpdateOrder.NAIVE], median[UpdateOrder.ACTIVE]),
            "deferred_over_off": ratio(median[UpdateOrder.AFTER_BACKWARD], median[UpdateOrder.KEPT]),
            "bf16_state_io_share": ratio(bf16, fp32),
        }
    )


if __name__ == "__main__":
    main()
