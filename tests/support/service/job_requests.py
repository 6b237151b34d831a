"""Requests for jobs over HTTP."""

from typing import Any

from fastapi.testclient import TestClient

JOBS = "/v1/fine_tuning/jobs"


def create(client: TestClient, file_id: str, **body: Any) -> Any:
    """The answer to a request for a job of the model `tiny`."""
    return client.post(JOBS, json={"model": "tiny", "training_file": file_id} | body)


def refusal(client: TestClient, file_id: str, **body: Any) -> dict[str, Any]:
    """The error of a request that is refused and makes no job."""
    response = create(client, file_id, **body)
    assert response.status_code in (400, 404), response.text
    error: dict[str, Any] = response.json()["error"]
    assert client.get(JOBS).json()["data"] == []
    return error
