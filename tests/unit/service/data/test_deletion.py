"""Deletion over HTTP, and removal by the dispatcher: all that is deleted goes, and nothing that is needed."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.support.service.api_client import context_of, make_model, upload
from tests.support.service.dispatcher_stage import Stage
from tests.support.service.keyed import World, keyed_world
from windlass.actors.scheduler.scheduler import PAUSED
from windlass.service.data import deletion
from windlass.service.installation.settings import Settings
from windlass.service.validation.request_errors import ApiError
from windlass.storage.sql.database import Database
from windlass.storage.sql.errors import StatusConflict
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.models import Job, JobEvent, JobMetrics
from windlass.storage.sql.repositories.deletions import DeletionRepository
from windlass.storage.sql.repositories.events import EventRepository
from windlass.storage.sql.repositories.files import FileRepository
from windlass.storage.sql.repositories.jobs import JobRepository

JOBS = "/v1/fine_tuning/jobs"


@pytest.fixture
def stage(settings: Settings, client: TestClient) -> Iterator[Stage]:
    """A dispatcher beside the API, on the same home."""
    database = Database(settings.database_url)
    yield Stage(settings.home, database)
    database.close()


def train(stage: Stage, *, checkpoints: tuple[int, ...] = (2,), **about: Any) -> str:
    """A running job that has reported two steps and has made checkpoints."""
    job_id, journal = stage.run()
    for step in (1, 2):
        journal.append("metrics", f"Step {step}", step=step, total_steps=4, train_loss=1.0 / step)
    for step in checkpoints:
        export(stage, job_id, step)
        name = f"{model_of(stage, job_id)}-step-{step}"
        data = {"fine_tuned_model_checkpoint": name, "step_number": step, "path": "", "reasons": ["interval"], **about}
        journal.append("checkpoint", f"Checkpoint of step {step} written", **data)
    journal.close()
    stage.tick()
    return job_id


def model_of(stage: Stage, job_id: str) -> str:
    return f"ft:tiny::{job_id.removeprefix('ftjob-')[:12]}"


def export(stage: Stage, job_id: str, step: int | None = None) -> Path:
    name = model_of(stage, job_id) + ("" if step is None else f"-step-{step}")
    make_model(stage.settings.fine_tuned_dir / name)
    return stage.settings.fine_tuned_dir / name


def succeed(stage: Stage, **about: Any) -> str:
    """A job with a model, a checkpoint and a result file, without running processes."""
    job_id = train(stage, **about)
    export(stage, job_id)
    journal = stage.journal(job_id, 1)
    journal.append_outcome("succeeded", "The model is ready")
    journal.close()
    stage.tick()
    stage.end_runner(job_id)
    stage.tick(2)
    assert stage.status(job_id) is JobStatus.SUCCEEDED
    return job_id


def refusal(response: Any, code: str, status: int = 400) -> str:
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code), error
    return str(error["message"])


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def pass_a_second(stage: Stage) -> None:
    stage.now += 1
    stage.tick()


# --- jobs ---


def test_a_deleted_job_leaves_its_model_and_nothing_else(stage: Stage, client: TestClient) -> None:
    job_id, other = succeed(stage), succeed(stage)
    (result_file,) = stage.job(job_id).result_files
    model = model_of(stage, job_id)
    answer = client.delete(f"{JOBS}/{job_id}")
    assert answer.json() == {"id": job_id, "object": "fine_tuning.job", "deleted": True}
    # Deleted at once for all clients, even if files are still on the disks.
    for path in (
        f"{JOBS}/{job_id}",
        f"{JOBS}/{job_id}/events",
        f"/v1/files/{result_file}",
        f"/v1/models/{model}-step-2",
    ):
        assert client.get(path).status_code == 404, path
    assert [job["id"] for job in client.get(JOBS).json()["data"]] == [other]
    assert {each["id"] for each in client.get("/v1/models").json()["data"]} == {
        *("tiny", model, model_of(stage, other), f"{model_of(stage, other)}-step-2")
    }
    assert client.delete(f"{JOBS}/{job_id}").status_code == 404
    pass_a_second(stage)
    assert names(stage.settings.jobs_dir) == {other}
    assert names(stage.settings.fine_tuned_dir) == {model, model_of(stage, other), f"{model_of(stage, other)}-step-2"}
    assert names(stage.settings.files_dir) == set(stage.job(other).result_files)
    with stage.database.read() as session:
        for table in (JobEvent, JobMetrics):
            assert session.query(table).filter_by(job_id=job_id).count() == 0
        assert session.query(Job).count() == 1
        assert list(DeletionRepository(session).jobs_to_remove(stage.node)) == []
        assert list(DeletionRepository(session).to_remove(stage.node)) == []


def test_delete_job_with_delete_model_removes_model(stage: Stage, client: TestClient) -> None:
    job_id = succeed(stage)
    assert client.delete(f"{JOBS}/{job_id}", params={"delete_model": True}).status_code == 200
    assert client.get(f"/v1/models/{model_of(stage, job_id)}").status_code == 404
    pass_a_second(stage)
    assert names(stage.settings.fine_tuned_dir) == set()


def test_the_model_of_a_deleted_job_can_be_deleted_later(stage: Stage, client: TestClient) -> None:
    job_id = succeed(stage)
    client.delete(f"{JOBS}/{job_id}")
    assert client.delete(f"/v1/models/{model_of(stage, job_id)}").status_code == 200
    assert client.get(f"/v1/models/{model_of(stage, job_id)}").status_code == 404


@pytest.mark.parametrize(
    "statuses",
    [
        (),
        (JobStatus.QUEUED,),
        (JobStatus.QUEUED, JobStatus.RUNNING),
        (JobStatus.QUEUED, JobStatus.RUNNING, JobStatus.PAUSING),
        (JobStatus.QUEUED, JobStatus.PAUSED),
    ],
)
def test_a_job_that_is_not_finished_stays(client: TestClient, file_id: str, statuses: tuple[JobStatus, ...]) -> None:
    job_id = client.post(JOBS, json={"model": "tiny", "training_file": file_id}).json()["id"]
    with context_of(client).database.write() as session:
        jobs = JobRepository(session)
        for status in statuses:
            jobs.transition(job_id, jobs.get(job_id).status, status, message="")
    message = refusal(client.delete(f"{JOBS}/{job_id}"), "invalid_state")
    status = statuses[-1] if statuses else JobStatus.VALIDATING_FILES
    assert f"job {job_id} is {status}; only finished jobs are deleted: cancel it first" in message
    assert client.get(f"{JOBS}/{job_id}").status_code == 200


def test_a_job_that_went_on_since_it_was_looked_at_is_not_deleted(stage: Stage, settings: Settings) -> None:
    """The condition is part of the statement."""
    job_id = stage.submit()
    with pytest.raises(StatusConflict), stage.database.write() as session:
        DeletionRepository(session).delete_job(JobRepository(session).get(job_id), model="x", keeps_model=False)
    assert stage.status(job_id) is JobStatus.VALIDATING_FILES


@pytest.mark.parametrize("used", ["model", "checkpoint"])
def test_model_that_another_job_starts_from_is_kept(stage: Stage, client: TestClient, used: str) -> None:
    job_id = succeed(stage)
    model = model_of(stage, job_id) + ("-step-2" if used == "checkpoint" else "")
    user = client.post(JOBS, json={"model": model, "training_file": upload(client)}).json()["id"]
    (checkpoint,) = client.get(f"{JOBS}/{job_id}/checkpoints").json()["data"]
    urls = [f"/v1/models/{model}", f"{JOBS}/{job_id}?delete_model=true"]
    urls += [f"{JOBS}/{job_id}/checkpoints/{checkpoint['id']}", f"{JOBS}/{job_id}"] if used == "checkpoint" else []
    for url in urls:
        assert f"is in use by job {user}; cancel it first" in refusal(client.delete(url), "model_in_use"), url
    assert (stage.settings.fine_tuned_dir / model / "config.json").exists()
    client.post(f"{JOBS}/{user}/cancel")
    for url in urls[:2]:
        assert client.delete(url).status_code == 200, url


def test_deletion_error_names_no_job_of_another_user(settings: Settings) -> None:
    """An admin may use objects of other users. The error for the owner does not name the admin's job."""
    with keyed_world(settings) as world:
        theirs = world.things["alice"]
        with context_of(world.client).database.write() as session:
            (job,) = [
                JobRepository(session).get(row.id)
                for row in JobRepository(session, "bob").page(limit=9, after=None, metadata={}).rows
                if row.status is JobStatus.QUEUED
            ]
            job.model = theirs.model
        told = {who: world.ask(who, "DELETE", f"/v1/models/{theirs.model}") for who in ("alice", "root")}
        assert "is in use by a job of another user" in refusal(told["alice"], "model_in_use")
        assert f"is in use by job {job.id}" in refusal(told["root"], "model_in_use")


