"""Starts of Ray's daemon that fail, without Ray."""

import logging
from pathlib import Path

import pytest

from windlass.service.machine.ray_cluster import RayCluster, RayStartError, _StartEndedError


class Cluster(RayCluster):
    """A cluster whose starts fail as the test says."""

    def __init__(self, home: Path, *failures: RayStartError) -> None:
        super().__init__(home)
        self.failures = list(failures)
        self.num_starts = 0

    def _start(self, *, num_cpus: int, num_gpus: int, num_devices: int) -> None:
        self.num_starts += 1
        if self.failures:
            raise self.failures.pop(0)


def test_start_that_ended_with_an_error_is_tried_once_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(tmp_path, _StartEndedError("`ray start` failed (exit code 1)"))
    with caplog.at_level(logging.WARNING):
        assert cluster.ensure_running(num_cpus=1, num_gpus=0)
    assert cluster.num_starts == 2
    assert "`ray start` failed (exit code 1); it is started once more" in caplog.text


def test_second_failure_and_a_start_without_an_end_are_reported(tmp_path: Path) -> None:
    twice = Cluster(tmp_path, _StartEndedError("first"), _StartEndedError("second"))
    with pytest.raises(RayStartError, match="second"):
        twice.ensure_running(num_cpus=1, num_gpus=0)
    late = Cluster(tmp_path, RayStartError("it did not finish within 120 s"))
    with pytest.raises(RayStartError, match="did not finish"):
        late.ensure_running(num_cpus=1, num_gpus=0)
    assert (twice.num_starts, late.num_starts) == (2, 1)
