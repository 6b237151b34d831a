"""The home directory: its owner, its name among homes, and the processes that serve it."""

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
from windlass.storage.files import open_lock_file, sync_path, try_lock
from windlass.storage.memory import is_out_of_space

# Minimum free bytes on the home's disk. Uploads, journals and the database need them.
LEAST_FREE_NBYTES = 64 * 1024**2
BOX_FILE = "box.json"  # of a home that is a box of a head


class HomeError(ReportedError):
    """The home cannot be used as it is."""


class AlreadyUpError(ReportedError):
    """Another supervisor already serves this home."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The supervisor of a home and the address of its API."""

    process: ProcessId
    url: str


def prepare_home(home: Path) -> None:
    """Makes the home, or checks that it belongs to this user and that no other user can read it."""
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        if is_out_of_space(error):
            raise  # `telling_of_disk` names the full disk
        raise HomeError(f"the home {home} cannot be made ({error.strerror}); choose another") from error
    stat = home.stat()
    if stat.st_uid != os.getuid():
        raise HomeError(f"the home {home} belongs to user {stat.st_uid}, not to you ({os.getuid()}); choose another")
    if stat.st_mode & 0o077:
        mode = f"{stat.st_mode & 0o777:o}"
        raise HomeError(f"others may enter the home {home} (mode {mode}); run `chmod 700 {home}` or choose another")
    (home / "logs").mkdir(mode=0o700, exist_ok=True)


def node_of(home: Path) -> str:
    """Returns the home's unique name among the homes that share a database.

    It is generated once and stored in the home.
    """
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
            # must be durable: with another name after a power loss, the home would not find its jobs
            os.fsync(file.fileno())
        path.hardlink_to(partial)  # atomic: the file is complete, and an existing one of another process stays
        sync_path(home)
    except FileExistsError:
        pass
    finally:
        partial.unlink(missing_ok=True)
    return path.read_text().strip()


@contextmanager
def telling_of_disk(home: Path) -> Iterator[None]:
    """Raises HomeError if the `with` block fails for lack of disk space."""
    try:
        yield
    except OSError as error:
        if not is_out_of_space(error):
            raise
        raise HomeError(
            f"a disk is full, that of the home {home} or of an SSD directory ({error}); make room"
        ) from error


def is_out_of_room(home: Path) -> bool:
    """Returns whether less than `LEAST_FREE_NBYTES` are free on the home's disk."""
    return room_reason(home) is not None


_ROOM_ON = "room on the disk of "


def room_reason(home: Path) -> str | None:
    """Returns the reason for jobs to wait if the home's disk is almost full, else None.

    None also if the disk does not answer. The next access to the home reports that error.
    """
    try:
        free_nbytes = shutil.disk_usage(home).free
    except OSError:
        return None
    return None if free_nbytes >= LEAST_FREE_NBYTES else needs_room(home, LEAST_FREE_NBYTES, free_nbytes)


def is_about_room(reason: str) -> bool:
    """Returns whether a waiting reason is one that `needs_room` made."""
    return reason.startswith(_ROOM_ON)


def needs_room(path: Path, needed_nbytes: int, free_nbytes: int) -> str:
    """Describes the disk space that a job waits for, as the API, the CLI and the dashboard show it."""
    return f"{_ROOM_ON}{path}: {bytes_text(needed_nbytes)} needed, {bytes_text(free_nbytes)} free"


class DispatcherLock:
    """The lock of the one dispatcher that a home has on a machine. It is held while the dispatcher's process lives."""

    def __init__(self, home: Path) -> None:
        self._fd = open_lock_file(home / "dispatcher.lock")

    def try_acquire(self) -> bool:
        """Returns False if another dispatcher holds the lock."""
        return try_lock(self._fd)

    def release(self) -> None:
        """Releases the lock for another dispatcher."""
        os.close(self._fd)


class HomeLock:
    """The lock of a home's one supervisor. The kernel releases it however the supervisor ends."""

    def __init__(self, home: Path) -> None:
        self._path = home / "windlass.lock"
        self._home = home
        self._file: IO[str] | None = None

    def acquire(self, url: str) -> None:
        """Acquires the lock and records the supervisor.

        Raises AlreadyUpError, with pid and address, if there is another one.
        """
        file = self._path.open("a+")
        if not try_lock(file):
            file.close()
            raise AlreadyUpError(self._describe_holder())
        process = find_process(os.getpid())
        assert process is not None
        file.truncate(0)
        json.dump(asdict(Serving(process=process, url=url)), file)
        file.flush()
        self._file = file

    def release(self) -> None:
        """Releases the lock and clears the record.

        So a record without a living process belongs to a killed supervisor.
        """
        if self._file is not None:
            self._file.truncate(0)
            self._file.close()
            self._file = None

    def _describe_holder(self) -> str:
        serving = find_serving(self._home)
        holder = "by another `windlass up`" if serving is None else f"at {serving.url} by process {serving.process.pid}"
        return f"windlass is up already: {self._home} is served {holder}; end it with `windlass down`"


def find_serving(home: Path) -> Serving | None:
    """Returns the living supervisor of a home, or None."""
    recorded = _read_record(home)
    return recorded if recorded is not None and recorded.process.is_alive else None


@dataclass(frozen=True, slots=True)
class BoxOfHead:
    """The box that a home is, and the address of its head."""

    name: str
    head: str


def box_of(home: Path) -> BoxOfHead | None:
    """Returns the box that a home is, or None if it has joined no head."""
    try:
        fields = json.loads((home / BOX_FILE).read_text())
        return BoxOfHead(name=str(fields["name"]), head=str(fields["head"]))
    except (OSError, ValueError, LookupError, TypeError):
        return None


def find_killed(home: Path) -> Serving | None:
    """Returns the last supervisor of a home if it was killed and neither a new one nor `windlass down` followed."""
    recorded = _read_record(home)
    return recorded if recorded is not None and not recorded.process.is_alive else None


def forget_killed(home: Path) -> None:
    """Clears the record of a killed supervisor."""
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
        return None  # no supervisor ever ran, or a full disk or a power loss truncated the file
