"""Databases of every earlier version migrate to the newest without loss of data.

This holds even if a migration is interrupted.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Connection, Engine, create_engine, inspect, text

from tests.support.storage.old_rows import (
    DONE,
    HYPERPARAMETERS,
    METHOD,
    MODEL,
    REVISIONS,
    RUNNING,
    SETTINGS,
    insert_rows,
)
from windlass.storage.sql.database import Database, migrate
from windlass.storage.sql.errors import NewerDatabase
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.models import Base
from windlass.storage.sql.repositories.api_keys import KeyRepository
from windlass.storage.sql.repositories.audit import AuditRepository
from windlass.storage.sql.repositories.boxes import BoxRepository, PartRepository
from windlass.storage.sql.repositories.deletions import DeletionRepository
from windlass.storage.sql.repositories.events import EventRepository
from windlass.storage.sql.repositories.files import FileRepository
from windlass.storage.sql.repositories.jobs import JobRepository
from windlass.storage.sql.repositories.leases import LeaseRepository
from windlass.storage.sql.repositories.stored import StoredRepository
from windlass.storage.sql.repositories.webhooks import WebhookRepository

VERSIONS = Path(__file__).parents[4] / "storage" / "sql" / "migrations" / "versions"


@contextmanager
def opened(url: str) -> Iterator[Engine]:
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    try:
        yield engine
    finally:
        engine.dispose()


def make_old(url: str, revision: str) -> dict[str, int]:
    """Makes a database as a service of this revision left it. Returns the number of rows of each table."""
    migrate(url, revision=revision)
    with opened(url) as engine, engine.begin() as connection:
        return insert_rows(connection, revision)


# From each revision, in `make test` only from the first one and from the one before the newest.
EACH_REVISION = [
    pytest.param(
        *(kind, revision),
        id=f"{kind}-{revision}",
        marks=[pytest.mark.long] * (revision not in (REVISIONS[0], REVISIONS[-2])),
    )
    for kind, revision in product(("sqlite", "postgresql"), REVISIONS)
]


def revision_of(url: str) -> str | None:
    with opened(url) as engine, engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def counts_of(url: str) -> dict[str, int]:
    with opened(url) as engine, engine.connect() as connection:
        tables = set(inspect(connection).get_table_names()) - {"alembic_version"}
        return {table: connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one() for table in tables}


def test_old_rows_cover_every_revision() -> None:
    assert sorted(path.name[1:5] for path in VERSIONS.glob("v*.py")) == list(REVISIONS)


def test_every_table_of_every_revision_has_rows(url: str) -> None:
    for revision in REVISIONS:
        migrate(url, revision=revision)
        assert revision_of(url) == revision
    with opened(url) as engine, engine.begin() as connection:
        insert_rows(connection, REVISIONS[-1])
    assert min(counts_of(url).values()) > 0


@pytest.mark.parametrize(("url", "revision"), EACH_REVISION, indirect=["url"])
def test_data_of_every_revision_is_there_after_the_migration(url: str, revision: str) -> None:
    rows = make_old(url, revision)
    migrate(url)
    assert revision_of(url) == REVISIONS[-1]
    counts = counts_of(url)
    assert {table: counts[table] for table in rows} == rows
    with opened(url) as engine, engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []


@pytest.mark.parametrize(("url", "revision"), EACH_REVISION, indirect=["url"])
def test_the_service_reads_what_earlier_versions_wrote(url: str, revision: str) -> None:
    make_old(url, revision)
    migrate(url)
    database = Database(url)
    try:
        read_all(database, revision)
        go_on(database)
    finally:
        database.close()


def read_all(database: Database, revision: str) -> None:
    owner = "ann" if revision >= "0005" else None
    with database.read() as session:
        files = FileRepository(session, owner).page(limit=9, after=None, newest_first=False, purpose=None).rows
        assert [(file.id, file.nbytes, file.owner) for file in files] == [
            ("file-train", 2**33, owner),
            ("file-csv", 9, owner),
        ]
        assert {file.node for file in files} == {"node-1" if revision >= "0009" else None}
        jobs = JobRepository(session, owner)
        found = jobs.page(limit=9, after=None, metadata={"team": "a 'b'"}).rows
        assert [job.id for job in found] == [RUNNING, DONE]
        done = jobs.get(DONE)
        assert (done.status, done.fine_tuned_model, done.result_files) == (JobStatus.SUCCEEDED, MODEL, ["file-csv"])
        assert (done.method, done.windlass, done.hyperparameters) == (METHOD, SETTINGS, HYPERPARAMETERS)
        assert (done.seed, done.trained_tokens, done.created_at, done.finished_at) == (2**63 - 1, 2**40, 100.5, 130.0)
        assert done.plan_number == (3 if revision >= "0002" else 0)
        assert (done.node, done.num_lost) == (("node-1", 2) if revision >= "0004" else (None, 0))
        assert done.finish_is_measured is (revision >= "0010")
        assert done.launched_at == (111.0 if revision >= "0011" else 110.0)
        assert done.keeps_place is (revision >= "0011")
        limits = {"max_running_jobs": 2} if revision >= "0011" else None
        assert [key.limits for key in KeyRepository(session).all()] == [limits] * (revision >= "0005")
        assert done.yields_to == ("ftjob-more-urgent" if revision >= "0007" else None)
        assert jobs.by_idempotency_key(owner, ["once"]) is done
        assert [job.id for job in jobs.with_status(JobStatus.RUNNING)] == [RUNNING]
        events = EventRepository(session)
        assert [event.message for event in events.since(0, limit=9)] == ["Created", "Step 1", "slow"]
        assert [row.data["train_loss"] for row in events.metrics(DONE)] == [2.5, 2.0]
        (checkpoint,) = events.checkpoints(DONE, limit=9, after=None).rows
        assert (checkpoint.id, checkpoint.model) == ("ftckpt-1", f"{MODEL}-step-1")
        known = (["interval"], 12345) if revision >= "0006" else ([], None)
        assert (checkpoint.reasons, checkpoint.nbytes) == known
        assert bool(WebhookRepository(session).due_secrets(1000.0, longest_s=1e6)) is (revision >= "0003")
        assert [holder.id for holder in LeaseRepository(session).holders()] == ["dispatcher-1"] * (revision >= "0004")
        assert [key.user for key in KeyRepository(session).all()] == ["ann"] * (revision >= "0005")
        assert [event.target for event in AuditRepository(session).page(limit=9).rows] == [DONE] * (revision >= "0005")
        deleted = DeletionRepository(session)
        assert [each.owner for each in deleted.jobs_to_remove("node-1")] == ["ann"] * (revision >= "0008")
        assert [each.name for each in deleted.to_remove("node-1")] == ["file-gone"] * (revision >= "0008")
        assert StoredRepository(session).nbytes_of("ann") == 2**40 * (revision >= "0012")
        assert done.box_cursor == (41 if revision >= "0013" else 0)
        boxes = BoxRepository(session)
        assert [box.name for box in boxes.all("node-1")] == ["attic"] * (revision >= "0013")
        assert [each.kind for each in boxes.instructions("box-1")] == ["pause"] * (revision >= "0013")
        parts = PartRepository(session).on("node-2")
        assert [(part.job_id, part.served, part.port) for part in parts] == [(RUNNING, 2, 7700)] * (revision >= "0014")


def go_on(database: Database) -> None:
    """Ends and deletes the jobs that had begun."""
    with database.write() as session:
        jobs = JobRepository(session)
        jobs.transition(RUNNING, JobStatus.RUNNING, JobStatus.CANCELLED, message="ended")
        last = EventRepository(session).last_ordinal()
        assert last == 4  # the numbers continue
        DeletionRepository(session).delete_job(jobs.get(DONE), model=MODEL, keeps_model=True)
    with database.read() as session:
        assert [event.job_id for event in EventRepository(session).since(0, limit=9)] == [RUNNING] * 2
        assert list(EventRepository(session).metrics(DONE)) == []
        assert EventRepository(session).checkpoint_of(f"{MODEL}-step-1") is None


def test_a_job_that_was_queued_after_it_had_run_keeps_its_place(url: str) -> None:
    make_old(url, "0010")
    with opened(url) as engine, engine.begin() as connection:
        connection.execute(text("UPDATE jobs SET status = 'queued'"))
        connection.execute(text("UPDATE jobs SET attempt = 0 WHERE id = :id"), {"id": DONE})
    migrate(url)
    database = Database(url)
    with database.read() as session:
        assert {job.id: job.keeps_place for job in JobRepository(session).with_status(JobStatus.QUEUED)} == {
            RUNNING: True,
            DONE: False,
        }
    database.close()


# --- errors ---


def test_a_newer_database_is_refused_and_left_as_it_is(url: str) -> None:
    rows = make_old(url, REVISIONS[-1])
    with opened(url) as engine, engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(NewerDatabase, match="schema 9999, which this version of windlass does not know"):
        migrate(url)
    assert revision_of(url) == "9999"
    assert counts_of(url) == rows


class Broken(Exception):
    pass


def columns_of(url: str) -> dict[str, set[str]]:
    with opened(url) as engine, engine.connect() as connection:
        look = inspect(connection)
        return {table: {column["name"] for column in look.get_columns(table)} for table in look.get_table_names()}


@pytest.mark.parametrize(
    "from_revision",
    [*(pytest.param(each, marks=pytest.mark.long) for each in REVISIONS[:-1] if each != "0012"), "0012"],
)
def test_a_migration_that_fails_in_the_middle_changes_nothing_and_can_be_made_again(
    url: str, from_revision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each of its operations, in turn."""
    rows = make_old(url, from_revision)
    before = columns_of(url)
    num_failures = 0
    while fails_after(url, num_failures + 1, monkeypatch):
        num_failures += 1
        assert (revision_of(url), counts_of(url), columns_of(url)) == (from_revision, rows, before)
    assert num_failures >= len(REVISIONS) - REVISIONS.index(from_revision) - 1
    assert revision_of(url) == REVISIONS[-1]
    counts = counts_of(url)
    assert {table: counts[table] for table in rows} == rows


