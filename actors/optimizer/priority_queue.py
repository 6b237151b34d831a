"""A worker's queue of chunks, in which chunks of an urgent block overtake the remaining chunks of another block."""

import itertools
import queue
from typing import Generic, TypeVar

from windlass.actors.policy import QueueOrder

_Item = TypeVar("_Item")


class UrgentQueue(Generic[_Item]):
    """A queue of items by (step, block), in the order of the scheduler's queues. Thread-safe.

    Items of one block stay in order of arrival.
    """

    def __init__(self, order: QueueOrder) -> None:
        self._order = order
        self._waiting: queue.PriorityQueue[tuple[tuple[int, int], int, _Item]] = queue.PriorityQueue()
        self._numbers = itertools.count()  # all different, so that items are never compared

    def __bool__(self) -> bool:
        return not self._waiting.empty()

    def put(self, step: int, block: int, item: _Item) -> None:
        """Adds an item."""
        priority = (step, block) if self._order is QueueOrder.PRIORITY else (0, 0)
        self._waiting.put((priority, next(self._numbers), item))

    def get(self) -> _Item:
        """Removes and returns the most urgent item. The queue must not be empty."""
        return self._waiting.get_nowait()[2]
