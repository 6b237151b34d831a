"""Several SSDs at once: each by a separate process, and nothing is left behind."""

from pathlib import Path

import pytest

from windlass.actors.job.admission import calibrated
from windlass.planner.profiling.combined_ssds import bytes_per_s_together


def test_all_are_driven_and_nothing_stays(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        with calibrated(path, {}):
            pass
    used = [used_nbytes(path) for path in paths]
    assert bytes_per_s_together(paths) > 1e6
    for path, before in zip(paths, used, strict=True):
        with calibrated(path, {}) as (volume, _):
            assert not volume.allocations()
        assert used_nbytes(path) == before


def used_nbytes(folder: Path) -> int:
    """The bytes that a folder's files have on the disk."""
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*"))


def test_one_that_fails_is_named(tmp_path: Path) -> None:
    good = tmp_path / "good"
    with calibrated(good, {}):
        pass
    with pytest.raises(RuntimeError, match="nowhere, beside others: "):
        bytes_per_s_together([good, Path("/proc/nowhere")])
