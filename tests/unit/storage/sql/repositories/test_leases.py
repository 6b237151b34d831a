"""Claims of jobs, and the time after which a dispatcher counts as dead."""

import multiprocessing
from collections.abc import Callable
from contextlib import closing
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier

import pytest
from sqlalchemy.orm import sessionmaker

from tests.support.postgresql import PostgresServer
from tests.unit.storage.sql.conftest import make_new_job
from windlass.storage.sql.database import Database
from windlass.storage.sql.errors import StatusConflict
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.models import Job
from windlass.storage.sql.repositories.jobs import JobRepository
from windlass.storage.sql.repositories.leases import LeaseRepository


def register(database: Database, node: str = "node-a", lasts_s: float = 60.0) -> str:
    with database.write() as session:
        return LeaseRepository(session).register(node=node, machine="boot-1", lasts_s=lasts_s)


def claim(database: Database, holder: str, node: str = "node-a") -> list[str]:
    with database.write() as session:
        return [job.id for job in LeaseRepository(session).claim(holder, node)]


def claimable(database: Database, node: str = "node-a") -> list[str]:
    with database.read() as session:
        return list(LeaseRepository(session).claimable(node))


def test_a_job_is_claimed_by_one(database: Database, make_job: Callable[..., Job]) -> None:
    first, second, job = register(database), register(database), make_job()
    assert claimable(database) == [job.id]
    assert claim(database, first) == [job.id]
    assert claimable(database) == []
    assert claim(database, second) == []
    assert claim(database, first) == []
    with database.read() as session:
        row = JobRepository(session).get(job.id)
        assert (row.lease_holder, row.node) == (first, "node-a")
        assert [each.id for each in JobRepository(session).with_status(*JobStatus, lease_holder=first)] == [job.id]
        assert JobRepository(session).with_status(*JobStatus, lease_holder=second) == []
        assert JobRepository(session).with_status(*JobStatus, node="node-b") == []


def test_the_jobs_of_a_dispatcher_that_is_taken_for_dead_can_be_claimed(
    database: Database, make_job: Callable[..., Job]
) -> None:
    first, second, job = register(database), register(database), make_job()
    claim(database, first)
    with database.read() as session:
        seen = JobRepository(session).get(job.id)
    with database.write() as session:
        assert LeaseRepository(session).end(first)
        assert not LeaseRepository(session).end(first)
    assert claim(database, second) == [job.id]
    with database.write() as session:
        assert not LeaseRepository(session).beat(first, 60.0)
    make_job()
    assert claim(database, first) == []
    with (
        pytest.raises(StatusConflict, match=f"attempt 0 of {first} but is .* of {second}"),
        database.write() as session,
    ):
        JobRepository(session).transition(
            job.id, JobStatus.VALIDATING_FILES, JobStatus.QUEUED, message="late", seen=seen
        )


def test_a_box_claims_its_own_jobs_and_those_of_none(database: Database, make_job: Callable[..., Job]) -> None:
    here, elsewhere, anywhere, over = make_job(node="node-a"), make_job(node="node-b"), make_job(), make_job()
    with database.write() as session:
        JobRepository(session).request_cancel(over.id)
    assert set(claim(database, register(database))) == {here.id, anywhere.id}
    assert claim(database, register(database, "node-b"), "node-b") == [elsewhere.id]


def test_dispatcher_with_recent_heartbeat_is_not_taken_for_dead(database: Database) -> None:
    holder = register(database)
    with database.read() as session:
        (seen,) = LeaseRepository(session).holders()
    with database.write() as session:
        assert LeaseRepository(session).beat(holder, 60.0)
        assert not LeaseRepository(session).end(holder, seen.heartbeat)
        (now,) = LeaseRepository(session).holders()
        assert now.heartbeat == seen.heartbeat + 1
        assert LeaseRepository(session).end(holder, now.heartbeat)
        assert LeaseRepository(session).holders() == []


def test_only_database_with_own_clock_gives_lease_terms(database: Database) -> None:
    late, early = register(database, lasts_s=-1.0), register(database, lasts_s=60.0)
    with database.write() as session:
        has_clock = session.get_bind().dialect.name == "postgresql"
        holders = {each.id: each for each in LeaseRepository(session).holders()}
        assert {each.has_term for each in holders.values()} == {has_clock}
        assert (holders[late].has_expired, holders[early].has_expired) == (has_clock, False)
        LeaseRepository(session).beat(late, 60.0)
        assert not any(each.has_expired for each in LeaseRepository(session).holders())


NUM_DISPATCHERS, NUM_ROUNDS, NUM_JOBS = 3, 10, 10


def _claim_in_rounds(url: str, barrier: Barrier, claimed: "Queue[tuple[str, list[str]]]") -> None:
    """One dispatcher that claims in rounds.

    Every other round runs without the lock that allows one writer at a time, so that row locks decide.
    """
    with closing(Database(url)) as database:
        holder, beside_others = register(database), sessionmaker(database._engine)
        for number in range(NUM_ROUNDS):
            barrier.wait(60)
            with database.write() if number % 2 else beside_others.begin() as session:
                found = [job.id for job in LeaseRepository(session).claim(holder, "node-a")]
            claimed.put((holder, found))


def test_processes_that_claim_at_once_get_each_job_once(postgresql: PostgresServer) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, claimed = context.Barrier(NUM_DISPATCHERS + 1), context.Queue()
    with postgresql.new_database(migrated=True) as url, closing(Database(url)) as database:
        dispatchers = [
            context.Process(target=_claim_in_rounds, args=(url, barrier, claimed), daemon=True)
            for _ in range(NUM_DISPATCHERS)
        ]
        for each in dispatchers:
            each.start()
        holders = dict[str, str]()
        for _ in range(NUM_ROUNDS):
            with database.write() as session:
                made = [JobRepository(session).create(make_new_job(node="node-a")).id for _ in range(NUM_JOBS)]
            barrier.wait(60)
            told = [claimed.get(timeout=60) for _ in dispatchers]
            assert sorted(job_id for _, found in told for job_id in found) == sorted(made)
            holders.update({job_id: holder for holder, found in told for job_id in found})
        for each in dispatchers:
            each.join(60)
        with database.read() as session:
            assert {job.id: job.lease_holder for job in JobRepository(session).with_status(*JobStatus)} == holders
