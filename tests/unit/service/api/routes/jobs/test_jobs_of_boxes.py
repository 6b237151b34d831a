"""Jobs that other boxes work on: users' requests reach the box, and a job goes on elsewhere if its box is lost."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.support.service.api_client import context_of, make_model, serve, upload
from tests.support.service.boxes import add_box
from windlass.service.installation.restored import mark_restored
from windlass.service.installation.settings import Settings
from windlass.storage.sql import Box, Checkpoint, JobStatus
from windlass.storage.sql.repositories import BoxRepository, BoxState, EventRepository, JobRepository, MirrorRepository

JOBS = "/v1/fine_tuning/jobs"


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    settings = Settings(home=tmp_path, port=8642, cluster_host="10.77.0.1")
    make_model(settings.models_dir / "tiny")
    with serve(settings) as client:
        yield client


def submit(client: TestClient, **windlass: Any) -> dict[str, Any]:
    body = {"model": "tiny", "training_file": upload(client), "windlass": windlass}
    answer: dict[str, Any] = client.post(JOBS, json=body).json()
    return answer


@pytest.fixture
def box(client: TestClient) -> Box:
    return add_box(context_of(client), "attic")


@pytest.fixture
def job_id(client: TestClient, box: Box) -> str:
    """A job that its box has taken and runs."""
    job_id: str = submit(client)["id"]
    with context_of(client).database.write() as session:
        jobs, boxes = JobRepository(session), BoxRepository(session)
        queued = jobs.transition(
            job_id,
            JobStatus.VALIDATING_FILES,
            JobStatus.QUEUED,
            message="Queued",
            total_steps=12,
            hyperparameters={"epochs": 3},
        )
        MirrorRepository(session).give_away(queued, boxes.get(box.id), message="is being copied")
        boxes.withdraw(boxes.instructions(box.id)[-1].ordinal)
        jobs.transition(job_id, JobStatus.QUEUED, JobStatus.RUNNING, message="Begun", attempt=1)
    return job_id


def instructions(client: TestClient, box: Box) -> list[str]:
    with context_of(client).database.read() as session:
        return [each.kind for each in BoxRepository(session).instructions(box.id)]


def lose(client: TestClient, box: Box, *, seconds: float = 3600.0) -> None:
    with context_of(client).database.write() as session:
        BoxRepository(session).set(box.id, seen_at=time.time() - seconds)


@pytest.mark.parametrize(("action", "shown"), [("pause", "pausing"), ("cancel", "running")])
def test_a_request_shows_at_once_and_instructs_the_box(
    client: TestClient, box: Box, job_id: str, action: str, shown: str
) -> None:
    assert client.post(f"{JOBS}/{job_id}/{action}").json()["status"] == shown
    assert instructions(client, box) == [action]


def test_a_job_asks_for_a_box_that_has_joined(client: TestClient, box: Box) -> None:
    assert submit(client, box="attic")["windlass"]["settings"]["box"] == "attic"
    error = submit(client, box="cellar")["error"]
    assert (error["param"], error["message"]) == (
        "windlass.box",
        "windlass.box: there is no box 'cellar'; there are head, attic",
    )


def test_a_job_whose_box_may_still_work_on_it_is_not_begun_elsewhere(client: TestClient, box: Box, job_id: str) -> None:
    lose(client, box, seconds=60)
    error = client.post(f"{JOBS}/{job_id}/restart").json()["error"]
    assert "box attic may still work on job" in error["message"]
    assert client.get(f"{JOBS}/{job_id}").json()["status"] == "running"


def test_a_shortened_lease_does_not_count_before_the_box_has_been_told(
    client: TestClient, box: Box, job_id: str
) -> None:
    with context_of(client).database.write() as session:
        boxes = BoxRepository(session)
        boxes.note_lease(boxes.get(box.id), 7200.0)  # the setting is 10 minutes now
    lose(client, box)
    error = client.post(f"{JOBS}/{job_id}/restart").json()["error"]
    assert "try again in 60 minutes" in error["message"]


def test_a_job_is_not_begun_elsewhere_before_its_box_could_call_a_restored_head(
    client: TestClient, box: Box, job_id: str
) -> None:
    lose(client, box)
    mark_restored(context_of(client).settings.home)
    error = client.post(f"{JOBS}/{job_id}/restart").json()["error"]
    assert "the service was restored from a backup" in error["message"]


def test_a_job_of_a_lost_box_goes_on_from_its_newest_checkpoint(client: TestClient, box: Box, job_id: str) -> None:
    settings = context_of(client).settings
    prefix = job_id.removeprefix("ftjob-")[:12]
    models = [f"ft:tiny::{prefix}-step-{step}" for step in (4, 8)]
    with context_of(client).database.write() as session:
        for step, model in zip((4, 8), models, strict=True):
            session.add(
                Checkpoint(
                    id=f"ftckpt-{step}",
                    job_id=job_id,
                    attempt=1,
                    step_number=step,
                    created_at=1.0,
                    model=model,
                    path="",
                    metrics={},
                    reasons=["interval"],
                )
            )
    make_model(settings.fine_tuned_dir / models[0])  # the newer one did not arrive
    lose(client, box)
    restarted = client.post(f"{JOBS}/{job_id}/restart").json()
    assert restarted["model"] == models[0], restarted
    assert restarted["windlass"]["settings"]["epochs"] == 2  # of three, a third is done
    old = client.get(f"{JOBS}/{job_id}").json()
    assert (old["status"], old["windlass"]["box"]) == ("cancelled", "head")
    with context_of(client).database.read() as session:
        told = [event.message for event in EventRepository(session).since(0, limit=99, job_id=restarted["id"])]
    assert "optimizer's states and the position in the data are lost" in told[-1]


def test_a_job_of_a_removed_box_begins_again_from_its_base_model(client: TestClient, box: Box, job_id: str) -> None:
    with context_of(client).database.write() as session:
        BoxRepository(session).set(box.id, state=BoxState.REMOVED.value)
    restarted = client.post(f"{JOBS}/{job_id}/restart", json={"windlass": {"box": "head"}}).json()
    assert (restarted["model"], restarted["windlass"]["settings"]["box"]) == ("tiny", "head")


def test_a_job_of_this_home_is_not_restarted(client: TestClient) -> None:
    error = client.post(f"{JOBS}/{submit(client)['id']}/restart").json()["error"]
    assert "goes on by itself" in error["message"]
