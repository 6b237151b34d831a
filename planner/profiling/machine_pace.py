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
from pathlib import Path
from statistics import median

import numpy as np

# Rows: with more, OpenBLAS uses threads of its own, whose number depends on the environment.
_MATRIX_SIZE = 64
_NUM_MATRICES = 512
_COPY_NBYTES = 32 << 20
_NUM_ROUNDS = 5  # of which the median counts
# The share of the cores' time that other processes may take meanwhile. With more, the pace is not that of the machine.
_MAX_OTHERS = 0.1
# Seconds for which a pace is used again.
_KEPT_S = 60.0
# Relative change below which a pace counts as the same: within it, the measurement itself varies.
_MIN_CHANGE = 0.05


class MachinePace:
    """The pace of this machine, measured when it is asked for, and again when it is old."""

    def __init__(
        self,
        measure: Callable[[], float | None],
        clock: Callable[[], float] = time.monotonic,
        *,
        kept_s: float = _KEPT_S,
    ) -> None:
        """`kept_s`: seconds for which a pace is used again, and for which a machine that was busy counts as busy."""
        self._measure, self._clock, self._kept_s = measure, clock, kept_s
        self._pace_s: float | None = None
        self._measured_at_s = -math.inf

    def now_s(self) -> float | None:
        """Returns the seconds of the fixed work now, or None while other work runs on the machine."""
        if self._clock() - self._measured_at_s >= self._kept_s:
            self._pace_s, self._measured_at_s = self._measure(), self._clock()
        return self._pace_s

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
    return MachinePace(lambda: this_machine().now_s(), kept_s=math.inf)


def measure_pace() -> float | None:
    """Returns the seconds of the fixed work, or None if other processes took part of the cores meanwhile."""
    num_cores = len(os.sched_getaffinity(0))
    others_before_s, start_s = _others_s(), time.perf_counter()
    with ThreadPoolExecutor(num_cores) as pool:
        works = [_Work() for _ in range(num_cores)]
        products_s = _round_s(pool, [work.multiply for work in works])
        copies_s = _round_s(pool, [work.copy for work in works])
    elapsed_s = time.perf_counter() - start_s
    if _others_s() - others_before_s > _MAX_OTHERS * num_cores * elapsed_s:
        return None
    return math.sqrt(products_s * copies_s)


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
    """Returns the core seconds that all other processes have taken so far, or 0 where the system does not tell."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    except OSError:
        return 0.0
    user, nice, system, _idle, _wait, irq, soft_irq = (int(field) for field in fields[:7])
    own = os.times()
    return (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK") - own.user - own.system
