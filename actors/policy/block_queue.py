"""Queue orders and limits on concurrent work. They affect the speed of a job, never its results."""

import heapq
from dataclasses import dataclass
from enum import StrEnum


class QueueOrder(StrEnum):
    """The orders in which waiting blocks get a resource. Both are total orders."""

    PRIORITY = "priority"  # the smallest (step, block) first, because the next forward pass needs it first
    FIFO = "fifo"  # the block that has waited longest first; for comparisons


# Fields of `Ordering` that limit the number of outstanding requests.
LIMITS = ("max_prefetched", "max_offloading", "max_updating", "max_updating_on_device", "max_flushing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordering:
    """The scheduler's settings for a job.

    The job's update order decides whether a block is updated during the backward pass of its own step.
    `overlaps_steps` decides whether updates run during the next step.

    Each limit is the number of requests that may be outstanding at a resource. It is large enough to keep the resource
    busy, and small because an urgent block cannot overtake requests that were already sent. The optimizers are the
    exception: they process chunks of the most urgent block first. Their limit is high, so that waiting blocks never
    keep an urgent one from reaching them.
    """

    queues: QueueOrder = QueueOrder.PRIORITY
    overlaps_steps: bool = True  # False: a step begins only after all blocks of the step before are updated
    max_prefetched: int = 2  # operations whose params were requested and that are not done; each holds device buffers
    max_offloading: int = 2  # blocks
    max_updating: int = 1024  # blocks at the optimizers
    max_updating_on_device: int = 2  # blocks whose states are on the device; it updates them in order of arrival
    max_flushing: int = 2  # blocks

    def __post_init__(self) -> None:
        for name in LIMITS:
            if (number := getattr(self, name)) < 1:
                raise ValueError(f"{name} is {number}; at least 1 must be outstanding, or nothing is ever done")


class BlockQueue:
    """The queue of (step, block) pairs that wait for a resource; each pair is queued at most once."""

    def __init__(self, order: QueueOrder) -> None:
        self._order = order
        self._waiting: list[tuple[tuple[int, ...], tuple[int, int]]] = []  # heap
        self._num_arrived = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, step: int, block: int) -> None:
        """Adds a block to the queue."""
        self._num_arrived += 1
        priority = (step, block) if self._order is QueueOrder.PRIORITY else (self._num_arrived,)
        heapq.heappush(self._waiting, (priority, (step, block)))

    @property
    def first(self) -> tuple[int, int]:
        """The next (step, block). The queue must not be empty."""
        return self._waiting[0][1]

    def pop(self) -> tuple[int, int]:
        """Removes and returns the next (step, block)."""
        return heapq.heappop(self._waiting)[1]
