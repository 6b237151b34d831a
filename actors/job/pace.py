"""Estimates a job's time per step from its plan's prediction or from measured steps. No clock, no I/O."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Number of an attempt's first steps that are not yet in steady state: caches are empty, and no update runs during the
# first one.
NUM_FIRST_STEPS = 2
# Number of steps in steady state after which their mean counts as measured. With fewer, the time left is an estimate.
MIN_MEASURED_STEPS = 3
# Largest factor between the expected time of a step and the measured mean. Beyond it, the expectation is not used.
MAX_MISS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The time of a step."""

    step_s: float  # of one without an evaluation
    is_measured: bool  # measured over enough steps of the job; else an estimate
    evaluation_s: float | None = None  # by which an evaluation makes a step longer; None: none was measured
    # The mean over the remaining steps, evaluations included; None: `step_s` is all that is known.
    mean_s: float | None = None


def pace_of_metrics(metrics: Mapping[str, Any]) -> Pace | None:
    """Returns the pace behind the remaining time in a step's metrics; None if they have none, or no step is left."""
    remaining_s, num_left = metrics.get("remaining_s"), metrics.get("total_steps", 0) - metrics.get("step", 0)
    if remaining_s is None or num_left <= 0:
        return None
    mean_s = remaining_s / num_left
    # Metrics of earlier releases lack `remaining_is_estimate`, or the times of a step and of an evaluation.
    return Pace(
        step_s=metrics.get("pace_s", mean_s),
        is_measured=not metrics.get("remaining_is_estimate", True),
        evaluation_s=metrics.get("evaluation_s"),
        mean_s=mean_s,
    )


def pace_of_attempt(num_steps: int, mean_s: float, expected: Pace | None) -> Pace | None:
    """Returns the pace of an attempt after `num_steps` steps; None if no number is reliable.

    `mean_s` is the mean of its steady steps or, without any, of its first steps. First steps take longer, because
    kernels are compiled and caches are empty. `expected` is the pace of earlier attempts or the plan's prediction.
    """
    num_steady = num_steps - NUM_FIRST_STEPS
    if num_steady >= MIN_MEASURED_STEPS:
        return Pace(step_s=mean_s, is_measured=True)
    if expected is None or mean_s < expected.step_s / MAX_MISS:
        # Even the slow first steps are faster than expected, so later steps will be as well.
        return Pace(step_s=mean_s, is_measured=False)
    if expected.is_measured:
        return expected
    if num_steady > 0:
        return Pace(step_s=mean_s, is_measured=False)
    # Slow first steps may be caused by one-time work or a wrong prediction. Then neither number is reliable.
    return expected if mean_s <= MAX_MISS * expected.step_s else None
