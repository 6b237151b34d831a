"""Answers to users contain no folders of the server. Answers to admins do, because they need them."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.service.api_client import context_of
from tests.support.service.keyed import World, keyed_world
from windlass.service.api.middleware.hidden_paths import HiddenPaths
from windlass.service.installation.settings import Settings
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.repositories.events import EventRepository
from windlass.storage.sql.repositories.jobs import JobRepository

_JOBS = "/v1/fine_tuning/jobs"


@pytest.fixture
def world(settings: Settings) -> Iterator[World]:
    """A service with a failed job of alice, whose error names folders."""
    with keyed_world(settings) as world:
        job_id = world.things["alice"].job_id
        words = f"no room in {settings.home}/fine-tuned; the SSD at {settings.ssd_dirs[1]} is slow"
        with context_of(world.client).database.write() as session:
            EventRepository(session).add(job_id, attempt=1, message=f"Beware: {words}", level="warn")
            JobRepository(session).set_waiting_reason(job_id, words)
            JobRepository(session).transition(
                job_id,
                JobStatus.QUEUED,
                JobStatus.FAILED,
                message=words,
                error={"code": "no_room", "message": words, "param": None},
            )
        yield world


_TOLD = "no room in the service's home/fine-tuned; the SSD at SSD 2 is slow"


def test_a_user_is_told_words_in_jobs_and_events(world: World, settings: Settings) -> None:
    job_id = world.things["alice"].job_id
    answers = [world.ask("alice", "GET", path) for path in (f"{_JOBS}/{job_id}", f"{_JOBS}/{job_id}/events", _JOBS)]
    assert answers[0].json()["error"]["message"] == _TOLD
    assert f"Beware: {_TOLD}" in [event["message"] for event in answers[1].json()["data"]]
    for answer in answers:
        assert str(settings.home) not in answer.text
        assert int(answer.headers["content-length"]) == len(answer.content)


def test_a_user_is_told_words_in_refusals_too(world: World, settings: Settings) -> None:
    body = {"model": "none", "training_file": world.things["alice"].file_id}
    refused = world.ask("alice", "POST", _JOBS, json=body)
    assert refused.status_code == 404
    assert str(settings.home) not in refused.text


def test_an_admin_is_told_the_folders(world: World, settings: Settings) -> None:
    told = world.ask("root", "GET", f"{_JOBS}/{world.things['alice'].job_id}").json()["error"]["message"]
    assert f"no room in {settings.home}/fine-tuned" in told


def test_the_contents_of_a_users_files_are_left_alone(world: World, settings: Settings) -> None:
    text = json.dumps({"text": f"my path is {settings.home}/x"}) + "\n"
    upload = {"files": {"file": ("a.jsonl", text.encode())}, "data": {"purpose": "fine-tune"}}
    file_id = world.ask("alice", "POST", "/v1/files", **upload).json()["id"]
    assert world.ask("alice", "GET", f"/v1/files/{file_id}/content").text == text


def test_only_whole_names_of_folders_are_replaced_the_longest_first(tmp_path: Path) -> None:
    paths = HiddenPaths(Settings(home=tmp_path / "h", ssd_dirs=(tmp_path / "h" / "ssd0", tmp_path / "ssd")))
    text = f"{tmp_path}/h/ssd0/x {tmp_path}/h/a {tmp_path}/h2 {tmp_path}/ssd: {tmp_path}/h.x {tmp_path}/h.".encode()
    assert paths.replaced(text) == (
        f"SSD 1/x the service's home/a {tmp_path}/h2 SSD 2: {tmp_path}/h.x the service's home.".encode()
    )
