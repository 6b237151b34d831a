"""Measures how fast this machine computes now, in a fifth of a second, to be compared with an earlier time.

A virtual machine's pace changes with its neighbours, and a processor's with its heat. The unit is seconds of a fixed
piece of work on all cores: matrix products that fit in caches, and copies that do not. It imports no torch.
"""

import functools
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

# Rows: with more, OpenBLAS uses threads of its own, whose number depends on the environment.
_MATRIX_SIZE = 64
_NUM_MATRICES = 512
_COPY_NBYTES = 32 << 20
_STAT = Path("/proc/stat")
_NUM_ROUNDS = 5  # of which the median counts
# The share of the cores' time that other processes may take during a measurement. With more, the machine is busy.
MAX_OTHERS = 0.1
# Seconds for which a pace is used again.
_KEPT_S = 60.0
# Relative change below which a pace counts as the same: within it, the measurement itself varies.
_MIN_CHANGE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The seconds of the fixed work, and the share of the cores' time that other processes took meanwhile."""

    seconds: float
    others: float = 0.0


class MachinePace:
    """The pace of this machine, measured when it is asked for, and again when it is old."""

    def __init__(
        self,
        measure: Callable[[], Pace],
        clock: Callable[[], float] = time.monotonic,
        *,
        kept_s: float = _KEPT_S,
    ) -> None:
        """`kept_s`: seconds for which a pace is used again, and for which a machine that was busy counts as busy."""
        self._measure, self._clock, self._kept_s = measure, clock, kept_s
        self._pace: Pace | None = None
        self._measured_at_s = -math.inf

    def now(self) -> Pace:
        """Returns the pace now. While other processes work, it is not that of the machine."""
        if self._pace is None or self._clock() - self._measured_at_s >= self._kept_s:
            self._pace, self._measured_at_s = self._measure(), self._clock()
        return self._pace

    def now_s(self) -> float | None:
        """Returns the seconds of the fixed work now, or None while other work runs on the machine."""
        now = self.now()
        return None if now.others > MAX_OTHERS else now.seconds

    def slowdown(self, earlier_s: float | None) -> float:
        """Returns the factor by which the machine is slower now than at `earlier_s`; 1 if it is unknown or small."""
        if earlier_s is None or (now_s := self.now_s()) is None:
            return 1.0
        slowdown = now_s / earlier_s
        return slowdown if abs(math.log(slowdown)) >= math.log1p(_MIN_CHANGE) else 1.0


@functools.cache
def this_machine() -> MachinePace:
    """Returns the pace of the machine that this process runs on."""
    return MachinePace(measure_pace)


def pace_of_an_answer() -> MachinePace:
    """Returns this machine's pace as it is at its first use from now on.

    So all parts of an answer have one pace, whatever the machine does while they are found.
    """
    return MachinePace(lambda: this_machine().now(), kept_s=math.inf)


def measure_pace() -> Pace:
    """Measures the pace in a fifth of a second."""
    num_cores, others = len(os.sched_getaffinity(0)), OtherWork()
    with ThreadPoolExecutor(num_cores) as pool:
        works = [_Work() for _ in range(num_cores)]
        products_s = _round_s(pool, [work.multiply for work in works])
        copies_s = _round_s(pool, [work.copy for work in works])
    return Pace(seconds=math.sqrt(products_s * copies_s), others=others.share())


class OtherWork:
    """The work of other processes, from the making of this object on."""

    def __init__(self) -> None:
        self._begin_s, self._others_s = time.perf_counter(), _others_s()

    def share(self) -> float:
        """Returns their share of the time of this process's cores; 0 where the system does not tell."""
        cores_s = len(os.sched_getaffinity(0)) * (time.perf_counter() - self._begin_s)
        return min(max((_others_s() - self._others_s) / cores_s, 0.0), 1.0)


class _Work:
    def __init__(self) -> None:
        shape = (_NUM_MATRICES, _MATRIX_SIZE, _MATRIX_SIZE)
        self._left = np.full(shape, 0.5, dtype=np.float32)
        self._right = np.full((_MATRIX_SIZE, _MATRIX_SIZE), 0.5, dtype=np.float32)
        self._product = np.empty(shape, dtype=np.float32)
        self._source = np.ones(_COPY_NBYTES, dtype=np.uint8)
        self._target = np.ones(_COPY_NBYTES, dtype=np.uint8)

    def multiply(self) -> None:
        np.matmul(self._left, self._right, out=self._product)

    def copy(self) -> None:
        np.copyto(self._target, self._source)


def _round_s(pool: ThreadPoolExecutor, works: list[Callable[[], None]]) -> float:
    """Returns the median seconds in which all cores do their part, after a round to warm up."""
    taken = []
    for _ in range(1 + _NUM_ROUNDS):
        start_s = time.perf_counter()
        for future in [pool.submit(work) for work in works]:
            future.result()
        taken.append(time.perf_counter() - start_s)
    return median(taken[1:])


def _others_s() -> float:
    """Returns the seconds of this process's cores that all other processes have taken so far; 0 if it is not known."""
    try:
        lines = _STAT.read_text().splitlines()
    except OSError:
        return 0.0
    cores, ticks = {f"cpu{core}" for core in os.sched_getaffinity(0)}, 0
    for core, _, fields in (line.partition(" ") for line in lines):
        if core in cores:
            user, nice, system, _idle, _wait, irq, soft_irq = map(int, fields.split()[:7])
            ticks += user + nice + system + irq + soft_irq
    own = os.times()
    return ticks / os.sysconf("SC_CLK_TCK") - own.user - own.system
