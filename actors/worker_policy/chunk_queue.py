"""The decisions about the chunks of a block: which begins next, whether it needs a slot, and when all of them are done.

Pure: the pipeline of updates (`ChunkPipeline`) and the simulator drive the same class.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from windlass.actors.worker_policy.block_queue import BlockQueue, QueueOrder
from windlass.storage.ids import BlockIndex, Step

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True, eq=False)
class QueuedChunk(Generic[_Item]):
    """One chunk of a block's update."""

    step: Step
    block: BlockIndex
    item: _Item
    is_resident: bool  # its states are in memory, so it needs no slot


class Countdown:
    """The remaining parts of tasks. Not thread-safe: threads that share it hold a lock."""

    def __init__(self) -> None:
        self._num_left: dict[Hashable, int] = {}

    def start(self, task: Hashable, num_parts: int) -> None:
        """Adds a task of at least one part."""
        self._num_left[task] = num_parts

    def part_done(self, task: Hashable) -> bool:
        """Counts a finished part of a task. Returns True, and forgets the task, if it was the last one."""
        self._num_left[task] -= 1
        if self._num_left[task]:
            return False
        del self._num_left[task]
        return True


class ChunkQueue(Generic[_Item]):
    """The chunks that wait for their update or are in it. Not thread-safe.

    Chunks begin in order of priority and are updated in order of arrival. In order of priority, a chunk that has
    arrived would hold its slot for as long as others are more urgent.

    While there are chunks to update, one further chunk is read ahead. This hides the read latency and delays a more
    urgent chunk by at most one update. While there are none, the SSDs are the bottleneck, and chunks may be read into
    all slots.
    """

    def __init__(self, order: QueueOrder, is_resident: Callable[[_Item], bool]) -> None:
        self._is_resident = is_resident
        self._waiting: BlockQueue[QueuedChunk[_Item]] = BlockQueue(order)
        self._chunks_left = Countdown()  # by step and block
        self._num_ahead = 0  # chunks that have begun, but whose update has not
        self._num_ready = 0  # chunks whose states have arrived and that are not updated yet

    def add(self, step: Step, block: BlockIndex, items: Sequence[_Item]) -> None:
        """Adds the chunks of a block's update; at least one."""
        self._chunks_left.start((step, block), len(items))
        for item in items:
            self._waiting.push(step, block, QueuedChunk(step, block, item, self._is_resident(item)))

    @property
    def first(self) -> QueuedChunk[_Item] | None:
        """The most urgent chunk that has not begun; None if all have."""
        return self._waiting.first if self._waiting else None

    @property
    def may_begin(self) -> bool:
        """True if a chunk waits and may begin: none is ahead, or there is nothing to update."""
        return bool(self._waiting) and (not self._num_ahead or not self._num_ready)

    def begin(self, *, has_slot: bool) -> QueuedChunk[_Item] | None:
        """Begins the most urgent chunk, which may be another one than before the caller waited for a slot.

        Returns None if it needs a slot and the caller has none. A resident chunk leaves the caller its slot.
        """
        if not has_slot and not self._waiting.first.is_resident:
            return None
        self._num_ahead += 1
        return self._waiting.pop()

    def arrived(self) -> None:
        """Records that the states of a chunk are in memory; at once for a resident chunk."""
        self._num_ready += 1

    def updating(self) -> None:
        """Records that the update of a chunk begins."""
        self._num_ahead -= 1

    def updated(self) -> None:
        """Records that the update of a chunk has ended. Unless it is resident, its states must be written."""
        self._num_ready -= 1

    def chunk_done(self, chunk: QueuedChunk[_Item]) -> bool:
        """Records that a chunk is updated, and written if it must be. Returns whether it is its block's last one."""
        return self._chunks_left.part_done((chunk.step, chunk.block))
