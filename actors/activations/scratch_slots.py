"""Tracks the free slots in the scratch space of the SSDs. Not thread-safe."""

import heapq
from collections.abc import Sequence


class ScratchSlots:
    """Allocates slots so that each SSD is used in proportion to its weight.

    The lowest slots go first, so that used slots stay close together.
    """

    def __init__(self, num_slots: Sequence[int], weights: Sequence[int]) -> None:
        """`num_slots` and `weights` have one number for each SSD."""
        self._num_slots = num_slots
        self._weights = weights
        self._num_used = [0] * len(num_slots)
        self._num_touched = [0] * len(num_slots)  # slots from the first on that were ever used
        self._returned: list[list[int]] = [[] for _ in num_slots]  # heaps

    @property
    def num_free(self) -> int:
        """The number of free slots on all SSDs together."""
        return sum(self._num_slots) - sum(self._num_used)

    def take(self, count: int) -> tuple[int, tuple[int, ...]]:
        """Acquires up to `count` slots of the SSD that is used least for its weight; returns the SSD and the slots.

        At least one slot must be free.
        """
        ssds = [ssd for ssd, num_slots in enumerate(self._num_slots) if self._num_used[ssd] < num_slots]
        ssd = min(ssds, key=lambda ssd: self._num_used[ssd] / self._weights[ssd])
        count = min(count, self._num_slots[ssd] - self._num_used[ssd])
        self._num_used[ssd] += count
        return ssd, tuple(self._take_one(ssd) for _ in range(count))

    def give_back(self, ssd: int, slots: Sequence[int]) -> None:
        """Releases slots."""
        for slot in slots:
            heapq.heappush(self._returned[ssd], slot)
        self._num_used[ssd] -= len(slots)

    def _take_one(self, ssd: int) -> int:
        if self._returned[ssd]:
            return heapq.heappop(self._returned[ssd])
        self._num_touched[ssd] += 1
        return self._num_touched[ssd] - 1
