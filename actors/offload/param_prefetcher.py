"""Prefetches the parameters of layers to the device, in the order in which the layers were called last time."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

import torch

from windlass.actors.offload.layers import OffloadedBlock
from windlass.actors.offload.store import OffloadStore
from windlass.engine.device import BlockLoad, Device, Event, OnArrival, ParamLoader, state_dtype
from windlass.engine.memory_plan import BlockBuffers, Pool
from windlass.storage.cancellation import Signal
from windlass.storage.ids import BlockIndex, ChunkKey, Span, StateKind, Step
from windlass.storage.memory import SlotPool

# Number of layers that are prefetched, in addition to the one being computed.
PREFETCH_DEPTH = 2
# A layer's call: its block, and whether it is in backward.
_Call = tuple[BlockIndex, bool]


class _State(Enum):
    QUEUED = auto()
    MOVING = auto()
    READY = auto()


@dataclass(slots=True, eq=False, kw_only=True)
class _Entry(BlockLoad):
    """A block's parameters on the device or in flight to it."""

    block: OffloadedBlock
    home: int  # the index of its buffer
    state: _State = _State.QUEUED
    num_copying: int = 0  # chunks that are not on the device


class ParamFeed:
    """Prefetches params of layers. Only the training thread may call `borrow`; all else is thread-safe."""

    def __init__(
        self,
        blocks: Sequence[OffloadedBlock],
        store: OffloadStore,
        device: Device,
        pool: Pool,
        host_slots: Mapping[ChunkKey, Span],
        param_offset: int,
    ) -> None:
        """`host_slots` are the slots of states that are resident in host memory; their params are at `param_offset`."""
        self._blocks = {block.index: block for block in blocks}
        self._store = store
        self._device = device
        self._slots = SlotPool(
            pool.offset, pool.slot_nbytes, pool.num_slots, name="slots of params", token=device.token
        )
        self._host_slots = host_slots
        self._param_offset = param_offset
        self._kind = store.formats.param_kind
        self.dtype = state_dtype(store.formats, self._kind)
        self.labels: dict[ChunkKey, Step] = {}  # the step that last changed each chunk; set before `unblock`
        # Each buffer can hold any one layer.
        self._largest = max(block.numel for block in blocks)
        self._flats = [device.take(self._largest, self.dtype) for _ in range(PREFETCH_DEPTH + 1)]
        self._num_moves = 0
        self._loader: ParamLoader[_Entry] = ParamLoader(self, device, store.arena, self.dtype)
        self._changed = threading.Condition()
        # All attributes below are protected by `_changed`.
        self._buffers: BlockBuffers[int, BlockIndex] = BlockBuffers({self._largest: len(self._flats)})
        self._used: list[Event | None] = [None] * len(self._flats)  # after the last queued work that reads each buffer
        self._entries: dict[BlockIndex, _Entry] = {}
        self._waiting: deque[_Entry] = deque()
        self._changing: set[BlockIndex] = set()
        self._following: dict[_Call, _Call] = {}  # the call that followed each call last time
        self._last: _Call | None = None

    @property
    def loops(self) -> tuple[Callable[[], None], ...]:
        """The functions to run in threads."""
        return (self._run_reads, self._loader.run)

    def close(self) -> None:
        """Frees the device's buffers, when the threads have ended. The model may hold this object for longer."""
        self._flats.clear()
        self._entries.clear()

    @property
    def num_moves(self) -> int:
        """The number of layers copied to the device so far."""
        return self._num_moves

    def borrow(self, block: OffloadedBlock, *, is_backward: bool) -> torch.Tensor:
        """Returns a layer's flat parameters on the device, valid until `give_back`. Raises OffloadFailedError."""
        call = (block.index, is_backward)
        with self._changed:
            if self._last is not None:
                self._following[self._last] = call
            self._last = call
            entry = self._await(block)
            self._buffers.acquire(self._largest, block.index)
            self._prefetch(frozenset())
            return entry.buffer

    def give_back(self, block: OffloadedBlock) -> None:
        """Releases a layer's parameters. Only work that is already queued on the device may still read them."""
        with self._changed:
            entry = self._entries[block.index]
            self._used[entry.home] = self._device.record_current()
            self._buffers.release(entry.home)
            self._changed.notify_all()

    def prefetch(self, skip: frozenset[BlockIndex]) -> None:
        """Prefetches the layers that are expected after the last call, except the blocks in `skip`."""
        with self._changed:
            self._prefetch(skip)

    def block(self, index: BlockIndex) -> None:
        """Drops a block's params from the device before they change; they are not read again until `unblock`."""
        with self._changed:
            self._wait(lambda: not self._is_moving(index), f"the params of {self._blocks[index].name} to arrive")
            if (entry := self._entries.get(index)) is not None:
                self._buffers.drop(entry.home)
                self._forget(index)
            self._changing.add(index)

    def unblock(self, index: BlockIndex) -> None:
        """Allows reads of a block's params after their change."""
        with self._changed:
            self._changing.remove(index)
            self._changed.notify_all()

    def await_unchanging(self, index: BlockIndex) -> None:
        """Waits until a running update of a block is written. Raises OffloadFailedError."""
        with self._changed:
            self._wait(lambda: index not in self._changing, f"the update of {self._blocks[index].name}")

    @contextmanager
    def host_chunk(self, key: ChunkKey) -> Iterator[torch.Tensor]:
        """Yields a chunk's params in host memory. No update of its block may be running."""
        if key in self._host_slots:
            yield self._view(key, self._host_slots[key].offset + self._param_offset)
            return
        (slot,) = self._slots.acquire(1)
        done = Signal(self._device.token)
        self._read(key, slot, done.set)
        done.wait(f"{key} from the SSDs")
        try:
            yield self._view(key, slot.offset)
        finally:
            self._slots.release([slot])

    # --- inside, with the lock held ---------------------------------------------------------------------------------

    def _await(self, block: OffloadedBlock) -> _Entry:
        def is_there() -> bool:
            entry = self._entries.get(block.index)
            if entry is None:
                self._enqueue(block, keep=frozenset(), urgent=True)
                return False
            if entry.state is _State.QUEUED and entry is not self._waiting[0]:
                self._waiting.remove(entry)
                self._waiting.appendleft(entry)
            return entry.state is _State.READY

        self._wait(is_there, f"the params of {block.name}")
        return self._entries[block.index]

    def _wait(self, is_done: Callable[[], bool], what: str) -> None:
        self._device.token.wait_for(self._changed, is_done, what)

    def _prefetch(self, skip: frozenset[BlockIndex]) -> None:
        """Queues the layers that followed the last call last time. None of them is evicted for another."""
        call, wanted = self._last, []
        for _ in range(PREFETCH_DEPTH):
            call = None if call is None else self._following.get(call)
            if call is not None and call[0] not in skip:
                wanted.append(call[0])
        keep = frozenset(wanted)
        for index in wanted:
            if index not in self._entries:
                self._enqueue(self._blocks[index], keep=keep, urgent=False)

    def _enqueue(self, block: OffloadedBlock, *, keep: frozenset[BlockIndex], urgent: bool) -> None:
        """Queues a block if there is an empty buffer, or one of an idle block that is not in `keep`."""
        acquired = self._buffers.acquire(self._largest, block.index, keep)
        if acquired is None:
            return
        home = acquired.buffer
        self._buffers.release(home)  # it is in use again once its chunks are in flight
        if acquired.evicted is not None:
            self._forget(acquired.evicted)
        entry = self._entries[block.index] = _Entry(block=block, home=home, buffer=self._flats[home][: block.numel])
        if urgent:
            self._waiting.appendleft(entry)
        else:
            self._waiting.append(entry)
        self._changed.notify_all()

    def _forget(self, index: BlockIndex) -> None:
        """Removes the entry of a block whose buffer is free for others, after queued work that reads it."""
        entry = self._entries.pop(index)
        if entry.state is _State.QUEUED:
            self._waiting.remove(entry)
        if (used := self._used[entry.home]) is not None:
            self._device.h2d.wait(used)
        self._device.poison(self._flats[entry.home], self._device.h2d)

    def _is_moving(self, index: BlockIndex) -> bool:
        entry = self._entries.get(index)
        return entry is not None and entry.state is _State.MOVING

    # --- inside: threads --------------------------------------------------------------------------------------------

    def _run_reads(self) -> None:
        while (entry := self._next()) is not None:
            self._loader.start(entry, entry.block.chunk_keys(self._store.chunk_numel))

    def _next(self) -> _Entry | None:
        def readable() -> _Entry | None:
            return next((entry for entry in self._waiting if entry.block.index not in self._changing), None)

        with self._changed:
            self._device.token.wait_for_work(self._changed, lambda: readable() is not None)
            if self._device.token.is_cancelled:
                return None
            entry = readable()
            assert entry is not None
            self._waiting.remove(entry)
            entry.state = _State.MOVING
            self._buffers.acquire(self._largest, entry.block.index)  # until all copies are over
            entry.num_missing = entry.num_copying = len(entry.block.chunk_keys(self._store.chunk_numel))
            return entry

    # --- calls of the loader ----------------------------------------------------------------------------------------

    def chunk_range(self, key: ChunkKey) -> tuple[int, int]:
        """See ParamSource."""
        return self._blocks[key.block].chunk_range(key, self._store.chunk_numel)

    def resident_params(self, key: ChunkKey) -> Span | None:
        """See ParamSource."""
        slot = self._host_slots.get(key)
        return None if slot is None else Span(slot.offset + self._param_offset, self._slots.slot_nbytes)

    def request_params(self, entry: _Entry, keys: Sequence[ChunkKey], on_arrival: OnArrival) -> None:
        """See ParamSource."""
        for key in keys:
            (slot,) = self._slots.acquire(1)
            self._read(key, slot, partial(on_arrival, key, slot, True))

    def release_params(self, entry: _Entry, slots: Mapping[ChunkKey, Span]) -> None:
        """See ParamSource."""
        self._slots.release(list(slots.values()))

    def naming(self, entry: _Entry, callback: Callable[[], None]) -> Callable[[], None]:
        """See ParamSource. Errors of the library name no layer."""
        return callback

    def chunk_arrived(self, entry: _Entry, key: ChunkKey, params: torch.Tensor) -> None:
        """See ParamSource."""

    def chunks_copied(self, entry: _Entry, nbytes: Mapping[ChunkKey, int], begun: Event, copied: Event) -> None:
        """See ParamSource. The params are ready when all copies are over: an update may then change the source."""
        with self._changed:
            entry.num_copying -= len(nbytes)
            if entry.num_copying == 0:
                entry.state = _State.READY
                self._buffers.release(entry.home)
                self._num_moves += 1
                self._changed.notify_all()

    # --- inside: reads ----------------------------------------------------------------------------------------------

    def _read(self, key: ChunkKey, slot: Span, on_done: Callable[[], None]) -> None:
        # More urgent than all reads and writes of updates, because the compute waits for these.
        offsets: dict[StateKind, int] = {self._kind: slot.offset}
        self._store.read(key, self._numel(key), self.labels[key], offsets, (0, 0), on_done)

    def _numel(self, key: ChunkKey) -> int:
        start, stop = self.chunk_range(key)
        return stop - start

    def _view(self, key: ChunkKey, offset: int) -> torch.Tensor:
        return self._store.arena.view(offset, self._numel(key), self.dtype)
