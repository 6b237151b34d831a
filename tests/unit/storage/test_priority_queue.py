"""The order of a priority queue and of its ties."""

import itertools

import pytest

from windlass.storage.priority_queue import PriorityQueue

ITEMS = [((2, 0), "a"), ((1, 3), "b"), ((1, 1), "c"), ((1, 1), "d")]


@pytest.mark.parametrize("arrivals", list(itertools.permutations(ITEMS)))
def test_smallest_rank_is_first_and_equal_ranks_stay_in_order(
    arrivals: tuple[tuple[tuple[int, int], str], ...],
) -> None:
    queue: PriorityQueue[str] = PriorityQueue()
    for rank, item in arrivals:
        queue.push(rank, item)
    assert len(queue) == len(ITEMS)
    found = []
    while queue:
        found.append(queue.first)
        assert queue.pop() == found[-1]
    ties = [item for _, item in arrivals if item in "cd"]
    assert found == [*ties, "b", "a"]


def test_items_that_cannot_be_compared_may_have_equal_ranks() -> None:
    queue: PriorityQueue[object] = PriorityQueue()
    first, second = object(), object()
    queue.push((), first)
    queue.push((), second)
    assert [queue.pop(), queue.pop()] == [first, second]
