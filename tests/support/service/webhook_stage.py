"""Helpers for tests of webhooks: endpoints, ended jobs, and the official client."""

import importlib
import time
from typing import Any

import openai
from fastapi.testclient import TestClient
from sqlalchemy import select

from tests.support.service.api_client import context_of, upload
from tests.support.service.webhook_receiver import Receiver
from windlass.storage.sql.models import WebhookDelivery

CANCELLED, SUCCEEDED = "fine_tuning.job.cancelled", "fine_tuning.job.succeeded"
URL = "/v1/webhook_endpoints"
DAY_S = 86400.0


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = time.time()

    def __call__(self) -> float:
        return self.now_s


def add(client: TestClient, receiver: Receiver, *types: str) -> dict[str, Any]:
    """Creates an endpoint for these events, or for cancelled jobs."""
    body = {"name": "mine", "url": receiver.url, "event_types": list(types or (CANCELLED,))}
    response = client.post(URL, json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def cancel_one(client: TestClient) -> str:
    """Creates and cancels a job. Returns its id."""
    job_id = make_job(client)
    assert client.post(f"/v1/fine_tuning/jobs/{job_id}/cancel").json()["status"] == "cancelled"
    return job_id


def make_job(client: TestClient) -> str:
    """Creates a job. Returns its id."""
    body = {"model": "tiny", "training_file": upload(client)}
    job_id: str = client.post("/v1/fine_tuning/jobs", json=body).json()["id"]
    return job_id


def deliveries(client: TestClient) -> list[WebhookDelivery]:
    """Returns all deliveries, oldest first."""
    with context_of(client).database.read() as session:
        return list(session.scalars(select(WebhookDelivery).order_by(WebhookDelivery.ordinal)))


def official(client: TestClient) -> openai.OpenAI:
    """A client whose requests are answered by the app in this process."""
    http = importlib.import_module(openai.DefaultHttpxClient.__mro__[1].__module__.split(".")[0])

    def answer(request: Any) -> Any:
        path = str(request.url.raw_path, "ascii")
        found = client.request(request.method, path, content=request.read(), headers=dict(request.headers))
        return http.Response(found.status_code, headers=dict(found.headers), content=found.content)

    return openai.OpenAI(
        base_url="http://127.0.0.1:8642/v1",
        api_key="none",
        http_client=openai.DefaultHttpxClient(transport=http.MockTransport(answer)),
        max_retries=0,
    )
