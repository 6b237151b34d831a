"""Files and folders that a power loss leaves as they are, once a call returns.

A file is safe when its content was synced, and each folder that leads to it since the name was put there.
"""

import os
from pathlib import Path


def sync_path(path: Path) -> None:
    """Sync a file's content, or a folder's list of names. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(folder: Path) -> None:
    """Sync a folder and all files and folders below it; its own name in its parent is the caller's. Raises OSError.

    Symbolic links are not followed.
    """
    for path in folder.rglob("*"):
        if not path.is_symlink() and (path.is_file() or path.is_dir()):
            sync_path(path)
    sync_path(folder)


def write_durably(path: Path, text: str) -> None:
    """Write a file whole or not at all, in the place of an earlier one, and sync it. Raises OSError."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    sync_path(partial)
    partial.replace(path)
    sync_path(path.parent)
