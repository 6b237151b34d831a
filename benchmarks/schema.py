"""Checks the API's answers against its own description with random requests.

`python -m benchmarks.schema` sends a hundred thousand valid and invalid requests that schemathesis generates. The
senders are a caller without a key, a user, an administrator, and in one of eight cases a caller with a wrong key.
No request may cause an internal error or an answer that the description lacks, and access control must hold. Every
second request names a model, files, jobs or webhooks of its sender. The requests and checks are in
`tests/unit/service/api/test_schema.py`, of which `make test` and `make test-long` run a part.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest

from benchmarks.reporting.report import Report
from benchmarks.scratch_folder import scratch_folder

_TESTS = "tests/unit/service/api/test_schema.py"
_ROOT = Path(__file__).parent.parent


def main() -> int:
    """Sends the requests and prints the report. Returns 0 if every answer was as described."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.schema", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="50 drawn requests of each operation")
    parser.add_argument("--cases", type=int, default=3300, help="drawn requests of each operation (default: 3300)")
    parser.add_argument("--processes", type=int, default=2, help="processes that send requests (default: 2)")
    options = parser.parse_args()
    cases = 50 if options.quick else options.cases
    report = Report(
        title="Requests made from the API's description",
        directory=Path(tempfile.gettempdir()),
        configuration={
            "requests": f"{cases} drawn for each operation with so many different requests, and one for each part of "
            "its schemas",
            "service": "the app itself, in process, on SQLite; an operation's database is its own",
            "schemathesis, hypothesis": f"{version('schemathesis')}, {version('hypothesis')}",
        },
    )
    with scratch_folder() as folder:
        file = folder / "told"
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "long", _TESTS, "--timeout=0"]
        command += ["-k", "thousands and sqlite", f"--numprocesses={options.processes}"]
        environment = {**os.environ, "SCHEMA_CASES": str(cases), "SCHEMA_TOLD": str(file)}
        begun = time.monotonic()
        ended = subprocess.run(command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        took_s = time.monotonic() - begun
        _tell(report, _read(file), ended, took_s)
    return ended.returncode


def _read(file: Path) -> Counter[tuple[str, int]]:
    """Returns the number of answers by operation and status."""
    counts: Counter[tuple[str, int]] = Counter()
    for line in file.read_text().splitlines() if file.exists() else ():
        for operation, status, number in json.loads(line):
            counts[operation, status] += number
    return counts


def _tell(
    report: Report, counts: Counter[tuple[str, int]], ended: subprocess.CompletedProcess[str], took_s: float
) -> None:
    statuses = sorted({status for _, status in counts})
    rows = []
    for operation in sorted({operation for operation, _ in counts}):
        numbers = [counts[operation, status] for status in statuses]
        rows.append([operation, f"{sum(numbers):,}", *(f"{number:,}" if number else "" for number in numbers)])
    sums = [sum(counts[operation, status] for operation, _ in {(o, 0) for o, _ in counts}) for status in statuses]
    rows.append(["all", f"{counts.total():,}", *(f"{number:,}" for number in sums)])
    report.add_table(("operation", "requests", *map(str, statuses)), rows)
    failed = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if ended.returncode == pytest.ExitCode.INTERRUPTED and not failed:
        report.add("The run was interrupted. Every answer until then was as the description says.")
    elif ended.returncode == 0:
        report.add("Every answer was as the description says; none was an internal error.")
    else:
        report.add("Not as described:", "", *(f"    {line}" for line in failed or ended.stdout.splitlines()[-20:]))
    report.add("")
    report.finish({"requests": counts.total(), "operations": len(rows) - 1, "failed": len(failed), "took_s": took_s})


if __name__ == "__main__":
    sys.exit(main())
