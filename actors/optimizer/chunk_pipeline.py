"""The update of chunks: a slot, a read of the states, the update, and a write back.

Reads, updates and writes of successive chunks overlap. One thread requests states as slots become free, and one thread
updates chunks whose states are in memory. `ChunkQueue` decides which goes first. The optimizers of jobs and
`windlass.offload` use it.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch

from windlass.actors.worker_policy import ChunkQueue, QueuedChunk, QueueOrder
from windlass.engine.device import release_team_beside_compute
from windlass.storage.cancellation import CancelToken
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
        self._changed = threading.Condition()
        # All attributes below are protected by `_changed`.
        self._queue: ChunkQueue[_Item] = ChunkQueue(
            order, slots.num_slots, lambda item: io.resident_slot(item) is not None
        )
        self._held: dict[QueuedChunk[_Item], Span] = {}  # the slots of chunks that were read and are not updated yet
        self._calls: deque[Callable[[], None]] = deque()

    @property
    def loops(self) -> tuple[Callable[[], None], ...]:
        """The functions to run in threads."""
        return (self._run_reads, self._run_updates)

    def begin(self, step: Step, block: BlockIndex, items: Sequence[_Item]) -> None:
        """Queues the chunks of a block's update; at least one."""
        with self._changed:
            self._queue.add(step, block, items)
            self._changed.notify_all()

    def call(self, function: Callable[[], None]) -> None:
        """Queues a call of a function in the thread that reads states, before all chunks that were not read yet."""
        with self._changed:
            self._calls.append(function)
            self._changed.notify_all()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _run_reads(self) -> None:
        while (task := self._next_task()) is not None:
            task()

    def _next_task(self) -> Callable[[], None] | None:
        with self._changed:
            self._token.wait_for_work(self._changed, lambda: bool(self._calls) or self._queue.first_to_read is not None)
            if self._token.is_cancelled:
                return None
            if self._calls:
                return self._calls.popleft()
            chunk = self._queue.first_to_read
            assert chunk is not None, "the wait ended with a chunk, which only this thread takes"
            self._io.works_at(chunk.item)
            return self._read_next

    def _read_next(self) -> None:
        """Reads the most urgent chunk. A chunk that becomes more urgent during the wait for a slot waits as well."""
        (slot,) = self._slots.acquire(1)
        with self._changed:
            chunk = self._queue.begin_to_read()
            self._held[chunk] = slot
        self._io.works_at(chunk.item)
        self._io.read_states(chunk.item, slot, partial(self._arrive, chunk))

    def _arrive(self, chunk: QueuedChunk[_Item]) -> None:
        with self._changed:
            self._queue.arrived(chunk)
            self._changed.notify_all()

    def _run_updates(self) -> None:
        torch.set_num_threads(self._num_threads)
        while (chunk := self._next_update()) is not None:
            self._io.works_at(chunk.item)
            slot = self._io.resident_slot(chunk.item)
            if slot is None:
                with self._changed:
                    slot = self._held.pop(chunk)
            self._io.update_chunk(chunk.item, slot)
            release_team_beside_compute()
            if chunk.is_resident:
                self._done(chunk)
            else:
                self._io.write_states(chunk.item, slot, partial(self._written, chunk, slot))

    def _next_update(self) -> QueuedChunk[_Item] | None:
        with self._changed:
            self._token.wait_for_work(self._changed, lambda: self._queue.has_update)
            return None if self._token.is_cancelled else self._queue.begin_update()

    def _written(self, chunk: QueuedChunk[_Item], slot: Span) -> None:
        self._slots.release([slot])
        self._done(chunk)

    def _done(self, chunk: QueuedChunk[_Item]) -> None:
        with self._changed:
            is_last = self._queue.chunk_done(chunk)
        if is_last:
            self._io.block_updated(chunk.step, chunk.block)
