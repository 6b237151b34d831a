"""Opens a database: connections, transactions, schema.

There is one writer at a time: in SQLite by design, in PostgreSQL by a lock. So a writer may read, decide and write
without a race. Events become visible in the order of their ordinals, so a reader that follows the ordinals misses none.
"""

import functools
import json
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, CursorResult, Delete, Dialect, Engine, Update, create_engine, event, make_url
from sqlalchemy.exc import DatabaseError, InterfaceError, InvalidatePoolError, OperationalError, TimeoutError
from sqlalchemy.orm import Session
from sqlalchemy.pool import ConnectionPoolEntry

from windlass.storage.sql.errors import DamagedDatabase, NewerDatabase

SUPPORTED_DATABASES = ("sqlite", "postgresql")

# Connections of a process. SQLite: one for each thread that answers requests. PostgreSQL has a limit of 100 for all
# processes.
_MOST_CONNECTIONS = {"sqlite": 40, "postgresql": 15}
# Threads of a process that read at the same time. The drivers release the GIL, SQLite's for each row, so that more
# threads mainly wake each other. Lists of 20 jobs per second by one process on SQLite with 16 requests at once: 109
# without a limit, 155 with 4, 180 with 2, 198 with 1. Not 1, so that a long query does not block all others.
_MOST_READERS = 2
_BUSY_TIMEOUT_MS = 15_000  # timeout of a wait for another writer
_WRITES = "windlass_writes"
_USED_S = "windlass_used_s"
# Seconds after its last use during which a PostgreSQL connection is reused without a ping, because a ping takes as long
# as most queries.
_SURELY_LIVES_S = 1.0
# The advisory lock of writers: any number that no other user of the same PostgreSQL database locks.
_WRITER_LOCK = 0x77696E646C617373
# Defaults for connections to PostgreSQL that the URL may override. A server that disappears without closing connections
# is noticed within a minute; with the system's settings it would take hours.
_NOTICES_LOSS = {
    "connect_timeout": "10",
    "keepalives_idle": "15",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}
_SQLITE_TROUBLE = {
    sqlite3.SQLITE_BUSY: "another process has locked it",
    sqlite3.SQLITE_LOCKED: "another process has locked it",
    sqlite3.SQLITE_FULL: "its disk is full",
    sqlite3.SQLITE_IOERR: "its file cannot be read or written",
    sqlite3.SQLITE_CANTOPEN: "its file cannot be opened",
    sqlite3.SQLITE_READONLY: "its file cannot be written",
    sqlite3.SQLITE_CORRUPT: "its file is damaged; `windlass restore` brings a backup back",
    sqlite3.SQLITE_NOTADB: "its file is damaged; `windlass restore` brings a backup back",
}


def why_unavailable(error: BaseException) -> str | None:
    """Returns the reason why the database is unavailable, as text; None if the error has another cause.

    If the database is unavailable, the caller may retry later.
    """
    original = getattr(error, "orig", None)
    if isinstance(original, sqlite3.Error) and (code := getattr(original, "sqlite_errorcode", None)) is not None:
        return _SQLITE_TROUBLE.get(code & 0xFF)  # the primary code; higher bits hold details
    if isinstance(error, TimeoutError):
        return "all connections to it are in use"
    if isinstance(error, OperationalError | InterfaceError) and not isinstance(original, sqlite3.Error):
        return "it does not answer, or not in time"
    return None


class _Turns:
    """Limits the number of threads inside a context. It is reentrant, so that a thread never waits for itself."""

    def __init__(self, most: int) -> None:
        self._free = threading.Semaphore(most)
        self._own = threading.local()

    def __enter__(self) -> None:
        depth = getattr(self._own, "depth", 0)
        if depth == 0:
            self._free.acquire()
        self._own.depth = depth + 1

    def __exit__(self, *_: object) -> None:
        self._own.depth -= 1
        if self._own.depth == 0:
            self._free.release()


class Database:
    """Sessions on one database. Two threads of a process may read at the same time."""

    def __init__(self, url: str) -> None:
        self._engine = _open_engine(url)
        self._turns = _Turns(_MOST_READERS)
        self._reading_engine = self._engine
        if self._engine.dialect.name == "postgresql":
            # Each statement has its own snapshot anyway, and a transaction would cost two more round trips.
            self._reading_engine = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        # The functions below that begin a transaction read this option. All engines share one pool.
        self._writing_engine = self._engine.execution_options(**{_WRITES: True})

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Opens a session for reading; changes are discarded. On SQLite all queries see the same snapshot."""
        with self._turns, Session(self._reading_engine, expire_on_commit=False, autoflush=False) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """Opens a session with one transaction. It is committed at the block's end and rolled back on an error."""
        with Session(self._writing_engine, expire_on_commit=False) as session, session.begin():
            yield session

    def close(self) -> None:
        """Closes all connections."""
        self._engine.dispose()


def check_whole(url: str, *, has_rows: bool) -> None:
    """Checks an existing SQLite file for damage. Other databases need no check.

    `has_rows`: the database held rows, so the file must not be empty. Raises DamagedDatabase.
    """
    path = make_url(url).database
    if make_url(url).get_backend_name() != "sqlite" or path is None or not Path(path).exists():
        return
    if has_rows and Path(path).stat().st_size == 0:
        raise DamagedDatabase(path, "it is empty, and there are jobs")  # SQLite would treat it as a new database
    engine = _open_engine(url)
    try:
        with engine.connect() as connection:
            found = str(connection.exec_driver_sql("PRAGMA quick_check(1)").scalar())
    except DatabaseError as error:
        code = getattr(error.orig, "sqlite_errorcode", sqlite3.SQLITE_OK)
        if code & 0xFF not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise
        found = str(error.orig)
    finally:
        engine.dispose()
    if found != "ok":
        raise DamagedDatabase(path, found)


