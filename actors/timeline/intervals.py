"""Operations on intervals of time: union, intersection, difference."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping

# Start and end. The intervals of a list are sorted and disjoint, unless a function says otherwise.
Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the union of any intervals, sorted and disjoint."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            if stop > merged[-1][1]:
                merged[-1] = (merged[-1][0], stop)
        elif stop > start:
            merged.append((start, stop))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Returns the total length."""
    return sum(stop - start for start, stop in intervals)


def clip(intervals: list[Interval], start: float, stop: float) -> list[Interval]:
    """Returns the parts between two times."""
    clipped: list[Interval] = []
    first = max(0, bisect_right(intervals, (start, float("inf"))) - 1)
    for i in range(first, len(intervals)):
        low, high = max(intervals[i][0], start), min(intervals[i][1], stop)
        if intervals[i][0] >= stop:
            break
        if low < high:
            clipped.append((low, high))
    return clipped


def intersect(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """Returns the parts that both lists cover."""
    return [part for start, stop in one for part in clip(other, start, stop)]


def subtract(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """Returns the parts that only the first list covers."""
    left: list[Interval] = []
    for start, stop in one:
        for low, high in clip(other, start, stop):
            if low > start:
                left.append((start, low))
            start = high
        if start < stop:
            left.append((start, stop))
    return left


def shared_out(kinds: Mapping[str, list[Interval]]) -> dict[str, float]:
    """Returns the time of each kind. Time that several kinds cover at once is divided equally among them."""
    turns = sorted(
        turn
        for name, intervals in kinds.items()
        for start, stop in union(intervals)
        for turn in ((start, True, name), (stop, False, name))
    )
    shares = dict.fromkeys(kinds, 0.0)
    active: set[str] = set()
    past_s = 0.0
    for at_s, begins, name in turns:
        for kind in active:
            shares[kind] += (at_s - past_s) / len(active)
        past_s = at_s
        if begins:
            active.add(name)
        else:
            active.remove(name)
    return shares
