"""Queue orders and limits on concurrent work. They affect the speed of a job, never its results."""

from dataclasses import dataclass
from enum import StrEnum

from windlass.storage.ids import BlockIndex, Step
from windlass.storage.priority_queue import PriorityQueue


class QueueOrder(StrEnum):
    """The orders in which waiting blocks get a resource. Both are total orders."""

    PRIORITY = "priority"  # the smallest (step, block) first, because the next forward pass needs it first
    FIFO = "fifo"  # the block that has waited longest first; for comparisons

    def rank(self, step: int, block: int, num_before: int) -> tuple[int, ...]:
        """Returns the rank of a block; the smallest is first. `num_before`: how many blocks came before it."""
        return (step, block) if self is QueueOrder.PRIORITY else (num_before,)


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
    """A queue of blocks of steps. Not thread-safe."""

    def __init__(self, order: QueueOrder) -> None:
        self._order = order
        self._waiting: PriorityQueue[tuple[Step, BlockIndex]] = PriorityQueue()
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, step: Step, block: BlockIndex) -> None:
        """Adds a block of a step."""
        self._waiting.push(self._order.rank(step, block, self._num_pushed), (step, block))
        self._num_pushed += 1

    @property
    def first(self) -> tuple[Step, BlockIndex]:
        """The next step and block. The queue must not be empty."""
        return self._waiting.first

    def pop(self) -> tuple[Step, BlockIndex]:
        """Removes and returns the next step and block. The queue must not be empty."""
        return self._waiting.pop()
