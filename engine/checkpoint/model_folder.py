"""A model's whole folder: how big it is, a copy of it, its end. Imports no torch."""

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
_COPY_NBYTES = 16 << 20
# What the kernel or the file system has no such copy for.
_CANNOT = frozenset(
    (errno.EXDEV, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.EPERM, errno.EMLINK, errno.ENOSYS)
)


def folder_nbytes(folder: Path) -> int:
    """Bytes of all files of a folder; 0 where there is none."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def copy_model_folder(
    source: Path, target: Path, *, links: bool, on_progress: Callable[[int], None] = lambda nbytes: None
) -> None:
    """Copies a folder, durably; `target` appears when it is whole, and a failure leaves nothing.

    `links`: files become other names of the same bytes where the file system can do that, for folders that nobody
    writes to. Else they share their blocks where it can do that, and are copied where not. `on_progress` gets the bytes
    that are there.

    Raises:
        FileExistsError: there is something at `target`.
        OSError: it cannot be read or written.
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
        sync_tree(partial)
        partial.rename(target)
        sync_path(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def remove_model_folder(folder: Path) -> None:
    """Removes a folder, at once for all who look for it; nothing where there is none."""
    doomed = folder.parent / f".{folder.name}.{uuid.uuid4().hex}.partial"
    try:
        folder.rename(doomed)
    except FileNotFoundError:
        return
    shutil.rmtree(doomed)


@contextlib.contextmanager
def _unless_it_cannot() -> Iterator[None]:
    """What follows is done where the file system cannot do this."""
    try:
        yield
    except OSError as error:
        if error.errno not in _CANNOT:
            raise


def _add(on_progress: Callable[[int], None], done: int, nbytes: int) -> None:
    on_progress(done + nbytes)


def _link(source: Path, target: Path) -> bool:
    """Whether the file system could do it."""
    with _unless_it_cannot():
        target.hardlink_to(source)
        return True
    return False


def copy_file(source: Path, target: Path, *, on_progress: Callable[[int], None] = lambda nbytes: None) -> None:
    """Copies a file's content to a new one; they share their blocks where the file system can do that.

    Raises:
        FileExistsError: there is something at `target`.
        OSError: it cannot be read or written.
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
