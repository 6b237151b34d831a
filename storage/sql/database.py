"""Opens a database: connections, transactions, schema."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.orm import Session

_BUSY_TIMEOUT_MS = 15_000
_WRITES = "windlass_writes"


class Database:
    """Sessions on one database. Each is one transaction, and whoever opens it owns it."""

    def __init__(self, url: str) -> None:
        self._engine = _open_engine(url)
        # The option reaches `_begin_sqlite` below; both share one pool.
        self._writing_engine = self._engine.execution_options(**{_WRITES: True})

    @contextmanager
    def read(self) -> Iterator[Session]:
        """One snapshot to read from; nothing is kept of what the block may change."""
        with Session(self._engine, expire_on_commit=False) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """One transaction: committed when the block ends, undone when it raises."""
        with Session(self._writing_engine, expire_on_commit=False) as session, session.begin():
            yield session

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()


def migrate(url: str) -> None:
    """Bring the schema to the newest version; two processes may try at once."""
    engine = _open_engine(url)
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    try:
        with engine.execution_options(**{_WRITES: True}).begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    finally:
        engine.dispose()


def _open_engine(url: str) -> Engine:
    engine = create_engine(url)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _set_up_sqlite(dbapi_connection: Any, _record: Any) -> None:
    # The driver would begin transactions by itself, late, and commit them before DDL.
    dbapi_connection.isolation_level = None
    cursor = dbapi_connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {_BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that reads first and writes later fails at once if another wrote in between, whatever the timeout.
    # Writers therefore take the write lock at the start.
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
