"""The queues' order and its ties, and settings that would stop the job forever."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

from windlass.actors.worker_policy.block_queue import LIMITS, BlockQueue, Ordering, QueueOrder
from windlass.storage.ids import BlockIndex, Step

BLOCKS = [(1, 3), (1, 2), (2, 0), (1, 0)]


def queue_of(order: QueueOrder, arrivals: Iterable[tuple[int, int]]) -> BlockQueue:
    queue = BlockQueue(order)
    for step, block in arrivals:
        queue.push(Step(step), BlockIndex(block))
    return queue


def drained(queue: BlockQueue) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    while queue:
        found.append(queue.first)
        assert queue.pop() == found[-1]
    return found


@pytest.mark.parametrize("arrivals", list(itertools.permutations(BLOCKS)))
def test_queues_are_in_order_of_urgency_or_of_arrival(arrivals: tuple[tuple[int, int], ...]) -> None:
    assert drained(queue_of(QueueOrder.PRIORITY, arrivals)) == sorted(BLOCKS)
    assert drained(queue_of(QueueOrder.FIFO, arrivals)) == list(arrivals)


def test_block_pushed_later_is_ordered_among_waiting_blocks() -> None:
    priority, fifo = (queue_of(order, [(1, 4), (1, 3)]) for order in (QueueOrder.PRIORITY, QueueOrder.FIFO))
    for queue in (priority, fifo):
        queue.pop()
        queue.push(Step(1), BlockIndex(2))
    assert drained(priority) == [(1, 2), (1, 4)]
    assert drained(fifo) == [(1, 3), (1, 2)]


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("number", [0, -1])
def test_a_resource_that_may_have_nothing_is_refused(name: str, number: int) -> None:
    options: dict[str, Any] = {name: number}
    with pytest.raises(ValueError, match=f"{name} is {number}; at least 1"):
        Ordering(**options)
