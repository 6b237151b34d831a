"""An interval of nine in ten jobs holds in nine of ten jobs, once some jobs of the machine are known."""

import math
import random

import pytest

from windlass.planner.predictions.confidence import MIN_COMPARED, TimesFrom, interval_in_words, step_interval

NUM_HISTORIES = 1500


def coverage(spread: float, num_past: int, *, bias: float = 0.0, odd: float = 0.0) -> float:
    """Returns how often the next job lies in the interval.

    `spread`, `bias`: of the logarithms of the errors. `odd`: the share of jobs with four times as large a spread.
    """
    draw = random.Random(3)

    def error() -> float:
        return math.exp(bias + draw.gauss(0.0, spread * (4 if draw.random() < odd else 1)))

    num_right = 0
    for _ in range(NUM_HISTORIES):
        past = [error() for _ in range(num_past)]
        interval = step_interval(3.0, TimesFrom.BLOCKS, errors=past)
        num_right += interval.low_s <= 3.0 * error() <= interval.high_s
    return num_right / NUM_HISTORIES


@pytest.mark.parametrize("num_past", [0, 5, 30])
def test_interval_holds_on_a_machine_like_those_that_were_compared(num_past: int) -> None:
    assert 0.88 <= coverage(0.08, num_past) <= 0.97


@pytest.mark.parametrize("spread", [0.05, 0.15, 0.25])
def test_interval_holds_on_any_machine_once_enough_jobs_are_known(spread: float) -> None:
    assert 0.87 <= coverage(spread, 3 * MIN_COMPARED) <= 0.99


def test_interval_holds_if_all_jobs_take_longer_or_some_are_far_off() -> None:
    assert coverage(0.04, 3 * MIN_COMPARED, bias=0.15) >= 0.9
    assert coverage(0.05, 3 * MIN_COMPARED, odd=0.1) >= 0.87


def test_interval_shrinks_and_grows_with_the_errors_of_earlier_jobs() -> None:
    widths = [
        math.log(step_interval(3.0, TimesFrom.BLOCKS, errors=errors).high_s / 3.0)
        for errors in ([1.01] * 30, [], [1.2, 1 / 1.2] * 15)
    ]
    assert widths == sorted(widths)


def test_interval_is_wider_for_rates_and_for_disturbed_measurements() -> None:
    by_blocks, by_rates = (step_interval(3.0, times_from) for times_from in (TimesFrom.BLOCKS, TimesFrom.RATES))
    disturbed = step_interval(3.0, TimesFrom.BLOCKS, standard_error=0.2)
    assert by_blocks.high_s < disturbed.high_s < by_rates.high_s
    assert by_rates.low_s < disturbed.low_s < by_blocks.low_s < 3.0


def test_step_may_take_less_without_the_other_work_of_a_measurement() -> None:
    alone, busy = (step_interval(3.0, TimesFrom.BLOCKS, others=others) for others in (0.0, 0.6))
    assert busy.low_s == pytest.approx(0.4 * alone.low_s)
    assert busy.high_s == alone.high_s


def test_interval_of_rates_is_as_wide_as_is_assumed_until_jobs_are_known() -> None:
    usual, wide = (step_interval(3.0, TimesFrom.RATES, spread=spread) for spread in (None, 0.7))
    assert wide.low_s < usual.low_s < usual.high_s < wide.high_s
    errors = [1.1] * 6
    known = step_interval(3.0, TimesFrom.RATES, errors=errors)
    assert step_interval(3.0, TimesFrom.RATES, errors=errors, spread=0.7) == known


def test_a_single_job_that_went_wrong_counts_no_more_than_threefold() -> None:
    assert step_interval(3.0, TimesFrom.BLOCKS, errors=[50.0]) == step_interval(3.0, TimesFrom.BLOCKS, errors=[3.0])


def test_nine_of_ten_is_said_only_with_enough_jobs() -> None:
    assert interval_in_words(2.81, 3.52, "blocks", 12) == (
        "2.81 to 3.52 s in nine of ten jobs, by 12 jobs of this machine"
    )
    assert interval_in_words(2.81, 3.52, "blocks", 1) == "likely 2.81 to 3.52 s; one job of this machine was compared"
    assert interval_in_words(2.0, 4.5, "rates", 0) == (
        "likely 2 to 4.5 s: it follows from the machine's rates, and no job of this machine was compared"
    )
