"""Locks on files (flock(2)). The kernel releases a lock when its holder's process ends, however it ends.

A lock belongs to the open file, so two descriptors of one process exclude each other too.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_POLL_S = 0.05


def open_lock_file(path: Path) -> int:
    """Opens a file for locking, and creates it for its owner only if it is missing. Returns the descriptor."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def lock(file: int | IO[str], *, shared: bool = False) -> None:
    """Waits until the file is locked. A shared lock excludes exclusive ones only."""
    fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)


def try_lock(file: int | IO[str]) -> bool:
    """Locks the file exclusively. Returns False if another one holds a lock of it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(file: int | IO[str]) -> None:
    """Releases the lock. Closing the file does, too."""
    fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def locked(path: Path, *, timeout_s: float | None = None) -> Iterator[None]:
    """Holds the lock of the file at a path, which is created if it is missing.

    Raises:
        TimeoutError: another one held the lock for `timeout_s`.
    """
    fd = open_lock_file(path)
    try:
        if timeout_s is None:
            lock(fd)
        else:
            deadline_s = time.monotonic() + timeout_s
            while not try_lock(fd):
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"another process has held {path} for {timeout_s:g} s")
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(fd)
