"""The allocated bytes of parts of a file, as the file system reports them."""

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from windlass.storage.files.allocated_size import backed_nbytes

MIB = 1 << 20


@pytest.fixture
def fd(tmp_path: Path) -> Any:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    if backed_nbytes(fd, 0, MIB) is None:
        os.close(fd)
        pytest.skip(f"the file system of {tmp_path} does not tell")
    yield fd
    os.close(fd)


def test_allocated_bytes_count_whether_written_or_not(fd: int) -> None:
    os.posix_fallocate(fd, 2 * MIB, 3 * MIB)
    os.pwrite(fd, b"x" * MIB, 3 * MIB)
    os.ftruncate(fd, 9 * MIB)
    assert backed_nbytes(fd, 0, 9 * MIB) == 3 * MIB
    assert backed_nbytes(fd, 0, 2 * MIB) == 0
    assert backed_nbytes(fd, 3 * MIB, MIB // 2) == MIB // 2
    assert backed_nbytes(fd, 4 * MIB, 4 * MIB) == MIB


def test_more_extents_than_one_answer_has(fd: int) -> None:
    for i in range(300):
        os.posix_fallocate(fd, i * 2 * 65536, 65536)
    assert backed_nbytes(fd, 0, 600 * 65536) == 300 * 65536


def test_file_system_without_extent_map_gives_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(fcntl, "ioctl", refuse)
    with (tmp_path / "file").open("wb") as file:
        assert backed_nbytes(file.fileno(), 0, MIB) is None
