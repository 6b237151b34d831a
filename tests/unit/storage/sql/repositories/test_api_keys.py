"""Keys and logins in the database, and the migration of a database without keys."""

import time
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine, text
from sqlalchemy.exc import IntegrityError

from tests.unit.storage.sql.conftest import make_new_job
from windlass.storage.sql import database as database_module
from windlass.storage.sql.database import Database, migrate
from windlass.storage.sql.repositories.api_keys import KeyRepository, Role, needs_note
from windlass.storage.sql.repositories.events import EventRepository
from windlass.storage.sql.repositories.files import FileRepository
from windlass.storage.sql.repositories.jobs import JobRepository


def test_a_key_is_found_by_its_secret_alone(database: Database) -> None:
    with database.write() as session:
        keys = KeyRepository(session)
        key, secret = keys.create(name="a", user="a", role=Role.USER)
        keys.create(name="a", user="a", role=Role.USER)
        assert keys.find(secret) is key
        for other in ("", secret[:-1], secret.upper(), key.digest, key.id, "\udcff"):
            assert keys.find(other) is None


def test_the_use_of_a_key_is_kept_to_the_minute(database: Database) -> None:
    with database.write() as session:
        key, _ = KeyRepository(session).create(name="a", user="a", role=Role.USER)
    kept = []
    for now_s in (1000.0, 1059.0, 1060.0, 1061.0):
        with database.write() as session:
            assert needs_note(KeyRepository(session).get(key.id), now_s) is (now_s in (1000.0, 1060.0))
            KeyRepository(session).note_use(key.id, now_s)
        with database.read() as session:
            kept.append(KeyRepository(session).get(key.id).last_used_at)
    assert kept == [1000.0, 1000.0, 1060.0, 1060.0]


def test_expired_logins_are_deleted(database: Database) -> None:
    with database.write() as session:
        keys = KeyRepository(session)
        key, _ = keys.create(name="a", user="a", role=Role.USER)
        over, open_ = keys.log_in(key.id, lasts_s=-1), keys.log_in(key.id, lasts_s=60)
        assert (keys.find_login(over), keys.find_login(open_)) == (None, key)
        assert session.scalar(text("SELECT count(*) FROM login_sessions")) == 1


@pytest.mark.parametrize("end", ["expires", "is revoked"])
def test_expired_or_revoked_key_is_refused(database: Database, end: str) -> None:
    with database.write() as session:
        keys = KeyRepository(session)
        key, secret = keys.create(name="a", user="a", role=Role.USER, expires_at=time.time() + 60)
        token = keys.log_in(key.id, lasts_s=600)
        opened = (keys.find(secret), keys.find_login(token), keys.is_open(key.id, None), keys.has_active())
        assert opened == (key, key, True, True)
        if end == "expires":
            key.expires_at = time.time()
        else:
            key.revoked_at = time.time()
        opened = (keys.find(secret), keys.find_login(token), keys.is_open(key.id, None), keys.has_active())
        assert opened == (None, None, False, False)


def test_a_key_is_needed_until_all_are_revoked(database: Database) -> None:
    with database.write() as session:
        keys = KeyRepository(session)
        assert (keys.is_needed(), keys.has_active()) == (False, False)
        key, _ = keys.create(name="a", user="a", role=Role.USER, expires_at=time.time() - 1)
        assert (keys.is_needed(), keys.has_active()) == (True, False)
        other, _ = keys.create(name="b", user="b", role=Role.USER, expires_at=time.time() + 60)
        assert (keys.is_needed(), keys.has_active()) == (True, True)
        keys.revoke(key.id)
        keys.revoke(other.id)
        assert (keys.is_needed(), keys.has_active()) == (False, False)


@pytest.mark.parametrize("owner", [None, "a"])
def test_an_owner_has_one_job_for_an_idempotency_key(database: Database, owner: str | None) -> None:
    with database.write() as session:
        JobRepository(session).create(make_new_job(owner=owner, idempotency_key="1"))
        JobRepository(session).create(make_new_job(owner="b", idempotency_key="1"))
        JobRepository(session).create(make_new_job(owner=owner))
        JobRepository(session).create(make_new_job(owner=owner))
    with pytest.raises(IntegrityError), database.write() as session:
        JobRepository(session).create(make_new_job(owner=owner, idempotency_key="1"))


@pytest.mark.parametrize("owner", [None, "a"])
def test_an_idempotency_key_finds_its_owners_job_only(database: Database, owner: str | None) -> None:
    with database.write() as session:
        jobs = JobRepository(session)
        jobs.create(make_new_job(owner="b", idempotency_key="1"))
        assert jobs.by_idempotency_key(owner, ["1"]) is None
        job = jobs.create(make_new_job(owner=owner, idempotency_key="1"))
        assert jobs.by_idempotency_key(owner, ["0", "1"]) is job
        assert jobs.by_idempotency_key(owner, ["2"]) is None


def test_rows_from_before_keys_are_kept_without_owner(url: str) -> None:
    """The table of jobs is recreated; rows that refer to it stay."""
    _migrate_to(url, "0002")
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO files VALUES ('file-1', 'a.jsonl', 'fine-tune', 5, 1.0)"))
        for number, key in ((1, "'once'"), (2, "NULL")):
            connection.execute(
                text(
                    "INSERT INTO jobs (id, status, attempt, created_at, model, training_file, seed, method, windlass, "
                    "metadata, priority, idempotency_key, cancel_requested, step, journal_attempt, journal_seq, "
                    f"result_files, plan_number) VALUES ('ftjob-{number}', 'queued', 1, {number}.0, 'tiny', 'file-1', "
                    f"7, '{{}}', '{{}}', '{{\"team\": \"x\"}}', 3, {key}, false, 4, 1, 9, '[]', 2)"
                )
            )
        connection.execute(
            text(
                "INSERT INTO job_events (job_id, attempt, seq, created_at, level, message, type, data) "
                "VALUES ('ftjob-1', 1, 1, 1.0, 'info', 'old', 'message', '{}')"
            )
        )
    engine.dispose()
    migrate(url)
    database = Database(url)
    with database.write() as session:
        jobs = JobRepository(session)
        job = jobs.get("ftjob-1")
        assert (job.owner, job.priority, job.plan_number, job.job_metadata) == (None, 3, 2, {"team": "x"})
        assert FileRepository(session).get("file-1").owner is None
        assert [event.message for event in EventRepository(session).since(0, limit=10)] == ["old"]
        assert jobs.by_idempotency_key(None, ["once"]) is job
        assert JobRepository(session, "a").page(limit=10, after=None, metadata={}).rows == ()
        jobs.create(make_new_job(owner="a", idempotency_key="once"))
    with pytest.raises(IntegrityError), database.write() as session:
        EventRepository(session).add("ftjob-none", attempt=0, message="lost")
    database.close()
    _migrate_to(url, "0002")
    engine = create_engine(url)
    with engine.begin() as connection:
        rows = connection.execute(text("SELECT id, idempotency_key FROM jobs ORDER BY created_at")).all()
        assert [key for _, key in rows] == ["once", None, None]
        assert connection.scalar(text("SELECT count(*) FROM job_events WHERE message = 'old'")) == 1
    engine.dispose()


def _migrate_to(url: str, revision: str) -> None:
    engine = database_module._open_engine(url, foreign_keys=False)
    config = Config()
    config.set_main_option("script_location", str(Path(database_module.__file__).parent / "migrations"))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        current = connection.dialect.has_table(connection, "api_keys")
        (command.downgrade if current else command.upgrade)(config, revision)
    engine.dispose()
