"""The home directory: whose it is, what it is called, and which processes serve it."""

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from windlass.amounts import bytes_text
from windlass.service.installation.process_ids import ProcessId, find_process
from windlass.service.validation import ReportedError
from windlass.storage.files import sync_path
from windlass.storage.memory import is_for_want_of_room

# With less, neither uploads and journals nor the database's own files have room.
LEAST_FREE_NBYTES = 64 * 1024**2


class HomeError(ReportedError):
    """The home can't be used as it is."""


class AlreadyUpError(ReportedError):
    """A supervisor serves this home already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The supervisor of a home and where its API answers."""

    process: ProcessId
    url: str


def prepare_home(home: Path) -> None:
    """Make the home, or make sure that it belongs to us and that nobody else can read it."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    stat = home.stat()
    if stat.st_uid != os.getuid():
        raise HomeError(f"the home {home} belongs to user {stat.st_uid}, not to you ({os.getuid()}); choose another")
    if stat.st_mode & 0o077:
        mode = f"{stat.st_mode & 0o777:o}"
        raise HomeError(f"others may enter the home {home} (mode {mode}); run `chmod 700 {home}` or choose another")
    (home / "logs").mkdir(mode=0o700, exist_ok=True)


def node_of(home: Path) -> str:
    """The home's name among those that share a database: given once, and kept in it."""
    path = home / "node"
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        pass
    partial = home / f".node-{secrets.token_hex(6)}"
    try:
        with partial.open("w") as file:
            file.write(f"node-{secrets.token_hex(12)}\n")
            file.flush()
            os.fsync(file.fileno())  # with another name after a power loss, its jobs would be nobody's
        path.hardlink_to(partial)  # whole, and only if no other process was faster
        sync_path(home)
    except FileExistsError:
        pass
    finally:
        partial.unlink(missing_ok=True)
    return path.read_text().strip()


@contextmanager
def telling_of_disk(home: Path) -> Iterator[None]:
    """Raises HomeError where the block fails for lack of disk space."""
    try:
        yield
    except OSError as error:
        if not is_for_want_of_room(error):
            raise
        raise HomeError(
            f"a disk is full, that of the home {home} or of an SSD directory ({error}); make room"
        ) from error


def is_out_of_room(home: Path) -> bool:
    """Whether the home's disk is full, or as good as that."""
    return room_reason(home) is not None


_ROOM_ON = "room on the disk of "


def room_reason(home: Path) -> str | None:
    """Why the jobs of a home wait where its disk is full, or as good as that; None where it has room.

    None also where the disk does not answer: what uses the home next tells why.
    """
    try:
        free_nbytes = shutil.disk_usage(home).free
    except OSError:
        return None
    return None if free_nbytes >= LEAST_FREE_NBYTES else needs_room(home, LEAST_FREE_NBYTES, free_nbytes)


def is_about_room(reason: str) -> bool:
    """Whether a job waits for what `needs_room` tells."""
    return reason.startswith(_ROOM_ON)


def needs_room(path: Path, needed_nbytes: int, free_nbytes: int) -> str:
    """The room that a job waits for, in the words that the API, the CLI and the page show."""
    return f"{_ROOM_ON}{path}: {bytes_text(needed_nbytes)} needed, {bytes_text(free_nbytes)} free"


class DispatcherLock:
    """Held by the one dispatcher that a home has on a machine, for as long as its process lives."""

    def __init__(self, home: Path) -> None:
        self._fd = os.open(home / "dispatcher.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def try_acquire(self) -> bool:
        """False if another dispatcher runs."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        """Let another dispatcher begin."""
        os.close(self._fd)


class HomeLock:
    """Held by a home's one supervisor, and let go by the kernel however it ends."""

    def __init__(self, home: Path) -> None:
        self._path = home / "windlass.lock"
        self._home = home
        self._file: IO[str] | None = None

    def acquire(self, url: str) -> None:
        """Become the home's supervisor; AlreadyUpError, with pid and address, if there is one."""
        file = self._path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise AlreadyUpError(self._describe_holder()) from None
        process = find_process(os.getpid())
        assert process is not None
        file.truncate(0)
        json.dump(asdict(Serving(process=process, url=url)), file)
        file.flush()
        self._file = file

    def release(self) -> None:
        """Let another supervisor serve the home. A record that stays is that of a supervisor that was killed."""
        if self._file is not None:
            self._file.truncate(0)
            self._file.close()
            self._file = None

    def _describe_holder(self) -> str:
        serving = find_serving(self._home)
        holder = "by another `windlass up`" if serving is None else f"at {serving.url} by process {serving.process.pid}"
        return f"windlass is up already: {self._home} is served {holder}; end it with `windlass down`"


def find_serving(home: Path) -> Serving | None:
    """The living supervisor of a home, if there is one."""
    recorded = _read_record(home)
    return recorded if recorded is not None and recorded.process.is_alive else None


def find_killed(home: Path) -> Serving | None:
    """The last supervisor of a home, if it was killed and neither another one nor `windlass down` came after it."""
    recorded = _read_record(home)
    return recorded if recorded is not None and not recorded.process.is_alive else None


def forget_killed(home: Path) -> None:
    """Remove the record of a supervisor that was killed."""
    if find_killed(home) is not None:
        lock = HomeLock(home)
        with suppress(AlreadyUpError):
            lock.acquire("")
            lock.release()


def _read_record(home: Path) -> Serving | None:
    try:
        fields = json.loads((home / "windlass.lock").read_text())
        return Serving(process=ProcessId(**fields["process"]), url=fields["url"])
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None  # nobody ever did, or a full disk or a power loss cut the file short
