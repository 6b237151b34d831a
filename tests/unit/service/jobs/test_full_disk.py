"""The service while a disk is full: it waits, or reports it in one line."""

import contextlib
import errno
import os
import re
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from sqlalchemy.exc import OperationalError

from tests.support.service.api_client import context_of, make_model, serve, upload
from tests.support.service.dispatcher_stage import PREPARED, Stage
from windlass.actors.lifecycle.attempt_lock import begin_attempt, tell_alive
from windlass.actors.scheduler.scheduler import INTERRUPTED
from windlass.amounts import bytes_text
from windlass.service.cli import jobs as cli_jobs
from windlass.service.cli.arguments import ids as cli_ids
from windlass.service.cli.errors import reported
from windlass.service.installation import home as home_module
from windlass.service.installation.client import ServiceClient
from windlass.service.installation.home import (
    HomeError,
    HomeLock,
    find_serving,
    is_out_of_room,
    node_of,
    telling_of_disk,
)
from windlass.service.installation.settings import Settings
from windlass.service.machine.ray_cluster import RayCluster
from windlass.service.preparation.pipeline import PreparationError
from windlass.service.processes.supervisor import Child
from windlass.storage.ids import Attempt
from windlass.storage.memory.capacity import directory_nbytes
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.repositories.files import FileRepository
from windlass.storage.sql.repositories.jobs import JobRepository


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A list with one bool, which says that the home's disk is full."""
    is_full = [True]
    free = {True: 3 << 20, False: 1 << 30}
    monkeypatch.setattr(home_module.shutil, "disk_usage", lambda _: SimpleNamespace(free=free[is_full[0]]))
    return is_full


def _reason(stage: Stage) -> str:
    return f"room on the disk of {stage.settings.home}: 64.00 MiB needed, 3.00 MiB free"


def _stop_pulse(stage: Stage, job_id: str) -> None:
    """Stops the runner's signs of life, as if it waited for space for its outcome, or had ended."""
    os.utime(stage.settings.jobs_dir / job_id / f"attempt-{stage.job(job_id).attempt}.lock", (0, 0))


def test_a_running_job_whose_attempt_waits_for_room_says_so_until_there_is_some(stage: Stage, full: list[bool]) -> None:
    full[0] = False
    job_id, _ = stage.run()
    full[0] = True
    stage.tick()
    assert stage.job(job_id).waiting_reason is None  # it still trains
    _stop_pulse(stage, job_id)
    stage.tick(3)
    job = stage.job(job_id)
    assert (job.status, job.waiting_reason) == (JobStatus.RUNNING, _reason(stage))
    assert stage.messages(job_id)[-1] == f"Waiting: {_reason(stage)}"
    assert tell_alive(stage.settings.jobs_dir / job_id, Attempt(1))
    stage.tick()
    assert stage.job(job_id).waiting_reason is None
    assert stage.messages(job_id)[-1] == "The job goes on, though the disk is still nearly full"
    _stop_pulse(stage, job_id)
    stage.tick()
    full[0] = False
    stage.tick(2)
    assert (stage.status(job_id), stage.job(job_id).waiting_reason) == (JobStatus.RUNNING, None)
    assert [message for message in stage.messages(job_id) if "oom on the disk" in message] == [
        f"Waiting: {_reason(stage)}",
        f"Waiting: {_reason(stage)}",
        "There is room on the disk again",
    ]


def test_a_running_job_whose_attempt_has_not_begun_yet_does_not_wait_for_room(stage: Stage, full: list[bool]) -> None:
    full[0] = False
    job_id, _ = stage.run()
    full[0] = True
    (stage.settings.jobs_dir / job_id / "attempt-1.lock").unlink()
    stage.tick()
    assert stage.job(job_id).waiting_reason is None


def test_an_attempt_that_ends_without_room_for_an_outcome_is_told_to_have_died_of_the_full_disk(
    stage: Stage, full: list[bool]
) -> None:
    full[0] = False
    job_id, journal = stage.run()
    journal.append("metrics", "Step 1", step=1, total_steps=4, train_loss=1.0)
    journal.close()
    stage.tick()
    full[0] = True
    _stop_pulse(stage, job_id)
    stage.tick()
    stage.end_runner(job_id)
    stage.tick(2)
    job = stage.job(job_id)
    assert (job.status, job.waiting_reason) == (JobStatus.QUEUED, _reason(stage))
    told = [message for message in stage.messages(job_id) if "was lost" in message]
    assert told == [
        f"Attempt 1 was lost: the disk of {stage.settings.home} was full, so that its runner could not go on, or tell "
        "how it ended; going on from the last committed step"
    ]
    full[0] = False
    stage.tick()
    job = stage.job(job_id)
    assert (job.status, job.waiting_reason) == (JobStatus.RUNNING, None)
    assert job.attempt > 1
    assert stage.messages(job_id)[-1] == "Attempt 2 started"


