"""A worker's queue of chunks, in which chunks of an urgent block overtake the remaining chunks of another block."""

from typing import Generic, TypeVar

from windlass.actors.policy import QueueOrder
from windlass.storage.priority_queue import PriorityQueue

_Item = TypeVar("_Item")


class UrgentQueue(Generic[_Item]):
    """A queue of items by (step, block), in the order of the scheduler's queues. Not thread-safe.

    Items of one block stay in order of arrival.
    """

    def __init__(self, order: QueueOrder) -> None:
        self._order = order
        self._waiting: PriorityQueue[_Item] = PriorityQueue()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, step: int, block: int, item: _Item) -> None:
        """Adds an item."""
        self._waiting.push((step, block) if self._order is QueueOrder.PRIORITY else (), item)

    def get(self) -> _Item:
        """Removes and returns the most urgent item. The queue must not be empty."""
        return self._waiting.pop()
