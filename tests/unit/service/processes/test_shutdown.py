"""The effect of `windlass down --force` on jobs, once their processes have ended with Ray."""

import getpass
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.service.dispatcher_stage import Stage
from windlass.actors.scheduler.scheduler import INTERRUPTED, PAUSED
from windlass.service.installation.settings import Settings
from windlass.service.processes import shutdown as lifecycle
from windlass.storage.sql.database import Database, migrate
from windlass.storage.sql.job_status import JobStatus


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    settings = Settings(home=tmp_path)
    settings.make_dirs()
    migrate(settings.database_url)
    database = Database(settings.database_url)
    yield Stage(tmp_path, database)
    database.close()


@pytest.mark.parametrize("was_interrupted", [False, True])
def test_a_running_job_fails_and_leaves_nothing(stage: Stage, was_interrupted: bool) -> None:
    """Also if its runner first saw the other processes die, and reported it."""
    job_id, journal = stage.run()
    stage.put_states(job_id)
    if was_interrupted:
        error = {"code": "process_lost", "message": "the process of ssd-1 died", "param": None}
        journal.append_outcome(INTERRUPTED, "the process of ssd-1 died", error)
    journal.close()
    assert lifecycle._fail_jobs_left(stage.settings) == (job_id,)
    error = stage.job(job_id).error or {}
    assert error["code"] == "service_stopped"
    assert stage.audit() == [("shut_down", job_id, getpass.getuser(), "command line")]
    assert stage.jobs_on_ssds() == [set(), set()]


def test_a_job_to_be_cancelled_is_cancelled(stage: Stage) -> None:
    job_id, journal = stage.run()
    journal.close()
    stage.request_cancel(job_id)
    assert lifecycle._fail_jobs_left(stage.settings) == ()
    assert stage.status(job_id) is JobStatus.CANCELLED
    assert [target for _, target, _, _ in stage.audit()] == [job_id]


def test_a_job_whose_attempt_ended_for_another_goes_on_when_the_service_is_back(stage: Stage) -> None:
    job_id, journal = stage.run()
    stage.put_states(job_id)
    journal.append_outcome(PAUSED, "The attempt ended after a commit")
    journal.close()
    assert lifecycle._fail_jobs_left(stage.settings) == ()
    assert stage.status(job_id) is JobStatus.QUEUED
    assert stage.audit() == []
    assert stage.jobs_on_ssds() == [{job_id}, {job_id}]


def test_a_job_that_pauses_is_paused_at_its_last_commit(stage: Stage) -> None:
    job_id, journal = stage.run()
    journal.close()
    stage.put_states(job_id)
    stage.request_pause(job_id)
    assert lifecycle.running_jobs(stage.settings) == (job_id,)
    assert lifecycle._fail_jobs_left(stage.settings) == ()
    assert stage.status(job_id) is JobStatus.PAUSED
    assert [target for _, target, _, _ in stage.audit()] == [job_id]
    assert stage.jobs_on_ssds() == [{job_id}, {job_id}]


def test_jobs_of_another_home_on_the_same_database_are_left_alone(stage: Stage) -> None:
    stage.node = "node-elsewhere"
    stage.new_dispatcher()
    job_id, journal = stage.run()
    journal.close()
    assert lifecycle.running_jobs(stage.settings) == ()
    assert lifecycle._fail_jobs_left(stage.settings) == ()
    assert stage.status(job_id) is JobStatus.RUNNING
    assert stage.audit() == []
