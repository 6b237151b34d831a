"""Orphaned states on SSDs that are raw block devices: files behind loop devices."""

import logging
from pathlib import Path

import pytest

from tests.integration.conftest import MakeLoop
from tests.support.disk_images import IMAGE_NBYTES
from windlass.service.data.job_remains import jobs_with_states, remove_states
from windlass.service.installation.settings import Settings
from windlass.storage.ids import JobId
from windlass.storage.sql.models import Job
from windlass.storage.ssd.volume import Volume
from windlass.storage.ssd.volume_format import UNIT_NBYTES, Demand

JOB = JobId("ftjob-1")


@pytest.fixture
def device(make_loop: MakeLoop) -> Path:
    return make_loop()


def test_states_on_a_device_are_found_and_freed(device: Path, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home", ssd_dirs=(device,))
    settings.make_dirs()
    volume = Volume.open(device)
    volume.reserve(JOB, Demand(head_nbytes=UNIT_NBYTES, extent_nbytes=UNIT_NBYTES, num_extents=2))
    try:
        assert jobs_with_states(settings) == {JOB}
        remove_states(settings, Job(id=JOB, model="tiny", suffix=None))
        assert volume.allocations() == {}
    finally:
        volume.close()


@pytest.mark.parametrize("content", [b"", b"somebody's bytes"])
def test_looking_writes_nothing_on_a_device_that_is_not_ours(
    device: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    with device.open("r+b") as file:
        file.write(content)
    settings = Settings(home=tmp_path / "home", ssd_dirs=(device,))
    settings.make_dirs()
    with caplog.at_level(logging.WARNING):
        assert jobs_with_states(settings) == set()
        remove_states(settings, Job(id=JOB, model="tiny", suffix=None))
    assert caplog.records == []
    assert device.read_bytes() == content.ljust(IMAGE_NBYTES, b"\0")