def test_model_of_deleted_job_keeps_its_owner(settings: Settings) -> None:
    with keyed_world(settings) as world:
        model = world.things["alice"].model
        (done,) = [job for job in jobs_of(world, "alice") if job["fine_tuned_model"] == model]
        assert world.ask("bob", "DELETE", f"{JOBS}/{done['id']}").status_code == 404
        assert world.ask("alice", "DELETE", f"{JOBS}/{done['id']}").status_code == 200
        asked = {who: world.ask(who, "GET", f"/v1/models/{model}").status_code for who in ("alice", "bob", "root")}
        assert asked == {"alice": 200, "bob": 404, "root": 200}


def jobs_of(world: World, who: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = world.ask(who, "GET", JOBS).json()["data"]
    return found


# --- when it is removed ---


def test_nothing_is_removed_while_a_process_of_the_job_lives(stage: Stage, client: TestClient) -> None:
    """The job is over, and its runner still needs some time to end."""
    job_id = train(stage)
    stage.put_states(job_id)
    with stage.worker(job_id, 1) as worker:
        stage.request_cancel(job_id)
        journal = stage.journal(job_id, 1)
        journal.append_outcome("cancelled", "The job was cancelled")
        journal.close()
        stage.tick()
        stage.end_runner(job_id)
        message = refusal(client.delete(f"{JOBS}/{job_id}"), "invalid_state")
        assert message == f"the processes of job {job_id} have not ended yet; try again soon"
        pass_a_second(stage)
        assert names(stage.settings.jobs_dir) == {job_id}
        assert stage.jobs_on_ssds() == [{job_id}, {job_id}]
        worker.kill()
        worker.wait()
    # Whether the dispatcher has noticed that or not.
    assert client.delete(f"{JOBS}/{job_id}").status_code == 200
    assert stage.jobs_on_ssds() == [{job_id}, {job_id}]
    stage.tick()
    assert stage.jobs_on_ssds() == [set(), set()]
    pass_a_second(stage)
    assert names(stage.settings.jobs_dir) == names(stage.settings.fine_tuned_dir) == set()


def test_a_job_that_is_deleted_while_it_is_prepared_leaves_no_folder(stage: Stage, client: TestClient) -> None:
    job_id = stage.submit()
    stage.tick()
    (stage.settings.jobs_dir / job_id / "prepare").mkdir(parents=True)
    client.post(f"{JOBS}/{job_id}/cancel")
    assert client.delete(f"{JOBS}/{job_id}").status_code == 200
    pass_a_second(stage)
    pass_a_second(stage)
    assert stage.preparations[-1].stopped
    assert names(stage.settings.jobs_dir) == set()


def test_states_on_an_ssd_that_was_away_are_freed_when_it_is_back(stage: Stage, client: TestClient) -> None:
    job_id = succeed(stage)
    stage.put_states(job_id)
    away = stage.settings.ssd_dirs[1]
    away.rename(away.with_name("unplugged"))
    client.delete(f"{JOBS}/{job_id}")
    pass_a_second(stage)
    assert names(stage.settings.jobs_dir) == set()
    away.with_name("unplugged").rename(away)
    assert stage.jobs_on_ssds() == [set(), {job_id}]
    stage.new_dispatcher()
    stage.tick(2)
    assert stage.jobs_on_ssds() == [set(), set()]


def test_states_of_unknown_jobs_are_left_alone(stage: Stage) -> None:
    """They may belong to another installation."""
    stage.put_states("ftjob-unknown")
    stage.new_dispatcher()
    pass_a_second(stage)
    assert stage.jobs_on_ssds() == [{"ftjob-unknown"}, {"ftjob-unknown"}]


class Killed(BaseException):
    """No code catches it, like a SIGKILL."""


def test_a_removal_that_is_cut_off_anywhere_is_finished_later_and_meanwhile_answers_nothing(
    stage: Stage, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = succeed(stage, checkpoints=(1, 2))
    stage.put_states(job_id)
    (result_file,) = stage.job(job_id).result_files
    client.delete(f"{JOBS}/{job_id}", params={"delete_model": True})
    num_cut_off = 0
    while cut_off(stage, num_cut_off + 1, monkeypatch):
        num_cut_off += 1
        for path in (f"{JOBS}/{job_id}", f"/v1/files/{result_file}", f"/v1/models/{model_of(stage, job_id)}"):
            assert client.get(path).status_code == 404
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny"]
        stage.new_dispatcher()
    assert num_cut_off > 3
    pass_a_second(stage)
    assert [names(path) for path in (stage.settings.jobs_dir, stage.settings.fine_tuned_dir)] == [set(), set()]
    assert names(stage.settings.files_dir) == set()
    assert stage.jobs_on_ssds() == [set(), set()]


def cut_off(stage: Stage, num_steps: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Returns whether there were more than `num_steps` steps; half of a folder's files are removed in one."""
    left = num_steps

    def step() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed

    def remove_half(folder: Path) -> None:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            step()
            path.unlink()
        step()
        rmtree(folder)

    rmtree = shutil.rmtree
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", remove_half)
        try:
            pass_a_second(stage)
        except Killed:
            return True
    return False


@pytest.mark.parametrize("what", ["file", "model", "checkpoint"])
def test_a_service_that_is_killed_after_it_said_that_it_deletes_leaves_the_rest_to_the_dispatcher(
    stage: Stage, client: TestClient, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    job_id = succeed(stage)
    (checkpoint,) = client.get(f"{JOBS}/{job_id}/checkpoints").json()["data"]
    file_id, model = upload(client), model_of(stage, job_id)
    url, path = {
        "file": (f"/v1/files/{file_id}", stage.settings.files_dir / file_id),
        "model": (f"/v1/models/{model}", stage.settings.fine_tuned_dir / model),
        "checkpoint": (
            f"{JOBS}/{job_id}/checkpoints/{checkpoint['id']}",
            stage.settings.fine_tuned_dir / f"{model}-step-2",
        ),
    }[what]
    with monkeypatch.context() as patch:
        patch.setattr(deletion, "carry_out", lambda *_: True)  # it is never executed
        client.delete(url)
    assert path.exists()
    assert client.get(url.replace(f"{JOBS}/{job_id}/checkpoints/", "/v1/models/")).status_code == 404
    if what != "file":
        listed = [each["id"] for each in client.get("/v1/models").json()["data"]]
        assert path.name not in listed
        body = {"model": path.name, "training_file": upload(client)}
        assert "there is no" in refusal(client.post(JOBS, json=body), "model_not_found", 404)
    if what == "checkpoint":
        assert client.get(f"{JOBS}/{job_id}/checkpoints").json()["data"] == []
    pass_a_second(stage)
    assert not path.exists()


def test_failed_removal_is_retried(stage: Stage, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id, rmtree = succeed(stage), shutil.rmtree

    def refuse(_folder: Path) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    client.delete(f"{JOBS}/{job_id}")
    pass_a_second(stage)
    assert names(stage.settings.jobs_dir) == {job_id}
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    pass_a_second(stage)
    assert names(stage.settings.jobs_dir) == {job_id}  # not at once
    stage.now += 30
    stage.tick()
    assert names(stage.settings.jobs_dir) == set()


# --- checkpoints ---


def test_a_checkpoint_is_deleted_by_its_id_and_by_its_model(stage: Stage, client: TestClient) -> None:
    job_id, other = succeed(stage, checkpoints=(1, 2)), succeed(stage)
    second, first = client.get(f"{JOBS}/{job_id}/checkpoints").json()["data"]
    url = f"{JOBS}/{job_id}/checkpoints/{second['id']}"
    assert client.delete(url.replace(job_id, other)).status_code == 404
    assert client.delete(url).json() == {
        "id": second["id"],
        "object": "fine_tuning.job.checkpoint",
        "deleted": True,
    }
    assert client.delete(url).status_code == 404
    left = client.get(f"{JOBS}/{job_id}/checkpoints").json()
    assert (left["data"], left["first_id"], left["last_id"]) == ([first], first["id"], first["id"])
    assert client.delete(f"/v1/models/{first['fine_tuned_model_checkpoint']}").status_code == 200
    assert client.get(f"{JOBS}/{job_id}/checkpoints").json()["data"] == []
    assert names(stage.settings.fine_tuned_dir) >= {model_of(stage, job_id)}
    assert len(names(stage.settings.fine_tuned_dir)) == 3


def test_checkpoints_of_a_job_that_trains_go_but_for_its_best(stage: Stage, client: TestClient) -> None:
    job_id = train(stage, reasons=["best", "interval"])
    (checkpoint,) = client.get(f"{JOBS}/{job_id}/checkpoints").json()["data"]
    url = f"{JOBS}/{job_id}/checkpoints/{checkpoint['id']}"
    assert "is the best that job" in refusal(client.delete(url), "model_in_use")
    other = train_another(stage, job_id)
    (checkpoint,) = client.get(f"{JOBS}/{other}/checkpoints").json()["data"]
    assert client.delete(f"{JOBS}/{other}/checkpoints/{checkpoint['id']}").status_code == 200


def train_another(stage: Stage, job_id: str) -> str:
    """Trains another job after that one."""
    stage.request_cancel(job_id)
    journal = stage.journal(job_id, 1)
    journal.append_outcome("cancelled", "The job was cancelled")
    journal.close()
    stage.tick()
    stage.end_runner(job_id)
    stage.tick(2)
    return train(stage)


def test_checkpoint_in_progress_is_not_deleted(stage: Stage, client: TestClient) -> None:
    """Its folder exists, and its record is not imported yet."""
    job_id = train(stage)
    for step in (None, 3):
        made = export(stage, job_id, step)
        assert f"just being made by job {job_id}" in refusal(client.delete(f"/v1/models/{made.name}"), "model_in_use")
        assert (made / "config.json").exists()


@pytest.mark.parametrize(
    ("settings_of_job", "reasons", "stays"),
    [
        ({}, ["interval"], True),
        ({}, ["best", "minutes"], True),
        ({}, ["best"], False),
        ({"keep_checkpoints": 2}, ["interval"], False),
    ],
)
def test_no_job_starts_from_a_checkpoint_that_a_running_job_may_remove(
    stage: Stage, client: TestClient, settings_of_job: dict[str, Any], reasons: list[str], stays: bool
) -> None:
    job_id = train(stage, reasons=reasons)
    with stage.database.write() as session:
        row = JobRepository(session).get(job_id)
        row.windlass = row.windlass | settings_of_job
    body = {"model": f"{model_of(stage, job_id)}-step-2", "training_file": upload(client)}
    response = client.post(JOBS, json=body)
    if stays:
        assert response.status_code == 200
    else:
        assert f"may be removed by job {job_id}, which still trains" in refusal(response, "model_may_go")
        train_another(stage, job_id)  # it is over
        assert client.post(JOBS, json=body).status_code == 200


def test_a_paused_job_keeps_what_it_needs(stage: Stage, client: TestClient) -> None:
    job_id = train(stage)
    stage.put_states(job_id)
    stage.request_pause(job_id)
    journal = stage.journal(job_id, 1)
    journal.append_outcome(PAUSED, "")
    journal.close()
    stage.tick()
    stage.end_runner(job_id)
    stage.tick(2)
    refusal(client.delete(f"{JOBS}/{job_id}"), "invalid_state")
    pass_a_second(stage)
    assert stage.jobs_on_ssds() == [{job_id}, {job_id}]


# --- other homes on the same database ---


def test_each_home_removes_what_is_its_own(tmp_path: Path, database: Database) -> None:
    here, elsewhere = Stage(tmp_path / "a", database), Stage(tmp_path / "b", database)
    assert here.node != elsewhere.node
    for stage in (here, elsewhere):
        for folder in ("ftjob-1", "ftjob-2"):
            (stage.settings.jobs_dir / folder).mkdir()
    job_id = here.submit(node=here.node)
    here.request_cancel(job_id)
    for stage in (here, elsewhere):
        (stage.settings.jobs_dir / job_id).mkdir()
    with pytest.raises(ApiError, match="lies with the service that it was sent to"), database.write() as session:
        deletion.delete_job(session, elsewhere.settings, JobRepository(session).get(job_id))
    with database.write() as session:
        deletion.delete_job(session, here.settings, JobRepository(session).get(job_id))
    pass_a_second(elsewhere)
    assert (here.settings.jobs_dir / job_id).exists()
    pass_a_second(here)
    assert not (here.settings.jobs_dir / job_id).exists()
    assert (elsewhere.settings.jobs_dir / job_id).exists()


def test_events_that_others_follow_go_on(stage: Stage, client: TestClient) -> None:
    """An ordinal is never used twice, not even one of a deleted job."""
    job_id = succeed(stage)
    with stage.database.read() as session:
        last = EventRepository(session).last_ordinal()
    client.delete(f"{JOBS}/{job_id}")
    stage.submit()
    with stage.database.read() as session:
        assert EventRepository(session).last_ordinal() > last
        assert FileRepository(session).all_ids() == frozenset()
