import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from windlass.storage.ids import Span
from windlass.storage.memory.arena import Arena
from windlass.storage.memory.huge_pages import HUGE_PAGE_NBYTES, use_huge_pages

NBYTES = 5 * HUGE_PAGE_NBYTES + 12 * 4096
WHOLE_NBYTES = 5 * HUGE_PAGE_NBYTES
BUDGET_S = 60.0


@pytest.fixture
def file() -> Iterator[int]:
    """A fully allocated file in shared memory."""
    path = Path("/dev/shm") / f"windlass-test-{os.getpid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    path.unlink()
    os.posix_fallocate(fd, 0, NBYTES)
    yield fd
    os.close(fd)


def shared_huge_nbytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("ShmemHugePages:"):
            return int(line.split()[1]) * 1024
    pytest.skip("this kernel does not tell of huge pages in shared memory")


def test_whole_huge_pages_are_used_and_nothing_else_changes(file: int) -> None:
    content = random.Random(1).randbytes(NBYTES)
    os.pwrite(file, content, 0)
    held_nbytes = os.fstat(file).st_blocks * 512
    done = use_huge_pages(file, NBYTES, BUDGET_S)
    if done == 0:
        pytest.skip("this kernel does not collapse pages of shared memory, or has no huge page free")
    assert done == WHOLE_NBYTES
    assert shared_huge_nbytes() >= WHOLE_NBYTES
    assert os.pread(file, NBYTES, 0) == content
    assert (os.fstat(file).st_size, os.fstat(file).st_blocks * 512) == (NBYTES, held_nbytes)


def test_huge_pages_without_time_budget_uses_none(file: int) -> None:
    assert use_huge_pages(file, NBYTES, 0.0) == 0


def test_huge_pages_of_small_file_are_none(file: int) -> None:
    assert use_huge_pages(file, HUGE_PAGE_NBYTES - 4096, BUDGET_S) == 0


def test_arena_with_huge_pages_holds_the_same_bytes(tmp_path: Path) -> None:
    path = Path("/dev/shm") / f"windlass-huge-test-{os.getpid()}.arena"
    for huge_pages in (True, False):
        arena = Arena.create(path, NBYTES, huge_pages=huge_pages)
        arena.buffer(Span(0, NBYTES))[:] = bytes(NBYTES)
        assert arena.held_nbytes == NBYTES
        arena.close()
        arena.unlink()


def test_huge_pages_of_unmappable_file_raises() -> None:
    read_end, write_end = os.pipe()
    try:
        with pytest.raises(OSError, match="mmap"):
            use_huge_pages(read_end, NBYTES, BUDGET_S)
    finally:
        os.close(read_end)
        os.close(write_end)
