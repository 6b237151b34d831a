"""A database that is temporarily unusable: locked by other processes, full, stopped and started again."""

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import text
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from tests.support.postgresql import PostgresServer
from tests.support.service.api_client import context_of, make_model, serve, upload
from tests.support.service.dispatcher_stage import PREPARED, Stage
from windlass.service.api.routes import files
from windlass.service.dispatcher.lease import Lease
from windlass.service.dispatcher.process import RayLostError, dispatch_until
from windlass.service.installation.settings import Settings
from windlass.service.processes import shutdown as lifecycle
from windlass.service.validation.database_errors import DatabaseUnavailableError
from windlass.storage.sql import database as database_module
from windlass.storage.sql.database import Database, migrate, why_unavailable
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.repositories.leases import LeaseRepository


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the timeout for a locked SQLite database short."""
    monkeypatch.setattr(database_module, "_BUSY_TIMEOUT_MS", 50)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'home' / 'windlass.db'}"


@pytest.fixture
def sqlite_stage(tmp_path: Path, url: str) -> Iterator[Stage]:
    (tmp_path / "home").mkdir(mode=0o700)
    migrate(url)
    database = Database(url)
    yield Stage(tmp_path / "home", database)
    database.close()


@contextlib.contextmanager
def locked(url: str) -> Iterator[None]:
    with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


@contextlib.contextmanager
def stopped(server: PostgresServer) -> Iterator[None]:
    server.stop()
    try:
        yield
    finally:
        server.start()


def error_in(database: Database, statement: str = "SELECT 1", *, writes: bool = False) -> SQLAlchemyError:
    with pytest.raises(SQLAlchemyError) as raised, database.write() if writes else database.read() as session:
        session.execute(text(statement))
    return raised.value


# --- error messages --------------------------------------------------------------------------------------------------


def test_a_locked_and_a_full_database_are_told_from_a_wrong_statement(sqlite_stage: Stage, url: str) -> None:
    database = sqlite_stage.database
    with locked(url):
        assert why_unavailable(error_in(database, writes=True)) == "another process has locked it"
    with database.write() as session:
        session.execute(text("PRAGMA max_page_count = 1"))  # no more pages than it has
    filling = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 5000) "
    filling += "INSERT INTO files SELECT 'file-' || i, 'x', 'x', 1, 1.0, NULL, NULL FROM n"
    assert why_unavailable(error_in(database, filling, writes=True)) == "its disk is full"
    assert why_unavailable(error_in(database, "SELECT nothing FROM nowhere")) is None
    assert why_unavailable(RuntimeError("database is locked")) is None


def test_a_server_that_was_started_again_is_used_as_before(
    postgresql: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windlass.storage.sql.database._SURELY_LIVES_S", 0.0)  # as after a moment
    with postgresql.new_database(migrated=True) as url:
        database = Database(url)
        with database.read() as session:
            session.execute(text("SELECT 1"))
        other = Database(url)
        with stopped(postgresql):
            assert why_unavailable(error_in(other)) == "it does not answer, or not in time"
        with database.read() as session:  # its connection belongs to the earlier server
            assert session.scalar(text("SELECT 7")) == 7
        other.close()
        database.close()


# --- the API ---------------------------------------------------------------------------------------------------------


def assert_503(response: object, code: str, message: str) -> None:
    assert response.status_code == 503, response.text  # type: ignore[attr-defined]
    error = response.json()["error"]  # type: ignore[attr-defined]
    assert (error["code"], error["type"], error["message"]) == (code, "server_error", message)
    assert int(response.headers["Retry-After"]) > 0  # type: ignore[attr-defined]


def test_while_the_database_is_locked_writers_are_asked_to_try_again(client: TestClient, settings: Settings) -> None:
    file_id = upload(client)
    job = {"model": "tiny", "training_file": file_id}
    with locked(settings.database_url):
        response = client.post("/v1/fine_tuning/jobs", json=job)
        assert_503(
            response, "database_unavailable", "the service's database cannot be used: another process has locked it"
        )
        assert client.get("/v1/files").status_code == 200
    assert client.post("/v1/fine_tuning/jobs", json=job).status_code == 200


def test_while_the_database_is_away_everybody_is_asked_to_try_again(tmp_path: Path, postgresql: PostgresServer) -> None:
    with postgresql.new_database(migrated=True) as url:
        settings = Settings(home=tmp_path, database_url=url)
        make_model(settings.models_dir / "tiny")
        with serve(settings) as client:
            file_id = upload(client)
            with stopped(postgresql):
                for path in ("/v1/files", "/v1/models", "/v1/fine_tuning/jobs", "/metrics", f"/v1/files/{file_id}"):
                    message = "the service's database cannot be used: it does not answer, or not in time"
                    assert_503(client.get(path), "database_unavailable", message)
                assert client.get("/healthz").status_code == 200
                assert client.get("/readyz").status_code == 503
            assert client.get(f"/v1/files/{file_id}").status_code == 200


def test_a_full_disk_is_told(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "_store", refuse)
    response = client.post("/v1/files", files={"file": ("a.jsonl", b"{}")}, data={"purpose": "fine-tune"})
    assert_503(response, "disk_full", "a disk of the service is full")


def test_another_failure_is_still_one_of_the_service(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (OSError(5, "Input/output error"), OperationalError("SELECT 1", {}, sqlite3.OperationalError("odd"))):

        def fail(*_: object, error: Exception = error) -> int:
            raise error

        monkeypatch.setattr(files, "_store", fail)
        if isinstance(error, OperationalError):
            assert error.orig is not None
            error.orig.sqlite_errorcode = sqlite3.SQLITE_ERROR  # type: ignore[attr-defined]
        response = client.post("/v1/files", files={"file": ("a.jsonl", b"{}")}, data={"purpose": "fine-tune"})
        assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert context_of(client).settings.files_dir.is_dir()


# --- the dispatcher --------------------------------------------------------------------------------------------------


class Ray:
    """Runs until it has been polled `num_passes` times."""

    def __init__(self, num_passes: int) -> None:
        self.num_left = num_passes

    @property
    def is_running(self) -> bool:
        self.num_left -= 1
        return self.num_left >= 0


def test_passes_fail_and_go_on(sqlite_stage: Stage, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.service.dispatcher.process._MAX_INTERVAL_S", 0.01)
    monkeypatch.setattr("windlass.service.dispatcher.process._INTERVAL_S", 0.01)
    job_id = sqlite_stage.submit()
    ending = threading.Event()
    with locked(url), pytest.raises(RayLostError):
        dispatch_until(ending, sqlite_stage.dispatcher, Ray(3))  # type: ignore[arg-type]
    assert sqlite_stage.preparations == []
    with pytest.raises(RayLostError):
        dispatch_until(ending, sqlite_stage.dispatcher, Ray(3))  # type: ignore[arg-type]
    assert len(sqlite_stage.preparations) == 1
    assert sqlite_stage.status(job_id) is JobStatus.VALIDATING_FILES


def test_preparation_that_ends_while_database_is_away_is_not_lost(sqlite_stage: Stage, url: str) -> None:
    job_id = sqlite_stage.submit()
    sqlite_stage.tick()
    sqlite_stage.preparations[0].ending = PREPARED
    with locked(url), pytest.raises(OperationalError):
        sqlite_stage.tick()
    sqlite_stage.tick(2)
    assert sqlite_stage.status(job_id) is JobStatus.RUNNING
    assert len(sqlite_stage.preparations) == 1


def test_next_pass_handles_what_a_failed_pass_left(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner that was made and not told to begin waits forever: the next dispatcher of its job ends it."""
    job_id, journal = stage.run()
    journal.close()
    (stage.settings.jobs_dir / job_id / "attempt-1.lock").unlink()
    stage.dispatcher.close()
    stage.new_dispatcher()
    claim = Lease.claim

    def claim_unheard(self: Lease) -> None:
        monkeypatch.setattr(Lease, "claim", claim)
        claim(self)
        raise OperationalError("COMMIT", {}, Exception("the server closed the connection"))

    monkeypatch.setattr(Lease, "claim", claim_unheard)
    with pytest.raises(OperationalError):
        stage.tick()
    assert stage.runners.alive == {(job_id, 1)}
    stage.tick()
    assert stage.runners.alive == set()


