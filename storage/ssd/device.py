"""Reads and writes the bytes of one SSD: a preallocated file or a raw block device.

A store's records, allocation and syncs go through this module. The io_uring engine of `storage.io` transfers chunks
through `data_fd`.
"""

import ctypes
import errno
import fcntl
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from windlass.storage.files import backed_nbytes, lock, unlock
from windlass.storage.integrity import DirectIoRefused

_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02  # fallocate(2)


class SsdDevice:
    """An SSD that is open for reading and writing. All methods are thread-safe."""

    def __init__(self, path: Path, *, is_raw: bool = False, direct: bool = True) -> None:
        """Opens an existing file or device. `direct=False` is for file systems that refuse O_DIRECT.

        Raises:
            DirectIoRefused: the file system refuses O_DIRECT.
        """
        self.path = path
        self.is_raw = is_raw
        # Small records use the page cache through a separate descriptor: they need no aligned buffers, and the fence is
        # read at memory speed before every write. Records share no page with the extents.
        self._records_fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.data_fd = _open_direct(path) if direct else os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except BaseException:
            os.close(self._records_fd)
            raise
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """The current size in bytes."""
        return os.lseek(self._records_fd, 0, os.SEEK_END)

    @property
    def is_present(self) -> bool:
        """True if the path still leads to this file. Data in a removed file is lost when the descriptor is closed."""
        try:
            current = self.path.stat()
        except OSError:
            return False
        mine = os.fstat(self._records_fd)
        return (current.st_dev, current.st_ino) == (mine.st_dev, mine.st_ino)

    def read(self, offset: int, buffer: memoryview) -> int:
        """Reads into `buffer` without the page cache. Returns the bytes read, which may be fewer."""
        return os.preadv(self.data_fd, [buffer], offset)

    def write(self, offset: int, buffer: memoryview) -> int:
        """Writes `buffer` without the page cache. Returns the bytes written, which may be fewer."""
        return os.pwritev(self.data_fd, [buffer], offset)

    def read_records(self, offset: int, nbytes: int) -> bytes:
        """Reads small records. Returns fewer bytes at the end of the file."""
        return os.pread(self._records_fd, nbytes, offset)

    def write_records(self, offset: int, raw: bytes) -> None:
        """Writes small records. They are durable only after `sync`."""
        done = 0
        while done < len(raw):
            done += os.pwrite(self._records_fd, raw[done:], offset + done)

    def sync(self) -> None:
        """Syncs: returns when all earlier writes and records survive a power loss."""
        os.fdatasync(self.data_fd)

    def allocate(self, offset: int, nbytes: int) -> None:
        """Allocates disk space for a range of the file, and extends the file if needed. No effect on a raw device."""
        if not self.is_raw:
            os.posix_fallocate(self._records_fd, offset, nbytes)

    def backed_nbytes(self, offset: int, nbytes: int) -> int | None:
        """Returns the bytes of a range that have disk space; None if the file system can't say, or for a raw device."""
        return None if self.is_raw else backed_nbytes(self._records_fd, offset, nbytes)

    def discard(self, offset: int, nbytes: int) -> None:
        """Returns a range's disk space to the file system. No effect on a raw device."""
        if self.is_raw:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        arguments = (ctypes.c_long(offset), ctypes.c_long(nbytes))
        while libc.fallocate(self._records_fd, _PUNCH_HOLE | _KEEP_SIZE, *arguments) != 0:
            code = ctypes.get_errno()
            if code == errno.EOPNOTSUPP:
                return  # the space is freed when the file is truncated
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code), str(self.path))

    def truncate(self, nbytes: int) -> None:
        """Truncates the file, or extends it without disk space. No effect on a raw device."""
        if not self.is_raw:
            os.ftruncate(self._records_fd, nbytes)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Excludes all other threads and processes during the context. Hold it only briefly."""
        with self._lock:
            lock(self._records_fd)
            try:
                yield
            finally:
                unlock(self._records_fd)

    def claim(self) -> bool:
        """Claims the device for long work, until `release` or the process's end. Returns False if another has it.

        A claim is independent of `lock`.
        """
        try:
            fcntl.fcntl(self._records_fd, fcntl.F_OFD_SETLK, _lock_request(fcntl.F_WRLCK))
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        """Releases a claim."""
        fcntl.fcntl(self._records_fd, fcntl.F_OFD_SETLK, _lock_request(fcntl.F_UNLCK))

    def close(self) -> None:
        """Closes the descriptors. No transfer may be in flight."""
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
    """Returns a `struct flock` for the first byte. Such a lock belongs to the open file, like one of flock(2)."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 1, 0)
