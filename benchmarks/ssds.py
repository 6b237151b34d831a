"""Measures the gain from several SSDs: `python -m benchmarks.ssds [--quick]`

The same model is trained in windlass's real processes with 1, 2, 4 and 8 SSD servers. Each server is throttled to the
same rate (`throttle.py`), because this machine need not have so many SSDs. One throttled SSD takes several times as
long as the compute, so it limits the step. With enough of them the compute does. The limit of a step is the larger of
two times: the compute time without throttles, and the step's bytes divided by the servers' total rate.

Source: Ratel, section V-F.
"""

import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.peers.contenders import Contender, ContenderRun, rounds, run_contender
from benchmarks.peers.workload import ModelShape, Workload
from benchmarks.reporting.machine import num_cores
from benchmarks.reporting.report import Report, parse_options, ratio, spread
from benchmarks.scratch_folder import scratch_folder
from benchmarks.step import contenders, describe
from windlass.actors.job import read_journal
from windlass.actors.job.journal import METRICS

# Ratio of one SSD's time to the compute time. With this many SSDs both take the same time.
_ONE_OVER_COMPUTE = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Measurements of the job without throttles. They determine the throttled rate."""

    compute_s: float  # seconds of a step
    ssd_nbytes: int  # bytes read and written in a step


@dataclass(frozen=True, slots=True)
class Setup:
    """A number of SSD servers, each with `rate` bytes/s."""

    num_ssds: int
    rate: float

    @property
    def name(self) -> str:
        """The name for files and tables."""
        return f"ssds-{self.num_ssds}"

    def limit_s(self, reference: Reference, nbytes: int) -> float:
        """Returns the lower limit of the step time."""
        return max(reference.compute_s, nbytes / (self.num_ssds * self.rate))


def workload_of(*, quick: bool) -> Workload:
    """Returns a model with many chunks, so that striping is even."""
    return Workload(
        shape=ModelShape(hidden=256, num_layers=8 if quick else 24, vocab=2048, intermediate=704, num_heads=4),
        batch_size=4 if quick else 8,
        sequence_length=256,
        num_warmup_steps=1 if quick else 2,
        num_timed_steps=2 if quick else 4,
        num_threads=num_cores(),
        seed=1,
    )


def measure_reference(workload: Workload, folder: Path) -> Reference:
    """Trains without throttles."""
    journal = folder / "unthrottled.jsonl"
    ours = contenders(folder / "ssd")[0]
    options = ("--place", "num_cached_params=0", "--journal", str(journal))
    run = run_contender(replace(ours, name="unthrottled", arguments=(*ours.arguments, *options)), workload, folder)
    steps = [each.data for each in read_journal(journal) if each.kind == METRICS and "compute_s" in each.data]
    timed = [data["compute_s"] for data in steps if data["step"] > workload.num_warmup_steps]
    return Reference(compute_s=statistics.median(timed), ssd_nbytes=moved(run))


def contender_of(setup: Setup, folder: Path) -> Contender:
    """Returns windlass with several servers, each with its own folder. No params stay in memory between uses."""
    ours = contenders(folder / "ssd")[0]
    directories = [str(folder / f"ssd-{i}") for i in range(setup.num_ssds)]
    options = ["--throttle", f"ssd_bytes_per_s={setup.rate}", "--place", "num_cached_params=0"]
    return replace(ours, name=setup.name, title=setup.name, arguments=(*directories, *options))


def moved(run: ContenderRun) -> int:
    """Returns the bytes that a step moves on all SSDs, as the servers count them."""
    assert run.ssd_nbytes is not None, "windlass counts its bytes"
    return sum(run.ssd_nbytes)


def main() -> None:
    """Measures, reports, and prints the ratios as the last line."""
    options = parse_options("ssds", __doc__, quick="a small model, one round, up to two SSDs")
    workload = workload_of(quick=options.quick)
    num_rounds = 1 if options.quick else 2
    configuration = {"form": "quick" if options.quick else "full", "rounds": num_rounds, "model": describe(workload)}
    report = Report("Several SSDs, each throttled to the same rate", options.directory, configuration)
    with scratch_folder(options.directory) as folder:
        workload.write(folder)
        reference = measure_reference(workload, folder)
        rate = reference.ssd_nbytes / (_ONE_OVER_COMPUTE * reference.compute_s)
        setups = [Setup(number, rate) for number in ((1, 2) if options.quick else (1, 2, 4, 8))]
        runs: dict[str, list[ContenderRun]] = {}
        for contender in rounds([contender_of(setup, folder) for setup in setups], num_rounds):
            runs.setdefault(contender.name, []).append(run_contender(contender, workload, folder))
    report.add(
        f"Each server is throttled to {rate / 1e6:.1f} MB/s. Without throttles a step computes for "
        f"{reference.compute_s:.2f} s."
    )
    add_table(report, setups, runs, reference)
    report.finish(ratios_of(setups, runs, reference))


def add_table(report: Report, setups: list[Setup], runs: dict[str, list[ContenderRun]], reference: Reference) -> None:
    """Adds a table with a row for each number of servers."""
    rows = []
    for setup in setups:
        mine = runs[setup.name]
        limit_s = setup.limit_s(reference, moved(mine[0]))
        rows.append(
            (
                str(setup.num_ssds),
                spread([each for run in mine for each in run.step_s]),
                f"{moved(mine[0]) / 1e6:.0f}",
                f"{limit_s:.2f}",
                f"{step_s(mine) / limit_s:.2f}",
            )
        )
    report.add_table(("SSD servers", "step, s", "MB a step", "limit, s", "step over limit"), rows)


def step_s(runs: list[ContenderRun]) -> float:
    """Returns the mean step time. The mean is exact even if one step shifts work to the next."""
    return statistics.fmean(each for run in runs for each in run.step_s)


def ratios_of(setups: list[Setup], runs: dict[str, list[ContenderRun]], reference: Reference) -> dict[str, Any]:
    """Returns the speed-ups over one server, and the step times divided by their limits."""
    by_number = {setup.num_ssds: step_s(runs[setup.name]) for setup in setups}
    limits = {str(each.num_ssds): each.limit_s(reference, moved(runs[each.name][0])) for each in setups}
    return {
        "two_over_one": ratio(by_number[1], by_number[2]),
        "four_over_one": ratio(by_number[1], by_number.get(4)),
        "step_over_limit": {
            str(each.num_ssds): by_number[each.num_ssds] / limits[str(each.num_ssds)] for each in setups
        },
    }


if __name__ == "__main__":
    main()
