"""How far a machine goes: the largest or smallest number for which something holds, found by search."""

from collections.abc import Callable
from enum import StrEnum

DEFAULT_SLACK = 0.02


class Goal(StrEnum):
    """What may be looked for."""

    LARGEST_BATCH = "largest-batch"  # that is computed at once
    LONGEST_CONTEXT = "longest-context"  # with micro-batches of one example
    MOST_LAYERS = "most-layers"  # of a model that is otherwise the same
    FEWEST_SSDS = "fewest-ssds"  # with which a step takes hardly longer than with all
    SMALLEST_RAM = "smallest-ram"  # GiB; the same


def largest(holds: Callable[[int], bool], *, most: int) -> int:
    """The largest number up to `most` for which it holds, where it holds for all smaller ones; 0 if not even for 1."""
    low, high = 0, 1
    while high <= most and holds(high):
        low, high = high, high * 2
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def smallest(holds: Callable[[int], bool], *, most: int) -> int | None:
    """The smallest number from 1 to `most` for which it holds, where it holds for all larger ones; None if for none."""
    below = largest(lambda number: not holds(number), most=most)
    return None if below == most else below + 1
