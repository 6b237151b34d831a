"""The Prometheus metrics, read with Prometheus' own parser."""

import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.support.service.api_client import context_of, make_model, serve, upload
from tests.support.service.boxes import GIB, TIB, add_box
from tests.unit.service.api.routes.jobs.test_job_metrics import BYTES, make_job, tell
from windlass.service.api.routes import health
from windlass.service.installation.settings import Settings
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.repositories.boxes import BoxRepository, BoxState
from windlass.storage.sql.repositories.jobs import JobRepository

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def scrape(client: TestClient, accept: str = "text/plain") -> Samples:
    response = client.get("/metrics", headers={"Accept": accept})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith(accept.split(";")[0])
    parse = parse_openmetrics if accept is OPENMETRICS else parse_text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse(response.text)
        for sample in family.samples
    }


def run(client: TestClient, job_id: str) -> None:
    with context_of(client).database.write() as session:
        jobs = JobRepository(session)
        jobs.transition(job_id, JobStatus.VALIDATING_FILES, JobStatus.QUEUED, message="", total_steps=10)
        jobs.transition(job_id, JobStatus.QUEUED, JobStatus.RUNNING, message="", attempt=1)


@pytest.mark.parametrize("accept", ["text/plain", OPENMETRICS])
def test_running_jobs_are_told_with_their_last_step(tmp_path: Path, accept: str) -> None:
    settings = Settings(home=tmp_path, port=8642, ssd_endurance_tbw=(1.0, 0.25))
    make_model(settings.models_dir / "tiny")
    with serve(settings) as client:
        file_id = upload(client)
        job_id, waiting = make_job(client, file_id), make_job(client, file_id)
        run(client, job_id)
        timeline = {"period_s": 4.0, "busy_s": {"gpu-0/compute": 3.0}, "moved_bytes": {"ssd-0": 500}}
        tell(client, job_id, 1, {"step": 3, "train_loss": 1.5, "tokens_per_s": 70.0, "timeline": timeline, **BYTES})
        found = scrape(client, accept)
    job = ("job", job_id)
    assert found["windlass_jobs", (("status", "running"),)] == 1
    assert found["windlass_jobs", (("status", "validating_files"),)] == 1
    assert found["windlass_jobs", (("status", "failed"),)] == 0
    assert found["windlass_job_step", (job,)] == 3
    assert found["windlass_job_steps", (job,)] == 10
    assert found["windlass_job_train_loss", (job,)] == 1.5
    assert found["windlass_job_tokens_per_second", (job,)] == 70.0
    assert found["windlass_job_busy_ratio", (job, ("resource", "gpu-0/compute"))] == 0.75
    assert found["windlass_job_step_bytes", (job, ("resource", "ssd-0"))] == 500
    assert found["windlass_job_ssd_written_bytes_total", (job, ("ssd", "0"))] == 8e9
    assert found["windlass_ssd_rated_bytes", (("ssd", "1"),)] == 0.25e12
    assert found["windlass_disk_free_bytes", (("path", str(tmp_path)),)] > 0
    assert not [labels for _, labels in found if ("job", waiting) in labels]
    assert not [name for name, _ in found if name == "windlass_job_valid_loss"]


def test_each_home_tells_of_the_jobs_that_run_in_it(tmp_path: Path, database_url: str) -> None:
    with ExitStack() as stack:
        clients = []
        for name in ("first", "second"):
            settings = Settings(home=tmp_path / name, port=8642, database_url=database_url)
            make_model(settings.models_dir / "tiny")
            clients.append(stack.enter_context(serve(settings)))
        jobs = [make_job(client, upload(client)) for client in clients]
        for client, job_id in zip(clients, jobs, strict=True):
            run(client, job_id)
            tell(client, job_id, 1, {"step": 3, "train_loss": 1.5, **BYTES})
        for client, job_id in zip(clients, jobs, strict=True):
            found = scrape(client)
            assert {dict(labels)["job"] for _, labels in found if "job" in dict(labels)} == {job_id}
            assert found["windlass_job_ssd_written_bytes_total", (("job", job_id), ("ssd", "0"))] == 8e9
            assert found["windlass_jobs", (("status", "running"),)] == 2


