"""A step's timeline over HTTP: a trace for a stored step, and a clear error for all others."""

from typing import Any

from fastapi.testclient import TestClient

from tests.support.service.api_client import context_of
from windlass.actors.messages import SpanKind, WorkSpan
from windlass.actors.timeline.span_files import FOLDER, StepSpans, keep_step
from windlass.service.jobs.spec_builder import job_dir

JOBS = "/v1/fine_tuning/jobs"


def make_job(client: TestClient, file_id: str, *steps: int) -> str:
    """A job whose runner has stored these steps."""
    job_id: str = client.post(JOBS, json={"model": "tiny", "training_file": file_id}).json()["id"]
    folder = job_dir(context_of(client).settings, job_id)
    folder.mkdir(parents=True, exist_ok=True)
    for step in steps:
        span = WorkSpan("ssd-0", SpanKind.READ_STATES, step, 2, 7, 100.0 + step, 100.5 + step, 4096)
        summary = {"period_s": 1.0 + step}
        kept = StepSpans(step=step, start_s=100.0, end_s=101.0 + step, summary=summary, spans=(span,))
        keep_step(folder / FOLDER, kept)
    return job_id


def refusal(client: TestClient, path: str) -> dict[str, Any]:
    response = client.get(path)
    assert response.status_code == 404, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


def test_a_held_step_is_a_trace(client: TestClient, file_id: str) -> None:
    job_id = make_job(client, file_id, 3, 4)
    trace = client.get(f"{JOBS}/{job_id}/timeline?step=3").json()
    assert [event["ts"] for event in trace["traceEvents"] if event["ph"] == "X"] == [3e6]
    about = {"job_id": job_id, "step": 3, "held_steps": [3, 4], "summary": {"period_s": 4.0}}
    assert trace["otherData"] == about
    last = client.get(f"{JOBS}/{job_id}/timeline").json()
    assert last["otherData"] == about | {"step": 4, "summary": {"period_s": 5.0}}


def test_resources_of_a_job_over_boxes_have_the_names_of_boxes(client: TestClient, file_id: str) -> None:
    job_id = make_job(client, file_id)
    span = WorkSpan("b1/ssd-0", SpanKind.READ_STATES, 3, 2, 7, 103.0, 103.5, 4096)
    summary = {"period_s": 4.0, "boxes": [{"box": "head"}, {"box": "attic"}]}
    kept = StepSpans(step=3, start_s=100.0, end_s=104.0, summary=summary, spans=(span,))
    keep_step(job_dir(context_of(client).settings, job_id) / FOLDER, kept)
    trace = client.get(f"{JOBS}/{job_id}/timeline").json()
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert names == ["attic/ssd-0"]


def test_a_step_that_is_not_held_is_not_found(client: TestClient, file_id: str) -> None:
    error = refusal(client, f"{JOBS}/{make_job(client, file_id, 3, 4)}/timeline?step=2")
    assert error["code"] == "timeline_not_held"
    assert error["param"] == "step"
    assert "no timeline of step 2; held are steps 3, 4." in error["message"]


def test_a_job_that_has_not_come_to_its_first_step(client: TestClient, file_id: str) -> None:
    job_id = make_job(client, file_id)
    for query in ("", "?step=1"):
        error = refusal(client, f"{JOBS}/{job_id}/timeline{query}")
        assert error["code"] == "timeline_not_held"
        assert "no step is held yet" in error["message"]


def test_an_unknown_job(client: TestClient) -> None:
    assert refusal(client, f"{JOBS}/ftjob-none/timeline?step=1")["code"] == "not_found"


def test_a_step_is_a_number_from_1(client: TestClient, file_id: str) -> None:
    job_id = make_job(client, file_id, 3)
    for step in ("0", "last", "-1"):
        response = client.get(f"{JOBS}/{job_id}/timeline", params={"step": step})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "step"
