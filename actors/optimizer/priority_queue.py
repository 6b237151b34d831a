"""What waits inside a worker: chunk by chunk, so that one of an urgent block goes before the rest of another block."""

import itertools
import queue
from typing import Generic, TypeVar

from windlass.actors.policy import QueueOrder

_Item = TypeVar("_Item")


class UrgentQueue(Generic[_Item]):
    """Items of blocks of steps, in the order of the scheduler's own queues; of one block as they came. Thread-safe."""

    def __init__(self, order: QueueOrder) -> None:
        self._order = order
        self._waiting: queue.PriorityQueue[tuple[tuple[int, int], int, _Item]] = queue.PriorityQueue()
        self._numbers = itertools.count()  # differ, so items are never compared

    def __bool__(self) -> bool:
        return not self._waiting.empty()

    def put(self, step: int, block: int, item: _Item) -> None:
        """It waits from now on."""
        urgency = (step, block) if self._order is QueueOrder.PRIORITY else (0, 0)
        self._waiting.put((urgency, next(self._numbers), item))

    def get(self) -> _Item:
        """The most urgent; there must be one."""
        return self._waiting.get_nowait()[2]
