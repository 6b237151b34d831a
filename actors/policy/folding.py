"""Sums of numbers that arrive in any order: they are added in an order that is fixed, so that every bit is."""

from collections.abc import Iterable


def fold(numbers: Iterable[float]) -> float:
    """The sum from left to right, rounded after each addition.

    Not by `sum`, which from Python 3.12 on carries the rounding errors along: the same job would get other bits there.
    """
    total = 0.0
    for number in numbers:
        total += number
    return total
