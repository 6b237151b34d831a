"""Two services with separate homes that share one PostgreSQL database.

Both list all jobs, and each runs those whose files it has.
"""

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.installation import Installation, free_port, make_tiny_model, write_examples
from tests.support.postgresql import PostgresServer
from windlass.service.api.schemas.objects import event_ordinal
from windlass.service.installation.home import find_serving, node_of
from windlass.service.installation.process_ids import wait_until_gone
from windlass.storage.sql.database import Database
from windlass.storage.sql.job_status import TERMINAL_STATUSES, JobStatus
from windlass.storage.sql.models import Job, JobEvent
from windlass.storage.sql.repositories.events import EventRepository
from windlass.storage.sql.repositories.jobs import JobRepository
from windlass.storage.sql.repositories.leases import LeaseRepository

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

_OPTIONS = ("--batch-size", "1", "--sequence-length", "32", "--precision", "fp32")
# Enough epochs that the jobs train until the test ends them.
_ENDLESS = 1000
# Seconds; only a hang takes that long.
_DEADLINE_S = 300.0
_MOST_EVENTS = 100_000

Pair = tuple[Installation, Installation]


@pytest.fixture
def database_url(postgresql: PostgresServer) -> Iterator[str]:
    """An empty database: both services create the tables, at the same time."""
    with postgresql.new_database(migrated=False) as url:
        yield url


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    with closing(Database(database_url)) as database:
        yield database


@pytest.fixture
def services(tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Two running services."""
    # Compiling kernels takes longer than the rest of the test.
    monkeypatch.setenv("CXX", "none")
    first, second = (Installation(tmp_path / name, free_port(), database_url) for name in ("first", "second"))
    try:
        for each in (first, second):
            make_tiny_model(each.home / "models" / "tiny")
            each.home.chmod(0o700)
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda each: each.ok("up", "--detach"), (first, second)))
        yield first, second
    finally:
        for each in (first, second):
            each.end()


def _submit(service: Installation, training_file: Path, *epochs: int) -> list[str]:
    """Submits one job for each number of epochs, and returns their ids."""
    return [
        service.ok("submit", "tiny", str(training_file), "--epochs", str(each), *_OPTIONS, "--no-wait")
        for each in epochs
    ]


def _submit_to_both(services: Pair, training_file: Path, *epochs: int) -> list[list[str]]:
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda each: _submit(each, training_file, *epochs), services))


def _await_step(service: Installation, job_id: str, step: int) -> int:
    job = service.await_job(job_id, lambda job: job["windlass"]["step"] >= step, f"step {step}", _DEADLINE_S)
    return int(job["windlass"]["step"])


def _await_status(service: Installation, job_id: str, status: JobStatus) -> None:
    service.await_job(job_id, lambda job: job["status"] == status, status, _DEADLINE_S)


def _listen(service: Installation, num_jobs: int) -> list[dict[str, Any]]:
    """All events of all jobs from the service's stream, until `num_jobs` jobs have ended."""
    events: list[dict[str, Any]] = []
    num_ended, deadline = 0, time.monotonic() + 3 * _DEADLINE_S
    with httpx.stream("GET", f"{service.url}/v1/events/stream", timeout=60.0, trust_env=False) as answer:
        for line in answer.iter_lines():
            assert time.monotonic() < deadline, f"{num_ended} of {num_jobs} jobs were told to have ended"
            if line.startswith("data:"):
                events.append(json.loads(line.removeprefix("data:")))
                num_ended += events[-1]["data"].get("status") in TERMINAL_STATUSES
            if num_ended == num_jobs:
                break
    return events


def _record(database: Database, job_id: str) -> tuple[Job, Sequence[JobEvent]]:
    """A job and its events, from the database."""
    with database.read() as session:
        job = JobRepository(session).get(job_id)
        return job, EventRepository(session).since(0, limit=_MOST_EVENTS, job_id=job_id)


def _assert_ran_once(database: Database, job_id: str, service: Installation, status: JobStatus) -> None:
    job, events = _record(database, job_id)
    assert (job.status, job.node, job.attempt) == (status, node_of(service.home), 1)
    assert [event.message for event in events].count("Fine-tuning job started") == 1
    assert [event.data.get("status") for event in events].count(status) == 1
    steps = Counter(event.data["step"] for event in events if "train_loss" in event.data)
    assert steps == Counter(range(1, job.step + 1))
    if status is JobStatus.SUCCEEDED:
        assert job.step == job.total_steps


def _folders(service: Installation, name: str) -> set[str]:
    return {path.name for path in (service.home / name).iterdir()}


def test_two_services_each_runs_own_jobs_and_lists_all(services: Pair, database: Database, tmp_path: Path) -> None:
    training_file = tmp_path / "train.jsonl"
    write_examples(training_file, 20)
    with ThreadPoolExecutor() as pool:
        streams = [pool.submit(_listen, each, num_jobs=4) for each in services]
        jobs = _submit_to_both(services, training_file, _ENDLESS, 1)
        others = list(zip(jobs, reversed(services), strict=True))  # jobs of the other service
        for (endless, _), other in others:
            _await_step(other, endless, 1)
        for each in services:
            listed = httpx.get(f"{each.url}/v1/fine_tuning/jobs", trust_env=False).json()["data"]
            assert {job["id"] for job in listed} == {job_id for both in jobs for job_id in both}
        for (endless, _), other in others:
            other.ok("cancel", endless)
        for (endless, short), other in others:
            _await_status(other, endless, JobStatus.CANCELLED)
            _await_status(other, short, JobStatus.SUCCEEDED)
        streamed = [[event_ordinal(event["id"]) for event in stream.result()] for stream in streams]

    for service, (endless, short) in zip(services, jobs, strict=True):
        _assert_ran_once(database, endless, service, JobStatus.CANCELLED)
        _assert_ran_once(database, short, service, JobStatus.SUCCEEDED)
        assert _folders(service, "jobs") == {endless, short}
        assert _folders(service, "fine-tuned") == {_record(database, short)[0].fine_tuned_model}
    with database.read() as session:
        ordinals = [event.ordinal for event in EventRepository(session).since(0, limit=_MOST_EVENTS)]
    assert streamed == [ordinals, ordinals]

    # A job is run by the service that has its files.
    first, second = services
    request = {"model": "tiny", "training_file": _record(database, jobs[0][0])[0].training_file}
    refused = httpx.post(f"{second.url}/v1/fine_tuning/jobs", json=request, trust_env=False)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "file_elsewhere")
    first.ok("down")
    second.ok("down")


