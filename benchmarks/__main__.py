"""Runs every benchmark and stores its report: `python -m benchmarks [--quick] [NAME ...]`"""

import argparse
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

NAMES = (
    "activations",
    "active_gradient",
    "api",
    "chaos",
    "cluster",
    "device_memory",
    "dispatch",
    "fairness",
    "memory",
    "network",
    "optimizer",
    "overflow",
    "planner",
    "scaling",
    "scheduler",
    "simulator",
    "ssd",
    "ssds",
    "step",
    "vertical",
)
REPORTS_DIR = Path(__file__).parent / "reports"


def run_benchmark(name: str, options: list[str]) -> tuple[int, str]:
    """Runs a benchmark in its own process and shows its output at once. Returns its exit code and its output."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            lines.append(line)
    return process.returncode, "".join(lines)


def write_report(name: str, text: str, reports_dir: Path, now: datetime) -> Path:
    """Writes a report to a file named by its date."""
    reports_dir.mkdir(exist_ok=True)
    path = reports_dir / f"{now:%Y-%m-%d}-{name}.md"
    path.write_text(text)
    return path


def main() -> int:
    """Returns 0 if all benchmarks succeeded. Reports of quick forms are not stored."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(NAMES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="the small form of each, without keeping a report")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(NAMES)):
        parser.error(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(NAMES)}")
    failed = []
    for name in options.names or NAMES:
        returncode, text = run_benchmark(name, ["--quick"] if options.quick else [])
        if returncode != 0:
            failed.append(name)
        elif not options.quick:
            print(f"kept as {write_report(name, text, REPORTS_DIR, datetime.now(UTC)).name}", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
