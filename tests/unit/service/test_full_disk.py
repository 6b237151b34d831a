"""What the service does while a disk is full: it waits, or says so in one line."""

import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from tests.unit.service.dispatcher_stage import PREPARED, Stage
from windlass.service import dispatcher as dispatcher_module
from windlass.service.cli_errors import reported
from windlass.service.home import HomeError, HomeLock, find_serving, is_out_of_room, node_of, telling_of_disk
from windlass.service.preparation import PreparationError
from windlass.service.ray_cluster import RayCluster
from windlass.service.supervisor import Child
from windlass.storage.sql.files import FileRepository
from windlass.storage.sql.statuses import JobStatus


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the home's disk is."""
    is_full = [True]
    monkeypatch.setattr(dispatcher_module, "is_out_of_room", lambda home: is_full[0])
    return is_full


def test_a_job_waits_for_room_and_says_so(stage: Stage, full: list[bool]) -> None:
    full[0] = False
    job_id = stage.submit()
    stage.tick()
    stage.preparations[0].ending = PREPARED
    full[0] = True
    stage.tick(3)
    job = stage.job(job_id)
    assert (job.status, job.attempt) == (JobStatus.QUEUED, 0)
    assert job.waiting_reason == f"less than 64 MiB are free on the disk of {stage.settings.home}"
    full[0] = False
    stage.tick()
    assert stage.status(job_id) is JobStatus.RUNNING


def test_a_preparation_that_fails_on_a_full_disk_begins_anew(stage: Stage, full: list[bool]) -> None:
    job_id = stage.submit()
    stage.tick()
    assert stage.preparations == []
    full[0] = False
    stage.tick()
    stage.preparations[0].ending = PreparationError("prepare_data_failed", "exit code 1, and no result")
    full[0] = True
    stage.tick(2)
    assert (stage.status(job_id), len(stage.preparations)) == (JobStatus.VALIDATING_FILES, 1)
    full[0] = False
    stage.tick()
    stage.preparations[1].ending = PREPARED
    stage.tick(2)
    assert stage.status(job_id) is JobStatus.RUNNING


def test_an_attempt_that_cannot_begin_for_lack_of_room_is_lost_and_not_failed(stage: Stage) -> None:
    stage.runners.refusal = OSError(errno.ENOSPC, "No space left on device")
    job_id = stage.queue()
    assert (stage.status(job_id), stage.job(job_id).attempt) == (JobStatus.QUEUED, 1)
    stage.runners.refusal = None
    stage.tick()
    stage.sit_out_the_pause()
    assert (stage.status(job_id), stage.job(job_id).attempt) == (JobStatus.RUNNING, 2)


def test_a_result_file_that_could_not_be_recorded_is_written_again_in_its_place(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, journal = stage.run()
    stage.export_model()
    journal.append_outcome("succeeded", "The model is ready", trained_tokens=10)
    journal.close()
    stage.end_runner(job_id)
    add = FileRepository.add

    def fail_once(self: FileRepository, **fields: object) -> None:
        monkeypatch.setattr(FileRepository, "add", add)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FileRepository, "add", fail_once)
    stage.tick()
    assert stage.status(job_id) is JobStatus.RUNNING
    stage.tick()
    job = stage.job(job_id)
    assert job.status is JobStatus.SUCCEEDED
    assert [path.name for path in stage.settings.files_dir.iterdir()] == job.result_files


def test_a_child_whose_log_cannot_be_opened_is_started_later(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "api.log"
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    child = Child("api", command, environment=os.environ, log_path=log, cwd=tmp_path, fds=())
    child.tend(100.0)  # the folder is not there
    log.parent.mkdir()
    child.tend(100.4)
    assert not log.exists()
    child.tend(100.5)
    assert log.exists()
    child.signal_end()
    child.finish(deadline=0.0)


def test_lack_of_room_is_told_in_one_line_and_nothing_else_is(tmp_path: Path) -> None:
    with pytest.raises(HomeError, match=f"that of the home {tmp_path}"), telling_of_disk(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(PermissionError), telling_of_disk(tmp_path):
        raise PermissionError(errno.EACCES, "Permission denied")


def test_a_disk_is_full_before_its_last_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_out_of_room(tmp_path)
    monkeypatch.setattr("windlass.service.home.LEAST_FREE_NBYTES", 2**62)
    assert is_out_of_room(tmp_path)


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    yield
    monkeypatch.undo()


def test_a_home_gets_its_name_whole_or_not_at_all(tmp_path: Path, no_room: None) -> None:
    with pytest.raises(OSError, match="No space left"):
        node_of(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["", "null", "{}", '{"process": {"pid": 1}}', '{"address": "x", "core": [1]}'])
def test_what_a_full_disk_left_of_a_record_is_no_record(tmp_path: Path, content: str) -> None:
    (tmp_path / "windlass.lock").write_text(content)
    (tmp_path / "ray.json").write_text(content)
    assert find_serving(tmp_path) is None
    assert (RayCluster(tmp_path).is_running, RayCluster(tmp_path).pids) == (False, ())
    lock = HomeLock(tmp_path)
    lock.acquire("http://127.0.0.1:1")
    assert find_serving(tmp_path) is not None
    lock.release()


def test_a_pid_that_is_another_process_by_now_serves_nobody(tmp_path: Path) -> None:
    lock = HomeLock(tmp_path)
    lock.acquire("http://127.0.0.1:1")
    lock.release()
    file = tmp_path / "windlass.lock"
    assert find_serving(tmp_path) is not None  # it names this process, which lives
    start = file.read_text().split('"start": "')[1].split('"')[0]
    file.write_text(file.read_text().replace(start, f"{start}0"))
    assert find_serving(tmp_path) is None


def test_a_command_that_finds_no_room_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    @reported
    def refused(code: int) -> None:
        raise OSError(code, "Odd", "/home/x")

    with pytest.raises(typer.Exit):
        refused(errno.ENOSPC)
    assert capsys.readouterr().err == "error: a disk is full ([Errno 28] Odd: '/home/x'); make room\n"
    with pytest.raises(OSError, match="Odd"):
        refused(errno.EIO)
