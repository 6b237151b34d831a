"""Folders in the state that a power loss would leave."""

import os
from pathlib import Path

import pytest


class PowerCut:
    """Records what is synced below a folder from now on; its present content counts as synced.

    It models the worst case that POSIX allows: a file keeps the content, and a folder the list of names, of its last
    sync. So a file that was written and renamed, but not synced, is empty or missing.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._contents: dict[int, bytes] = {}  # of files, by inode
        self._names: dict[int, dict[str, int]] = {}  # of folders: the inode of each name
        self._sync = os.fsync
        for path in (root, *root.rglob("*")):
            self._keep(path)
        monkeypatch.setattr(os, "fsync", self._fsync)

    def left(self) -> dict[str, bytes]:
        """The files that a power loss now would leave below the folder, by relative path, with content."""
        return self._below(self._root.stat().st_ino, "")

    def _fsync(self, fd: int) -> None:
        self._sync(fd)
        self._keep(Path(f"/proc/self/fd/{fd}"))

    def _keep(self, path: Path) -> None:
        inode = path.stat().st_ino
        if path.is_dir():
            self._names[inode] = {child.name: child.stat().st_ino for child in path.iterdir() if child.exists()}
        else:
            self._contents[inode] = path.read_bytes()

    def _below(self, inode: int, prefix: str) -> dict[str, bytes]:
        if inode not in self._names:
            return {prefix.removesuffix("/"): self._contents.get(inode, b"")}
        found: dict[str, bytes] = {}
        for name, child in self._names[inode].items():
            found |= self._below(child, f"{prefix}{name}/")
        return found


def files_of(root: Path) -> dict[str, bytes]:
    """The present files below a folder, by relative path, with content."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
