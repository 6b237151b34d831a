"""Runs all tests, the long ones too, in shards, and goes on where it was stopped: `make test-long`.

A shard is a number of test files. The result of each is kept in `.test-long/`, under the commit and the changes that it
was run with. A shard that has passed is not run again; one that has failed, or was cut off, is.
`python -m tests.support.long_tests --shards 3 7` runs two of them; `--again` forgets what has passed.
"""

import argparse
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from benchmarks.reporting.kept import ROOT, tree_digest
from tests.support.examples import LONG_VARIABLE

RESULTS = ROOT / ".test-long"
NUM_SHARDS = 20


def shards() -> list[list[str]]:
    """The test files of each shard. Files of one folder are spread, because they take about as long as each other."""
    paths = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
    return [paths[index::NUM_SHARDS] for index in range(NUM_SHARDS)]


def summary_of(report: Path) -> tuple[int, int, int, float]:
    """Counts of a JUnit report: tests, failures and errors, skipped tests, and seconds."""
    suite = next(ElementTree.parse(report).iter("testsuite"))
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    seconds = float(suite.get("time", 0))
    return counts["tests"], counts["failures"] + counts["errors"], counts["skipped"], seconds


def run_shard(paths: list[str], report: Path) -> bool:
    """Runs the tests of some files; `report` appears once they have ended. Returns whether all passed."""
    partial = report.with_suffix(".partial")
    command = [sys.executable, "-m", "pytest", "-m", "not gpu", "--durations=5", f"--junitxml={partial}", *paths]
    environment = {**os.environ, LONG_VARIABLE: "1"}
    passed = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode in (0, 5)  # 5: no test
    if partial.exists():
        partial.replace(report if passed else report.with_suffix(".failed.xml"))
    return passed


def main() -> int:
    """1 if a shard has failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, nargs="*", choices=range(1, NUM_SHARDS + 1), metavar="N")
    parser.add_argument("--again", action="store_true", help="run also what has passed")
    options = parser.parse_args()
    folder = RESULTS / tree_digest()
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for number, paths in enumerate(shards(), start=1):
        if options.shards and number not in options.shards:
            continue
        report = folder / f"shard-{number:02}.xml"
        if report.exists() and not options.again:
            print(f"shard {number} of {NUM_SHARDS}: passed before", flush=True)
            continue
        begun_s = time.monotonic()
        print(f"shard {number} of {NUM_SHARDS}: {len(paths)} files", flush=True)
        if not run_shard(paths, report):
            failed.append(number)
        print(f"shard {number} of {NUM_SHARDS}: {time.monotonic() - begun_s:.0f} s", flush=True)
    reports = [summary_of(path) for path in sorted(folder.glob("shard-??.xml"))]
    num_tests, num_skipped, total_s = (sum(row[i] for row in reports) for i in (0, 2, 3))
    print(f"{len(reports)} of {NUM_SHARDS} shards passed: {num_tests} tests, {num_skipped} skipped, {total_s:.0f} s")
    if failed:
        print(f"failed: shards {', '.join(map(str, failed))}; the same command runs them again", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
