"""A dispatcher that holds: it begins no attempts, and running ones end at a commit and go on when the hold is over."""

import errno
import json
import os
import time

import pytest

from tests.support.service.dispatcher_stage import Stage
from windlass.actors.scheduler.scheduler import PAUSED
from windlass.service.installation.home import BOX_FILE
from windlass.service.machine.fleet import hold
from windlass.service.machine.fleet.content import taken_dir
from windlass.service.machine.fleet.hold import note_answer, read_hold, read_silence, stop_holding, write_hold
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.repositories.jobs import JobRepository

REASON = "box attic is being drained"


@pytest.fixture
def held(stage: Stage) -> Stage:
    write_hold(stage.settings.home, REASON)
    return stage


def test_dispatcher_that_holds_begins_no_attempt_and_says_why(held: Stage) -> None:
    job_id = held.queue_only()
    held.tick(3)
    assert (held.status(job_id), held.job(job_id).waiting_reason) == (JobStatus.QUEUED, REASON)
    assert held.messages(job_id).count(f"Waiting: {REASON}") == 1
    write_hold(held.settings.home, None)
    held.tick()
    assert held.status(job_id) is JobStatus.RUNNING


def test_dispatcher_that_holds_ends_a_running_attempt_and_goes_on_afterwards(stage: Stage) -> None:
    job_id, journal = stage.run()
    stage.put_states(job_id)
    write_hold(stage.settings.home, REASON)
    stage.tick(2)
    assert stage.runners.paused == [(job_id, 1)]
    assert stage.status(job_id) is JobStatus.RUNNING  # its user has asked for nothing
    journal.append("metrics", "Step 1", step=1, total_steps=4, train_loss=1.0)
    journal.append_outcome(PAUSED, "The attempt ended after a commit")
    journal.close()
    stage.tick()
    stage.end_runner(job_id, 1)
    stage.tick(2)
    job = stage.job(job_id)
    assert (job.status, job.num_lost, job.keeps_place) == (JobStatus.QUEUED, 0, True)
    ended = f"Attempt 1 ended after step 1, because {REASON}; the job goes on by itself afterwards"
    assert stage.messages(job_id)[-2:] == [ended, f"Waiting: {REASON}"]
    assert stage.jobs_on_ssds() == [{job_id}, {job_id}]
    write_hold(stage.settings.home, None)
    stage.tick()
    assert (stage.status(job_id), stage.job(job_id).attempt) == (JobStatus.RUNNING, 2)


def test_dispatcher_that_holds_still_cancels(stage: Stage) -> None:
    job_id, journal = stage.run()
    journal.close()
    write_hold(stage.settings.home, REASON)
    stage.request_cancel(job_id)
    stage.tick()
    assert stage.runners.cancelled == [(job_id, 1)]


def test_hold_that_cannot_be_read_counts_as_a_hold(stage: Stage) -> None:
    home = stage.settings.home
    assert read_hold(home) is None
    (home / "hold.json").write_text("{")
    assert read_hold(home) is not None
    write_hold(home, REASON)
    assert read_hold(home) == REASON


def test_dispatcher_holds_by_itself_when_the_lease_is_over_and_no_agent_says_so(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = stage.settings.home
    note_answer(home, lease_s=600)
    assert read_hold(home) is None
    uptime_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    monkeypatch.setattr(time, "clock_gettime", lambda _clock: uptime_s + 601)
    reason = "the head has not answered this box for longer than its lease of 10 minutes"
    job_id = stage.queue_only()
    stage.tick(2)
    assert (stage.status(job_id), stage.job(job_id).waiting_reason) == (JobStatus.QUEUED, reason)
    monkeypatch.undo()
    note_answer(home, lease_s=600)
    stage.tick()
    assert stage.status(job_id) is JobStatus.RUNNING


@pytest.mark.parametrize("step_s", [-86400, 86400])
def test_a_step_of_the_wall_clock_neither_ends_nor_lengthens_the_lease(stage: Stage, step_s: int) -> None:
    path = stage.settings.home / "answered.json"
    note_answer(stage.settings.home, lease_s=600)
    noted_at = path.stat().st_mtime - step_s  # as the clock shows it after the step
    os.utime(path, (noted_at, noted_at))
    silence = read_silence(stage.settings.home)
    assert silence is not None
    assert silence.seconds < 60
    noted = json.loads(path.read_text())
    path.write_text(json.dumps({**noted, "uptime_s": noted["uptime_s"] - 700}))
    assert read_hold(stage.settings.home) is not None


def test_after_another_start_of_the_machine_the_wall_clock_counts(stage: Stage) -> None:
    path = stage.settings.home / "answered.json"
    note_answer(stage.settings.home, lease_s=600)
    path.write_text(json.dumps({**json.loads(path.read_text()), "boot": "another"}))
    assert read_hold(stage.settings.home) is None
    noted_at = time.time() - 601
    os.utime(path, (noted_at, noted_at))
    assert read_hold(stage.settings.home) is not None


def test_an_answer_is_noted_though_the_disk_has_no_room_for_another_file(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = stage.settings.home
    note_answer(home, lease_s=0.0)
    assert read_hold(home) is not None

    def refuse(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(hold, "write_atomically", refuse)
    note_answer(home, lease_s=600)
    assert read_hold(home) is None


def test_home_that_has_left_its_head_holds_no_more(stage: Stage) -> None:
    home = stage.settings.home
    note_answer(home, lease_s=0.0)
    write_hold(home, REASON)
    stop_holding(home)
    assert read_hold(home) is None


def test_housekeeping_of_a_box_deletes_nothing_because_it_is_old(stage: Stage) -> None:
    job_id, journal = stage.run()
    journal.append_outcome("cancelled", "ended")
    journal.close()
    stage.tick()
    stage.end_runner(job_id, 1)
    stage.tick(2)
    (stage.settings.home / BOX_FILE).touch()
    stage.settings = stage.settings.model_copy(update={"keep_jobs_days": 1e-9})
    stage.new_dispatcher()
    stage.tick(3)
    assert stage.status(job_id) is JobStatus.CANCELLED
    taken_dir(stage.settings.home).mkdir()
    (stage.settings.home / BOX_FILE).unlink()
    stage.new_dispatcher()
    stage.tick(3)
    with stage.database.read() as session:
        assert JobRepository(session).find(job_id) is None, "a home that has left its head is like any other"
