import errno
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from windlass.storage.ids import Span
from windlass.storage.memory import arena as arena_module
from windlass.storage.memory import numa, page_allocation
from windlass.storage.memory.arena import Arena
from windlass.storage.memory.numa import NumaNode
from windlass.storage.memory.page_allocation import HUGE_PAGE_NBYTES, allocate_pages

NBYTES = 5 * HUGE_PAGE_NBYTES + 12 * 4096
WHOLE_NBYTES = 5 * HUGE_PAGE_NBYTES
BUDGET_S = 60.0

# Creates arenas in a small file system of its own, beside a file that the check for room does not see.
CREATE_IN_LITTLE_ROOM = """
import subprocess, sys
from pathlib import Path
from windlass.storage.ids import Span
from windlass.storage.memory import arena, page_allocation
from windlass.storage.memory.capacity import InsufficientSpaceError
directory, nbytes = Path(sys.argv[1]), 14 << 20
subprocess.run(["mount", "-t", "tmpfs", "-o", sys.argv[2], "tmpfs", str(directory)], check=True)
print("mounted", flush=True)
arena.require_arena_room = lambda directory, nbytes: None
page_allocation._STRIDE_NBYTES = 2 << 20
other = directory / "other"
for huge_pages in (True, False):
    other.write_bytes(bytes(8 << 20))
    try:
        arena.Arena.create(directory / "arena", nbytes, huge_pages=huge_pages)
    except InsufficientSpaceError as error:
        print(f"refused: {error}")
    print(f"left: {[path.name for path in directory.iterdir()]}")
    other.unlink()
    whole = arena.Arena.create(directory / "arena", nbytes, huge_pages=huge_pages)
    whole.buffer(Span(0, nbytes))[:] = bytes(nbytes)
    print(f"held: {whole.held_nbytes}")
    whole.unlink()
    whole.close()
"""


@pytest.fixture
def empty_file() -> Iterator[int]:
    """A file in shared memory, without pages."""
    path = Path("/dev/shm") / f"windlass-test-{os.getpid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    path.unlink()
    os.truncate(fd, NBYTES)
    yield fd
    os.close(fd)


@pytest.fixture
def file(empty_file: int) -> int:
    """A fully allocated file in shared memory."""
    os.posix_fallocate(empty_file, 0, NBYTES)
    return empty_file


def held_nbytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def shared_huge_nbytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("ShmemHugePages:"):
            return int(line.split()[1]) * 1024
    pytest.skip("this kernel does not tell of huge pages in shared memory")


def fails_with(monkeypatch: pytest.MonkeyPatch, number: int, *advices: int) -> list[int]:
    """Lets `madvise` fail for some advices. Returns the list to which all calls are added."""
    called: list[int] = []
    advise = page_allocation._Work.advise

    def advise_or_fail(work: page_allocation._Work, start: int, nbytes: int, advice: int) -> int:
        called.append(advice)
        return number if advice in advices else advise(work, start, nbytes, advice)

    monkeypatch.setattr(page_allocation._Work, "advise", advise_or_fail)
    return called


def skip_without_population(fd: int) -> None:
    allocate_pages(fd, NBYTES, huge_budget_s=0.0)
    if held_nbytes(fd) == 0:
        pytest.skip("this kernel does not allocate pages on demand")


def test_whole_huge_pages_are_used_and_nothing_else_changes(file: int) -> None:
    content = random.Random(1).randbytes(NBYTES)
    os.pwrite(file, content, 0)
    held = held_nbytes(file)
    done = allocate_pages(file, NBYTES, huge_budget_s=BUDGET_S)
    if done == 0:
        pytest.skip("this kernel does not collapse pages of shared memory, or has no huge page free")
    assert done == WHOLE_NBYTES
    assert shared_huge_nbytes() >= WHOLE_NBYTES
    assert os.pread(file, NBYTES, 0) == content
    assert (os.fstat(file).st_size, held_nbytes(file)) == (NBYTES, held)


def test_empty_file_gets_whole_huge_pages_at_once(empty_file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_allocation, "_STRIDE_NBYTES", 2 * HUGE_PAGE_NBYTES)
    done = allocate_pages(empty_file, NBYTES, huge_budget_s=BUDGET_S)
    if done == 0:
        pytest.skip("this kernel does not collapse pages of shared memory, or has no huge page free")
    assert done == WHOLE_NBYTES
    assert shared_huge_nbytes() >= WHOLE_NBYTES
    assert (os.fstat(empty_file).st_size, held_nbytes(empty_file)) == (NBYTES, NBYTES)
    assert os.pread(empty_file, NBYTES, 0) == bytes(NBYTES)


