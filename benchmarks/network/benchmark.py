"""Measures the link between boxes beside other ways to move bytes: `python -m benchmarks.network [--quick]`

Two boxes are network namespaces of this machine. Their rate is limited (`tbf`) to 1 and to 10 Gbit/s, then not at all.
All contenders move the same bytes in one direction, from memory to memory, interleaved. The processor time is that of
the processes of both sides, with what the kernel counts to them.

Contenders that are not installed are left out: iperf3, ZeroMQ (`pyzmq`), UCX (`ucx_perftest` of `ucx-utils`).

Then a real job trains over two such boxes, its compute held back to a declared speed. Its steps are compared with the
formula by which jobs are planned, and with the simulator. Both get the rate of the link, measured in the same run.
"""

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.network.contenders import CONTENDERS, IPERF3, LINK, PLAIN_LINK, Rig, Run, Unavailable, open_rig
from benchmarks.network.steps import CASES, JobFailedError, StepRun, measure_steps
from benchmarks.reporting.report import Report, parse_options, spread
from benchmarks.scratch_folder import scratch_folder
from tests.support.boxes.namespaces import NamespaceError

_GBIT, _GB = 1e9, 1e9
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """A limit of the boxes' rate, and the bytes that are moved under it."""

    name: str
    bits_per_s: float | None
    nbytes: int


SHAPES = (
    Shape("1 Gbit/s", _GBIT, 300 * _MIB),
    Shape("10 Gbit/s", 10 * _GBIT, 2048 * _MIB),
    Shape("no limit", None, 2048 * _MIB),
)
QUICK_SHAPES = (Shape("1 Gbit/s", _GBIT, 48 * _MIB),)


@dataclass(slots=True)
class Measured:
    """The runs of all contenders under one limit, one list for each contender and one run for each round."""

    shape: Shape
    runs: dict[str, list[Run]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def over(self, name: str, other: str) -> float | None:
        """Returns the median over rounds of the quotient of two contenders' rates."""
        pairs = zip(self.runs.get(name, ()), self.runs.get(other, ()), strict=False)
        quotients = [run.gb_per_s / reference.gb_per_s for run, reference in pairs]
        return statistics.median(quotients) if quotients else None


def main() -> None:
    """Runs all contenders and prints the report."""
    options = parse_options("network", __doc__, quick="1 Gbit/s, one round with few bytes")
    shapes, num_rounds = (QUICK_SHAPES, 1) if options.quick else (SHAPES, 3)
    report = Report(
        title="The link between boxes",
        directory=options.directory,
        configuration={
            "boxes": "two network namespaces, veth and a bridge, tbf at both ends",
            "bytes": ", ".join(f"{shape.nbytes // _MIB} MiB at {shape.name}" for shape in shapes),
            "rounds": num_rounds,
            "load before": f"{os.getloadavg()[0]:.1f}",
        },
    )
    with scratch_folder(options.directory) as folder:
        try:
            rig = open_rig(folder)
        except NamespaceError as error:
            report.add(f"not measured: no boxes of namespaces on this machine: {error}")
            report.finish(ratios((), ()))
            return
        failures: list[str] = []
        steps: list[StepRun] = []
        try:
            measured = [measure(rig, shape, num_rounds) for shape in shapes]
            for case in CASES[:1] if options.quick else CASES:
                try:
                    steps.append(measure_steps(rig, case))
                except (JobFailedError, Unavailable) as error:
                    failures.append(f"{case.name}: no steps were measured: {error}")
        finally:
            rig.network.close()
    for each in measured:
        _tell(report, each)
    _tell_of_steps(report, steps)
    report.add(*failures, "", f"load after: {os.getloadavg()[0]:.1f}")
    report.finish(ratios(measured, steps))


def measure(rig: Rig, shape: Shape, num_rounds: int) -> Measured:
    """Runs all contenders under a limit, round by round."""
    rig.shape(shape.bits_per_s)
    measured = Measured(shape)
    for _ in range(num_rounds):
        for name, run in CONTENDERS.items():
            if name in measured.missing:
                continue
            try:
                measured.runs.setdefault(name, []).append(run(rig, shape.nbytes))
            except Unavailable as error:
                measured.missing[name] = str(error)
    return measured


def ratios(measured: Sequence[Measured], steps: Sequence[StepRun]) -> dict[str, float | None]:
    """Returns the last line's numbers. The ratios without a limit count in no other."""
    shaped = [each for each in measured if each.shape.bits_per_s is not None]
    unshaped = [each for each in measured if each.shape.bits_per_s is None]
    link_runs = [run for each in measured for name in (LINK, PLAIN_LINK) for run in each.runs.get(name, ())]
    return {
        "link_over_iperf3": _smallest([each.over(LINK, IPERF3) for each in shaped]),
        "tls_over_plain": _smallest([each.over(LINK, PLAIN_LINK) for each in shaped]),
        "bytes_over_minimum_max": max((run.link_nbytes / run.nbytes for run in link_runs), default=None),
        "step_over_bound_max": max((run.over_bound for run in steps), default=None),
        "simulator_error_max": max((run.simulator_error for run in steps), default=None),
        **{f"link_over_iperf3, {each.shape.name}": each.over(LINK, IPERF3) for each in measured},
        **{f"plain_link_over_iperf3, {each.shape.name}": each.over(PLAIN_LINK, IPERF3) for each in measured},
        "tls_over_plain_unshaped": _smallest([each.over(LINK, PLAIN_LINK) for each in unshaped]),
    }


def _smallest(values: Sequence[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _tell_of_steps(report: Report, runs: Sequence[StepRun]) -> None:
    report.add("", "Steps of a job over two boxes:")
    rows = [
        (
            run.case.name,
            f"{run.network_bytes / _GB:.4f}",
            spread(run.steps_s),
            f"{run.formula_s:.3f}",
            f"{run.simulated_s:.3f}",
            f"{run.over_bound:.3f}",
            f"{100 * run.simulator_error:.1f}",
        )
        for run in runs
    ]
    head = (
        "case",
        "link, GB/s",
        "step, s",
        "formula, s",
        "simulated, s",
        "step over formula",
        "simulator's error, percent",
    )
    report.add_table(head, rows)


def _tell(report: Report, measured: Measured) -> None:
    report.add("", f"{measured.shape.name}:")
    rows = []
    for name, runs in measured.runs.items():
        if not runs:
            continue
        used = [run.cpu_s_per_gb for run in runs if run.cpu_s_per_gb is not None]
        rows.append(
            (
                name,
                spread([run.gb_per_s for run in runs], digits=3),
                spread(used) if used else "busy loops",
                spread([run.link_nbytes / run.nbytes for run in runs], digits=4),
            )
        )
    rows += [(name, f"missing: {reason}", "", "") for name, reason in measured.missing.items()]
    report.add_table(("contender", "GB/s", "processor s per GB", "bytes on the interface over data"), rows)
