"""The shards of `make test-long`."""

from pathlib import Path

from tests.support.long_tests import ROOT, shards, summary_of


def test_shards_hold_every_test_file_once() -> None:
    held = [path for paths in shards() for path in paths]
    assert len(held) == len(set(held))
    assert set(held) == {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}


def test_summary_of_a_report_counts_failures_and_errors(tmp_path: Path) -> None:
    report = tmp_path / "shard.xml"
    report.write_text(
        '<testsuites><testsuite tests="7" failures="1" errors="2" skipped="3" time="4.5"></testsuite></testsuites>'
    )
    assert summary_of(report) == (7, 3, 3, 4.5)
