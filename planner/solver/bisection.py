"""Searches for the largest or smallest number for which a condition holds."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

DEFAULT_SLACK = 0.02  # share by which a step may become longer when the search reduces SSDs or host memory


class Goal(StrEnum):
    """The quantity that a search maximizes or minimizes."""

    LARGEST_BATCH = "largest-batch"  # examples in one micro-batch, or in one of each lane and GPU
    LONGEST_CONTEXT = "longest-context"  # tokens, with micro-batches of one example
    MOST_LAYERS = "most-layers"  # every layer like the model's first one
    FEWEST_SSDS = "fewest-ssds"  # with which a step takes at most `slack` longer than with all SSDs
    SMALLEST_RAM = "smallest-ram"  # GiB of host memory, with the same condition on the step
    SMALLEST_GPU = "smallest-gpu"  # GiB of GPU memory with which the job fits at all


def largest(holds: Callable[[int], bool], *, most: int) -> int:
    """Returns the largest number up to `most` for which `holds` is true, or 0 if it is false for 1.

    It must be true for all smaller numbers as well.
    """
    low, high = 0, 1
    while high <= most and holds(high):
        low, high = high, high * 2
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def smallest(holds: Callable[[int], bool], *, most: int) -> int | None:
    """Returns the smallest number from 1 to `most` for which `holds` is true, or None if there is none.

    It must be true for all larger numbers as well.
    """
    below = largest(lambda number: not holds(number), most=most)
    return None if below == most else below + 1


@dataclass(slots=True, kw_only=True)
class MarginSearch:
    """A search for the margin by which a limit must be smaller for an estimate, so that the exact need fits the limit.

    The estimate leaves out bytes, and how many is known only for a plan. With the margin `too_little`, a plan exceeded
    the limit. With `too_much`, there was no plan. The next margin to try lies between them.
    """

    near: float  # the search ends when its interval is smaller
    margin: float = 0.0  # the next one to try
    too_little: float = 0.0
    too_much: float | None = None
    least_excess: float = math.inf  # of all plans
    _last_excess: float = math.inf

    def exceeded(self, excess: float, left_out: float) -> None:
        """Takes note of a plan that exceeds the limit by `excess`. `left_out`: bytes that its estimate left out."""
        self.least_excess = min(self.least_excess, excess)
        # A new plan may need even more than the estimate counts. If that repeats, take growing steps.
        growing = 2 * (self.margin - self.too_little) if excess > self._last_excess / 2 else 0.0
        self._last_excess = excess
        self.too_little, self.margin = self.margin, max(left_out, self.margin + max(excess, growing))
        if self.too_much is not None:
            self.margin = min(self.margin, (self.too_little + self.too_much) / 2)

    def found_none(self) -> bool:
        """Takes note that there is no plan. Returns whether a smaller margin is to be tried."""
        self.too_much = self.margin
        if self.too_much - self.too_little < self.near:
            return False
        self.margin = (self.too_little + self.too_much) / 2
        return True

    def fitted(self, left_out: float) -> bool:
        """Takes note of a plan that fits. Returns whether its own `left_out` is a smaller margin to try."""
        if not self.too_little < left_out < self.margin:
            return False
        self.margin = left_out
        return True
