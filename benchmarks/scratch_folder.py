"""Folders for a benchmark's files, which may be gigabytes. What a killed benchmark leaves, the next one removes.

A folder is named by its process's id, ".bench-PID-...", for the user to see. The process also holds a lock, which
tells whether it lives. Ids are not compared, because the kernel reuses them, and another container has others.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from windlass.storage.files import lock, try_lock

_NAME = re.compile(r"\.bench-\d+-\w+")


@contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """Makes a new folder in `parent`, as an absolute path, and removes it at the end.

    It first removes what killed benchmarks left there. `parent`: None: the system's folder for temporary files.
    """
    parent = (parent or Path(tempfile.gettempdir())).resolve()
    remove_leftovers(parent)
    folder, file = _make_locked(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(file)


def remove_leftovers(parent: Path) -> None:
    """Removes the folders of benchmarks whose process has ended, with all that is in them."""
    for folder in parent.iterdir():
        if _NAME.fullmatch(folder.name):
            with suppress(OSError):  # it is another user's, or another benchmark has just removed it
                file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    if try_lock(file):
                        shutil.rmtree(folder)
                finally:
                    os.close(file)


def _make_locked(parent: Path) -> tuple[Path, int]:
    """Makes a folder and returns it with the descriptor that holds its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f".bench-{os.getpid()}-", dir=parent))
        with suppress(FileNotFoundError):
            file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            lock(file)
            if folder.exists():
                return folder, file
            os.close(file)  # another benchmark saw it without a lock and removed it
