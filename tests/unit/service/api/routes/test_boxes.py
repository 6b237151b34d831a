"""The boxes of a service: what each user is told of them, and how administrators drain and remove them."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.support.service.api_client import context_of, make_model, serve, upload
from tests.support.service.boxes import GIB, TIB, add_box, make_facts
from tests.support.service.keyed import keyed_world
from windlass.service.installation.settings import Settings
from windlass.service.machine.fleet.facts import Finding
from windlass.service.machine.fleet.here import FactsHere
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.repositories.audit import AuditRepository
from windlass.storage.sql.repositories.boxes import BoxRepository, Instruction
from windlass.storage.sql.repositories.events import EventRepository
from windlass.storage.sql.repositories.jobs import JobRepository

JOBS = "/v1/fine_tuning/jobs"


@pytest.fixture
def open_client(tmp_path: Path) -> Iterator[TestClient]:
    """A client of a service that boxes can join."""
    settings = Settings(home=tmp_path, port=8642, cluster_host="10.77.0.1", ssd_endurance_tbw=(600.0,))
    make_model(settings.models_dir / "tiny")
    with serve(settings) as client:
        yield client


def make_job(client: TestClient, *, node: str | None = None, status: JobStatus = JobStatus.QUEUED, **more: Any) -> str:
    """A job of a box that has come as far as a status."""
    body = {"model": "tiny", "training_file": upload(client)}
    job_id: str = client.post(JOBS, json=body).json()["id"]
    with context_of(client).database.write() as session:
        jobs = JobRepository(session)
        jobs.transition(job_id, JobStatus.VALIDATING_FILES, JobStatus.QUEUED, message="queued", total_steps=10)
        attempt = 0 if status is JobStatus.QUEUED else 1
        if attempt:
            jobs.transition(job_id, JobStatus.QUEUED, JobStatus.RUNNING, message="started", attempt=attempt)
        if status not in (JobStatus.QUEUED, JobStatus.RUNNING):
            jobs.transition(job_id, JobStatus.RUNNING, JobStatus.PAUSING, message="pausing")
        if status is JobStatus.PAUSED:
            jobs.transition(job_id, JobStatus.PAUSING, JobStatus.PAUSED, message="paused")
        job = jobs.get(job_id)
        for name, value in ({"node": node or job.node} | more).items():
            setattr(job, name, value)
    return job_id


def boxes_of(client: TestClient, **params: Any) -> dict[str, dict[str, Any]]:
    response = client.get("/v1/boxes", params=params)
    assert response.status_code == 200, response.text
    return {box["name"]: box for box in response.json()["data"]}


def change(client: TestClient, name: str, what: str) -> Any:
    return client.post(f"/v1/boxes/{name}/{what}")


def error_of(response: Any) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_service_alone_shows_the_head(client: TestClient) -> None:
    job_id = make_job(client)
    answer = client.get("/v1/boxes").json()
    assert answer["windlass"] == {"cluster_address": None}
    (head,) = answer["data"]
    assert (head["name"], head["state"], head["is_head"], head["address"]) == ("head", "ready", True, None)
    assert head["devices"] == {"kind": "cpu", "total": 1, "used": 0, "free": 1}
    assert head["unequal_versions"] == []
    assert [job["id"] for job in head["jobs"]["waiting"]["data"]] == [job_id]
    assert len(head["ssds"]) == 2
    assert head["memory"]["total_bytes"] > 0
    assert client.get("/v1/boxes/head").json()["id"] == "box-head"
    assert error_of(client.post("/v1/join_codes")) == (400, "no_cluster_host")


def test_box_is_shown_with_what_is_free_and_what_runs_and_waits(open_client: TestClient) -> None:
    client = open_client
    facts = make_facts(torch="2.0.0", findings=(Finding(text="shared memory: 1 GiB; too small", is_problem=True),))
    box = add_box(context_of(client), "attic", facts=facts)
    running = make_job(client, node=box.node, status=JobStatus.RUNNING)
    waiting = make_job(client, node=box.node, waiting_reason="its model is being copied to box attic")
    here = make_job(client)
    shown = boxes_of(client)
    attic = shown["attic"]
    assert list(shown) == ["head", "attic"]
    assert (attic["state"], attic["address"], attic["link_bytes_per_s"]) == ("ready", "10.77.0.2", 1.1e9)
    assert (shown["head"]["link_host"], attic["link_host"]) == ("10.77.0.1", "10.77.0.2")
    assert attic["devices"] == {"kind": "gpu", "total": 2, "used": 1, "free": 1}
    assert attic["memory"] == {"total_bytes": 256 * GIB, "free_bytes": 200 * GIB}
    assert [(ssd["free_bytes"], ssd["worn"]) for ssd in attic["ssds"]] == [(TIB, 0.05), (GIB, 0.9)]
    assert attic["unequal_versions"] == ["torch"]
    assert attic["findings"] == [{"text": "shared memory: 1 GiB; too small", "is_problem": True}]
    assert [job["id"] for job in attic["jobs"]["running"]["data"]] == [running]
    assert [(job["id"], job["waiting_reason"]) for job in attic["jobs"]["waiting"]["data"]] == [
        (waiting, "its model is being copied to box attic")
    ]
    assert [job["id"] for job in shown["head"]["jobs"]["waiting"]["data"]] == [here]
    assert client.get("/v1/boxes/attic").json() == attic
    assert error_of(client.get("/v1/boxes/cellar")) == (404, "not_found")
    assert client.get("/v1/boxes").json()["windlass"] == {"cluster_address": "10.77.0.1:8643"}
    jobs = {job["id"]: job["windlass"]["box"] for job in client.get(JOBS).json()["data"]}
    assert jobs == {running: "attic", waiting: "attic", here: "head"}


def test_box_that_does_not_call_is_away_since_its_last_call(open_client: TestClient) -> None:
    add_box(context_of(open_client), "attic", seen_s_ago=60)
    assert change(open_client, "attic", "drain").status_code == 200
    attic = boxes_of(open_client)["attic"]
    assert (attic["state"], attic["is_draining"]) == ("away", True)
    assert attic["away_since"] == attic["seen_at"]
    assert 58 <= time.time() - attic["away_since"] < 90


def test_box_without_readable_facts_is_shown(open_client: TestClient) -> None:
    database = context_of(open_client).database
    box = add_box(context_of(open_client), "attic")
    with database.write() as session:
        BoxRepository(session).set(box.id, facts={}, capacity={"of": "another version"})
    attic = boxes_of(open_client)["attic"]
    assert (attic["versions"], attic["facts"], attic["ssds"], attic["devices"]["total"]) == (None, None, [], 0)


def test_drained_box_is_resumed(open_client: TestClient) -> None:
    add_box(context_of(open_client), "attic")
    assert boxes_of(open_client)["attic"]["state_since"] is None
    drained = change(open_client, "attic", "drain").json()
    assert drained["state"] == "draining"
    assert abs(drained["state_since"] - time.time()) < 60
    assert change(open_client, "attic", "drain").json()["state_since"] == drained["state_since"]
    assert change(open_client, "attic", "resume").json()["state"] == "ready"
    with context_of(open_client).database.read() as session:
        rows = AuditRepository(session).page(limit=3).rows
        assert [(row.action, row.target) for row in rows] == [
            ("resume_box", "attic"),
            ("drain_box", "attic"),
            ("drain_box", "attic"),
        ]


@pytest.mark.parametrize("what", ["drain", "resume", "remove"])
def test_head_and_unknown_boxes_are_refused(open_client: TestClient, what: str) -> None:
    assert error_of(change(open_client, "head", what)) == (400, "box_is_head")
    assert error_of(change(open_client, "cellar", what)) == (404, "not_found")


def test_removed_box_gives_back_what_has_not_begun_and_strands_the_rest(open_client: TestClient) -> None:
    client, database = open_client, context_of(open_client).database
    box = add_box(context_of(open_client), "attic")
    fresh = make_job(client, node=box.node, waiting_reason="is being copied to box attic")
    running = make_job(client, node=box.node, status=JobStatus.RUNNING)
    pausing = make_job(client, node=box.node, status=JobStatus.PAUSING)
    paused = make_job(client, node=box.node, status=JobStatus.PAUSED)
    ending = make_job(client, node=box.node, status=JobStatus.RUNNING, cancel_requested=True)
    with database.write() as session:
        BoxRepository(session).instruct(box.id, fresh, Instruction.TAKE)
    removed = change(client, "attic", "remove").json()
    assert removed["state"] == "removed"
    jobs = {job["id"]: job for job in client.get(JOBS).json()["data"]}
    assert (jobs[fresh]["windlass"]["box"], jobs[fresh]["windlass"]["waiting_reason"]) == ("head", None)
    assert {jobs[job]["windlass"]["box"] for job in (running, pausing, paused)} == {"attic"}
    assert (jobs[fresh]["windlass"]["is_here"], jobs[running]["windlass"]["is_here"]) == (True, False)
    assert [jobs[job]["status"] for job in (running, pausing, paused, ending)] == [
        "queued",
        "paused",
        "paused",
        "cancelled",
    ]
    reason = "box attic, which holds its states, was removed; `windlass restart` starts it elsewhere"
    assert {jobs[job]["windlass"]["waiting_reason"] for job in (running, pausing, paused)} == {reason}
    with database.read() as session:
        assert BoxRepository(session).instructions(box.id) == []
        assert JobRepository(session).get(fresh).lease_holder is None
        last = EventRepository(session).page(fresh, limit=1, after=None, type=None).rows[0]
        assert last.message == "Back in the queue: box attic was removed before the job began there"
    assert "attic" in boxes_of(client), "while it holds states of jobs"
    for job in (running, pausing, paused):
        assert client.post(f"{JOBS}/{job}/cancel").json()["status"] == "cancelled"
    assert "attic" not in boxes_of(client)
    assert boxes_of(client, with_removed=True)["attic"]["state"] == "removed"
    assert error_of(change(client, "attic", "drain")) == (400, "box_removed")
    assert change(client, "attic", "remove").status_code == 200


def test_join_code_is_told_once_with_the_commands_and_its_end(open_client: TestClient) -> None:
    made = open_client.post("/v1/join_codes").json()
    assert made["cluster_address"] == "10.77.0.1:8643"
    assert 0 < made["expires_at"] - time.time() <= 24 * 3600
    assert any(made["code"] in command for command in made["commands"])
    assert any("10.77.0.1:8643" in command for command in made["commands"])
    assert open_client.post("/v1/join_codes").json()["code"] != made["code"]
    with context_of(open_client).database.read() as session:
        (row, _) = AuditRepository(session).page(limit=2).rows
        assert (row.action, row.target) == ("create_join_code", None)


def test_user_sees_boxes_and_counts_of_others_jobs(settings: Settings) -> None:
    with keyed_world(settings) as world:
        box = add_box(context_of(world.client), "cellar")
        with context_of(world.client).database.write() as session:
            for who in ("alice", "bob"):
                JobRepository(session).get(world.things[who].job_id).node = box.node
        cellar = world.ask("alice", "GET", "/v1/boxes/cellar").json()
        waiting = cellar["jobs"]["waiting"]
        assert [job["id"] for job in waiting["data"]] == [world.things["alice"].job_id]
        assert (waiting["total"], waiting["of_others"]) == (2, 1)
        for path in ("boxes/cellar/drain", "boxes/cellar/resume", "boxes/cellar/remove", "join_codes"):
            assert error_of(world.ask("alice", "POST", f"/v1/{path}")) == (403, "permission_denied")
        assert world.ask("root", "GET", "/v1/boxes/cellar").json()["jobs"]["waiting"]["of_others"] == 0


def test_page_offers_changes_of_boxes_to_admins_only(settings: Settings) -> None:
    with keyed_world(settings) as world:
        pages = {who: world.ask(who, "GET", "/").text for who in ("alice", "root")}
    for mark in ("data-admin", 'id="join-open"'):
        assert [mark in pages[who] for who in ("alice", "root")] == [False, True]


def test_findings_are_looked_for_by_a_thread_and_not_again_soon(tmp_path: Path) -> None:
    looks = []

    def look() -> list[Finding]:
        looks.append(time.monotonic())
        return [Finding(text="a finding", is_problem=True)]

    facts = FactsHere(Settings(home=tmp_path), look=look)
    assert [finding.text for finding in facts.read().findings] == ["a finding"]
    facts.read()
    assert len(looks) == 1
