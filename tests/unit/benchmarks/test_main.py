"""`python -m benchmarks`: all benchmarks, and their reports."""

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from benchmarks.__main__ import NAMES, run_benchmark, write_report


def test_a_report_is_kept_under_its_date(tmp_path: Path) -> None:
    path = write_report("step", "# text\n", tmp_path / "reports", datetime(2031, 2, 3, tzinfo=UTC))
    assert path == tmp_path / "reports" / "2031-02-03-step.md"
    assert path.read_text() == "# text\n"


def test_output_is_shown_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    returncode, text = run_benchmark("step", ["--help"])
    assert returncode == 0
    assert "--quick" in text
    assert capsys.readouterr().out == text


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks", "stpe"], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 2
    assert f"no such benchmark: stpe; there are {', '.join(NAMES)}" in result.stderr
