"""Compares simulated steps with real ones: `python -m benchmarks.simulator [--quick]`

The jobs are small. Their activations are swapped to host memory and SSDs, their layers are streamed, or their
micro-batches form several groups. They run in the real engine, with all actors in one process. Links, SSDs and compute
are slowed down to declared rates. The simulator gets the same rates, and no measurements.
"""

import os
import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.reporting.machine import num_cores
from benchmarks.reporting.report import Report, parse_options
from benchmarks.scratch_folder import scratch_folder
from benchmarks.simulator.cases import BATCH_SIZE, CASES, LENGTH, NUM_LAYERS, NUM_STEPS, Comparison, compare

QUICK_CASES = ("swapped, the SSDs", "in pieces")


def add_table(report: Report, comparisons: Mapping[str, Comparison]) -> None:
    """Adds a table with a row for each case."""
    rows = [
        (
            name,
            f"{comparison.real.step_s:.3f}",
            f"{comparison.simulated.step_s:.3f}",
            f"{100 * (comparison.simulated_over_real - 1):+.1f}",
            "the same" if comparison.simulated.nbytes == comparison.real.nbytes else "others",
        )
        for name, comparison in comparisons.items()
    ]
    report.add_table(("job", "step, s", "simulated, s", "error, percent", "bytes by kind, block and step"), rows)


def ratios_of(comparisons: Mapping[str, Comparison]) -> dict[str, Any]:
    """Returns the relative errors, and the number of cases whose real and simulated bytes differ."""
    errors = [abs(comparison.simulated_over_real - 1) for comparison in comparisons.values()]
    return {
        "simulated_over_real": {name: comparison.simulated_over_real for name, comparison in comparisons.items()},
        "simulator_error_max": max(errors),
        "simulator_error_mean": statistics.fmean(errors),
        "num_other_bytes": sum(
            comparison.simulated.nbytes != comparison.real.nbytes for comparison in comparisons.values()
        ),
    }


def main() -> None:
    """Measures, reports, and prints the ratios as the last line."""
    options = parse_options("simulator", __doc__, quick="two of the jobs")
    names = QUICK_CASES if options.quick else tuple(CASES)
    configuration = {
        "form": "quick" if options.quick else "full",
        "model": f"{NUM_LAYERS} layers of hidden size 64, fp32, {BATCH_SIZE} examples of {LENGTH} tokens a step",
        "steps": f"{NUM_STEPS}, of which the first and the last do not count",
        "beside": f"load average {os.getloadavg()[0]:.1f} on {num_cores()} cores when it began",
    }
    report = Report("The simulator beside real jobs at declared rates", options.directory, configuration)
    with scratch_folder(options.directory) as folder:
        comparisons = {name: compare(CASES[name], folder) for name in names}
    add_table(report, comparisons)
    report.add("Where the machine has other work, threads that copy come late, and real steps are longer.")
    report.finish(ratios_of(comparisons))


if __name__ == "__main__":
    main()
