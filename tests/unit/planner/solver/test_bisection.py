import hypothesis.strategies as st
from hypothesis import given

from windlass.planner.solver.bisection import largest, smallest


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
