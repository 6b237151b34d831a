"""The update of chunks: a slot, a read of the states, the update, a write back, and a count of the remaining chunks.

Reads, updates and writes of successive chunks overlap. One thread requests states as slots become free, and one thread
updates chunks that have arrived. Waiting chunks of the most urgent block go first, even if another block was begun
earlier; for this, few chunks are read ahead. The optimizers of jobs and `windlass.offload` use it.
"""

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch

from windlass.actors.optimizer.read_ahead import ReadAhead
from windlass.actors.policy import BlockQueue, QueueOrder
from windlass.storage.cancellation import CancelToken, TaskQueue
from windlass.storage.ids import BlockIndex, Span, Step
from windlass.storage.memory import SlotPool

_Item = TypeVar("_Item")
_Taken = TypeVar("_Taken", contravariant=True)


class UpdateIo(Protocol[_Taken]):
    """Moves and updates the chunks of a pipeline. An item describes one chunk of a block's update."""

    def works_at(self, item: _Taken) -> None:
        """Names the chunk in the errors of the calling thread."""

    def resident_slot(self, item: _Taken) -> Span | None:
        """Returns the slot in which the states are resident; None if they are read and written back."""

    def read_states(self, item: _Taken, slot: Span, on_done: Callable[[], None]) -> None:
        """Requests the states, and the gradient if it is not in memory. Calls `on_done` when they are in the slot."""

    def update_chunk(self, item: _Taken, slot: Span) -> None:
        """Updates the states in the slot, and releases the gradient."""

    def write_states(self, item: _Taken, slot: Span, on_done: Callable[[], None]) -> None:
        """Requests the write of the states. Calls `on_done` when the slot may be reused."""

    def block_updated(self, step: Step, block: BlockIndex) -> None:
        """Takes note that all chunks of a block's update are done."""


class Countdown:
    """Counts the remaining parts of tasks. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_left: dict[Hashable, int] = {}

    def start(self, task: Hashable, num_parts: int) -> None:
        """Adds a task."""
        with self._lock:
            self._num_left[task] = num_parts

    def is_last(self, task: Hashable) -> bool:
        """Counts a finished part of a task. Returns whether it was the last one."""
        with self._lock:
            self._num_left[task] -= 1
            if self._num_left[task]:
                return False
            del self._num_left[task]
            return True


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting(Generic[_Item]):
    """A chunk that has not begun."""

    step: Step
    block: BlockIndex
    item: _Item


@dataclass(frozen=True, slots=True, eq=False)
class _Begun(Generic[_Item]):
    """A chunk in flight."""

    waiting: _Waiting[_Item]
    slot: Span  # of its states
    is_resident: bool  # the states stay in the slot and are not written


class ChunkPipeline(Generic[_Item]):
    """Updates chunks in the order of their blocks. All methods are thread-safe."""

    def __init__(
        self, io: UpdateIo[_Item], slots: SlotPool, order: QueueOrder, token: CancelToken, *, num_threads: int
    ) -> None:
        """`token` ends the threads and their waits. `num_threads` is torch's number for updates."""
        self._io = io
        self._token = token
        self._slots = slots
        self._num_threads = num_threads
        self._read_ahead = ReadAhead(token)
        self._left = Countdown()
        # In order of arrival. In order of priority, a chunk would hold its slot for as long as others are more urgent.
        self._arrived: TaskQueue[_Begun[_Item]] = TaskQueue(token)
        self._changed = threading.Condition()
        # All attributes below are protected by `_changed`.
        self._waiting: BlockQueue[_Waiting[_Item]] = BlockQueue(order)
        self._calls: deque[Callable[[], None]] = deque()

    @property
    def loops(self) -> tuple[Callable[[], None], ...]:
        """The functions to run in threads."""
        return (self._run_feeds, self._run_updates)

    def begin(self, step: Step, block: BlockIndex, items: Sequence[_Item]) -> None:
        """Queues the chunks of a block's update; at least one."""
        self._left.start((step, block), len(items))
        with self._changed:
            for item in items:
                self._waiting.push(step, block, _Waiting(step, block, item))
            self._changed.notify_all()

    def call(self, function: Callable[[], None]) -> None:
        """Queues a call of a function in the thread that begins chunks, before all chunks that have not begun."""
        with self._changed:
            self._calls.append(function)
            self._changed.notify_all()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _run_feeds(self) -> None:
        while (task := self._next_task()) is not None:
            task()

    def _next_task(self) -> Callable[[], None] | None:
        with self._changed:
            self._token.wait_for_work(self._changed, lambda: bool(self._calls or self._waiting))
            if self._token.is_cancelled:
                return None
            return self._calls.popleft() if self._calls else self._begin_next

    def _begin_next(self) -> None:
        with self._changed:
            self._io.works_at(self._waiting.first.item)
        self._read_ahead.begin()
        begun = self._take_next()
        self._io.works_at(begun.waiting.item)
        if begun.is_resident:
            self._arrive(begun)
        else:
            self._io.read_states(begun.waiting.item, begun.slot, partial(self._arrive, begun))

    def _take_next(self) -> _Begun[_Item]:
        """Removes and returns the most urgent chunk, with a slot. Waits for a slot only if the chunk needs one."""
        with self._changed:
            if (resident := self._io.resident_slot(self._waiting.first.item)) is not None:
                return _Begun(self._waiting.pop(), resident, is_resident=True)
        (slot,) = self._slots.acquire(1)
        with self._changed:  # only now, because a more urgent chunk may have arrived during the wait
            chunk = self._waiting.pop()
        if (resident := self._io.resident_slot(chunk.item)) is None:
            return _Begun(chunk, slot, is_resident=False)
        self._slots.release([slot])
        return _Begun(chunk, resident, is_resident=True)

    def _arrive(self, begun: _Begun[_Item]) -> None:
        self._read_ahead.arrived()
        self._arrived.put(begun)

    def _run_updates(self) -> None:
        torch.set_num_threads(self._num_threads)
        while (begun := self._arrived.take()) is not None:
            item = begun.waiting.item
            self._io.works_at(item)
            self._read_ahead.updating()
            self._io.update_chunk(item, begun.slot)
            self._read_ahead.updated()
            if begun.is_resident:
                self._done(begun.waiting)
            else:
                self._io.write_states(item, begun.slot, partial(self._written, begun))

    def _written(self, begun: _Begun[_Item]) -> None:
        self._slots.release([begun.slot])
        self._done(begun.waiting)

    def _done(self, chunk: _Waiting[_Item]) -> None:
        if self._left.is_last((chunk.step, chunk.block)):
            self._io.block_updated(chunk.step, chunk.block)
