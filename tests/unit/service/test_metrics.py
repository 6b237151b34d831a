"""What a page reads before it follows the stream: last metrics, curves, and the event that both are as new as."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.unit.service.api_client import context_of
from windlass.actors.journal import JournalRecord
from windlass.storage.sql.journal import import_journal

JOBS = "/v1/fine_tuning/jobs"


def make_job(client: TestClient, file_id: str) -> str:
    job_id: str = client.post(JOBS, json={"model": "tiny", "training_file": file_id}).json()["id"]
    return job_id


def tell(client: TestClient, job_id: str, attempt: int, *metrics: dict[str, Any]) -> None:
    records = [
        JournalRecord(
            attempt=attempt, seq=seq, created_at=100.0, kind="metrics", level="info", message="Step", data=data
        )
        for seq, data in enumerate(metrics, start=1)
    ]
    with context_of(client).database.write() as session:
        import_journal(session, job_id, attempt, records)


@pytest.fixture
def job_id(client: TestClient, file_id: str) -> str:
    """A job that was resumed after step 1, and another one beside it."""
    made, other = make_job(client, file_id), make_job(client, file_id)
    tell(client, made, 1, *({"step": step, "train_loss": 4.0 - step} for step in (1, 2, 3)))
    tell(client, other, 1, {"step": 9, "train_loss": 0.5})
    tell(client, made, 2, {"step": 2, "train_loss": 2.5, "tokens_per_s": 7.0}, {"step": 2, "valid_loss": 2.75})
    return made


def test_jobs_carry_the_metrics_of_their_last_step(client: TestClient, job_id: str, file_id: str) -> None:
    fresh = make_job(client, file_id)
    listed = {job["id"]: job["windlass"]["last_metrics"] for job in client.get(JOBS).json()["data"]}
    assert listed[job_id] == {"step": 2, "train_loss": 2.5, "tokens_per_s": 7.0, "valid_loss": 2.75}
    assert sorted(metrics["step"] for metrics in listed.values() if metrics) == [2, 9]
    assert listed[fresh] is None
    assert client.get(f"{JOBS}/{job_id}").json()["windlass"]["last_metrics"] == listed[job_id]
    assert client.post(f"{JOBS}/{job_id}/cancel").json()["windlass"]["last_metrics"] == listed[job_id]


def test_a_curve_has_each_step_that_counts_once(client: TestClient, job_id: str) -> None:
    answer = client.get(f"{JOBS}/{job_id}/metrics").json()
    assert answer["data"] == {
        "step": [1, 2],
        "attempt": [1, 2],
        "train_loss": [3.0, 2.5],
        "valid_loss": [None, 2.75],
    }
    assert client.get(f"{JOBS}/ftjob-none/metrics").status_code == 404


def test_answers_say_which_event_they_are_as_new_as(client: TestClient, job_id: str) -> None:
    events = client.get(f"{JOBS}/{job_id}/events").json()["data"]
    newest = int(events[0]["id"].removeprefix("ftevent-"))
    assert client.get(f"{JOBS}/{job_id}/metrics").json()["last_event_ordinal"] == newest
    assert client.get(JOBS).json()["windlass"] == {"last_event_ordinal": newest}


def test_events_of_one_type(client: TestClient, job_id: str) -> None:
    pages = {kind: client.get(f"{JOBS}/{job_id}/events", params={"type": kind}) for kind in ("message", "metrics")}
    assert {kind: [event["type"] for event in page.json()["data"]] for kind, page in pages.items()} == {
        "message": ["message"],
        "metrics": ["metrics"] * 5,
    }
    refused = client.get(f"{JOBS}/{job_id}/events", params={"type": "x"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "type")


def test_browsers_ask_about_assets_each_time(client: TestClient) -> None:
    answer = client.get("/static/app.js")
    assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-cache")
    again = client.get("/static/app.js", headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.headers["cache-control"]) == (304, "no-cache")
