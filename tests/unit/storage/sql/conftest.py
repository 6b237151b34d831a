"""A fresh database, and jobs in it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from windlass.storage.sql.database import Database, migrate
from windlass.storage.sql.jobs import JobRepository, NewJob
from windlass.storage.sql.models import Job


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/windlass.db"


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    migrate(url)
    database = Database(url)
    yield database
    database.close()


@pytest.fixture
def make_job(database: Database) -> Callable[..., Job]:
    def make(**changes: Any) -> Job:
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
        with database.write() as session:
            return JobRepository(session).create(NewJob(**(fields | changes)))

    return make
