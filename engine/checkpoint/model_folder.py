"""Measures, copies and removes a model's folder. Imports no torch."""

import contextlib
import errno
import fcntl
import functools
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from windlass.engine.checkpoint.atomic_folder import make_partial_folder
from windlass.storage.files import sync_path, sync_tree

_FICLONE = 0x40049409  # from linux/fs.h
_COPY_NBYTES = 16 << 20  # bytes that one read of a copy loads into memory
# Errors of a file system or kernel that cannot link these files or share their blocks.
_CANNOT = frozenset(
    (errno.EXDEV, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.EPERM, errno.EMLINK, errno.ENOSYS)
)


def folder_nbytes(folder: Path) -> int:
    """Returns the bytes of all files of a folder, 0 if it does not exist."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def copy_model_folder(
    source: Path, target: Path, *, links: bool, on_progress: Callable[[int], None] = lambda nbytes: None
) -> None:
    """Copies a folder and syncs the copy to the disk. `target` appears only when complete; a failure leaves nothing.

    Args:
        source: the folder to copy.
        target: the copy's path.
        links: make hard links if the file system can; only for folders whose files never change. Without links, or
            if they are impossible, files share their blocks if the file system can do that, else bytes are copied.
        on_progress: is called with the bytes that are complete so far. While the copy is synced they are all bytes.

    Raises:
        FileExistsError: `target` exists.
        OSError: a file cannot be read or written.
    """
    if target.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    partial = make_partial_folder(target)
    try:
        done = 0
        for path in sorted(source.rglob("*")):
            there = partial / path.relative_to(source)
            if path.is_dir():
                there.mkdir()
                continue
            if not (links and _link(path, there)):
                copy_file(path, there, on_progress=functools.partial(_add, on_progress, done))
            done += path.stat().st_size
            on_progress(done)
        sync_tree(partial, functools.partial(on_progress, done))
        partial.rename(target)
        sync_path(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def remove_model_folder(folder: Path) -> None:
    """Removes a folder; it disappears under its name in one step. Does nothing if it does not exist."""
    doomed = folder.parent / f".{folder.name}.{uuid.uuid4().hex}.partial"
    try:
        folder.rename(doomed)
    except FileNotFoundError:
        return
    shutil.rmtree(doomed)


@contextlib.contextmanager
def _unless_it_cannot() -> Iterator[None]:
    """Suppresses the errors of a file system that lacks an operation. The code after the context is the fallback."""
    try:
        yield
    except OSError as error:
        if error.errno not in _CANNOT:
            raise


def _add(on_progress: Callable[[int], None], done: int, nbytes: int) -> None:
    on_progress(done + nbytes)


def _link(source: Path, target: Path) -> bool:
    """Makes a hard link. Returns False if the file system cannot."""
    with _unless_it_cannot():
        target.hardlink_to(source)
        return True
    return False


def copy_file(source: Path, target: Path, *, on_progress: Callable[[int], None] = lambda nbytes: None) -> None:
    """Copies a file to a new one. The two share their blocks if the file system can do that.

    Raises:
        FileExistsError: `target` exists.
        OSError: a file cannot be read or written.
    """
    with source.open("rb") as file, target.open("xb") as copy:
        with _unless_it_cannot():
            fcntl.ioctl(copy.fileno(), _FICLONE, file.fileno())
            return
        done = 0
        while piece := file.read(_COPY_NBYTES):
            copy.write(piece)
            done += len(piece)
            on_progress(done)
