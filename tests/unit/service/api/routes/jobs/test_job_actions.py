"""Jobs that are paused, resumed and cancelled over HTTP."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.support.service.api_client import context_of
from tests.support.service.job_requests import JOBS, create
from windlass.service.api.routes import jobs as routes
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.repositories.jobs import JobRepository

RESOLVED = {"epochs": 1, "batch_size": 2, "learning_rate": 1e-5}


def act(client: TestClient, job_id: str, action: str) -> str:
    """The job's status after the action, or the message of a refusal."""
    response = client.post(f"{JOBS}/{job_id}/{action}")
    if response.status_code == 200:
        return str(response.json()["status"])
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (400, "invalid_state", "invalid_request_error")
    return str(error["message"])


def bring_to(client: TestClient, job_id: str, *statuses: JobStatus) -> None:
    with context_of(client).database.write() as session:
        jobs = JobRepository(session)
        for target in statuses:
            jobs.transition(job_id, jobs.get(job_id).status, target, message="", hyperparameters=RESOLVED)


def test_a_job_that_is_not_prepared_yet_pauses_at_once_and_is_prepared_when_it_is_resumed(
    client: TestClient, file_id: str
) -> None:
    job_id = create(client, file_id).json()["id"]
    assert act(client, job_id, "pause") == "paused"
    assert "is paused and cannot become paused" in act(client, job_id, "pause")
    assert act(client, job_id, "resume") == "validating_files"
    assert "was expected to be paused but is validating_files" in act(client, job_id, "resume")


def test_a_paused_job_is_resumed_with_another_number_of_gpus(
    client: TestClient, file_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[int] = []
    monkeypatch.setattr(routes, "check_gpus", lambda _, gpus: checked.append(gpus))
    job_id = create(client, file_id).json()["id"]
    bring_to(client, job_id, JobStatus.QUEUED)
    assert act(client, job_id, "pause") == "paused"

    def resume(gpus: int | str) -> Any:
        return client.post(f"{JOBS}/{job_id}/resume", json={"windlass": {"gpus": gpus}})

    for gpus in (0, 17, "many"):
        error = resume(gpus).json()["error"]
        told = 'must be "auto" or a whole number from 1 to 16' in error["message"]
        assert (error["param"], told) == ("windlass.gpus", True)
    num_microbatches = 4
    with context_of(client).database.write() as session:
        row = JobRepository(session).get(job_id)
        hyperparameters = {**RESOLVED, "num_microbatches": num_microbatches}
        JobRepository(session).set_fields(job_id, seen=row, hyperparameters=hyperparameters)
    error = resume(num_microbatches + 1).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", "windlass.gpus")
    assert f"but the job has {num_microbatches} micro-batches a step" in error["message"]
    resumed = resume(num_microbatches).json()
    assert (resumed["status"], resumed["windlass"]["settings"]["gpus"]) == ("queued", num_microbatches)
    assert checked[-1] == num_microbatches
    assert act(client, job_id, "pause") == "paused"
    assert act(client, job_id, "resume") == "queued"
    assert client.get(f"{JOBS}/{job_id}").json()["windlass"]["settings"]["gpus"] == num_microbatches
    assert act(client, job_id, "pause") == "paused"
    assert resume("auto").json()["windlass"]["settings"]["gpus"] == "auto"


def test_a_queued_job_pauses_at_once_and_goes_back_to_the_queue(client: TestClient, file_id: str) -> None:
    job_id = create(client, file_id).json()["id"]
    bring_to(client, job_id, JobStatus.QUEUED)
    assert act(client, job_id, "pause") == "paused"
    assert act(client, job_id, "resume") == "queued"
    assert act(client, job_id, "pause") == "paused"
    assert act(client, job_id, "cancel") == "cancelled"
    for action in ("pause", "resume", "cancel"):
        assert act(client, job_id, action).endswith(": it has ended")


def test_a_running_job_pauses_when_its_runner_has_stopped(client: TestClient, file_id: str) -> None:
    job_id = create(client, file_id).json()["id"]
    bring_to(client, job_id, JobStatus.QUEUED, JobStatus.RUNNING)
    others = client.post(f"{JOBS}/{job_id}/resume", json={"windlass": {"gpus": "auto"}}).json()["error"]["message"]
    assert others.endswith("was expected to be paused but is running; pause it first")
    assert act(client, job_id, "pause") == "pausing"
    assert act(client, job_id, "pause") == "pausing"
    events = client.get(f"{JOBS}/{job_id}/events").json()["data"]
    assert [event["message"] for event in events].count("Pausing: the runner ends its attempt after its step") == 1
    assert act(client, job_id, "resume") == "running"
    assert act(client, job_id, "pause") == "pausing"
    assert act(client, job_id, "cancel") == "pausing"
    assert "was expected to be paused but is pausing and asked to end" in act(client, job_id, "resume")
    assert client.get(f"{JOBS}/{job_id}").json()["windlass"]["cancel_requested"] is True


def test_a_job_that_is_to_be_cancelled_does_not_pause(client: TestClient, file_id: str) -> None:
    job_id = create(client, file_id).json()["id"]
    bring_to(client, job_id, JobStatus.QUEUED, JobStatus.RUNNING)
    assert act(client, job_id, "cancel") == "running"
    assert "was expected to be running but is running and asked to end" in act(client, job_id, "pause")


def test_a_finished_job_is_not_cancelled_again(client: TestClient, file_id: str) -> None:
    job_id = create(client, file_id).json()["id"]
    assert act(client, job_id, "cancel") == "cancelled"
    assert "is cancelled and cannot become cancelled" in act(client, job_id, "cancel")
