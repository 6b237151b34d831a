"""Cores that simulated tasks share."""

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from windlass.planner.simulation.clock import Clock, Process
from windlass.planner.simulation.cores import SharedCores


def ends_of(num_cores: int, tasks: list[tuple[float, float, float]]) -> list[float]:
    """The end of each task, given as (start, duration, threads)."""
    clock = Clock()
    cores = SharedCores(clock, num_cores)
    ends = [math.nan] * len(tasks)

    def run(index: int, start_s: float, duration_s: float, num_threads: float) -> Process:
        yield start_s
        yield from cores.work(duration_s, num_threads)
        ends[index] = clock.now

    for index, task in enumerate(tasks):
        clock.process(run(index, *task))
    clock.run()
    return ends


def test_alone_work_takes_its_time() -> None:
    assert ends_of(2, [(1.0, 3.0, 2)]) == [4.0]
    assert ends_of(2, [(0.0, 3.0, 1), (0.0, 5.0, 1)]) == [3.0, 5.0]
    assert ends_of(2, [(1.0, 0.0, 2)]) == [1.0]


def test_more_threads_than_cores_slow_down_alike() -> None:
    """A copy of one thread beside a computation of two: both at two thirds, until the copy ends."""
    ends = ends_of(2, [(0.0, 4.0, 2), (0.0, 1.0, 1)])
    assert ends == pytest.approx([4.5, 1.5])


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.floats(0, 5), st.floats(0.01, 5), st.integers(1, 4)), min_size=1, max_size=6),
)
def test_no_work_is_faster_than_alone(num_cores: int, tasks: list[tuple[float, float, float]]) -> None:
    ends = ends_of(num_cores, tasks)
    assert all(end >= start + duration - 1e-9 for end, (start, duration, _) in zip(ends, tasks, strict=True))


@given(st.integers(1, 4), st.lists(st.tuples(st.floats(0.01, 5), st.integers(0, 3)), min_size=1, max_size=6))
def test_busy_cores_do_all_they_can(num_cores: int, tasks: list[tuple[float, int]]) -> None:
    """Each task alone is as wide as the cores, so these are never idle and complete all the work."""
    wide = [(0.0, duration, float(num_cores + more)) for duration, more in tasks]
    thread_s = sum(duration * threads for _, duration, threads in wide)
    alone = [duration * threads / num_cores for _, duration, threads in wide]
    assert len(tasks) > 1 or ends_of(num_cores, wide) == pytest.approx(alone)
    assert max(ends_of(num_cores, wide)) == pytest.approx(thread_s / num_cores)
