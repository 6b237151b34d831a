"""Opens a database: connections, transactions, schema.

One writer at a time, in SQLite by nature and in PostgreSQL by a lock. A writer may therefore read, decide and write,
and events become visible in the order of their ordinals, so that whoever follows them by ordinal misses none.
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

from sqlalchemy import URL, Connection, Dialect, Engine, create_engine, event, make_url
from sqlalchemy.exc import DatabaseError, InterfaceError, InvalidatePoolError, OperationalError, TimeoutError
from sqlalchemy.orm import Session
from sqlalchemy.pool import ConnectionPoolEntry

from windlass.storage.sql.errors import DamagedDatabase, NewerDatabase

SUPPORTED_DATABASES = ("sqlite", "postgresql")

# Of a process. SQLite: one for each thread that answers requests. PostgreSQL shares its own limit (100) out to all.
_MOST_CONNECTIONS = {"sqlite": 40, "postgresql": 15}
# Of a process. The drivers let go of the interpreter's lock, SQLite's for each row, so that threads that read at the
# same time spend more on waking each other than on what they read: of lists of 20 jobs, 16 at once, one process
# answered 109 a second on SQLite without this limit, 155 with 4, 180 with 2, and 198 with 1. More than one, so that a
# long look through a table does not hold up everything.
_MOST_READERS = 2
_BUSY_TIMEOUT_MS = 15_000
_WRITES = "windlass_writes"
_USED_S = "windlass_used_s"
# A connection to PostgreSQL that was used a moment ago is used again without being asked whether it lives: that takes
# as long as most of what is asked of it.
_SURELY_LIVES_S = 1.0
# Any number will do that no other user of the same PostgreSQL database locks.
_WRITER_LOCK = 0x77696E646C617373
# Of connections to PostgreSQL, where the URL says nothing else: a server that is gone without a word is noticed within
# a minute, not after the hours that the system's own settings take.
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
    """Why the database cannot be used for now, in words, where that is what an error says. None: it says another thing.

    What was asked of the database may be asked again later.
    """
    original = getattr(error, "orig", None)
    if isinstance(original, sqlite3.Error) and (code := getattr(original, "sqlite_errorcode", None)) is not None:
        return _SQLITE_TROUBLE.get(code & 0xFF)  # the rest of the code tells more than is needed
    if isinstance(error, TimeoutError):
        return "all connections to it are in use"
    if isinstance(error, OperationalError | InterfaceError) and not isinstance(original, sqlite3.Error):
        return "it does not answer, or not in time"
    return None


class _Turns:
    """At most so many threads are within it at a time; one that is may enter again, so that none waits for itself."""

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
    """Sessions on one database: whoever opens one owns it. Two threads of a process read at a time."""

    def __init__(self, url: str) -> None:
        self._engine = _open_engine(url)
        self._turns = _Turns(_MOST_READERS)
        self._reading_engine = self._engine
        if self._engine.dialect.name == "postgresql":
            # Each statement has a snapshot of its own anyway, and a transaction takes two more ways there and back.
            self._reading_engine = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        # The option reaches the functions below that begin a transaction; all engines share one pool.
        self._writing_engine = self._engine.execution_options(**{_WRITES: True})

    @contextmanager
    def read(self) -> Iterator[Session]:
        """To read in; nothing is kept of what the block may change. On SQLite all of it is of one moment."""
        with self._turns, Session(self._reading_engine, expire_on_commit=False, autoflush=False) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """One transaction: committed when the block ends, undone when it raises."""
        with Session(self._writing_engine, expire_on_commit=False) as session, session.begin():
            yield session

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()


def check_whole(url: str, *, has_rows: bool) -> None:
    """Look through a SQLite file for damage, if it is there; other databases look after themselves.

    `has_rows`: something was kept in it, so it may not be empty. Raises DamagedDatabase.
    """
    path = make_url(url).database
    if make_url(url).get_backend_name() != "sqlite" or path is None or not Path(path).exists():
        return
    if has_rows and Path(path).stat().st_size == 0:
        raise DamagedDatabase(path, "it is empty, and there are jobs")  # else it would become a new one
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
    """Bring the schema to the newest version; two processes may try at once. All of it is done, or nothing.

    `revision`: to that one, and not further. Raises NewerDatabase.
    """
    # Some changes make a SQLite table anew; dropping the old one would delete the rows that refer to it.
    engine = _open_engine(url, foreign_keys=False)
    # Here, as only the process that starts a service needs it.
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
    if parsed.drivername == "postgresql":  # SQLAlchemy would take the driver before this one
        parsed = parsed.set(drivername="postgresql+psycopg")
    engine = create_engine(
        _noticing_loss(parsed),
        json_serializer=_to_json,
        # Kept open once they were needed: to open one takes longer than most requests.
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
    """Without escapes: SQLite finds a key only as it is written. Those of what is no Unicode have to stay."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def _set_up_sqlite(dbapi_connection: Any, _record: Any) -> None:
    # The driver would begin transactions by itself, late, and commit them before DDL.
    dbapi_connection.isolation_level = None
    cursor = dbapi_connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {_BUSY_TIMEOUT_MS}")
    _use_write_ahead_log(cursor)
    cursor.close()


def _hold_foreign_keys(dbapi_connection: Any, _record: Any) -> None:
    dbapi_connection.execute("PRAGMA foreign_keys = ON")


def _use_write_ahead_log(cursor: sqlite3.Cursor) -> None:
    """Waits as everything else does: while another connection writes to a new file, SQLite itself fails at once."""
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
    # A transaction that reads first and writes later fails at once if another wrote in between, whatever the timeout.
    # Writers therefore take the write lock at the start.
    connection.exec_driver_sql("BEGIN IMMEDIATE" if _writes(connection) else "BEGIN")


def _begin_postgresql(connection: Connection) -> None:
    if _writes(connection):
        lock = f"SELECT pg_advisory_xact_lock({_WRITER_LOCK})"
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = {_BUSY_TIMEOUT_MS}; {lock}")  # one way there and back


def _note_use(_dbapi_connection: Any, record: ConnectionPoolEntry) -> None:
    record.info[_USED_S] = time.monotonic()


def _check_unused(dialect: Dialect, dbapi_connection: Any, record: ConnectionPoolEntry, _proxy: Any) -> None:
    """Ask PostgreSQL whether a connection lives that nobody used for a while: it may have been started again since."""
    if time.monotonic() - record.info[_USED_S] < _SURELY_LIVES_S:
        return
    try:
        dialect.do_ping(dbapi_connection)
    except dialect.loaded_dbapi.Error as error:
        if not dialect.is_disconnect(error, dbapi_connection, None):
            raise
        raise InvalidatePoolError from error  # all of them are opened anew


def _writes(connection: Connection) -> bool:
    return bool(connection.get_execution_options().get(_WRITES, False))