def test_boxes_are_told_with_what_is_free_and_what_runs(client: TestClient, file_id: str) -> None:
    database = context_of(client).database
    box = add_box(context_of(client), "attic")
    add_box(context_of(client), "cellar", seen_s_ago=60)
    with database.write() as session:
        boxes = BoxRepository(session)
        boxes.set_state(box.id, BoxState.DRAINING)
    running, waiting = make_job(client, file_id), make_job(client, file_id)
    run(client, running)
    with database.write() as session:
        for job_id in (running, waiting):
            JobRepository(session).get(job_id).node = box.node
    found = scrape(client)

    def value(name: str, box: str, **labels: str) -> float:
        return found[f"windlass_box_{name}", tuple(sorted({"box": box, **labels}.items()))]

    assert [value("up", name) for name in ("head", "attic", "cellar")] == [1, 1, 0]
    assert [value("draining", name) for name in ("head", "attic", "cellar")] == [0, 1, 0]
    assert value("seen_seconds", "head") == 0
    assert 58 <= value("seen_seconds", "cellar") < 90
    assert (value("devices", "attic"), value("devices_used", "attic")) == (2, 1)
    assert (value("memory_bytes", "attic"), value("memory_free_bytes", "attic")) == (256 * GIB, 200 * GIB)
    assert [value("jobs", "attic", state=state) for state in ("running", "waiting", "paused")] == [1, 1, 0]
    assert [value("ssd_free_bytes", "attic", ssd=ssd) for ssd in "01"] == [TIB, GIB]
    assert value("ssd_written_bytes_total", "attic", ssd="1") == 540e12
    assert value("ssd_rated_bytes", "attic", ssd="1") == 6e14
    assert ("windlass_box_ssd_written_bytes_total", (("box", "head"), ("ssd", "0"))) not in found, "not known"


def test_the_queue_is_as_old_as_its_oldest_job(client: TestClient, file_id: str) -> None:
    assert scrape(client)["windlass_queue_oldest_seconds", ()] == 0
    job_id = make_job(client, file_id)
    with context_of(client).database.write() as session:
        jobs = JobRepository(session)
        jobs.get(job_id).created_at -= 100
        session.flush()
        jobs.transition(job_id, JobStatus.VALIDATING_FILES, JobStatus.QUEUED, message="")
    assert 100 <= scrape(client)["windlass_queue_oldest_seconds", ()] < 1000


def test_requests_are_counted_by_their_route(client: TestClient, file_id: str) -> None:
    client.get(f"/v1/files/{file_id}")
    client.get("/v1/files/file-unknown")
    for path in ("/made/up", "/made/up/too", "/v1/\u00e4"):
        client.get(path)
    client.request("BREW", "/v1/files")
    found = scrape(client)

    def number(method: str, route: str, status: int) -> float:
        labels = (("method", method), ("route", route), ("status", str(status)))
        return found["windlass_http_requests_total", labels]

    assert number("GET", "/v1/files/{file_id}", 200) == 1
    assert number("GET", "/v1/files/{file_id}", 404) == 1
    assert number("GET", "unknown", 404) == 3
    routes = {dict(labels)["route"] for name, labels in found if name == "windlass_http_requests_total"}
    assert not [route for route in routes if "made" in route]
    methods = {dict(labels)["method"] for name, labels in found if name == "windlass_http_requests_total"}
    assert "BREW" not in methods
    labels = (("method", "GET"), ("route", "/v1/files/{file_id}"))
    assert found["windlass_http_request_seconds_count", labels] == 2


def test_service_with_database_and_disk_space_is_ready(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    assert client.get("/readyz").json() == {"status": "ok", "reasons": []}
    usage = shutil.disk_usage("/")._replace(free=3 * 1024**2)
    monkeypatch.setattr(health.shutil, "disk_usage", lambda _: usage)
    response = client.get("/readyz")
    assert response.status_code == 503
    assert response.json()["reasons"] == ["only 3 MiB are free on the home's disk"]


def test_service_without_database_is_alive_but_not_ready(client: TestClient, settings: Settings) -> None:
    context_of(client).database.close()
    for path in settings.home.glob("windlass.db*"):
        path.unlink()
    settings.home.joinpath("windlass.db").mkdir()
    response = client.get("/readyz")
    assert (response.status_code, response.json()["reasons"]) == (
        503,
        ["the database cannot be used: its file cannot be opened"],
    )
    assert client.get("/healthz").status_code == 200
