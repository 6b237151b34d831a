"""Measures memory and processor time of a set of processes, from /proc.

PSS divides a shared page's bytes among the processes that map it, so a sum over processes counts every page once.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a set of processes at one moment, in bytes."""

    private_nbytes: int  # PSS without shared memory
    shm_nbytes: int  # shared memory

    @property
    def nbytes(self) -> int:
        """Private and shared memory together."""
        return self.private_nbytes + self.shm_nbytes


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """The memory of one process, in bytes."""

    pss_nbytes: int  # with its part of shared pages
    anon_nbytes: int  # the part of PSS that belongs to no file


def process_tree(roots: Iterable[int]) -> set[int]:
    """Returns the living processes among `roots`, and all their descendants."""
    children: dict[int, list[int]] = {}
    living = set()
    for pid, fields in _stats():
        living.add(pid)
        children.setdefault(int(fields[1]), []).append(pid)
    tree: set[int] = set()
    pending = [pid for pid in roots if pid in living]
    while pending:
        pid = pending.pop()
        if pid not in tree:
            tree.add(pid)
            pending += children.get(pid, [])
    return tree


def memory_of(pids: Iterable[int], shm_files: Iterable[Path] = ()) -> Memory:
    """Returns the sum of PSS, with every page counted once.

    `shm_files`: files in a tmpfs that belong to these processes. All their allocated pages count, because a page that
    no process maps is in no process's PSS.
    """
    private_nbytes = shm_nbytes = 0
    for pid in pids:
        rollup = _smaps_rollup(pid)
        shm_nbytes += rollup.get("Pss_Shmem", 0)
        private_nbytes += rollup.get("Pss", 0) - rollup.get("Pss_Shmem", 0)
    return Memory(private_nbytes, max(shm_nbytes, sum(_allocated_nbytes(path) for path in shm_files)))


def process_memory(pid: int) -> ProcessMemory | None:
    """Returns the memory of a process, or None if it has ended."""
    rollup = _smaps_rollup(pid)
    return ProcessMemory(rollup["Pss"], rollup["Pss_Anon"]) if rollup else None


def resident_memory(shm_files: Iterable[Path]) -> Memory:
    """Returns the memory of this process from the kernel's counters, which is fast for any size.

    Pages of libraries that other processes map as well count in full. `shm_files` as in `memory_of`.
    """
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    private_nbytes = sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))
    return Memory(private_nbytes, sum(_allocated_nbytes(path) for path in shm_files))


class ThreadSeconds(NamedTuple):
    """Processor seconds of a thread, and the kernel's name for it."""

    user_s: float
    system_s: float
    name: str


def thread_seconds(pids: Iterable[int]) -> dict[tuple[int, int], ThreadSeconds]:
    """Returns the processor time of every living thread, by (pid, tid)."""
    seconds = {}
    for pid in pids:
        try:
            tids = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
        except OSError:  # the process has ended
            continue
        for tid in tids:
            stat = _stat(Path(f"/proc/{pid}/task/{tid}/stat"))
            if stat is not None:
                name, fields = stat
                # utime and stime, the 14th and 15th field; the first two are cut off.
                user_s, system_s = (int(fields[i]) / _CLOCK_TICKS_PER_S for i in (11, 12))
                seconds[pid, tid] = ThreadSeconds(user_s, system_s, name)
    return seconds


class MemorySampler:
    """Samples the memory of processes in a thread, and keeps the peak of every phase.

    The kernel needs about 10 ms per gigabyte, which would disturb measured times. So it samples rarely in a timed
    phase.
    """

    def __init__(self, sample: Callable[[], Memory]) -> None:
        self._sample = sample
        self._lock = threading.Lock()
        self._phase = "start"
        self._peaks: dict[str, int] = {}
        self._share = 0.5
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory sampler", daemon=True)

    def __enter__(self) -> "MemorySampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def enter_phase(self, phase: str, *, share: float = 0.5) -> None:
        """Assigns the following samples to `phase`. They take at most `share` of the time."""
        with self._lock:
            self._phase, self._share = phase, share

    def peak_nbytes(self, *phases: str) -> int:
        """Returns the largest sample of these phases, or of all phases; 0 if there is none."""
        with self._lock:
            return max((peak for phase, peak in self._peaks.items() if not phases or phase in phases), default=0)

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self._lock:
                phase, share = self._phase, self._share
            start_s = time.perf_counter()
            nbytes = self._sample().nbytes
            cost_s = time.perf_counter() - start_s
            with self._lock:
                self._peaks[phase] = max(self._peaks.get(phase, 0), nbytes)
            self._stopping.wait(max(_INTERVAL_S - cost_s, cost_s / share - cost_s))


def _stats() -> Iterable[tuple[int, list[str]]]:
    """Yields (pid, stat fields from the state on) of all processes."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and (stat := _stat(process / "stat")) is not None:
            yield int(process.name), stat[1]


def _stat(path: Path) -> tuple[str, list[str]] | None:
    """Returns the process name, and the stat fields from the third on."""
    try:
        text = path.read_text()
    except OSError:  # the process has ended
        return None
    # The second field is the name in parentheses, which may contain any character.
    end = text.rindex(")")
    return text[text.index("(") + 1 : end], text[end + 2 :].split()


def _smaps_rollup(pid: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:  # the process has ended
        return {}
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}


def _allocated_nbytes(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except OSError:  # removed meanwhile
        return 0
