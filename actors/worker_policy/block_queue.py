"""Queue orders and limits on concurrent work. They affect the speed of a job, never its results."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from windlass.storage.priority_queue import PriorityQueue

_Item = TypeVar("_Item")


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


class BlockQueue(Generic[_Item]):
    """A queue of items of (step, block), such as its chunks. Not thread-safe.

    Items of one block stay in order of arrival.
    """

    def __init__(self, order: QueueOrder) -> None:
        self._order = order
        self._waiting: PriorityQueue[_Item] = PriorityQueue()

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, step: int, block: int, item: _Item) -> None:
        """Adds an item."""
        self._waiting.push((step, block) if self._order is QueueOrder.PRIORITY else (), item)

    @property
    def first(self) -> _Item:
        """The next item. The queue must not be empty."""
        return self._waiting.first

    def pop(self) -> _Item:
        """Removes and returns the next item. The queue must not be empty."""
        return self._waiting.pop()