def test_a_job_whose_database_was_on_the_full_disk_is_told_for_how_long_it_was_full(
    stage: Stage, full: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its attempt ends while nothing can be written; each pass fails."""
    full[0] = False
    job_id, _ = stage.run()
    full[0] = True
    no_room = sqlite3.OperationalError("database or disk is full")
    no_room.sqlite_errorcode = sqlite3.SQLITE_FULL
    refused = OperationalError("UPDATE", None, no_room)

    def refuse() -> bool:
        raise refused

    with monkeypatch.context() as patched:
        patched.setattr(stage.dispatcher._lease, "renew", refuse)
        for _ in range(3):
            with pytest.raises(OperationalError):
                stage.tick()
            stage.now += 5
    stage.end_runner(job_id)
    full[0] = False
    stage.tick()
    lost, told = [message for message in stage.messages(job_id) if "full" in message]
    assert lost.startswith(f"Attempt 1 was lost: the disk of {stage.settings.home} was full, so that its runner")
    assert told == f"The disk of {stage.settings.home} was full for 10 s; there is room again"


def test_an_attempt_that_is_lost_long_after_the_disk_was_full_did_not_die_of_that(
    stage: Stage, full: list[bool]
) -> None:
    full[0] = False
    job_id, _ = stage.run()
    full[0] = True
    stage.tick()
    full[0] = False
    stage.now += 31
    stage.end_runner(job_id)
    stage.tick()
    assert "killed for lack of memory, by hand" in next(each for each in stage.messages(job_id) if "was lost" in each)


def test_the_api_and_the_cli_tell_that_a_job_waits_for_room_where_its_database_cannot(
    tmp_path: Path, full: list[bool], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full[0] = False
    settings = Settings(home=tmp_path, port=8642)
    make_model(settings.models_dir / "tiny")
    with serve(settings) as client:
        file_id = upload(client)
        made = client.post("/v1/fine_tuning/jobs", json={"model": "tiny", "training_file": file_id}).json()
        with context_of(client).database.write() as session:
            jobs = JobRepository(session)
            jobs.transition(made["id"], JobStatus.VALIDATING_FILES, JobStatus.QUEUED, message="")
            jobs.transition(made["id"], JobStatus.QUEUED, JobStatus.RUNNING, message="", attempt=1)
        service = ServiceClient(settings.base_url)
        service._http.close()
        service._http = client
        for module in (cli_ids, cli_jobs):
            monkeypatch.setattr(module, "open_client", lambda _: contextlib.nullcontext(service))
        assert service.job(made["id"])["windlass"]["waiting_reason"] is None
        cli_jobs.jobs(tmp_path)
        assert "waiting for" not in capsys.readouterr().out
        (settings.jobs_dir / made["id"]).mkdir()
        os.close(begin_attempt(settings.jobs_dir / made["id"], Attempt(1)))
        os.utime(settings.jobs_dir / made["id"] / "attempt-1.lock", (0, 0))
        full[0] = True
        reason = f"room on the disk of {tmp_path}: 64.00 MiB needed, 3.00 MiB free"
        job = service.job(made["id"])
        assert (job["status"], job["windlass"]["waiting_reason"]) == ("running", reason)
        cli_jobs.jobs(tmp_path)
        assert capsys.readouterr().out.splitlines()[1].endswith(reason)
        cli_jobs.show(made["id"], tmp_path)
        assert re.search(rf"^waiting for +{re.escape(reason)}$", capsys.readouterr().out, re.MULTILINE)
        with context_of(client).database.write() as session:
            JobRepository(session).transition(made["id"], JobStatus.RUNNING, JobStatus.CANCELLED, message="")
        assert service.job(made["id"])["windlass"]["waiting_reason"] is None


def _lose_attempt_for_room(stage: Stage, path: Path, nbytes: int) -> str:
    """A job whose first attempt found less than `nbytes` free, long enough ago for the next one to begin."""
    job_id, journal = stage.run()
    journal.append("metrics", "Step 1", step=1, total_steps=4, train_loss=1.0)
    error = {"code": "process_lost", "message": "gpu-0: DiskFull: not enough room", "param": None}
    journal.append_outcome(INTERRUPTED, "not enough room", error, room=[str(path), nbytes])
    journal.close()
    stage.end_runner(job_id)
    stage.tick(2)
    stage.now += 1000
    stage.tick()  # the processes of the attempt have ended
    stage.sit_out_the_pause()
    return job_id


def test_a_job_does_not_wait_for_more_room_than_the_whole_disk_has(stage: Stage, tmp_path: Path) -> None:
    job_id = _lose_attempt_for_room(stage, tmp_path, 5 << 60)
    job = stage.job(job_id)
    assert (job.status, job.waiting_reason) == (JobStatus.RUNNING, None)
    assert job.attempt > 1


def test_a_home_whose_disk_does_not_answer_does_not_end_the_dispatcher(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    job_id, _ = stage.run()
    monkeypatch.setattr(home_module.shutil, "disk_usage", fail)
    stage.tick()
    assert stage.status(job_id) is JobStatus.RUNNING


def test_a_job_whose_model_found_no_room_waits_for_as_much_as_it_needs(stage: Stage, tmp_path: Path) -> None:
    job_id = _lose_attempt_for_room(stage, tmp_path, needed := directory_nbytes(tmp_path))
    job = stage.job(job_id)
    assert (job.status, job.attempt) == (JobStatus.QUEUED, 1)
    assert job.waiting_reason is not None
    assert job.waiting_reason.startswith(f"room on the disk of {tmp_path}: {bytes_text(needed)} needed, ")
    stage.dispatcher._watches[job_id].queued.required_space = (tmp_path, 1)
    stage.tick()
    assert (stage.status(job_id), stage.job(job_id).waiting_reason) == (JobStatus.RUNNING, None)


def test_a_job_waits_for_room_and_says_so(stage: Stage, full: list[bool]) -> None:
    full[0] = False
    job_id = stage.submit()
    stage.tick()
    stage.preparations[0].ending = PREPARED
    full[0] = True
    stage.tick(3)
    job = stage.job(job_id)
    assert (job.status, job.attempt) == (JobStatus.QUEUED, 0)
    assert job.waiting_reason == _reason(stage)
    assert stage.messages(job_id)[-1] == f"Waiting: {_reason(stage)}"
    full[0] = False
    stage.tick()
    assert stage.status(job_id) is JobStatus.RUNNING


def test_a_preparation_that_fails_on_a_full_disk_begins_anew(stage: Stage, full: list[bool]) -> None:
    job_id = stage.submit()
    stage.tick()
    assert stage.preparations == []
    assert stage.job(job_id).waiting_reason == _reason(stage)
    full[0] = False
    stage.tick()
    assert stage.job(job_id).waiting_reason is None
    assert stage.messages(job_id)[-1] == "There is room on the disk again"
    stage.preparations[0].ending = PreparationError("prepare_data_failed", "exit code 1, and no result")
    full[0] = True
    stage.tick(2)
    assert (stage.status(job_id), len(stage.preparations)) == (JobStatus.VALIDATING_FILES, 1)
    assert stage.job(job_id).waiting_reason == _reason(stage)
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
    child.tend(100.0)  # the folder does not exist
    log.parent.mkdir()
    child.tend(100.4)
    assert not log.exists()
    child.tend(100.5)
    assert log.exists()
    child.signal_end()
    child.finish(deadline=0.0)


def test_only_lack_of_disk_space_is_reported_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(HomeError, match=f"that of the home {tmp_path}"), telling_of_disk(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(PermissionError), telling_of_disk(tmp_path):
        raise PermissionError(errno.EACCES, "Permission denied")


def test_a_disk_is_full_before_its_last_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_out_of_room(tmp_path)
    monkeypatch.setattr("windlass.service.installation.home.LEAST_FREE_NBYTES", 2**62)
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
def test_partial_record_from_full_disk_is_ignored(tmp_path: Path, content: str) -> None:
    (tmp_path / "windlass.lock").write_text(content)
    (tmp_path / "ray.json").write_text(content)
    assert find_serving(tmp_path) is None
    assert (RayCluster(tmp_path).is_running, RayCluster(tmp_path).pids) == (False, ())
    lock = HomeLock(tmp_path)
    lock.acquire("http://127.0.0.1:1")
    assert find_serving(tmp_path) is not None
    lock.release()


def test_reused_pid_is_no_serving_process(tmp_path: Path) -> None:
    lock = HomeLock(tmp_path)
    lock.acquire("http://127.0.0.1:1")
    file = tmp_path / "windlass.lock"
    assert find_serving(tmp_path) is not None  # it names this process, which is alive
    start = file.read_text().split('"start": "')[1].split('"')[0]
    file.write_text(file.read_text().replace(start, f"{start}0"))
    assert find_serving(tmp_path) is None
    lock.release()


def test_a_command_that_finds_no_room_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    @reported
    def refused(code: int) -> None:
        raise OSError(code, "Odd", "/home/x")

    with pytest.raises(typer.Exit):
        refused(errno.ENOSPC)
    assert capsys.readouterr().err == "error: a disk is full ([Errno 28] Odd: '/home/x'); make room\n"
    with pytest.raises(OSError, match="Odd"):
        refused(errno.EIO)
