"""Measures the limit of the SSDs: simultaneous reads and writes by plain threads with O_DIRECT, in the same folders."""

import mmap
import os
import random
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
_FILE_NBYTES = 1024 * MIB


class DirectIoError(Exception):
    """Raised if a directory's file system does not support O_DIRECT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixSetting:
    """A number of threads, each with one transfer of a given size in flight."""

    num_threads: int
    block_nbytes: int


SETTINGS = (
    MixSetting(num_threads=8, block_nbytes=4 * MIB),
    MixSetting(num_threads=8, block_nbytes=MIB),
    MixSetting(num_threads=16, block_nbytes=MIB),
)


class MixFiles:
    """A file of random bytes in every directory, removed at the end of the context."""

    def __init__(self, directories: Sequence[Path], file_nbytes: int = _FILE_NBYTES) -> None:
        self._paths = [directory / "mix.bin" for directory in directories]
        self.file_nbytes = file_nbytes
        self.fds: list[int] = []

    def __enter__(self) -> "MixFiles":
        block = random.Random(0).randbytes(MIB)
        for path in self._paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                for _ in range(self.file_nbytes // MIB):
                    file.write(block)
                file.flush()
                os.fsync(file.fileno())
            try:
                self.fds.append(os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC))
            except OSError as error:
                self.__exit__()
                raise DirectIoError(
                    f"files in {path.parent} cannot be opened with O_DIRECT ({error.strerror}); name a directory on an "
                    "SSD with --directory"
                ) from error
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self.fds:
            os.close(fd)
        for path in self._paths:
            with suppress(FileNotFoundError):
                path.unlink()


def mixed_bytes_per_s(files: MixFiles, setting: MixSetting, read_share: float, seconds: float) -> float:
    """Returns the bytes read and written per second, together. `read_share` of the transfers are reads."""
    until_s = time.perf_counter() + seconds
    moved = [0] * setting.num_threads
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            moved[index] = _transfer(files, setting, index, read_share, until_s)
        except BaseException as error:  # noqa: BLE001 - raised again in the caller
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(setting.num_threads)]
    start_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for fd in files.fds:
        os.fdatasync(fd)
    if failures:
        raise failures[0]
    return sum(moved) / (time.perf_counter() - start_s)


def _transfer(files: MixFiles, setting: MixSetting, index: int, read_share: float, until_s: float) -> int:
    """Runs one thread: blocks at random offsets of its file, reads and writes in proportion to `read_share`."""
    fd = files.fds[index % len(files.fds)]
    places = random.Random(index)
    num_blocks = files.file_nbytes // setting.block_nbytes
    moved_nbytes, num_reads, num_transfers = 0, 0, 0
    with mmap.mmap(-1, setting.block_nbytes) as buffer:  # anonymous memory is page-aligned
        os.preadv(fd, [buffer], 0)  # fills the buffer with bytes that are not all zero
        while time.perf_counter() < until_s:
            offset = places.randrange(num_blocks) * setting.block_nbytes
            num_transfers += 1
            if num_reads < read_share * num_transfers:
                num_reads += 1
                moved_nbytes += os.preadv(fd, [buffer], offset)
            else:
                moved_nbytes += os.pwritev(fd, [buffer], offset)
    return moved_nbytes
