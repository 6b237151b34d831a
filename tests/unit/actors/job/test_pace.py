"""The remaining time comes from measured steps once there are enough, and never from an estimate they contradict."""

import pytest

from windlass.actors.job.pace import MIN_MEASURED_STEPS, Pace, pace_of_attempt, pace_of_metrics
from windlass.actors.timeline.resource_usage import NUM_FIRST_STEPS

PROMISE, MEASURED = Pace(step_s=10.0, is_measured=False), Pace(step_s=10.0, is_measured=True)
FIRST, STEADY, ENOUGH = NUM_FIRST_STEPS, NUM_FIRST_STEPS + 1, NUM_FIRST_STEPS + MIN_MEASURED_STEPS


def estimate(step_s: float) -> Pace:
    return Pace(step_s=step_s, is_measured=False)


@pytest.mark.parametrize("expected", [None, PROMISE, MEASURED])
@pytest.mark.parametrize("mean_s", [0.1, 10.0, 1000.0])
def test_pace_after_enough_steady_steps_is_theirs_whatever_was_expected(mean_s: float, expected: Pace | None) -> None:
    assert pace_of_attempt(ENOUGH, mean_s, expected) == Pace(step_s=mean_s, is_measured=True)
    before = pace_of_attempt(ENOUGH - 1, mean_s, expected)
    assert before is not None
    assert before.is_measured == (expected == MEASURED and mean_s >= 10.0)


@pytest.mark.parametrize(("mean_s", "found"), [(4.9, estimate(4.9)), (5.0, PROMISE), (20.0, PROMISE), (20.1, None)])
def test_pace_of_first_steps_is_the_promise_unless_they_contradict_it(mean_s: float, found: Pace | None) -> None:
    assert pace_of_attempt(FIRST, mean_s, PROMISE) == found
    assert pace_of_attempt(1, mean_s, PROMISE) == found


def test_pace_of_one_steady_step_is_an_estimate_of_its_own() -> None:
    assert pace_of_attempt(STEADY, 30.0, PROMISE) == estimate(30.0)
    assert pace_of_attempt(STEADY, 11.0, PROMISE) == estimate(11.0)


def test_pace_without_a_promise_is_an_estimate_from_the_first_step_on() -> None:
    assert pace_of_attempt(1, 30.0, None) == estimate(30.0)


def test_pace_of_earlier_attempts_holds_while_the_first_steps_are_slow() -> None:
    assert pace_of_attempt(1, 300.0, MEASURED) == MEASURED
    assert pace_of_attempt(STEADY, 12.0, MEASURED) == MEASURED
    assert pace_of_attempt(1, 1.0, MEASURED) == estimate(1.0), "the machine is another one"


def test_pace_of_metrics_is_what_they_tell() -> None:
    told = {"step": 4, "total_steps": 10, "remaining_s": 30.0}
    measured, guessed = (Pace(step_s=5.0, is_measured=is_measured, mean_s=5.0) for is_measured in (True, False))
    assert pace_of_metrics(told | {"remaining_is_estimate": False}) == measured
    assert pace_of_metrics(told | {"remaining_is_estimate": True}) == guessed
    assert pace_of_metrics(told) == guessed
    with_evaluations = told | {"remaining_is_estimate": False, "pace_s": 4.0, "evaluation_s": 3.0}
    assert pace_of_metrics(with_evaluations) == Pace(step_s=4.0, is_measured=True, evaluation_s=3.0, mean_s=5.0)
    assert pace_of_metrics(told | {"remaining_s": None}) is None
    assert pace_of_metrics({"step": 10, "total_steps": 10, "remaining_s": 0.0}) is None
    assert pace_of_metrics({"step": 3, "valid_loss": 2.0}) is None
