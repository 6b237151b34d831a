"""The decisions about the chunks of a block: which is read or updated next, and when all of them are done.

Pure: the pipeline of updates (`ChunkPipeline`) and the simulator drive the same class.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from windlass.actors.worker_policy.block_queue import QueueOrder
from windlass.storage.ids import BlockIndex, Step
from windlass.storage.priority_queue import PriorityQueue

_Item = TypeVar("_Item")

# Updates of chunks on SSDs for each one of a resident chunk, while more than half of the slots wait for theirs.
_UPDATES_FOR_RESIDENT = 2


@dataclass(slots=True, eq=False)
class QueuedChunk(Generic[_Item]):
    """One chunk of a block's update."""

    step: Step
    block: BlockIndex
    item: _Item
    is_resident: bool  # its states are in memory, so it needs no slot
    rank: tuple[int, ...]  # its priority; the smallest first


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

    The states of a chunk are resident in memory, or they are read from an SSD into a slot and written back. The most
    urgent ones are read as soon as there is a slot, so that the SSDs have work while resident chunks are updated. Of
    the chunks that are in memory, the most urgent one is updated. But while more than half of the slots wait for their
    update, at most every third update is that of a resident chunk: without slots, the SSDs would be idle. See decision
    62.
    """

    def __init__(self, order: QueueOrder, num_slots: int, is_resident: Callable[[_Item], bool]) -> None:
        """`num_slots`: for chunks on SSDs."""
        self._order = order
        self._num_slots = num_slots
        self._is_resident = is_resident
        self._to_read: PriorityQueue[QueuedChunk[_Item]] = PriorityQueue()
        self._resident: PriorityQueue[QueuedChunk[_Item]] = PriorityQueue()
        self._arrived: PriorityQueue[QueuedChunk[_Item]] = PriorityQueue()
        self._chunks_left = Countdown()  # by step and block
        self._num_added = 0  # blocks
        self._num_since_resident = _UPDATES_FOR_RESIDENT  # updates after the last one of a resident chunk

    def add(self, step: Step, block: BlockIndex, items: Sequence[_Item]) -> None:
        """Adds the chunks of a block's update; at least one."""
        self._chunks_left.start((step, block), len(items))
        rank = self._order.rank(step, block, self._num_added)
        self._num_added += 1
        for item in items:
            chunk = QueuedChunk(step, block, item, self._is_resident(item), rank)
            (self._resident if chunk.is_resident else self._to_read).push(rank, chunk)

    @property
    def first_to_read(self) -> QueuedChunk[_Item] | None:
        """The most urgent chunk whose states are on an SSD and are not read yet."""
        return self._to_read.first_or_none

    def begin_to_read(self) -> QueuedChunk[_Item]:
        """Returns the most urgent chunk to read, for which the caller has a slot. There must be one."""
        return self._to_read.pop()

    def arrived(self, chunk: QueuedChunk[_Item]) -> None:
        """Records that the states of a chunk were read."""
        self._arrived.push(chunk.rank, chunk)

    @property
    def has_update(self) -> bool:
        """True if the states of a chunk that is not updated yet are in memory."""
        return bool(self._arrived or self._resident)

    def begin_update(self) -> QueuedChunk[_Item]:
        """Returns the chunk to update next. There must be one."""
        arrived, resident = self._arrived.first_or_none, self._resident.first_or_none
        if arrived is None or resident is None:
            is_resident_next = arrived is None
        else:
            read_may_wait = (
                2 * len(self._arrived) <= self._num_slots or self._num_since_resident >= _UPDATES_FOR_RESIDENT
            )
            is_resident_next = read_may_wait and resident.rank < arrived.rank
        self._num_since_resident = 0 if is_resident_next else self._num_since_resident + 1
        return (self._resident if is_resident_next else self._arrived).pop()

    def chunk_done(self, chunk: QueuedChunk[_Item]) -> bool:
        """Records that a chunk is updated, and written if it must be. Returns whether it is its block's last one."""
        return self._chunks_left.part_done((chunk.step, chunk.block))