def test_a_new_holder_is_told_of_though_the_first_look_at_others_failed(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = Lease(database, node="node-a", machine="boot-1", is_alone=True)
    holders = LeaseRepository.holders

    def fail_once(self: LeaseRepository) -> None:
        monkeypatch.setattr(LeaseRepository, "holders", holders)
        raise OperationalError("SELECT", {}, Exception("the server closed the connection"))

    monkeypatch.setattr(LeaseRepository, "holders", fail_once)
    with pytest.raises(OperationalError):
        lease.renew()
    assert lease.renew()
    assert not lease.renew()


def test_a_dispatcher_ends_though_it_can_give_nothing_up(sqlite_stage: Stage, url: str) -> None:
    sqlite_stage.tick()
    with locked(url):
        sqlite_stage.dispatcher.close()


# --- start and end of the service ------------------------------------------------------------------------------------


def test_windlass_down_with_failing_database_prints_one_line(tmp_path: Path, url: str) -> None:
    (tmp_path / "home").mkdir(mode=0o700)
    settings = Settings(home=tmp_path / "home", database_url="postgresql://nobody@/none?host=/nonexistent")
    with pytest.raises(DatabaseUnavailableError, match="the database cannot be used: it does not answer") as raised:
        lifecycle.running_jobs(settings)
    assert "\n" not in str(raised.value)