def test_one_that_dies_or_is_ended_does_not_touch_the_other(services: Pair, database: Database, tmp_path: Path) -> None:
    dying, other = services
    training_file = tmp_path / "train.jsonl"
    write_examples(training_file, 300)
    (orphan,), (beside,) = _submit_to_both(services, training_file, 1)
    for job_id in (orphan, beside):
        _await_step(other, job_id, 3)

    killed = dying.service_processes()
    assert len(killed) >= 3
    for process in killed:
        os.kill(process.pid, signal.SIGKILL)
    assert wait_until_gone(killed, timeout_s=60.0)
    _await_the_only_dispatcher(database, other)
    job, _ = _record(database, orphan)
    assert (job.status, job.attempt, job.node) == (JobStatus.RUNNING, 1, node_of(dying.home))
    _await_status(other, beside, JobStatus.SUCCEEDED)
    dying.ok("up", "--detach")
    _await_status(other, orphan, JobStatus.SUCCEEDED)
    _assert_ran_once(database, orphan, dying, JobStatus.SUCCEEDED)
    _assert_ran_once(database, beside, other, JobStatus.SUCCEEDED)

    # Jobs of the other service do not keep this one up, and continue.
    (endless,) = _submit(other, training_file, _ENDLESS)
    step = _await_step(other, endless, 1)
    ended, stays = [*dying.service_processes(), *dying.ray_processes()], find_serving(other.home)
    dying.ok("down")
    assert wait_until_gone(ended, timeout_s=60.0)
    _await_step(other, endless, step + 10)
    assert find_serving(other.home) == stays
    other.ok("cancel", endless)
    _await_status(other, endless, JobStatus.CANCELLED)
    _assert_ran_once(database, endless, other, JobStatus.CANCELLED)
    other.ok("down")


def _await_the_only_dispatcher(database: Database, service: Installation) -> None:
    """Waits until only the dispatcher of this service counts as alive."""
    deadline = time.monotonic() + _DEADLINE_S
    while True:
        with database.read() as session:
            nodes = [holder.node for holder in LeaseRepository(session).holders()]
        if nodes == [node_of(service.home)]:
            return
        assert time.monotonic() < deadline, nodes
        time.sleep(0.2)
