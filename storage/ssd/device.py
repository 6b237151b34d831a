"""The bytes of one SSD: a preallocated file, or a raw block device. Everything a store moves goes through here."""

import ctypes
import errno
import fcntl
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from windlass.storage.files import backed_nbytes
from windlass.storage.integrity import DirectIoRefused

_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02  # fallocate(2)


class SsdDevice:
    """Open for reading and writing; safe from many threads at once."""

    def __init__(self, path: Path, *, is_raw: bool = False, direct: bool = True) -> None:
        """Opens what is there; `direct=False` is for file systems that refuse O_DIRECT.

        Raises:
            DirectIoRefused: it is one of those.
        """
        self.path = path
        self.is_raw = is_raw
        # Small records go through the page cache on a descriptor of their own: no aligned buffers, and the fence is
        # read at memory speed before every write. They share no page with the extents.
        self._records_fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.data_fd = _open_direct(path) if direct else os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except BaseException:
            os.close(self._records_fd)
            raise
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Its size now."""
        return os.lseek(self._records_fd, 0, os.SEEK_END)

    @property
    def is_present(self) -> bool:
        """Whether its path still leads to it: what is written to a removed file is lost with the descriptor."""
        try:
            found = self.path.stat()
        except OSError:
            return False
        mine = os.fstat(self._records_fd)
        return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)

    def read(self, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` past the page cache; returns the bytes moved, which may be fewer."""
        return os.preadv(self.data_fd, [buffer], offset)

    def write(self, offset: int, buffer: memoryview) -> int:
        """Write `buffer` past the page cache; returns the bytes moved, which may be fewer."""
        return os.pwritev(self.data_fd, [buffer], offset)

    def read_records(self, offset: int, nbytes: int) -> bytes:
        """Small records, whole; fewer bytes where the file ends."""
        return os.pread(self._records_fd, nbytes, offset)

    def write_records(self, offset: int, raw: bytes) -> None:
        """Small records; safe only after `sync`."""
        done = 0
        while done < len(raw):
            done += os.pwrite(self._records_fd, raw[done:], offset + done)

    def sync(self) -> None:
        """Returns when all that was written before, by either way, is safe from a power loss."""
        os.fdatasync(self.data_fd)

    def allocate(self, offset: int, nbytes: int) -> None:
        """Back a range of the file with disk space, growing it as needed. Nothing to do for a raw device."""
        if not self.is_raw:
            os.posix_fallocate(self._records_fd, offset, nbytes)

    def backed_nbytes(self, offset: int, nbytes: int) -> int | None:
        """Bytes of a range of the file that have disk space; None where the file system does not tell, or is none."""
        return None if self.is_raw else backed_nbytes(self._records_fd, offset, nbytes)

    def discard(self, offset: int, nbytes: int) -> None:
        """Give a range's disk space back to the file system. Nothing to do for a raw device."""
        if self.is_raw:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        arguments = (ctypes.c_long(offset), ctypes.c_long(nbytes))
        while libc.fallocate(self._records_fd, _PUNCH_HOLE | _KEEP_SIZE, *arguments) != 0:
            code = ctypes.get_errno()
            if code == errno.EOPNOTSUPP:
                return  # the space comes back when the end of the file is cut off
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code), str(self.path))

    def truncate(self, nbytes: int) -> None:
        """Cut off the end of the file, or let it grow without backing. Nothing to do for a raw device."""
        if not self.is_raw:
            os.ftruncate(self._records_fd, nbytes)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Nobody else, in this process or another, is inside meanwhile. For moments only."""
        with self._lock:
            fcntl.flock(self._records_fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._records_fd, fcntl.LOCK_UN)

    def claim(self) -> bool:
        """Become the one who may do something long with it, until `release` or the end of the process; False if another
        is. Independent of `lock`."""
        try:
            fcntl.fcntl(self._records_fd, fcntl.F_OFD_SETLK, _lock_request(fcntl.F_WRLCK))
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        """Give a claim up."""
        fcntl.fcntl(self._records_fd, fcntl.F_OFD_SETLK, _lock_request(fcntl.F_UNLCK))

    def close(self) -> None:
        """Close the descriptors. No transfer may be running."""
        os.close(self.data_fd)
        os.close(self._records_fd)


def _open_direct(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise DirectIoRefused(
            f"the file system of {path.parent} refuses O_DIRECT (memory-backed ones do); choose a directory on an SSD "
            "with ext4 or XFS, or a raw block device"
        ) from error


def _lock_request(kind: int) -> bytes:
    """`struct flock` for the first byte; locks of this sort belong to the open file, as those of flock(2) do."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 1, 0)
