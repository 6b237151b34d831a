import asyncio
import math
import os
from pathlib import Path

import httpx
import pytest

from benchmarks.api.benchmark import _percentile
from benchmarks.api.fill import fill
from benchmarks.api.first_step import _holders
from benchmarks.api.load import MIX, Order, _Load
from windlass.service.api.schemas.objects import EventObject, JobObject
from windlass.storage.sql.database import Database
from windlass.storage.sql.job_status import TERMINAL_STATUSES
from windlass.storage.sql.repositories.events import EventRepository
from windlass.storage.sql.repositories.files import FileRepository
from windlass.storage.sql.repositories.jobs import JobRepository


def test_the_database_is_filled_with_what_the_service_can_show(database_url: str) -> None:
    filled = fill(database_url, num_jobs=10, num_events=120, file_id="file-a")
    assert (filled.num_jobs, filled.num_events, len(filled.job_ids)) == (10, 120, 10)
    database = Database(database_url)
    with database.read() as session:
        assert FileRepository(session).get("file-a").owner is None
        jobs = JobRepository(session).page(limit=100, after=None, metadata={"team": "team-2"}).rows
        assert len(jobs) == 2
        assert {JobObject.of(job).status for job in jobs} <= TERMINAL_STATUSES
        events = EventRepository(session)
        assert events.last_ordinal() == 120
        page = events.page(jobs[0].id, limit=100, after=None)
        steps = [EventObject.of(row).data["step"] for row in page.rows]
        assert steps == list(range(12, 0, -1))
        assert events.last_metrics([jobs[0].id])[jobs[0].id]["step"] == 10
    database.close()


@pytest.mark.parametrize(("rate", "num_lines"), [(1000.0, 1), (None, 3)])
def test_the_load_is_of_all_kinds_and_no_job_that_it_submits_is_left(rate: float | None, num_lines: int) -> None:
    made: set[str] = set()
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(f"{request.method} {request.url.path}")
        if request.method == "POST" and request.url.path.endswith("/jobs"):
            made.add(request.headers["idempotency-key"])
            return httpx.Response(200, json={"id": request.headers["idempotency-key"]})
        if request.url.path.endswith("/cancel"):
            made.remove(request.url.path.split("/")[-2])
        return httpx.Response(200, json={})

    async def run() -> _Load:
        order = Order(url="http://x", seconds=0.3, job_ids=["a", "b"], job={}, key="k", rate=rate)
        async with httpx.AsyncClient(base_url="http://x", transport=httpx.MockTransport(answer)) as client:
            load = _Load(order, client)
            if rate is None:
                await load.in_lines(num_lines, order.seconds)
            else:
                await load.at_rate(rate, order.seconds)
            assert sum(load.statuses.values()) == sum(map(len, load.latencies_s.values())) == len(asked)
            await load.end()
        return load

    load = asyncio.run(run())
    if rate is not None:
        assert sum(load.statuses.values()) == 300
        assert load.latencies_s.keys() == MIX.keys()
    assert made == set()


def test_a_later_load_submits_jobs_of_its_own() -> None:
    """With the keys of an earlier load, it would get that load's jobs, which have ended."""
    keys: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["idempotency-key"])
        return httpx.Response(200, json={"id": keys[-1]})

    async def run() -> None:
        order = Order(url="http://x", seconds=0.1, job_ids=["a"], job={}, key="k", kinds={"submit": 1}, rate=50.0)
        async with httpx.AsyncClient(base_url="http://x", transport=httpx.MockTransport(answer)) as client:
            await _Load(order, client).at_rate(50.0, order.seconds)

    for _ in range(2):
        asyncio.run(run())
    assert len(keys) == len(set(keys)) == 10


def test_holders_of_open_file_are_found(tmp_path: Path) -> None:
    path = tmp_path.resolve() / "lock"
    assert not path.exists()
    with path.open("w"):
        assert [each.pid for each in _holders(path)] == [os.getpid()]
    assert list(_holders(path)) == []


def test_percentiles() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [_percentile(values, percent) for percent in (50, 99, 100)] == [50.0, 99.0, 100.0]
    assert _percentile([3.0], 50) == 3.0
    assert math.isnan(_percentile([], 50))