def fails_after(url: str, num_operations: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Returns whether a migration has so many operations that it failed after `num_operations`."""

    def fail() -> None:
        raise Broken

    with monkeypatch.context() as patch:
        _count_operations(patch, num_operations, fail)
        try:
            migrate(url)
        except Broken:
            return True
    return False


def _count_operations(patch: pytest.MonkeyPatch, number: int, then: Callable[[], None]) -> None:
    """Calls `then` after `number` operations of migrations."""
    invoke, left = Operations.invoke, number

    def invoke_and_count(operations: Operations, operation: Any) -> Any:
        nonlocal left
        done = invoke(operations, operation)
        left -= 1
        if left == 0:
            then()
        return done

    patch.setattr(Operations, "invoke", invoke_and_count)


def _migrate_and_die(url: str, num_operations: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        _count_operations(patch, num_operations, lambda: os.kill(os.getpid(), signal.SIGKILL))
        migrate(url)


@pytest.mark.short("sqlite-9", "postgresql-2")
@pytest.mark.parametrize("num_operations", [2, 9])
def test_a_process_that_is_killed_in_a_migration_leaves_a_database_that_can_be_migrated(
    url: str, num_operations: int
) -> None:
    rows = make_old(url, "0002")
    process = multiprocessing.get_context("spawn").Process(target=_migrate_and_die, args=(url, num_operations))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert (revision_of(url), counts_of(url)) == ("0002", rows)
    migrate(url)
    counts = counts_of(url)
    assert (revision_of(url), {table: counts[table] for table in rows}) == (REVISIONS[-1], rows)


def test_no_row_refers_to_one_that_is_not_there(sqlite_url: str) -> None:
    """Some migrations recreate a table in SQLite with foreign keys off."""
    make_old(sqlite_url, "0004")
    migrate(sqlite_url)
    with opened(sqlite_url) as engine, engine.connect() as connection:
        assert broken_references(connection) == []


def broken_references(connection: Connection) -> list[Any]:
    return list(connection.exec_driver_sql("PRAGMA foreign_key_check"))
