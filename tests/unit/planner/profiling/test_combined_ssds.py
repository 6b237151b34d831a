"""Several SSDs at once: each by a separate process, and nothing is left behind."""

from pathlib import Path

import pytest

from windlass.actors.job.admission import calibrated
from windlass.planner.profiling.combined_ssds import bytes_per_s_together
from windlass.storage.ssd.volume import Volume


def test_all_are_driven_and_nothing_stays(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        with calibrated(path, {}):
            pass
    free = [volume_free_nbytes(path) for path in paths]
    assert bytes_per_s_together(paths) > 1e6
    for path, before in zip(paths, free, strict=True):
        with calibrated(path, {}) as (volume, _):
            assert not volume.allocations()
        assert volume_free_nbytes(path) >= before - (64 << 20)  # other tests use the disk as well


def test_one_that_fails_is_named(tmp_path: Path) -> None:
    good = tmp_path / "good"
    with calibrated(good, {}):
        pass
    with pytest.raises(RuntimeError, match="nowhere, beside others: "):
        bytes_per_s_together([good, Path("/proc/nowhere")])


def volume_free_nbytes(path: Path) -> int:
    volume = Volume.open(path)
    try:
        return volume.free_nbytes()
    finally:
        volume.close()
