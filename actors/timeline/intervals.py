"""Stretches of time: what they cover together, and what is left of some without others."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping

# Begin and end; those of a list are sorted and do not meet, unless it says otherwise.
Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """What any intervals cover together: sorted, and apart from each other."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            if stop > merged[-1][1]:
                merged[-1] = (merged[-1][0], stop)
        elif stop > start:
            merged.append((start, stop))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """How long they are together."""
    return sum(stop - start for start, stop in intervals)


def clip(intervals: list[Interval], start: float, stop: float) -> list[Interval]:
    """What lies between two times."""
    found: list[Interval] = []
    first = max(0, bisect_right(intervals, (start, float("inf"))) - 1)
    for i in range(first, len(intervals)):
        low, high = max(intervals[i][0], start), min(intervals[i][1], stop)
        if intervals[i][0] >= stop:
            break
        if low < high:
            found.append((low, high))
    return found


def intersect(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """What both cover."""
    return [part for start, stop in one for part in clip(other, start, stop)]


def subtract(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """What only the first covers."""
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
    """What is covered by several kinds at once counts in equal parts for each; all together it counts once."""
    turns = sorted(
        turn
        for name, intervals in kinds.items()
        for start, stop in union(intervals)
        for turn in ((start, True, name), (stop, False, name))
    )
    found = dict.fromkeys(kinds, 0.0)
    active: set[str] = set()
    past_s = 0.0
    for at_s, begins, name in turns:
        for each in active:
            found[each] += (at_s - past_s) / len(active)
        past_s = at_s
        if begins:
            active.add(name)
        else:
            active.remove(name)
    return found
