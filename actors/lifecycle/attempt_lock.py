"""Lock files that show whether processes of an attempt still live.

Each process locks the attempt's file before it writes anything of the job. The kernel releases a lock when the last
thread of its process has ended. Pids are less reliable: the kernel reuses them, and a killed process shows as a zombie
while another of its threads is still inside a write.
"""

import os
import signal
from pathlib import Path

from windlass.storage.files import lock, try_lock, write_durably
from windlass.storage.ids import Attempt


class AttemptClosed(RuntimeError):
    """The attempt was closed, and another may have begun, so a late process must not join it."""


def begin_attempt(job_dir: Path, attempt: Attempt) -> int:
    """Creates and locks the attempt's file; the runner calls this before it starts anything.

    The returned descriptor holds the lock and must stay open for as long as the process lives. Raises AttemptClosed if
    the attempt was closed before it began.
    """
    path = _path(job_dir, attempt)
    fd = _lock_shared(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), path)
    # Only now, with the file in place: `close_attempt` writes the number first and then looks for the file. In another
    # order, both could miss each other.
    if attempt <= _last_closed(job_dir):
        path.unlink(missing_ok=True)
        os.close(fd)
        raise _closed(path)
    return fd


def join_attempt(job_dir: Path, attempt: Attempt) -> int:
    """Locks the attempt's file like `begin_attempt`, but for any other process of the attempt. Raises AttemptClosed."""
    path = _path(job_dir, attempt)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise _closed(path) from error
    return _lock_shared(fd, path)


def has_begun(job_dir: Path, attempt: Attempt) -> bool:
    """Returns whether the attempt's runner has begun and the attempt is not closed."""
    return _path(job_dir, attempt).exists()


def tell_alive(job_dir: Path, attempt: Attempt) -> bool:
    """Writes the runner's sign of life. Returns False, and writes nothing, if the attempt is closed."""
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
    """Closes the attempt if none of its processes lives, so that none can join it. Returns False if one lives.

    From the call on, neither this attempt nor an earlier one can begin.
    """
    path = _path(job_dir, attempt)
    if job_dir.exists() and attempt > _last_closed(job_dir):
        write_durably(_last_closed_path(job_dir), f"{attempt}\n")  # durably: an empty file after a crash is no number
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True  # it never began, or is already closed
    try:
        if not try_lock(fd):
            return False
        path.unlink()
    finally:
        os.close(fd)
    return True


def kill_attempt(job_dir: Path, attempt: Attempt) -> list[int]:
    """Kills the processes of this machine that have the attempt's file open; returns their pids."""
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
    lock(fd, shared=True)
    if os.fstat(fd).st_nlink == 0:  # the attempt was closed between the open and the lock
        os.close(fd)
        raise _closed(path)
    return fd


def _kill_holder(pid: int, path: Path) -> bool:
    try:
        # A pidfd refers to this process even if it ends now and the kernel reuses its pid.
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False  # the process has ended, or the number is a thread's
    try:
        if not any(_refers_to(link, path) for link in Path(f"/proc/{pid}/fd").iterdir()):
            return False
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except OSError:
        return False  # another user's process, or the process is gone
    finally:
        os.close(pidfd)
    return True


def _refers_to(link: Path, path: Path) -> bool:
    try:
        return link.readlink() == path
    except OSError:
        return False  # the process has closed this file meanwhile, but not necessarily the one of the attempt
