"""The queues' order and its ties, and settings that would stop the job forever."""

import itertools
from typing import Any

import pytest

from windlass.actors.worker_policy.block_queue import LIMITS, BlockQueue, Ordering, QueueOrder

BLOCKS = [(1, 3), (1, 2), (2, 0), (1, 0)]


def drained(order: QueueOrder, arrivals: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    queue: BlockQueue[tuple[int, int]] = BlockQueue(order)
    for step, block in arrivals:
        queue.push(step, block, (step, block))
    found = []
    while queue:
        found.append(queue.first)
        assert queue.pop() == found[-1]
    return found


@pytest.mark.parametrize("arrivals", list(itertools.permutations(BLOCKS)))
def test_queues_are_in_order_of_urgency_or_of_arrival(arrivals: tuple[tuple[int, int], ...]) -> None:
    assert drained(QueueOrder.PRIORITY, arrivals) == sorted(BLOCKS)
    assert drained(QueueOrder.FIFO, arrivals) == list(arrivals)


def test_block_pushed_later_is_ordered_among_waiting_blocks() -> None:
    priority: BlockQueue[int] = BlockQueue(QueueOrder.PRIORITY)
    fifo: BlockQueue[int] = BlockQueue(QueueOrder.FIFO)
    for queue in (priority, fifo):
        queue.push(1, 4, 4)
        queue.push(1, 3, 3)
        queue.pop()
        queue.push(1, 2, 2)
    assert [priority.pop(), priority.pop()] == [2, 4]
    assert [fifo.pop(), fifo.pop()] == [3, 2]


@pytest.mark.parametrize("order", list(QueueOrder))
def test_items_of_one_block_stay_in_order_of_arrival(order: QueueOrder) -> None:
    queue: BlockQueue[str] = BlockQueue(order)
    for name in "cabd":
        queue.push(1, 1, name)
    assert [queue.pop() for _ in range(4)] == list("cabd")


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("number", [0, -1])
def test_a_resource_that_may_have_nothing_is_refused(name: str, number: int) -> None:
    options: dict[str, Any] = {name: number}
    with pytest.raises(ValueError, match=f"{name} is {number}; at least 1"):
        Ordering(**options)
