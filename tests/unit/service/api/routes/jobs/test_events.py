"""Events in pages and as a stream that ends. Live streams are tested with a real server."""

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.support.service.api_client import context_of
from windlass.actors.job.journal import JournalRecord
from windlass.storage.sql.repositories.journal_import import import_journal

JOBS = "/v1/fine_tuning/jobs"


@pytest.fixture
def job_id(client: TestClient, file_id: str) -> str:
    """A cancelled job with three metrics events."""
    made: str = client.post(JOBS, json={"model": "tiny", "training_file": file_id}).json()["id"]
    with context_of(client).database.write() as session:
        import_journal(session, made, 1, [metrics(seq) for seq in (1, 2, 3)])
    client.post(f"{JOBS}/{made}/cancel")
    return made


def metrics(seq: int) -> JournalRecord:
    data = {"step": seq, "train_loss": 4.0 - seq}
    return JournalRecord(
        attempt=1, seq=seq, created_at=100.0 + seq, kind="metrics", level="info", message=f"Step {seq}", data=data
    )


def streamed(client: TestClient, job_id: str, last: str | None = None, **params: Any) -> list[dict[str, Any]]:
    headers = {} if last is None else {"Last-Event-ID": last}
    response = client.get(f"{JOBS}/{job_id}/events/stream", headers=headers, params=params)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in response.text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if "data" in fields:
            events.append(json.loads(fields["data"]) | {"sse_id": fields["id"]})
    return events


def test_pages_newest_first(client: TestClient, job_id: str) -> None:
    page = client.get(f"{JOBS}/{job_id}/events", params={"limit": 3}).json()
    messages = ["Fine-tuning job cancelled", "Step 3", "Step 2"]
    assert ([event["message"] for event in page["data"]], page["has_more"]) == (messages, True)
    assert (page["data"][1]["type"], page["data"][1]["data"]["train_loss"]) == ("metrics", 1.0)
    rest = client.get(f"{JOBS}/{job_id}/events", params={"after": page["data"][-1]["id"]}).json()
    assert [event["message"] for event in rest["data"]] == ["Step 1", f"Created fine-tuning job: {job_id}"]
    assert rest["has_more"] is False


@pytest.mark.parametrize(("after", "status"), [("x", 400), ("ftevent-x", 400), ("ftevent-99", 404)])
def test_pages_go_on_from_an_event_of_this_job_only(client: TestClient, job_id: str, after: str, status: int) -> None:
    assert client.get(f"{JOBS}/{job_id}/events", params={"after": after}).status_code == status


def test_a_stream_of_a_finished_job_tells_all_and_ends(client: TestClient, job_id: str) -> None:
    events = streamed(client, job_id)
    assert [event["type"] for event in events] == ["message", "metrics", "metrics", "metrics", "message"]
    assert {event["job_id"] for event in events} == {job_id}
    assert [f"ftevent-{event['sse_id']}" for event in events] == [event["id"] for event in events]
    assert events[-1]["data"] == {"status": "cancelled"}


def test_a_stream_goes_on_where_it_broke(client: TestClient, job_id: str) -> None:
    events = streamed(client, job_id)
    assert streamed(client, job_id, last=events[2]["sse_id"]) == events[3:]
    assert streamed(client, job_id, after=int(events[3]["sse_id"])) == events[4:]
    assert streamed(client, job_id, last=events[4]["sse_id"], after=0) == []
    assert streamed(client, job_id, last="1000000") == events  # of a database that was replaced


def test_a_stream_refuses_what_is_no_id(client: TestClient, job_id: str) -> None:
    response = client.get(f"{JOBS}/{job_id}/events/stream", headers={"Last-Event-ID": "abc"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "Last-Event-ID")
