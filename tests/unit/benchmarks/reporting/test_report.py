"""Tables, spreads and the last line of a report."""

import json
from pathlib import Path

import pytest

from benchmarks.reporting.machine import describe_machine, file_system
from benchmarks.reporting.report import Report, ratio, rounded, spread, table


def test_table_columns_are_aligned_and_cells_cannot_break_it() -> None:
    lines = table(("a", "long name"), [("value", "1"), ("x|y", "22")])
    assert lines == [
        "| a     | long name |",
        "|-------|-----------|",
        "| value | 1         |",
        "| x/y   | 22        |",
    ]


def test_spread_shows_median_and_extremes() -> None:
    assert spread([3.0, 1.0, 2.0]) == "2.00 (1.00 to 3.00)"
    assert spread([2048.0], scale=1024, digits=0) == "2 (2 to 2)"
    assert spread([]) == "missing"


def test_ratios_of_missing_things_are_missing() -> None:
    assert ratio(3.0, 2.0) == 1.5
    assert ratio(None, 2.0) is None
    assert ratio(3.0, None) is None
    assert ratio(3.0, 0.0) is None


def test_numbers_are_rounded_at_every_depth() -> None:
    assert rounded({"a": {"b": 1.23456, "c": None, "d": 123456}}) == {"a": {"b": 1.235, "c": None, "d": 123456}}


def test_the_last_line_is_the_object_of_ratios(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("Title", tmp_path, {"rounds": 2})
    report.finish({"step_over_plain": 1.23456, "peak": None})
    printed = capsys.readouterr().out
    assert printed.startswith("# Title\n")
    assert json.loads(printed.splitlines()[-1]) == {"step_over_plain": 1.235, "peak": None}
    assert str(tmp_path) not in printed


def test_the_machine_is_described_without_its_name(tmp_path: Path) -> None:
    rows = dict(describe_machine(tmp_path))
    assert rows.keys() >= {"processor", "memory", "disk", "kernel", "torch", "transformers", "ray", "deepspeed"}
    assert rows["memory"].endswith("GiB")
    assert all("/" not in value for value in rows.values())


def test_file_system_is_that_of_the_deepest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    deep = tmp_path / "with blank"
    deep.mkdir()
    escaped = str(deep).replace(" ", "\\040")
    mounts.write_text(f"a / ext4 rw 0 0\nb {tmp_path} xfs rw 0 0\nc {escaped} btrfs rw 0 0\n")
    assert file_system(deep, mounts) == "btrfs"
    assert file_system(tmp_path, mounts) == "xfs"
    assert file_system(Path("/"), mounts) == "ext4"
