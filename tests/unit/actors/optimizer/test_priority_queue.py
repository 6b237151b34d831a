"""The order in which a worker takes waiting chunks."""

import itertools

import pytest

from windlass.actors.optimizer.priority_queue import UrgentQueue
from windlass.actors.policy.block_queue import QueueOrder

ITEMS = [(2, 0, "a"), (1, 3, "b"), (1, 1, "c"), (1, 1, "d")]


def drained(order: QueueOrder, items: list[tuple[int, int, str]]) -> list[str]:
    queue: UrgentQueue[str] = UrgentQueue(order)
    for item in items:
        queue.put(*item)
    return [queue.get() for _ in items]


@pytest.mark.parametrize("arrivals", list(itertools.permutations(ITEMS)))
def test_the_most_urgent_block_is_first_and_its_own_items_come_in_order(arrivals: tuple[tuple[int, int, str]]) -> None:
    of_one_block = [name for _, _, name in arrivals if name in "cd"]
    assert drained(QueueOrder.PRIORITY, list(arrivals)) == [*of_one_block, "b", "a"]


def test_in_order_of_arrival_nothing_is_overtaken() -> None:
    assert drained(QueueOrder.FIFO, ITEMS) == ["a", "b", "c", "d"]
