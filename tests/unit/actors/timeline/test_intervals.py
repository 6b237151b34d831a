"""Operations on time intervals, compared with the same operations tick by tick."""

import random

import pytest

from windlass.actors.timeline.intervals import Interval, clip, intersect, length, shared_out, subtract, union

NUM_TICKS = 40


def some(generator: random.Random) -> list[Interval]:
    """Intervals of whole ticks, in random order."""
    starts = [generator.randrange(NUM_TICKS) for _ in range(generator.randrange(8))]
    return [(start, generator.randrange(start, NUM_TICKS + 1)) for start in starts]


def ticks(intervals: list[Interval]) -> set[int]:
    return {tick for start, stop in intervals for tick in range(int(start), int(stop))}


def is_tidy(intervals: list[Interval]) -> bool:
    bounds = [bound for interval in intervals for bound in interval]
    return bounds == sorted(bounds) and all(start < stop for start, stop in intervals)


@pytest.mark.parametrize("seed", range(200))
def test_interval_operations_equal_operations_on_ticks(seed: int) -> None:
    generator = random.Random(seed)
    raw, raw_other = some(generator), some(generator)
    one, other = union(raw), union(raw_other)
    assert is_tidy(one)
    assert ticks(one) == ticks(raw)
    assert length(one) == len(ticks(one))
    start, stop = sorted(generator.sample(range(NUM_TICKS), 2))
    for found, expected in (
        (clip(one, start, stop), ticks(one) & set(range(start, stop))),
        (intersect(one, other), ticks(one) & ticks(other)),
        (subtract(one, other), ticks(one) - ticks(other)),
    ):
        assert is_tidy(found)
        assert ticks(found) == expected


def test_union_joins_adjacent_intervals() -> None:
    assert union([(2.0, 3.0), (0.0, 1.0), (1.0, 2.0), (5.0, 5.0), (6.0, 9.0), (7.0, 8.0)]) == [(0.0, 3.0), (6.0, 9.0)]


@pytest.mark.parametrize("seed", range(50))
def test_time_covered_by_several_is_divided_equally(seed: int) -> None:
    generator = random.Random(seed)
    kinds = {name: some(generator) for name in "abc"}
    found = shared_out(kinds)
    for name, intervals in kinds.items():
        share = sum(1 / sum(tick in ticks(other) for other in kinds.values()) for tick in ticks(intervals))
        assert found[name] == pytest.approx(share)
    assert sum(found.values()) == pytest.approx(length(union(part for each in kinds.values() for part in each)))
