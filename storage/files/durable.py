"""Makes files and folders durable: once a call returns, they survive a power loss.

A file is durable when its content was synced, and each folder on its path was synced after its entry was made.
"""

import os
from pathlib import Path


def sync_path(path: Path) -> None:
    """Syncs a file's content, or a folder's list of names. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(folder: Path) -> None:
    """Syncs a folder and all files and folders below it, but not its name in its parent. Raises OSError.

    Symbolic links are not followed.
    """
    for path in folder.rglob("*"):
        if not path.is_symlink() and (path.is_file() or path.is_dir()):
            sync_path(path)
    sync_path(folder)


def write_durably(path: Path, text: str) -> None:
    """Replaces a file atomically, and syncs it. Raises OSError."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    sync_path(partial)
    partial.replace(path)
    sync_path(path.parent)
