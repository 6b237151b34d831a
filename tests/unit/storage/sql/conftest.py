"""Fresh databases, and jobs in them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.postgresql import PostgresServer
from windlass.storage.sql.database import Database
from windlass.storage.sql.models import Job
from windlass.storage.sql.repositories.jobs import JobRepository, NewJob


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """The URL of a database that does not exist yet."""
    return f"sqlite:///{tmp_path}/windlass.db"


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, sqlite_url: str) -> Iterator[str]:
    """The URL of a database without tables."""
    if request.param == "sqlite":
        yield sqlite_url
    else:
        server: PostgresServer = request.getfixturevalue("postgresql")
        with server.new_database(migrated=False) as made:
            yield made


def make_new_job(**changes: Any) -> NewJob:
    fields: dict[str, Any] = {
        "model": "tiny",
        "training_file": "file-1",
        "validation_file": None,
        "suffix": None,
        "seed": 1,
        "method": {"type": "supervised"},
        "windlass": {},
        "metadata": {},
        "priority": 0,
        "idempotency_key": None,
        "request_digest": None,
    }
    return NewJob(**(fields | changes))


@pytest.fixture
def make_job(database: Database) -> Callable[..., Job]:
    def make(**changes: Any) -> Job:
        with database.write() as session:
            return JobRepository(session).create(make_new_job(**changes))

    return make