def test_pages_without_time_budget_are_small(file: int) -> None:
    assert allocate_pages(file, NBYTES, huge_budget_s=0.0) == 0


def test_pages_of_small_file_are_small(file: int) -> None:
    assert allocate_pages(file, HUGE_PAGE_NBYTES - 4096, huge_budget_s=BUDGET_S) == 0


@pytest.mark.parametrize("num_cores", [1, 3])
def test_threads_allocate_all_pages_and_keep_contents(
    empty_file: int, monkeypatch: pytest.MonkeyPatch, num_cores: int
) -> None:
    skip_without_population(empty_file)
    os.truncate(empty_file, 0)
    os.truncate(empty_file, NBYTES)
    monkeypatch.setattr(page_allocation, "_STRIDE_NBYTES", HUGE_PAGE_NBYTES)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)))
    os.pwrite(empty_file, b"kept", 3 * HUGE_PAGE_NBYTES)
    allocate_pages(empty_file, NBYTES, huge_budget_s=0.0)
    assert held_nbytes(empty_file) == NBYTES
    assert os.pread(empty_file, 5, 3 * HUGE_PAGE_NBYTES) == b"kept\0"


def test_old_kernel_is_asked_once_a_thread_and_allocates_nothing(
    empty_file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_allocation, "_STRIDE_NBYTES", HUGE_PAGE_NBYTES)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    called = fails_with(monkeypatch, errno.EINVAL, page_allocation._MADV_POPULATE_WRITE, page_allocation._MADV_COLLAPSE)
    assert allocate_pages(empty_file, NBYTES, huge_budget_s=BUDGET_S) == 0
    assert held_nbytes(empty_file) == 0
    assert page_allocation._MADV_COLLAPSE not in called
    assert called.count(page_allocation._MADV_POPULATE_WRITE) == 2  # a page, then the rest


def test_kernel_without_collapsing_is_asked_once(empty_file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_population(empty_file)
    monkeypatch.setattr(page_allocation, "_STRIDE_NBYTES", HUGE_PAGE_NBYTES)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    called = fails_with(monkeypatch, errno.EINVAL, page_allocation._MADV_COLLAPSE)
    assert allocate_pages(empty_file, NBYTES, huge_budget_s=BUDGET_S) == 0
    assert called.count(page_allocation._MADV_COLLAPSE) == 1
    assert held_nbytes(empty_file) == NBYTES


def test_threads_enter_the_node_and_the_caller_does_not(empty_file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = os.sched_getaffinity(0)
    if len(cores) == 1:
        pytest.skip("on one core a thread that enters the node cannot be told from one that does not")
    last = frozenset({max(cores)})
    entered: list[frozenset[int]] = []
    enter = NumaNode.enter

    def enter_noted(node: NumaNode) -> None:
        enter(node)
        entered.append(frozenset(os.sched_getaffinity(0)))

    monkeypatch.setattr(NumaNode, "enter", enter_noted)
    allocate_pages(empty_file, NBYTES, huge_budget_s=0.0, node=NumaNode(0, last, is_strict=True))
    assert entered == [last]
    assert os.sched_getaffinity(0) == cores


@pytest.mark.parametrize("num_cores", [1, 3])
def test_allocation_that_is_stopped_ends_between_two_strides(
    empty_file: int, monkeypatch: pytest.MonkeyPatch, num_cores: int
) -> None:
    strides: list[int] = []

    def check_stop() -> None:
        if len(strides) >= 2:
            raise InterruptedError("the job was cancelled")

    monkeypatch.setattr(page_allocation, "_STRIDE_NBYTES", 4096)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)))
    monkeypatch.setattr(page_allocation._Work, "advise", lambda _, start, *__: strides.append(start) or 0)
    with pytest.raises(InterruptedError, match="cancelled"):
        allocate_pages(empty_file, NBYTES, huge_budget_s=0.0, check_stop=check_stop)
    assert 2 <= len(strides) <= 1 + num_cores


