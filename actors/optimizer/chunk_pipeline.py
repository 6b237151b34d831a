"""The update of chunks: a slot, a read of the states, the update, and a write back.

Reads, updates and writes of successive chunks overlap. One thread requests states as slots become free, and one thread
updates chunks that have arrived. Waiting chunks of the most urgent block go first, even if another block was begun
earlier (`ChunkQueue`). The optimizers of jobs and `windlass.offload` use it.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch

from windlass.actors.worker_policy import ChunkQueue, QueuedChunk, QueueOrder
from windlass.engine.device import release_team_beside_compute
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


@dataclass(frozen=True, slots=True, eq=False)
class _Begun(Generic[_Item]):
    """A chunk in flight."""

    chunk: QueuedChunk[_Item]
    slot: Span  # of its states; it stays theirs if they are resident


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
        self._arrived: TaskQueue[_Begun[_Item]] = TaskQueue(token)
        self._changed = threading.Condition()
        # All attributes below are protected by `_changed`.
        self._queue: ChunkQueue[_Item] = ChunkQueue(order, lambda item: io.resident_slot(item) is not None)
        self._calls: deque[Callable[[], None]] = deque()

    @property
    def loops(self) -> tuple[Callable[[], None], ...]:
        """The functions to run in threads."""
        return (self._run_feeds, self._run_updates)

    def begin(self, step: Step, block: BlockIndex, items: Sequence[_Item]) -> None:
        """Queues the chunks of a block's update; at least one."""
        with self._changed:
            self._queue.add(step, block, items)
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
            self._token.wait_for_work(self._changed, lambda: bool(self._calls) or self._queue.first is not None)
            if self._token.is_cancelled:
                return None
            if self._queue.first is not None:
                self._io.works_at(self._queue.first.item)
            self._token.wait_for(
                self._changed,
                lambda: bool(self._calls) or self._queue.may_begin,
                "the update of a chunk: the optimizer is stuck",
            )
            return self._calls.popleft() if self._calls else self._begin_next

    def _begin_next(self) -> None:
        """Begins the most urgent chunk. A chunk that becomes more urgent during the wait for a slot waits as well."""
        with self._changed:
            chunk = self._queue.begin(has_slot=False)
        slots: list[Span] = []
        if chunk is None:
            slots = self._slots.acquire(1)
            with self._changed:
                chunk = self._queue.begin(has_slot=True)
            assert chunk is not None, "with a slot any chunk may begin"
        self._io.works_at(chunk.item)
        if (resident := self._io.resident_slot(chunk.item)) is not None:
            self._slots.release(slots)
            self._arrive(_Begun(chunk, resident))
        else:
            begun = _Begun(chunk, *slots)
            self._io.read_states(chunk.item, begun.slot, partial(self._arrive, begun))

    def _arrive(self, begun: _Begun[_Item]) -> None:
        self._record(self._queue.arrived)
        self._arrived.put(begun)

    def _run_updates(self) -> None:
        torch.set_num_threads(self._num_threads)
        while (begun := self._arrived.take()) is not None:
            chunk = begun.chunk
            self._io.works_at(chunk.item)
            self._record(self._queue.updating)
            self._io.update_chunk(chunk.item, begun.slot)
            release_team_beside_compute()
            self._record(self._queue.updated)
            if chunk.is_resident:
                self._done(chunk)
            else:
                self._io.write_states(chunk.item, begun.slot, partial(self._written, begun))

    def _record(self, event: Callable[[], None]) -> None:
        with self._changed:
            event()
            self._changed.notify_all()

    def _written(self, begun: _Begun[_Item]) -> None:
        self._slots.release([begun.slot])
        self._done(begun.chunk)

    def _done(self, chunk: QueuedChunk[_Item]) -> None:
        with self._changed:
            is_last = self._queue.chunk_done(chunk)
        if is_last:
            self._io.block_updated(chunk.step, chunk.block)
