"""The lanes of a step: every micro-batch is in one of them, whatever the groups."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.engine.lanes.lane_division import LaneDivision, rounded_to_lanes


@st.composite
def divisions(draw: st.DrawFn) -> LaneDivision:
    num_microbatches = draw(st.integers(1, 40))
    return LaneDivision(draw(st.integers(1, num_microbatches)), num_microbatches)


@pytest.mark.parametrize(
    ("num_lanes", "num_microbatches", "sizes"),
    [(1, 4, [4]), (2, 4, [2, 2]), (3, 4, [1, 1, 2]), (4, 4, [1, 1, 1, 1]), (4, 10, [2, 3, 2, 3]), (1, 1, [1])],
)
def test_lanes_of_known_steps(num_lanes: int, num_microbatches: int, sizes: list[int]) -> None:
    division = LaneDivision(num_lanes, num_microbatches)
    assert [len(division.microbatches(lane)) for lane in range(num_lanes)] == sizes


@given(divisions())
def test_every_microbatch_is_in_one_lane_in_order(division: LaneDivision) -> None:
    lanes = [division.microbatches(lane) for lane in range(division.num_lanes)]
    assert [microbatch for lane in lanes for microbatch in lane] == list(range(division.num_microbatches))
    assert all(lanes)
    for number, lane in enumerate(lanes):
        assert {division.lane_of(microbatch) for microbatch in lane} == {number}
        assert [division.ends_lane(microbatch) for microbatch in lane] == [False] * (len(lane) - 1) + [True]
        assert lane.start == number * division.num_microbatches // division.num_lanes


@given(divisions(), st.integers(1, 41))
def test_groups_add_each_later_lane_once(division: LaneDivision, group_size: int) -> None:
    starts = range(0, division.num_microbatches, group_size)
    stops = [min(start + group_size, division.num_microbatches) for start in starts]
    groups = list(zip(starts, stops, strict=True))
    assert sum(division.num_added_lanes(*group) for group in groups) == division.num_lanes - 1
    cut = [lane for lane in range(1, division.num_lanes) for stop in stops if stop in division.microbatches(lane)[1:]]
    assert division.num_open_lanes(group_size) == len(cut)
    for start, stop in groups:
        later = [m for m in range(start, stop) if m not in division.microbatches(0)]
        assert division.needs_lane_sum(stop) == bool(later)


@pytest.mark.parametrize("num_lanes", [0, -1, 5])
def test_lanes_without_a_microbatch_are_refused(num_lanes: int) -> None:
    with pytest.raises(ValueError, match=f"lanes is {num_lanes}, and a step has 4 micro-batches"):
        LaneDivision(num_lanes, 4)


@pytest.mark.parametrize(
    ("num_lanes", "num_microbatches", "size"), [(1, 6, 1), (2, 12, 6), (3, 6, 2), (2, 5, 5), (4, 4, 1)]
)
def test_the_smallest_groups_that_cut_no_later_lane(num_lanes: int, num_microbatches: int, size: int) -> None:
    division = LaneDivision(num_lanes, num_microbatches)
    assert division.smallest_uncut_group == size
    assert division.num_open_lanes(size) == 0


@pytest.mark.parametrize(("least", "num_lanes", "expected"), [(1, 1, 1), (5, 1, 5), (1, 3, 3), (4, 3, 6), (6, 3, 6)])
def test_numbers_rounded_to_lanes_make_them_equal(least: int, num_lanes: int, expected: int) -> None:
    assert rounded_to_lanes(least, num_lanes) == expected
    lanes = LaneDivision(num_lanes, expected)
    assert len({len(lanes.microbatches(lane)) for lane in range(num_lanes)}) == 1


@pytest.mark.parametrize(
    ("num_lanes", "num_microbatches", "group_size", "most", "has_long"),
    [(1, 4, 4, 1, False), (4, 4, 1, 1, False), (4, 4, 4, 4, False), (2, 4, 2, 1, True), (3, 4, 4, 3, True)],
)
def test_lanes_of_a_group_are_counted(
    num_lanes: int, num_microbatches: int, group_size: int, most: int, has_long: bool
) -> None:
    division = LaneDivision(num_lanes, num_microbatches)
    assert division.most_lanes_in_group(group_size) == most
    assert division.has_long_lane is has_long
