"""Remains of jobs on SSDs and beside exports: found and removed in any state of the SSDs."""

import logging
import shutil
from pathlib import Path

import pytest

from windlass.engine.checkpoint.atomic_folder import make_partial_folder
from windlass.service.data.job_remains import jobs_with_states, output_dir, remove_states
from windlass.service.installation.settings import Settings
from windlass.storage.ids import JobId
from windlass.storage.integrity.records import RECORD_NBYTES
from windlass.storage.sql.models import Job
from windlass.storage.ssd.volume import VOLUME_FILE, Volume
from windlass.storage.ssd.volume_format import UNIT_NBYTES, Demand

ONE, OTHER = JobId("ftjob-1"), JobId("ftjob-2")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = Settings(home=tmp_path)
    settings.make_dirs()
    return settings


def job(job_id: str = ONE) -> Job:
    return Job(id=job_id, model="tiny", suffix=None)


def put_states(ssd_dir: Path, *jobs: JobId) -> None:
    volume = Volume.open(ssd_dir, direct=False)
    for each in jobs:
        volume.reserve(each, Demand(head_nbytes=UNIT_NBYTES, extent_nbytes=UNIT_NBYTES, num_extents=2))
    volume.close()


def jobs_on(ssd_dir: Path) -> set[JobId]:
    volume = Volume.open(ssd_dir, direct=False)
    found = set(volume.allocations())
    volume.close()
    return found


def test_every_ssd_is_looked_at(settings: Settings) -> None:
    put_states(settings.ssd_dirs[0], ONE)
    put_states(settings.ssd_dirs[1], OTHER)
    assert jobs_with_states(settings) == {ONE, OTHER}


def test_a_jobs_states_are_freed_on_every_ssd_and_no_other_jobs(settings: Settings) -> None:
    for ssd_dir in settings.ssd_dirs:
        put_states(ssd_dir, ONE, OTHER)
    remove_states(settings, job())
    assert [jobs_on(ssd_dir) for ssd_dir in settings.ssd_dirs] == [{OTHER}, {OTHER}]
    remove_states(settings, job())


@pytest.mark.parametrize("content", [None, b"", bytes(4 * UNIT_NBYTES)])
def test_looking_makes_no_volume(settings: Settings, content: bytes | None) -> None:
    """Neither in an empty directory, nor from a partial file of a killed process."""
    file = settings.ssd_dirs[0] / VOLUME_FILE
    if content is not None:
        file.write_bytes(content)
    assert jobs_with_states(settings) == set()
    remove_states(settings, job())
    assert file.exists() == (content is not None)
    assert content is None or file.read_bytes() == content
    assert list(settings.ssd_dirs[1].iterdir()) == []


def test_an_ssd_that_is_missing_is_logged_and_holds_up_no_other(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    missing, there = settings.ssd_dirs
    put_states(there, ONE)
    missing.rmdir()
    with caplog.at_level(logging.WARNING):
        assert jobs_with_states(settings) == {ONE}
        remove_states(settings, job())
    assert jobs_on(there) == set()
    assert [record.getMessage().startswith(f"SSD {missing} is passed over") for record in caplog.records] == [True] * 2
    assert not missing.exists()


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 2 * RECORD_NBYTES), (UNIT_NBYTES, 2 * UNIT_NBYTES)])
def test_an_ssd_that_is_damaged_holds_up_no_other(settings: Settings, offset: int, nbytes: int) -> None:
    """Both of its superblocks are damaged, or both of its allocation tables."""
    damaged, sound = settings.ssd_dirs
    for ssd_dir in settings.ssd_dirs:
        put_states(ssd_dir, ONE)
    with (damaged / VOLUME_FILE).open("r+b") as file:
        file.seek(offset)
        file.write(b"x" * nbytes)
    assert jobs_with_states(settings) == {ONE}
    remove_states(settings, job())
    assert jobs_on(sound) == set()


def test_an_ssd_that_cannot_be_opened_is_logged(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    (settings.ssd_dirs[0] / VOLUME_FILE).mkdir()
    with caplog.at_level(logging.WARNING):
        assert jobs_with_states(settings) == set()
    (logged,) = caplog.messages
    assert logged.startswith(f"SSD {settings.ssd_dirs[0]} is passed over: ")


def test_half_written_exports_of_the_job_are_removed_and_whole_ones_stay(settings: Settings) -> None:
    mine, other = output_dir(settings, job()), output_dir(settings, job(OTHER))
    mine.mkdir()
    checkpoint = mine.with_name(f"{mine.name}-step-5")
    make_partial_folder(mine)
    make_partial_folder(checkpoint)
    kept = make_partial_folder(other)
    remove_states(settings, job())
    assert set(settings.fine_tuned_dir.iterdir()) == {mine, kept}


def test_an_export_that_cannot_be_removed_is_logged(
    settings: Settings, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_folder: Path) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    make_partial_folder(output_dir(settings, job()))
    with caplog.at_level(logging.WARNING):
        remove_states(settings, job())
    (logged,) = caplog.messages
    assert logged.endswith("could not be removed: not yours")