def test_arena_whose_creation_is_stopped_leaves_nothing(tmp_path: Path) -> None:
    def check_stop() -> None:
        raise InterruptedError("the job was cancelled")

    with pytest.raises(InterruptedError, match="cancelled"):
        Arena.create(tmp_path / "arena", NBYTES, check_stop=check_stop)
    assert list(tmp_path.iterdir()) == []


def test_arena_with_huge_pages_holds_the_same_bytes(tmp_path: Path) -> None:
    path = Path("/dev/shm") / f"windlass-huge-test-{os.getpid()}.arena"
    for huge_pages in (True, False):
        arena = Arena.create(path, NBYTES, huge_pages=huge_pages)
        arena.buffer(Span(0, NBYTES))[:] = bytes(NBYTES)
        assert arena.held_nbytes == NBYTES
        arena.close()
        arena.unlink()


@pytest.mark.parametrize(("room_nbytes", "second_is_strict"), [(2 * NBYTES - 1, False), (2 * NBYTES, True)])
def test_arenas_that_are_created_together_bind_to_a_node_only_if_it_has_room_for_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room_nbytes: int, second_is_strict: bool
) -> None:
    """The second one looks at the node when the first one has decided, and has allocated nothing yet."""
    paths = [tmp_path / f"windlass-ftjob-{number}-1-{os.getpid()}.arena" for number in (1, 2)]
    are_strict: list[bool] = []

    def allocate(fd: int, nbytes: int, *, huge_budget_s: float, node: NumaNode, check_stop: None) -> None:
        are_strict.append(node.is_strict)
        if len(are_strict) == 1:
            Arena.create(paths[1], NBYTES, node=0).close()

    (tmp_path / "devices/system/node/node0").mkdir(parents=True)
    (tmp_path / "devices/system/node/node0/cpulist").write_text("0\n")
    (tmp_path / "devices/system/node/node0/meminfo").write_text("")
    look = NumaNode.for_memory
    monkeypatch.setattr(NumaNode, "for_memory", lambda number, nbytes: look(number, nbytes, tmp_path))
    monkeypatch.setattr(numa, "_room_nbytes", lambda _meminfo: room_nbytes)
    monkeypatch.setattr(arena_module, "allocate_pages", allocate)
    Arena.create(paths[0], NBYTES, node=0).close()
    assert are_strict == [True, second_is_strict]
    third = tmp_path / f"windlass-ftjob-3-1-{os.getpid()}.arena"
    Arena.create(third, room_nbytes // 4096 * 4096, node=0).close()  # the others have all of their memory
    assert are_strict[2]


def test_arena_on_a_kernel_that_populates_nothing_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_with(monkeypatch, errno.EINVAL, page_allocation._MADV_POPULATE_WRITE, page_allocation._MADV_COLLAPSE)
    arena = Arena.create(Path("/dev/shm") / f"windlass-old-test-{os.getpid()}.arena", NBYTES, node=0)
    assert arena.held_nbytes == NBYTES
    arena.close()
    arena.unlink()


@pytest.mark.parametrize("options", ["size=16m", "size=16m,huge=advise", "size=16m,huge=always"])
def test_arena_without_room_is_refused_and_one_with_room_can_be_written(tmp_path: Path, options: str) -> None:
    """Nothing ends by a signal, whatever the file system says or other processes take meanwhile."""
    command = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", CREATE_IN_LITTLE_ROOM]
    done = subprocess.run([*command, str(tmp_path), options], capture_output=True, text=True, check=False)
    if "mounted" not in done.stdout:
        pytest.skip(f"no file system can be mounted here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()[1:]
    assert [line.partition(":")[0] for line in lines] == ["refused", "left", "held"] * 2
    refusal = "14.00 MiB needed, 6.00 MiB more than the 8.00 MiB free"
    assert all(refusal in line for line in lines if line.startswith("refused"))
    assert all(line == "left: ['other']" for line in lines if line.startswith("left"))
    assert all(line == f"held: {14 << 20}" for line in lines if line.startswith("held"))


def test_unmappable_file_raises() -> None:
    read_end, write_end = os.pipe()
    try:
        with pytest.raises(OSError, match="mmap"):
            allocate_pages(read_end, NBYTES, huge_budget_s=BUDGET_S)
    finally:
        os.close(read_end)
        os.close(write_end)
