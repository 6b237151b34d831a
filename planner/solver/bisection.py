"""Searches for the largest or smallest number for which a condition holds."""

from collections.abc import Callable
from enum import StrEnum

DEFAULT_SLACK = 0.02  # share by which a step may become longer when the search reduces SSDs or host memory


class Goal(StrEnum):
    """The quantity that a search maximizes or minimizes."""

    LARGEST_BATCH = "largest-batch"  # examples in one micro-batch, or in one of each lane and GPU
    LONGEST_CONTEXT = "longest-context"  # tokens that the model takes, with micro-batches of one example
    MOST_LAYERS = "most-layers"  # every layer like the model's first one
    FEWEST_SSDS = "fewest-ssds"  # with which a step takes at most `slack` longer than with all SSDs
    SMALLEST_RAM = "smallest-ram"  # GiB of host memory, with the same condition on the step
    SMALLEST_GPU = "smallest-gpu"  # GiB of GPU memory with which the job fits at all

    @property
    def unit(self) -> str:
        """The unit of the number that is found."""
        return _UNITS[self]


# Searches for the least part of a machine with which a step takes little longer.
GOALS_WITH_SLACK = (Goal.FEWEST_SSDS, Goal.SMALLEST_RAM)

_UNITS = {
    Goal.LARGEST_BATCH: "examples",
    Goal.LONGEST_CONTEXT: "tokens",
    Goal.MOST_LAYERS: "layers",
    Goal.FEWEST_SSDS: "SSDs",
    Goal.SMALLEST_RAM: "GiB",
    Goal.SMALLEST_GPU: "GiB",
}


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
