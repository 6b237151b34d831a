import hypothesis.strategies as st
from hypothesis import given

from windlass.planner.solver.bisection import MarginSearch, largest, smallest


@given(st.integers(0, 300), st.integers(1, 250))
def test_the_largest_and_the_smallest_are_found(limit: int, most: int) -> None:
    asked: list[int] = []

    def holds(number: int) -> bool:
        asked.append(number)
        assert 1 <= number <= most
        return number <= limit

    assert largest(holds, most=most) == min(limit, most)
    assert len(asked) <= 20
    assert smallest(lambda number: number > limit, most=most) == (limit + 1 if limit < most else None)


def test_margin_search_of_a_constant_gap_fits_with_the_second_plan() -> None:
    search = MarginSearch(near=1.0)
    search.exceeded(excess=30.0, left_out=40.0)
    assert search.margin == 40.0
    assert not search.fitted(left_out=40.0)


def test_margin_search_of_a_plan_that_left_out_less_tries_its_own_margin() -> None:
    search = MarginSearch(near=1.0)
    search.exceeded(excess=40.0, left_out=40.0)
    assert search.fitted(left_out=25.0)
    assert search.margin == 25.0


@given(
    need=st.integers(1, 400),
    needs_more=st.lists(st.integers(0, 100), min_size=12, max_size=12),
    most=st.integers(1, 1000),
)
def test_margin_search_keeps_the_next_margin_between_its_bounds(need: int, needs_more: list[int], most: int) -> None:
    """There is no plan with a margin above `most`. A plan leaves out `need` bytes or more, and fills its limit."""
    search = MarginSearch(near=5.0)
    for more in needs_more:
        before = search.margin
        if before > most:
            if not search.found_none():
                assert before - search.too_little < search.near
                return
            assert search.too_little < search.margin < before == search.too_much
        elif need + more <= before:
            assert search.fitted(need + more) == (search.too_little < need + more < before)
            return
        else:
            search.exceeded(need + more - before, left_out=need + more)
            assert search.too_little == before < search.margin
            assert search.too_much is None or search.margin < search.too_much
