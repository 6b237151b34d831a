"""The time of a step follows the last steps, and the interval is right as often as it says."""

import math
import random
from collections.abc import Callable, Sequence
from statistics import fmean

import pytest

from windlass.actors.job import NUM_RECENT_STEPS, StepTimes

NUM_HISTORIES, NUM_STEPS = 400, 90


def noted(step_s: Sequence[float]) -> StepTimes:
    times = StepTimes()
    for seconds in step_s:
        times.note(seconds)
    return times


def steady(draw: random.Random) -> list[float]:
    return [3.0 * math.exp(draw.gauss(0.0, 0.04)) for _ in range(NUM_STEPS)]


def drifting(draw: random.Random) -> list[float]:
    """A machine whose pace walks at random, by some percent within each window."""
    log_s, step_s = 1.0, []
    for _ in range(NUM_STEPS):
        log_s += draw.gauss(0.0, 0.02)
        step_s.append(math.exp(log_s + draw.gauss(0.0, 0.02)))
    return step_s


def coverage(history: Callable[[random.Random], list[float]], num_known: int) -> float:
    """Returns how often the mean of the next steps lies in the interval after `num_known` steps."""
    draw, num_right = random.Random(7), 0
    for _ in range(NUM_HISTORIES):
        step_s = history(draw)
        interval_s = noted(step_s[:num_known]).interval_s
        assert interval_s is not None
        low_s, high_s = interval_s
        num_right += low_s <= fmean(step_s[num_known : num_known + NUM_RECENT_STEPS]) <= high_s
    return num_right / NUM_HISTORIES


def test_recent_time_follows_a_machine_that_slows_down() -> None:
    times = noted([2.0] * 50 + [3.0] * (NUM_RECENT_STEPS // 2 + 1))
    assert times.recent_s == 3.0
    assert times.mean_s == pytest.approx(3.0, rel=0.05)


def test_recent_time_ignores_a_slow_step_which_the_mean_spreads_over_all() -> None:
    times = noted(([2.0] * 9 + [12.0]) * 5)
    assert times.recent_s == 2.0
    assert times.mean_s == pytest.approx(3.0, rel=0.05)


def test_evaluations_are_counted_apart() -> None:
    times = noted([2.0] * 9)
    times.note(7.0, evaluated=True)
    assert (times.recent_s, times.mean_s, times.evaluation_s) == (2.0, 2.0, 5.0)
    assert times.num_recent == 9


@pytest.mark.parametrize("num_known", [4, 9, 30, 60, 80])
def test_interval_of_a_steady_machine_holds_in_nine_of_ten_cases(num_known: int) -> None:
    assert 0.86 <= coverage(steady, num_known) <= 0.97


@pytest.mark.parametrize("num_known", [30, 60, 80])
def test_interval_of_a_drifting_machine_holds_in_nine_of_ten_cases(num_known: int) -> None:
    assert 0.84 <= coverage(drifting, num_known) <= 0.97


def test_interval_is_unknown_before_the_third_step() -> None:
    assert noted([2.0, 2.1]).interval_s is None
    assert StepTimes().recent_s is None
    assert StepTimes().mean_s is None
    assert StepTimes().evaluation_s is None
    times = noted([])
    times.note(7.0, evaluated=True)
    assert times.evaluation_s is None, "what the step takes without it is unknown"
