"""Says how sure a predicted step time is: between which times nine of ten jobs lie.

A prediction is wrong by a factor, so errors are logarithms of measured over predicted times. Their variance is learned
from the jobs that this machine has finished. As long as they are few, jobs that were compared elsewhere fill up their
number. The predictive distribution is then Student's t. Errors count from zero, not from their mean: a machine on which
every job takes 10 percent longer than predicted has wide intervals.

Source: Gelman and others, Bayesian Data Analysis, section 2.6 (normal data with a known mean and an unknown variance).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import log

from windlass.actors.job import factor_of_nine_in_ten
from windlass.amounts import number_text

# Jobs of this machine from which on no others count.
_NUM_OWN = 6
# Finished jobs of this machine from which on "in nine of ten jobs" is said.
MIN_COMPARED = 10
# The largest error that a single job may have, up or down: with more, something else was wrong than the prediction.
_MAX_LOG_ERROR = log(3.0)


class TimesFrom(StrEnum):
    """The source of the times that a prediction adds up."""

    STEPS = "steps"  # the job's own steps
    BLOCKS = "blocks"  # the model's blocks were measured on this machine
    RATES = "rates"  # operations and bytes over the rates of the machine's profile


# Standard deviation of the errors. Steps and blocks: of 18 jobs of `python -m benchmarks.planner` (2026-11-23), 0.08,
# most of it by changes of a virtual machine's pace. Rates: an assumption, because no plan by a GPU's rates was
# compared. Where the device is the CPU, decision 61 compared 18 on one machine; other CPUs may have other ratios of
# rates. A profile with one rate of matrix products may have it of another precision than the job's.
CPU_SPREAD, CPU_SPREAD_OF_ONE_RATE = 0.35, 0.7
_ASSUMED = {TimesFrom.STEPS: 0.06, TimesFrom.BLOCKS: 0.08, TimesFrom.RATES: 0.25}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInterval:
    """The times between which the step of nine of ten jobs lies, and what this is known from."""

    low_s: float
    high_s: float
    times_from: TimesFrom
    num_compared: int  # finished jobs of this machine whose predictions had times from the same source


def step_interval(
    step_s: float,
    times_from: TimesFrom,
    *,
    errors: Sequence[float] = (),
    standard_error: float = 0.0,
    others: float = 0.0,
    spread: float | None = None,
) -> StepInterval:
    """Returns the interval of a predicted step time.

    `errors`: measured over predicted step times of this machine's finished jobs. `standard_error`: relative, of the
    measured blocks' sum; it adds to what is known from other jobs. `others`: share of the cores' time that other
    processes took while blocks were measured. Without them a step may take less by as much. `spread`: standard
    deviation of the errors as long as few jobs are known; None: that of `times_from`.
    """
    squares = [min(abs(log(error)), _MAX_LOG_ERROR) ** 2 for error in errors]
    num_others = max(0, _NUM_OWN - len(squares))
    num_degrees = num_others + len(squares)
    assumed = _ASSUMED[times_from] if spread is None else spread
    log_variance = (num_others * assumed**2 + sum(squares)) / num_degrees
    factor = factor_of_nine_in_ten(log_variance + standard_error**2, num_degrees)
    low_s = (1 - others) * step_s / factor
    return StepInterval(low_s=low_s, high_s=step_s * factor, times_from=times_from, num_compared=len(squares))


def interval_in_words(low_s: float, high_s: float, times_from: str, num_compared: int) -> str:
    """Describes an interval. It says "nine of ten" only if enough jobs of this machine were compared."""
    interval = f"{number_text(low_s)} to {number_text(high_s)} s"
    if num_compared >= MIN_COMPARED:
        return f"{interval} in nine of ten jobs, by {num_compared} jobs of this machine"
    compared = {0: "no job of this machine was compared", 1: "one job of this machine was compared"}.get(
        num_compared, f"{num_compared} jobs of this machine were compared"
    )
    if times_from == TimesFrom.RATES:
        return f"likely {interval}: it follows from the machine's rates, and {compared}"
    return f"likely {interval}; {compared}"
