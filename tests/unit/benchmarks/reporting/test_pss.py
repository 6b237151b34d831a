"""Memory and CPU time, measured on real processes."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.reporting.pss import Memory, MemorySampler, memory_of, process_tree, thread_seconds

ROOT = Path(__file__).parents[4]
MIB = 1 << 20
SHM = Path("/dev/shm")


@contextmanager
def running(code: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A Python process that has printed "ready" and waits for the end of its input."""
    command = [
        sys.executable,
        "-S",
        "-c",
        f"{code}\nprint('ready', flush=True)\nimport sys; sys.stdin.read()",
        *arguments,
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.stdin.close()


@pytest.fixture
def shm_file() -> Iterator[Path]:
    path = SHM / f"windlass-test-{os.getpid()}"
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 64 * MIB)
    yield path
    path.unlink()


def test_memory_counts_private_pages() -> None:
    with running("") as small, running("x = bytearray(b'x') * (100 << 20)") as large:
        extra_nbytes = memory_of([large.pid]).nbytes - memory_of([small.pid]).nbytes
    assert 99 * MIB < extra_nbytes < 110 * MIB


def test_shared_pages_count_once(shm_file: Path) -> None:
    touch = (
        "import mmap, sys\nf = open(sys.argv[1], 'r+b')\nm = mmap.mmap(f.fileno(), 0)\n"
        "sum(m[i] for i in range(0, len(m), 4096))"
    )
    with running(touch, str(shm_file)) as one, running(touch, str(shm_file)) as other:
        assert abs(memory_of([one.pid, other.pid]).shm_nbytes - 64 * MIB) < MIB
        assert abs(memory_of([one.pid]).shm_nbytes - 32 * MIB) < MIB
        # A file that is both named and mapped counts once.
        assert abs(memory_of([one.pid, other.pid], [shm_file]).shm_nbytes - 64 * MIB) < MIB


def test_untouched_shared_memory_counts_if_named(shm_file: Path) -> None:
    assert memory_of([], [shm_file]).nbytes == 64 * MIB
    assert memory_of([]).nbytes == 0
    assert memory_of([], [SHM / "windlass-test-absent"]).nbytes == 0


def test_tree_holds_descendants_and_not_the_dead() -> None:
    spawn = "import subprocess, sys\nc = subprocess.Popen(['sleep', '60'])\nprint(c.pid, flush=True)"
    command = [sys.executable, "-S", "-c", f"{spawn}\nsys.stdin.read()\nc.kill()\nc.wait()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        grandchild = int(process.stdout.readline())
        assert process_tree([process.pid]) == {process.pid, grandchild}
        assert process_tree([os.getpid()]) >= {os.getpid(), process.pid, grandchild}
        process.stdin.close()
        process.wait()
    assert process_tree([process.pid]) == set()


def test_thread_seconds_grow_with_work() -> None:
    pid = os.getpid()
    before = thread_seconds([pid])
    until_s = time.thread_time() + 0.3
    while time.thread_time() < until_s:
        pass
    after = thread_seconds([pid])
    worked_s = sum(sum(after[key][:2]) - sum(before.get(key, (0.0, 0.0))[:2]) for key in after)
    assert worked_s >= 0.25
    assert after[pid, pid].name == Path("/proc/self/comm").read_text().strip()
    assert thread_seconds([2**22 + 1]) == {}


def test_sampler_keeps_the_peak_of_every_phase() -> None:
    level = [Memory(5, 0)]
    with MemorySampler(lambda: level[0]) as sampler:
        sampler.enter_phase("steps")
        level[0] = Memory(7, 3)
        time.sleep(0.4)
        level[0] = Memory(1, 0)
        sampler.enter_phase("end")
        time.sleep(0.4)
    assert sampler.peak_nbytes("steps") == 10
    assert sampler.peak_nbytes("end") == 1
    assert sampler.peak_nbytes() == 10
    assert sampler.peak_nbytes("absent") == 0


def test_sampler_takes_no_more_than_its_share() -> None:
    def slow_sample() -> Memory:
        samples.append(time.perf_counter())
        time.sleep(0.05)
        return Memory(1, 0)

    samples: list[float] = []
    with MemorySampler(slow_sample) as sampler:
        sampler.enter_phase("timed", share=0.1)
        time.sleep(1.6)
    # The first sample may have begun before the phase; then one each half second.
    assert 2 <= len(samples) <= 5


def test_anonymous_memory_of_this_process_is_seen() -> None:
    # In a separate process: this one's share of torch's libraries changes whenever another process loads them.
    code = (
        "import mmap, os\nfrom benchmarks.reporting.pss import memory_of\nbefore = memory_of([os.getpid()]).nbytes\n"
        "block = mmap.mmap(-1, 50 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
        "for place in range(0, len(block), mmap.PAGESIZE): block[place] = 1\n"
        "print(memory_of([os.getpid()]).nbytes - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 49 * MIB


def test_own_memory_by_the_kernels_counts(shm_file: Path) -> None:
    """In a separate process, because other memory of this one may be paged out or back in meanwhile."""
    code = (
        "import mmap, pathlib, sys\nfrom benchmarks.reporting.pss import resident_memory\n"
        "before = resident_memory([])\n"
        "held = mmap.mmap(-1, 100 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\nheld.write(b'x' * (100 << 20))\n"
        "after = resident_memory([pathlib.Path(sys.argv[1])])\n"
        "print(after.private_nbytes - before.private_nbytes, before.shm_nbytes, after.shm_nbytes)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(shm_file)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    private_nbytes, *shm_nbytes = map(int, found.stdout.split())
    assert 99 * MIB < private_nbytes < 110 * MIB
    assert shm_nbytes == [0, 64 * MIB]
