"""Schema, transactions, and the SQLite settings that other code depends on."""

import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, inspect, text
from sqlalchemy.exc import IntegrityError, OperationalError

from tests.support.postgresql import PostgresServer
from windlass.storage.sql.database import Database, migrate, why_unavailable
from windlass.storage.sql.models import Base, Job
from windlass.storage.sql.repositories.events import EventRepository
from windlass.storage.sql.repositories.jobs import JobRepository


def test_migrations_build_the_schema_that_the_models_describe(url: str) -> None:
    migrate(url)
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
        tables = set(inspect(connection).get_table_names())
    engine.dispose()
    assert tables >= {"files", "jobs", "job_events", "job_metrics", "checkpoints"}


def _migrate(url: str, failures: list[Exception]) -> None:
    try:
        migrate(url)
    except Exception as error:  # noqa: BLE001 - the test reports whatever it was
        failures.append(error)


def test_migrate_may_run_again_and_at_once_from_two_places(url: str) -> None:
    failures: list[Exception] = []
    threads = [threading.Thread(target=_migrate, args=(url, failures)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    migrate(url)
    assert failures == []


def test_a_database_that_another_process_is_making_is_waited_for(sqlite_url: str) -> None:
    failures: list[Exception] = []
    with closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        thread = threading.Thread(target=_migrate, args=(sqlite_url, failures))
        thread.start()
        thread.join(0.3)
        other.execute("COMMIT")
    thread.join()
    assert failures == []


def test_other_databases_are_refused() -> None:
    with pytest.raises(ValueError, match="one of sqlite, postgresql, got 'mysql'"):
        Database("mysql://localhost/windlass")


def test_sqlite_is_set_up_for_several_processes(sqlite_url: str) -> None:
    database = Database(sqlite_url)
    with database.read() as session:
        assert session.scalar(text("PRAGMA journal_mode")) == "wal"
        assert session.scalar(text("PRAGMA foreign_keys")) == 1
        assert session.scalar(text("PRAGMA busy_timeout")) >= 10_000
    database.close()


def test_foreign_keys_hold(database: Database) -> None:
    with pytest.raises(IntegrityError), database.write() as session:
        EventRepository(session).add("ftjob-none", attempt=0, message="lost")


def test_a_write_that_raises_leaves_nothing(database: Database, make_job: Callable[..., Job]) -> None:
    job = make_job()

    def write_and_fail() -> None:
        with database.write() as session:
            JobRepository(session).set_waiting_reason(job.id, "no GPU")
            raise RuntimeError("undo")

    with pytest.raises(RuntimeError, match="undo"):
        write_and_fail()
    with database.read() as session:
        assert JobRepository(session).get(job.id).waiting_reason is None
        assert len(EventRepository(session).since(0, limit=10)) == 1


def test_writers_that_read_first_wait_for_each_other(database: Database, make_job: Callable[..., Job]) -> None:
    job = make_job()

    def add_ten() -> None:
        for _ in range(10):
            with database.write() as session:
                jobs = JobRepository(session)
                jobs.set_fields(job.id, step=jobs.get(job.id).step + 1)

    threads = [threading.Thread(target=add_ten) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with database.read() as session:
        assert JobRepository(session).get(job.id).step == 40


def test_two_threads_read_at_a_time_and_one_that_reads_may_read_again(sqlite_url: str) -> None:
    may_end, reading = threading.Event(), threading.Semaphore(0)

    def read() -> None:
        with database.read() as session, database.read() as another:
            assert session.execute(text("SELECT 1")).scalar() == another.execute(text("SELECT 1")).scalar() == 1
            reading.release()
            assert may_end.wait(30)

    with closing(Database(sqlite_url)) as database, ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read) for _ in range(3)]
        assert all(reading.acquire(timeout=30) for _ in range(2))
        assert not reading.acquire(timeout=0.2)
        may_end.set()
        for reader in readers:
            reader.result(30)
    assert reading.acquire(timeout=0)


def _end_all_connections(database: Database, others: str) -> None:
    """Ends all connections, as a restart of the server does. Three of `database` are open before."""
    with database.read() as one, database.read() as two, database.read() as three:
        assert len({each.scalar(text("SELECT pg_backend_pid()")) for each in (one, two, three)}) == 3
    with closing(Database(others)) as other, other.read() as session:
        ended = session.scalars(
            text(
                "SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
            )
        ).all()
    assert len(ended) >= 3
    assert all(ended)


def test_postgresql_restart_between_uses_causes_no_error(
    postgresql: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with postgresql.new_database(migrated=True) as url, closing(Database(url)) as database:
        monkeypatch.setattr("windlass.storage.sql.database._SURELY_LIVES_S", 0.0)
        _end_all_connections(database, url)
        for _ in range(4):
            with database.read() as session:
                assert session.scalar(text("SELECT 1")) == 1
        monkeypatch.setattr("windlass.storage.sql.database._SURELY_LIVES_S", 60.0)
        _end_all_connections(database, url)
        with pytest.raises(OperationalError) as raised, database.read() as session:
            session.scalar(text("SELECT 1"))
        assert why_unavailable(raised.value) is not None
        for _ in range(4):  # one failure was enough
            with database.read() as session:
                assert session.scalar(text("SELECT 1")) == 1


def test_change_in_a_read_session_is_not_stored(database: Database, make_job: Callable[..., Job]) -> None:
    job = make_job()
    with database.read() as session:
        jobs = JobRepository(session)
        jobs.get(job.id).step = 7
        assert jobs.count_by_status()
    with database.read() as session:
        assert JobRepository(session).get(job.id).step == 0
