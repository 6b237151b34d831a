"""Replaces files atomically, and makes files and folders durable: once a call returns, they survive a power loss.

A file is durable when its content was synced, and each folder on its path was synced after its entry was made.
"""

import os
from collections.abc import Callable
from pathlib import Path


def sync_path(path: Path) -> None:
    """Syncs a file's content, or a folder's list of names. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(folder: Path, on_synced: Callable[[], None] = lambda: None) -> None:
    """Syncs a folder and all files and folders below it, but not its name in its parent. Raises OSError.

    Symbolic links are not followed. `on_synced` is called after each file or folder.
    """
    for path in folder.rglob("*"):
        if not path.is_symlink() and (path.is_file() or path.is_dir()):
            sync_path(path)
            on_synced()
    sync_path(folder)


def write_durably(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Replaces a file atomically, and syncs it. `mode`: of a new file, less the umask. Raises OSError."""
    _replace(path, text, mode=mode, is_synced=True)
    sync_path(path.parent)


def write_atomically(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Replaces a file: readers see the old content or the new one. A power loss may leave either, or an empty file.

    The file has one writer at a time. `mode`: of a new file, less the umask. Raises OSError, and leaves the old file
    then.
    """
    _replace(path, text, mode=mode, is_synced=False)


def _replace(path: Path, text: str, *, mode: int, is_synced: bool) -> None:
    partial = path.with_name(f"{path.name}.partial")  # always the same one, so that a killed writer's does not stay
    try:
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        with os.fdopen(fd, "w") as file:
            file.write(text)
            file.flush()
            if is_synced:
                os.fsync(fd)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
