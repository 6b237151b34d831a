"""Compares the predicted peak of device memory with the real one: `python -m benchmarks.device_memory [--quick]`

All jobs are predicted by shapes alone before the first one runs. Then each one is trained in its own process. The
device is the CPU, and "device memory" is that process's private memory. It also grows by Python's objects, stacks and
thread pools, which a minimal job measures.

The prediction is a range, because the number of swapped bytes that have not left yet depends on the speed of copies.
A CPU's memory counts only once it is written. So each job has two steps, and swapped activations count as they return.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.activations.run import ActivationRun, job_spec, run_in_process
from benchmarks.reporting.report import Report, parse_options
from benchmarks.scratch_folder import scratch_folder
from windlass.actors.job import make_context
from windlass.actors.job.device_memory_check import device_need_of_job
from windlass.engine.memory_plan import ActivationChoice, DeviceNeed
from windlass.engine.model import partition_folder

MIB = 2**20
_RECOMPUTE, _KEEP = ActivationChoice.RECOMPUTE, ActivationChoice.KEEP
_SWAP, _SWAP_INPUT = ActivationChoice.SWAP, ActivationChoice.RECOMPUTE_SWAP_INPUT
_BASE = ActivationRun(hidden=256, intermediate=704, num_layers=6, batch_size=96, sequence_length=256, choice=_RECOMPUTE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job, with the properties that distinguish it."""

    title: str
    run: ActivationRun


CASES = (
    Case(title="all computed again", run=_BASE),
    Case(title="narrow and deep", run=replace(_BASE, hidden=128, intermediate=352, num_layers=24, batch_size=128)),
    Case(title="all kept", run=replace(_BASE, num_layers=3, batch_size=32, choice=_KEEP)),
    Case(title="4 micro-batches", run=replace(_BASE, batch_size=160, num_layers=4, num_microbatches=4)),
    Case(
        title="4 micro-batches in groups of 2, all kept",
        run=replace(_BASE, num_layers=3, batch_size=64, choice=_KEEP, num_microbatches=4, group_size=2),
    ),
    Case(
        title="wide, states of 2 layers on the device",
        run=replace(_BASE, hidden=768, intermediate=3072, num_layers=3, batch_size=8, device_blocks=(1, 2)),
    ),
    Case(
        title="wide, layers in pieces",
        run=replace(_BASE, hidden=1024, intermediate=4096, num_layers=3, batch_size=16, streamed_blocks=(1, 2, 3)),
    ),
    Case(
        title="wide, gradients in pieces, too",
        run=replace(
            _BASE,
            hidden=1024,
            intermediate=4096,
            num_layers=3,
            batch_size=16,
            vocabulary=16384,
            streamed_blocks=(1, 2, 3),
            streams_grads=True,
        ),
    ),
    Case(
        title="large vocabulary, the head in slices",
        run=replace(_BASE, num_layers=2, batch_size=20, vocabulary=16384),
    ),
    Case(title="inputs swapped", run=replace(_BASE, choice=_SWAP_INPUT)),
    Case(title="all swapped", run=replace(_BASE, num_layers=3, batch_size=32, choice=_SWAP)),
)
_QUICK = replace(_BASE, num_layers=2, batch_size=8)
_NEXT_TO_NOTHING = replace(_BASE, hidden=64, intermediate=64, num_layers=2, batch_size=1, sequence_length=64)
QUICK_CASES = (
    Case(title="all computed again", run=_QUICK),
    Case(title="all swapped", run=replace(_QUICK, choice=_SWAP)),
)


def predict(run: ActivationRun, folder: Path) -> DeviceNeed:
    """Predicts the memory need of a run. Writes its files below `folder`."""
    folder.mkdir()
    spec = job_spec(run, folder)
    partition = partition_folder(spec.model_dir, spec.training.precision)
    return device_need_of_job(make_context(spec, partition.layout, ""), partition)


def error_of(need: DeviceNeed, found_nbytes: int) -> float:
    """Returns the relative distance of a peak from the predicted range: above 0 if larger, below 0 if smaller."""
    if found_nbytes > need.nbytes:
        return found_nbytes / need.nbytes - 1
    return min(0.0, found_nbytes / need.settled_nbytes - 1)


def main() -> None:
    """Predicts, measures, reports, and prints the ratios as the last line."""
    options = parse_options("device_memory", __doc__, quick="two small jobs")
    cases = QUICK_CASES if options.quick else CASES
    configuration = {"form": "quick" if options.quick else "full", "training": "bf16, 2 steps, states on one SSD"}
    report = Report("Device memory: predicted and measured", options.directory, configuration)
    with scratch_folder(options.directory) as directory:
        needs = [predict(case.run, directory / str(i)) for i, case in enumerate(cases)]
        report.add("", "Predicted, MiB:")
        report.add_table(_PARTS, [_parts_of(case, need) for case, need in zip(cases, needs, strict=True)])
        floor_nbytes = measure(_NEXT_TO_NOTHING, directory)
        report.add("", f"A job of next to nothing takes {_mib(floor_nbytes)} MiB.")
        errors, errors_above_floor, rows = [], [], []
        for case, need in zip(cases, needs, strict=True):
            found_nbytes = measure(case.run, directory)
            errors.append(error_of(need, found_nbytes))
            errors_above_floor.append(error_of(need, found_nbytes - floor_nbytes))
            sizes = map(_mib, (need.settled_nbytes, need.nbytes, found_nbytes))
            rows.append((case.title, *sizes, *(f"{100 * each[-1]:+.1f}" for each in (errors, errors_above_floor))))
        columns = ("job", "predicted, MiB", "at most, MiB", "measured, MiB", "error, percent", "without that job's")
        report.add_table(columns, rows)
    report.finish(
        {
            "peak_error_max": max(map(abs, errors)),
            "peak_error_above_floor_max": max(map(abs, errors_above_floor)),
            "floor_mib": floor_nbytes / MIB,
        }
    )


def measure(run: ActivationRun, directory: Path) -> int:
    """Returns the peak of a run's device memory in bytes."""
    result = run_in_process(run, directory)
    assert result.error is None, result.error
    return result.device_nbytes


_PARTS = (
    "job",
    "params",
    "gradients",
    "states",
    "constants",
    "held",
    "hidden",
    "returning",
    "leaving",
    "operation",
    "at worst",
)


def _parts_of(case: Case, need: DeviceNeed) -> tuple[str, ...]:
    step, moment = need.activations, need.moment
    sizes = (
        need.params_nbytes,
        need.grads_nbytes,
        need.states_nbytes,
        need.constants_nbytes,
        step.held_nbytes,
        step.hidden_nbytes,
        step.returning_nbytes,
        step.leaving_nbytes,
        step.operation_nbytes,
    )
    where = f"{moment.direction} of block {moment.block}, micro-batch {moment.microbatch}"
    return (case.title, *map(_mib, sizes), where)


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.1f}"


if __name__ == "__main__":
    main()
