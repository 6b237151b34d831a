"""Whether processes of an attempt still live: each locks the attempt's file before it may write anything of the job.

The kernel gives a lock up when the last thread of its process has ended. A pid tells less: it is used again, and a
killed process shows as a zombie while another of its threads is still inside a write.
"""

import fcntl
import os
import signal
from pathlib import Path

from windlass.storage.files import write_durably
from windlass.storage.ids import Attempt


class AttemptClosed(RuntimeError):
    """The attempt was found dead, and another may have begun; a process that comes late must not take part."""


def begin_attempt(job_dir: Path, attempt: Attempt) -> int:
    """The runner's part, before it starts anything: make the file and lock it.

    The descriptor holds the lock and must stay open for as long as the process lives. Raises AttemptClosed where the
    attempt was given up before it began.
    """
    path = _path(job_dir, attempt)
    fd = _lock_shared(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), path)
    # Looked at with the file in place: who gives an attempt up writes first, and looks for its file then.
    if attempt <= _last_closed(job_dir):
        path.unlink(missing_ok=True)
        os.close(fd)
        raise _closed(path)
    return fd


def join_attempt(job_dir: Path, attempt: Attempt) -> int:
    """The part of every other process of the attempt, as `begin_attempt`. Raises AttemptClosed."""
    path = _path(job_dir, attempt)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise _closed(path) from error
    return _lock_shared(fd, path)


def has_begun(job_dir: Path, attempt: Attempt) -> bool:
    """Whether the attempt's runner has begun, and the attempt was not closed."""
    return _path(job_dir, attempt).exists()


def tell_alive(job_dir: Path, attempt: Attempt) -> bool:
    """The runner's sign of life. False, and nothing done, once the attempt is closed."""
    try:
        os.utime(_path(job_dir, attempt))
    except FileNotFoundError:
        return False
    return True


def last_sign_of_life(job_dir: Path, attempt: Attempt) -> int | None:
    """A number that changes with each sign of life of the runner; None before it has begun."""
    try:
        return _path(job_dir, attempt).stat().st_mtime_ns
    except FileNotFoundError:
        return None


def close_attempt(job_dir: Path, attempt: Attempt) -> bool:
    """Close the attempt if none of its processes lives: from then on none can join it. False if one lives.

    Neither it nor one before it can begin any more.
    """
    path = _path(job_dir, attempt)
    if job_dir.exists() and attempt > _last_closed(job_dir):
        write_durably(_last_closed_path(job_dir), f"{attempt}\n")  # an empty file would be no number
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True  # it never began, or was closed before
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def kill_attempt(job_dir: Path, attempt: Attempt) -> list[int]:
    """Kill the processes of this machine that hold the attempt's file; returns their pids."""
    path = _path(job_dir, attempt).resolve()
    return [int(folder.name) for folder in Path("/proc").glob("[0-9]*") if _kill_holder(int(folder.name), path)]


def _path(job_dir: Path, attempt: Attempt) -> Path:
    return job_dir / f"attempt-{attempt}.lock"


def _last_closed_path(job_dir: Path) -> Path:
    return job_dir / "last-closed-attempt"


def _last_closed(job_dir: Path) -> int:
    try:
        return int(_last_closed_path(job_dir).read_text())
    except FileNotFoundError:
        return 0


def _closed(path: Path) -> AttemptClosed:
    return AttemptClosed(f"{path} was removed: this attempt was given up, and a later one may have begun")


def _lock_shared(fd: int, path: Path) -> int:
    fcntl.flock(fd, fcntl.LOCK_SH)
    if os.fstat(fd).st_nlink == 0:  # closed between our opening and our locking it
        os.close(fd)
        raise _closed(path)
    return fd


def _kill_holder(pid: int, path: Path) -> bool:
    try:
        # Holds on to this very process: if it ends now, its pid cannot come to mean another one.
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False  # gone, or a thread
    try:
        if path not in [link.readlink() for link in Path(f"/proc/{pid}/fd").iterdir()]:
            return False
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except OSError:
        return False  # somebody else's, or it, or what it had open, is gone
    finally:
        os.close(pidfd)
    return True
