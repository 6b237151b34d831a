"""How long a job's steps take, as far as that is known: promised by a plan, or measured. No clock, no I/O."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# The first steps of an attempt, which are not steady yet: caches are empty, and no update runs beside the first one.
NUM_FIRST_STEPS = 2
# Steps in steady state after which their mean counts as measured; until then every time left is an estimate.
MIN_MEASURED_STEPS = 3
# A promise that the first steps miss by more than this factor is not used: it was made for something else.
MAX_MISS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What a step takes. `is_measured`: by enough of the job's steps; else it is an estimate."""

    step_s: float
    is_measured: bool


def pace_of_metrics(metrics: Mapping[str, Any]) -> Pace | None:
    """The pace by which a step's metrics tell the time left; None where they tell none, or no step is left."""
    remaining_s, num_left = metrics.get("remaining_s"), metrics.get("total_steps", 0) - metrics.get("step", 0)
    if remaining_s is None or num_left <= 0:
        return None
    # Metrics of an earlier release do not say whether it was measured.
    return Pace(step_s=remaining_s / num_left, is_measured=not metrics.get("remaining_is_estimate", True))


def pace_of_attempt(num_steps: int, mean_s: float, expected: Pace | None) -> Pace | None:
    """The pace of an attempt that has made `num_steps` steps; None where no number can be relied on.

    `mean_s`: of its steady steps where there are any, else of its first ones, which take longer: kernels are compiled
    and caches are empty. `expected`: of earlier attempts, or the plan's promise; None: neither is known.
    """
    num_steady = num_steps - NUM_FIRST_STEPS
    if num_steady >= MIN_MEASURED_STEPS:
        return Pace(step_s=mean_s, is_measured=True)
    if expected is None or mean_s < expected.step_s / MAX_MISS:
        # Even first steps are faster than expected: then the steps to come are, too.
        return Pace(step_s=mean_s, is_measured=False)
    if expected.is_measured:
        return expected
    if num_steady > 0:
        return Pace(step_s=mean_s, is_measured=False)
    # Slow first steps may be what is done only once, or the promise may be wrong: no number is the better one.
    return expected if mean_s <= MAX_MISS * expected.step_s else None
