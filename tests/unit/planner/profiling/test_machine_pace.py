"""The machine's pace is measured now and again, and a small change of it is none."""

import pytest

from windlass.planner.profiling import MachinePace
from windlass.planner.profiling.machine_pace import measure_pace


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_pace_is_measured_again_once_it_is_old() -> None:
    clock, measured = Clock(), iter([2.0, 3.0])
    pace = MachinePace(lambda: next(measured), clock)
    assert [pace.now_s(), pace.now_s()] == [2.0, 2.0]
    clock.now_s = 61.0
    assert pace.now_s() == 3.0


@pytest.mark.parametrize(
    ("now_s", "earlier_s", "slowdown"),
    [(2.5, 2.0, 1.25), (1.6, 2.0, 0.8), (2.08, 2.0, 1.0), (1.92, 2.0, 1.0), (None, 2.0, 1.0), (2.5, None, 1.0)],
)
def test_slowdown_is_that_of_the_fixed_work(now_s: float | None, earlier_s: float | None, slowdown: float) -> None:
    assert MachinePace(lambda: now_s).slowdown(earlier_s) == pytest.approx(slowdown)


def test_this_machine_has_a_pace_or_is_busy() -> None:
    pace_s = measure_pace()
    assert pace_s is None or pace_s > 0.0
