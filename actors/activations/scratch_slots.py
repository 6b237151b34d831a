"""Which slots of the SSDs' scratch are free. Bookkeeping only; for one thread at a time."""

import heapq
from collections.abc import Sequence


class ScratchSlots:
    """Hands slots out so that each SSD is used in proportion to its weight; the lowest first, so that they are near."""

    def __init__(self, num_slots: Sequence[int], weights: Sequence[int]) -> None:
        """Both of each SSD."""
        self._num_slots = num_slots
        self._weights = weights
        self._num_used = [0] * len(num_slots)
        self._num_touched = [0] * len(num_slots)  # from the first slot on: all others were never handed out
        self._returned: list[list[int]] = [[] for _ in num_slots]  # heaps

    @property
    def num_free(self) -> int:
        """On all SSDs together."""
        return sum(self._num_slots) - sum(self._num_used)

    def take(self, count: int) -> tuple[int, tuple[int, ...]]:
        """Up to `count` slots of the SSD that is used least, beside its weight, and which it is; some must be free."""
        ssds = [ssd for ssd, num_slots in enumerate(self._num_slots) if self._num_used[ssd] < num_slots]
        ssd = min(ssds, key=lambda ssd: self._num_used[ssd] / self._weights[ssd])
        count = min(count, self._num_slots[ssd] - self._num_used[ssd])
        self._num_used[ssd] += count
        return ssd, tuple(self._take_one(ssd) for _ in range(count))

    def give_back(self, ssd: int, slots: Sequence[int]) -> None:
        """They are free again."""
        for slot in slots:
            heapq.heappush(self._returned[ssd], slot)
        self._num_used[ssd] -= len(slots)

    def _take_one(self, ssd: int) -> int:
        if self._returned[ssd]:
            return heapq.heappop(self._returned[ssd])
        self._num_touched[ssd] += 1
        return self._num_touched[ssd] - 1
