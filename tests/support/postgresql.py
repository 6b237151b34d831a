"""A private PostgreSQL server for a test run, and databases in it."""

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
    """The folder of `initdb` and `postgres`; None if PostgreSQL is not installed."""
    if (found := shutil.which("initdb")) is not None:
        return Path(found).resolve().parent
    folders = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    return max(folders, key=lambda folder: int(folder.parent.name), default=None)


class PostgresServer:
    """A server that answers on a Unix socket in its own folder."""

    def __init__(self, folder: Path, command: Sequence[str | Path]) -> None:
        self._folder = folder
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count(1)

    def url(self, database: str) -> str:
        """The URL of one of its databases."""
        return f"postgresql://{_USER}@/{database}?host={self._folder}"

    def start(self) -> None:
        """Starts the server, and returns once it answers."""
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(self._command, cwd=self._folder, stdout=log, stderr=log)
        self._wait_until_ready()

    def stop(self) -> None:
        """Ends the server at once even if clients are connected. Written data stays."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(_DEADLINE_S)

    def pause(self) -> None:
        """Stops all answers until `go_on`. Clients are not disconnected."""
        self._signal_all(signal.SIGSTOP)

    def go_on(self) -> None:
        """Continues after `pause`."""
        self._signal_all(signal.SIGCONT)

    @contextmanager
    def new_database(self, *, migrated: bool) -> Iterator[str]:
        """The URL of a database, empty or with all tables, which is dropped at the end."""
        name = f"test_{next(self._numbers)}"
        self._run(f"CREATE DATABASE {name}" + (f" TEMPLATE {_TEMPLATE}" if migrated else ""))
        try:
            yield self.url(name)
        finally:
            self._run(f"DROP DATABASE {name} WITH (FORCE)")

    def make_template(self) -> None:
        """Makes the database that migrated databases are copied from."""
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
    """A server that ends with the block, and with this process even if it is killed.

    `is_durable`: it waits for the disk, as in production.
    """
    # Not in a test's folder, because the path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="windlass-pg-") as name:
        folder = Path(name)
        is_root = os.getuid() == 0
        if is_root:  # PostgreSQL does not run as root
            shutil.chown(folder, _USER)
        user = _USER if is_root else None
        data = folder / "data"
        initdb = [
            str(programs / "initdb"),
            "--auth=trust",
            f"--username={_USER}",
            "--no-sync",
            "--encoding=UTF8",
            str(data),
        ]
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
