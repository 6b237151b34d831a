"""Databases of both kinds, and small slots for activations."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.postgresql import PostgresServer
from windlass.engine.memory_plan import plan
from windlass.storage.sql.database import Database, migrate


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database with all tables, of each kind."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'test.db'}"
        migrate(url)
        yield url
    else:
        server: PostgresServer = request.getfixturevalue("postgresql")
        with server.new_database(migrated=True) as url:
            yield url


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """A database with all tables, of each kind."""
    database = Database(database_url)
    yield database
    database.close()


@pytest.fixture
def small_activation_slots(monkeypatch: pytest.MonkeyPatch) -> int:
    """Makes activation slots as small as the models of tests. Returns the bytes of a slot."""
    monkeypatch.setattr(plan, "ACTIVATION_SLOT_NBYTES", 4096)
    return 4096
