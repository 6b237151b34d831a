"""A PostgreSQL server of a test run's own, and databases in it."""

import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
from sqlalchemy import create_engine
from sqlalchemy.exc import OperationalError

from windlass.storage.sql.database import migrate

_USER = "postgres"
_DEADLINE_S = 60.0
_TEMPLATE = "migrated"


def find_programs() -> Path | None:
    """Where `initdb` and `postgres` lie; None where PostgreSQL is not installed."""
    if (found := shutil.which("initdb")) is not None:
        return Path(found).resolve().parent
    folders = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    return max(folders, key=lambda folder: int(folder.parent.name), default=None)


class PostgresServer:
    """Answers on a socket in a folder of its own."""

    def __init__(self, folder: Path, command: Sequence[str | Path]) -> None:
        self._folder = folder
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count(1)

    def url(self, database: str) -> str:
        """Of one of its databases."""
        return f"postgresql://{_USER}@/{database}?host={self._folder}"

    def start(self) -> None:
        """Returns once it answers."""
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(self._command, cwd=self._folder, stdout=log, stderr=log)
        self._wait_until_ready()

    def stop(self) -> None:
        """End it at once, whoever is connected; what was written stays."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(_DEADLINE_S)

    def pause(self) -> None:
        """Nobody gets an answer until `go_on`, nor is anybody told."""
        self._signal_all(signal.SIGSTOP)

    def go_on(self) -> None:
        """After `pause`."""
        self._signal_all(signal.SIGCONT)

    @contextmanager
    def new_database(self, *, migrated: bool) -> Iterator[str]:
        """The URL of a database, which is dropped in the end: empty, or with all tables."""
        name = f"test_{next(self._numbers)}"
        self._run(f"CREATE DATABASE {name}" + (f" TEMPLATE {_TEMPLATE}" if migrated else ""))
        try:
            yield self.url(name)
        finally:
            self._run(f"DROP DATABASE {name} WITH (FORCE)")

    def make_template(self) -> None:
        """What migrated databases are copied from."""
        self._run(f"CREATE DATABASE {_TEMPLATE}")
        migrate(self.url(_TEMPLATE))

    def _wait_until_ready(self) -> None:
        until_s = time.monotonic() + _DEADLINE_S
        while True:
            try:
                self._run("SELECT 1")
                return
            except OperationalError:
                if time.monotonic() > until_s:
                    raise
            time.sleep(0.05)

    def _signal_all(self, signum: signal.Signals) -> None:
        assert self._process is not None
        server = psutil.Process(self._process.pid)
        for process in (server, *server.children(recursive=True)):
            process.send_signal(signum)

    def _run(self, statement: str) -> None:
        engine = create_engine(self.url("postgres").replace("://", "+psycopg://", 1), isolation_level="AUTOCOMMIT")
        try:
            with engine.connect() as connection:
                connection.exec_driver_sql(statement)
        finally:
            engine.dispose()


@contextmanager
def postgres_server(programs: Path, *, is_durable: bool = False) -> Iterator[PostgresServer]:
    """A server that ends with the block, and with this process however that ends.

    `is_durable`: it waits for the disk, as one that is used does.
    """
    # Not in a test's folder: a socket's path is short.
    with tempfile.TemporaryDirectory(prefix="windlass-pg-") as name:
        folder = Path(name)
        is_root = os.getuid() == 0
        if is_root:  # for whom PostgreSQL does not run
            shutil.chown(folder, _USER)
        user = _USER if is_root else None
        data = folder / "data"
        initdb = [programs / "initdb", "--auth=trust", f"--username={_USER}", "--no-sync", "--encoding=UTF8", data]
        subprocess.run(initdb, user=user, cwd=folder, check=True, capture_output=True, timeout=_DEADLINE_S)
        options = {"listen_addresses": "", "unix_socket_directories": folder}
        if not is_durable:  # nothing has to survive the test
            options |= {"fsync": "off", "full_page_writes": "off"}
        words = [f"--{key}={value}" for key, value in options.items()]
        login = ["--reuid", _USER, "--regid", _USER, "--clear-groups"] if is_root else []
        server = PostgresServer(
            folder, ["setpriv", "--pdeathsig", "QUIT", *login, programs / "postgres", "-D", data, *words]
        )
        try:
            server.start()
            server.make_template()
            yield server
        finally:
            server.stop()
