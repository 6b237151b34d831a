"""The data that a page reads before it follows the stream: last metrics, curves, and the ordinal of the last event."""

from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.support.service.api_client import context_of, make_model, serve, upload
from windlass.actors.job.journal import JournalRecord
from windlass.service.cli import jobs as cli_jobs
from windlass.service.cli.arguments import ids as cli_ids
from windlass.service.installation.client import ServiceClient
from windlass.service.installation.settings import Settings
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.repositories.jobs import JobRepository
from windlass.storage.sql.repositories.journal_import import import_journal

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


BYTES = {"ssd_bytes_written_step_by_ssd": [2 * 10**9, 10**9], "ssd_bytes_written_by_ssd": [8 * 10**9, 4 * 10**9]}
TOLD = {"step": 3, "total_steps": 10, "train_loss": 1.0, "step_s": 2.0, **BYTES}


def test_jobs_carry_what_they_wear_off_ssds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(home=tmp_path, port=8642, ssd_endurance_tbw=(1.0, 0.25))
    make_model(settings.models_dir / "tiny")
    with serve(settings) as client:
        job_id = make_job(client, upload(client))
        tell(client, job_id, 1, TOLD)
        (listed,) = client.get(JOBS).json()["data"]
        assert client.get(f"{JOBS}/{job_id}").json() == listed
        summary = (
            "2.79 GiB a step, 30.73 GiB by the whole job (4.4 % of the rating); "
            "the rating lasts 250 steps or 0.0 days of training"
        )
        assert listed["windlass"]["ssd_wear"] == {
            "bytes_per_step": 3 * 10**9,
            "bytes_written": 12 * 10**9,
            "bytes_of_whole_job": 33 * 10**9,
            "forecast": {"steps": 250.0, "days": 500 / 86400, "share_of_rating": 11 / 250},
            "summary": summary,
        }
        with context_of(client).database.write() as session:
            job = JobRepository(session).get(job_id)
            node, job.node = job.node, "node-elsewhere"
        elsewhere = client.get(f"{JOBS}/{job_id}").json()["windlass"]["ssd_wear"]
        assert (elsewhere["bytes_written"], elsewhere["forecast"]) == (12 * 10**9, None)  # its SSDs have other ratings
        with context_of(client).database.write() as session:
            JobRepository(session).get(job_id).node = node
            error = {"code": "x", "message": "x", "param": None}
            JobRepository(session).transition(
                job_id, JobStatus.VALIDATING_FILES, JobStatus.FAILED, message="The job failed", error=error
            )
        wear = client.get(f"{JOBS}/{job_id}").json()["windlass"]["ssd_wear"]
        assert wear["bytes_of_whole_job"] == wear["bytes_written"] == 12 * 10**9

        service = ServiceClient(settings.base_url)
        service._http.close()
        service._http = client
        monkeypatch.setattr(cli_ids, "open_client", lambda settings: service)
        cli_jobs.show(job_id, tmp_path)
        assert f"SSD wear         {wear['summary']}\n" in capsys.readouterr().out


def test_without_ratings_jobs_carry_bytes_only(client: TestClient, file_id: str) -> None:
    fresh = client.get(f"{JOBS}/{make_job(client, file_id)}").json()
    assert fresh["windlass"]["ssd_wear"] is None
    tell(client, fresh["id"], 1, TOLD)
    wear = client.get(f"{JOBS}/{fresh['id']}").json()["windlass"]["ssd_wear"]
    assert (wear["forecast"], wear["summary"]) == (None, "2.79 GiB a step, 30.73 GiB by the whole job")


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
