"""A priority queue in which items of equal rank stay in order of arrival."""

import heapq
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class PriorityQueue(Generic[_Item]):
    """A heap of items by rank, the smallest first. Items are never compared. Not thread-safe."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, ...], int, _Item]] = []
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, rank: tuple[int, ...], item: _Item) -> None:
        """Adds an item."""
        heapq.heappush(self._heap, (rank, self._num_pushed, item))
        self._num_pushed += 1

    @property
    def first(self) -> _Item:
        """The next item. The queue must not be empty."""
        return self._heap[0][2]

    @property
    def first_or_none(self) -> _Item | None:
        """The next item; None if the queue is empty."""
        return self._heap[0][2] if self._heap else None

    def pop(self) -> _Item:
        """Removes and returns the next item. The queue must not be empty."""
        return heapq.heappop(self._heap)[2]
