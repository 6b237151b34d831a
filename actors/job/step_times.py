"""The times of an attempt's steps in steady state: how long a step takes now, and how sure that is. No I/O."""

import math
from collections import deque
from statistics import fmean, median, variance

from windlass.actors.job.spread import factor_of_nine_in_ten

# Number of last steps whose median is the time of a step now. More steps vary less, but follow a change later.
NUM_RECENT_STEPS = 9
# Number of last steps over whose mean what single steps take longer counts: checkpoints, other work on the machine.
_NUM_SLOW_SOUGHT = 100
# Number of last forecasts that tell how sure the next one is.
_NUM_FORECASTS = 100
# Forecasts of that many windows that do not overlap are enough to tell how sure the next one is.
_MIN_WINDOWS = 3
_MIN_STEPS = 3  # for an interval
# Variance of a median divided by that of the mean, of numbers with a normal distribution.
_OF_MEDIAN = math.pi / 2


class StepTimes:
    """Collects the times of one step after the other."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=NUM_RECENT_STEPS)
        # The medians at the ends of the steps before, the oldest first: forecasts for the steps after them.
        self._forecasts: deque[float] = deque(maxlen=NUM_RECENT_STEPS)
        self._misses: deque[float] = deque(maxlen=_NUM_FORECASTS)  # logarithms: mean of a window over its forecast
        self._longer_s: deque[float] = deque(maxlen=_NUM_SLOW_SOUGHT)
        self._evaluations_s: deque[float] = deque(maxlen=NUM_RECENT_STEPS)

    def note(self, step_s: float, *, evaluated: bool = False) -> None:
        """Counts a step. `evaluated`: an evaluation ran during it, so that its time tells nothing of other steps."""
        if evaluated:
            self._evaluations_s.append(step_s)
            return
        self._recent.append(step_s)
        if len(self._forecasts) == NUM_RECENT_STEPS:
            self._misses.append(math.log(fmean(self._recent) / self._forecasts[0]))
        self._longer_s.append(step_s - median(self._recent))
        if len(self._recent) == NUM_RECENT_STEPS:
            self._forecasts.append(median(self._recent))

    @property
    def num_recent(self) -> int:
        """The number of steps behind `recent_s`."""
        return len(self._recent)

    @property
    def recent_s(self) -> float | None:
        """The time of one of the last steps without an evaluation: their median. None before the first."""
        return median(self._recent) if self._recent else None

    @property
    def mean_s(self) -> float | None:
        """The mean time of the next steps without evaluations, or None before the first step.

        It is `recent_s` and what single steps take longer, such as those with a checkpoint, spread over all.
        """
        return median(self._recent) + fmean(self._longer_s) if self._recent else None

    @property
    def evaluation_s(self) -> float | None:
        """The time by which an evaluation makes a step longer; None before a step with one and a step without."""
        if not self._evaluations_s or not self._recent:
            return None
        return max(0.0, fmean(self._evaluations_s) - median(self._recent))

    @property
    def interval_s(self) -> tuple[float, float] | None:
        """The low and high end of the mean time of the next `NUM_RECENT_STEPS` steps: right in nine of ten cases.

        It comes from the errors of such forecasts for the steps so far, so it is the wider the more the machine's pace
        drifts. While there are few of them, it comes from the spread of the last steps too, as if the pace did not
        drift. It is None before the third step.
        """
        if len(self._recent) < _MIN_STEPS:
            return None
        of_step = variance(map(math.log, self._recent))
        log_variance = of_step * (_OF_MEDIAN / len(self._recent) + 1 / NUM_RECENT_STEPS)
        num_degrees = len(self._recent) - 1.0
        if self._misses:
            of_misses, num_windows = fmean(miss**2 for miss in self._misses), len(self._misses) / NUM_RECENT_STEPS
            if num_windows >= _MIN_WINDOWS or of_misses > log_variance:
                log_variance, num_degrees = of_misses, max(num_windows, _MIN_WINDOWS)
        factor = factor_of_nine_in_ten(log_variance, num_degrees)
        center_s = median(self._recent)
        return center_s / factor, center_s * factor
