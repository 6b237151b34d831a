"""Leaves out in turn what orders a device's work, and prints a table: the call, the scenario, the reports.

`python -m tests.support.races [PATH ...]` takes the calls of files whose paths begin so.
A call takes up to five seconds.
"""

import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

from tests.support.races.scenarios import reports_without
from tests.support.races.sites import sites
from tests.support.races.table import CAUGHT_BY


def main(paths: list[str]) -> int:
    """Returns 1 if a call that was left out is not reported by name."""
    torch.set_num_threads(1)
    num_missed = 0
    for site in sites():
        scenario = CAUGHT_BY.get(site.path, {}).get(site.call)
        if scenario is None or not site.path.startswith(tuple(paths or [""])):
            continue
        with tempfile.TemporaryDirectory() as directory:
            reports = reports_without(site, scenario, Path(directory))
        kinds = Counter(report.kind.name for report in reports)
        num_missed += not kinds
        shown = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items())) or "nothing"
        print(f"| {site.name} | {scenario} | {shown} |", flush=True)
    return 1 if num_missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
