"""Sums in a fixed order, so that results are the same to the last bit in whatever order the numbers arrive."""

from collections.abc import Iterable


def fold(numbers: Iterable[float]) -> float:
    """Returns the sum from left to right, rounded after each addition.

    The built-in `sum` is not used, because from Python 3.12 on it compensates rounding errors. A job would then get
    different bits on different versions of Python.
    """
    total = 0.0
    for number in numbers:
        total += number
    return total