def migrate(url: str, *, revision: str = "head") -> None:
    """Migrates the schema to the newest version, completely or not at all. Two processes may call it at once.

    `revision`: the version to stop at. Raises NewerDatabase.
    """
    # Foreign keys are off, because some migrations recreate a SQLite table, and dropping the old one would delete the
    # rows that refer to it.
    engine = _open_engine(url, foreign_keys=False)
    # Imported here, because only the process that starts a service needs it.
    from alembic import command
    from alembic.config import Config
    from alembic.migration import MigrationContext
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    try:
        with engine.execution_options(**{_WRITES: True}).begin() as connection:
            known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
            for current in MigrationContext.configure(connection).get_current_heads():
                if current not in known:
                    raise NewerDatabase(current)
            config.attributes["connection"] = connection
            command.upgrade(config, revision)
    finally:
        engine.dispose()


def _open_engine(url: str, *, foreign_keys: bool = True) -> Engine:
    parsed = make_url(url)
    backend = parsed.get_backend_name()
    if backend not in SUPPORTED_DATABASES:
        raise ValueError(f"the database must be one of {', '.join(SUPPORTED_DATABASES)}, got {backend!r}")
    if parsed.drivername == "postgresql":  # SQLAlchemy's default would be psycopg2
        parsed = parsed.set(drivername="postgresql+psycopg")
    engine = create_engine(
        _noticing_loss(parsed),
        json_serializer=_to_json,
        # Connections stay open, because opening one takes longer than most requests.
        pool_size=_MOST_CONNECTIONS[backend],
        max_overflow=0,
        pool_use_lifo=True,
    )
    if backend == "sqlite":
        event.listen(engine, "connect", _set_up_sqlite)
        if foreign_keys:
            event.listen(engine, "connect", _hold_foreign_keys)
        event.listen(engine, "begin", _begin_sqlite)
    else:
        event.listen(engine, "begin", _begin_postgresql)
        event.listen(engine, "connect", _note_use)
        event.listen(engine, "checkin", _note_use)
        event.listen(engine, "checkout", functools.partial(_check_unused, engine.dialect))
    return engine


def _noticing_loss(url: URL) -> URL:
    if url.get_backend_name() == "sqlite":
        return url
    return url.update_query_dict({key: value for key, value in _NOTICES_LOSS.items() if key not in url.query})


def _to_json(value: Any) -> str:
    """Converts to JSON without escapes, because SQLite finds a key only in its exact spelling.

    Lone surrogates, which UTF-8 cannot encode, keep their escapes.
    """
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def _set_up_sqlite(dbapi_connection: Any, _record: Any) -> None:
    # Otherwise the driver begins transactions itself, too late, and commits them before DDL.
    dbapi_connection.isolation_level = None
    cursor = dbapi_connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {_BUSY_TIMEOUT_MS}")
    _use_write_ahead_log(cursor)
    cursor.close()


def _hold_foreign_keys(dbapi_connection: Any, _record: Any) -> None:
    dbapi_connection.execute("PRAGMA foreign_keys = ON")


def _use_write_ahead_log(cursor: sqlite3.Cursor) -> None:
    """Switches to WAL mode. Retries until the timeout, because SQLite fails at once if another connection writes."""
    until_s = time.monotonic() + _BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            cursor.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > until_s:
                raise
        time.sleep(0.01)


def _begin_sqlite(connection: Connection) -> None:
    # Writers acquire the write lock at the start. A transaction that reads first and writes later would fail at once if
    # another wrote in between, regardless of the timeout.
    connection.exec_driver_sql("BEGIN IMMEDIATE" if _writes(connection) else "BEGIN")


def _begin_postgresql(connection: Connection) -> None:
    if _writes(connection):
        lock = f"SELECT pg_advisory_xact_lock({_WRITER_LOCK})"
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = {_BUSY_TIMEOUT_MS}; {lock}")  # in one round trip


def _note_use(_dbapi_connection: Any, record: ConnectionPoolEntry) -> None:
    record.info[_USED_S] = time.monotonic()


def _check_unused(dialect: Dialect, dbapi_connection: Any, record: ConnectionPoolEntry, _proxy: Any) -> None:
    """Pings PostgreSQL on a connection that was unused for a while, because the server may have been restarted."""
    if time.monotonic() - record.info[_USED_S] < _SURELY_LIVES_S:
        return
    try:
        dialect.do_ping(dbapi_connection)
    except dialect.loaded_dbapi.Error as error:
        if not dialect.is_disconnect(error, dbapi_connection, None):
            raise
        raise InvalidatePoolError from error  # SQLAlchemy then reopens all connections


def _writes(connection: Connection) -> bool:
    return bool(connection.get_execution_options().get(_WRITES, False))


def execute_change(session: Session, statement: Update | Delete) -> int:
    """Executes an UPDATE or DELETE and returns the number of changed rows.

    Rows that the session has read stay as they were read.
    """
    result = session.execute(statement.execution_options(synchronize_session=False))
    assert isinstance(result, CursorResult)
    return result.rowcount
