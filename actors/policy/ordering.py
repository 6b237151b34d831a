"""What waits for a resource, and what goes first; how much of the job may run beside how much. Changes no result."""

import heapq
from dataclasses import dataclass
from enum import StrEnum


class QueueOrder(StrEnum):
    """Which of the blocks that wait for a resource is next. Both are total orders."""

    PRIORITY = "priority"  # the smallest (step, block): what the next forward pass needs first
    FIFO = "fifo"  # what has waited longest: for comparison


# Of an ordering.
LIMITS = ("max_prefetched", "max_offloading", "max_updating", "max_updating_on_device", "max_flushing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordering:
    """The scheduler's settings for a job.

    Beside its own step's backward pass a block is updated where the job's update order says so; beside the next step,
    where `overlaps_steps` does. The limits are of what may be outstanding at each resource: enough to keep it busy, few
    for a late urgent block to overtake. What has been given to a resource cannot be overtaken any more, except at the
    optimizers, where chunks of the most urgent block go first: a block there whose turn does not come holds up nothing,
    and must not keep an urgent one from getting there.
    """

    queues: QueueOrder = QueueOrder.PRIORITY
    overlaps_steps: bool = True  # False: nothing of a step begins before all blocks of the step before are updated
    max_prefetched: int = 2  # operations whose params have been asked for and which are not done: device buffers
    max_offloading: int = 2  # blocks
    max_updating: int = 1024  # blocks at the optimizers
    max_updating_on_device: int = 2  # blocks that rest there: it updates them as they come
    max_flushing: int = 2  # blocks

    def __post_init__(self) -> None:
        for name in LIMITS:
            if (number := getattr(self, name)) < 1:
                raise ValueError(f"{name} is {number}; at least 1 must be outstanding, or nothing is ever done")


class BlockQueue:
    """Blocks of steps that wait for a resource, each (step, block) once."""

    def __init__(self, order: QueueOrder) -> None:
        self._order = order
        self._waiting: list[tuple[tuple[int, ...], tuple[int, int]]] = []  # heap
        self._num_arrived = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def push(self, step: int, block: int) -> None:
        """It waits from now on."""
        self._num_arrived += 1
        urgency = (step, block) if self._order is QueueOrder.PRIORITY else (self._num_arrived,)
        heapq.heappush(self._waiting, (urgency, (step, block)))

    @property
    def first(self) -> tuple[int, int]:
        """(step, block) of what is next; there must be something."""
        return self._waiting[0][1]

    def pop(self) -> tuple[int, int]:
        """Takes out what is next."""
        return heapq.heappop(self._waiting)[1]
