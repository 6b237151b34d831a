"""Databases of both kinds, and small slots for activations."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.postgresql import PostgresServer
from windlass.engine.memory_plan.arena import layout as arena_layout
from windlass.storage.sql.database import Database, migrate


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file with all tables and no rows, for tests to copy."""
    path = tmp_path_factory.mktemp("migrated") / "windlass.db"
    migrate(f"sqlite:///{path}")
    return path


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path, migrated_file: Path) -> Iterator[str]:
    """The URL of a database with all tables, of each kind."""
    if request.param == "sqlite":
        shutil.copyfile(migrated_file, tmp_path / "test.db")
        yield f"sqlite:///{tmp_path / 'test.db'}"
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
    monkeypatch.setattr(arena_layout, "ACTIVATION_SLOT_NBYTES", 4096)
    return 4096
