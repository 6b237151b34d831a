"""The service looks at SSDs that are raw block devices: real ones, of files behind loop devices."""

import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from windlass.service.leftovers import jobs_with_states, remove_states
from windlass.service.settings import Settings
from windlass.storage.ids import JobId
from windlass.storage.sql.models import Job
from windlass.storage.volume import Volume
from windlass.storage.volume_format import UNIT_NBYTES, Demand

JOB = JobId("ftjob-1")
IMAGE_NBYTES = 64 << 20


def attach(image: Path) -> str:
    with image.open("wb") as file:
        file.truncate(IMAGE_NBYTES)
    try:
        done = subprocess.run(
            ["losetup", "--find", "--show", str(image)], capture_output=True, text=True, check=False, timeout=60
        )
    except FileNotFoundError:
        pytest.skip("no loop devices here: losetup is not installed")
    if done.returncode != 0:
        pytest.skip(f"no loop devices here: {done.stderr.strip()}")
    return done.stdout.strip()


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Path]:
    name = attach(tmp_path / "disk")
    yield Path(name)
    subprocess.run(["losetup", "--detach", name], check=True, timeout=60)


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
