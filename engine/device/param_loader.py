"""Copies the params of blocks to device buffers, chunk by chunk, from host memory or from the SSDs.

Missing chunks are requested in batches while slots are free. One thread queues the copies of chunks that are in host
memory. Those of a block that are there at the same time are copied together (`copy_batches`). A chunk that arrives
alone is copied at once. The GPU worker of jobs and `windlass.offload` decide which block comes next, and use one loader
each.
"""

import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch

from windlass.engine.device.device import Device, copy_all
from windlass.engine.device.streams import Event
from windlass.engine.device.tensor_arena import TensorArena
from windlass.engine.memory_plan import copy_batch_size
from windlass.storage.cancellation import TaskQueue, What
from windlass.storage.ids import ChunkKey, Span
from windlass.storage.memory import SlotPool


@dataclass(slots=True, eq=False, kw_only=True)
class BlockLoad:
    """The params of one block on their way to a device buffer."""

    buffer: torch.Tensor
    first: int = 0  # the index in the block of the buffer's first element; elements before it are not copied
    holds_chunks: bool = False  # chunks stay in host memory until their slots in `held` are released by the caller
    num_missing: int = 0  # chunks whose copies are not queued
    held: list[Span] = field(default_factory=list)
    is_ready: bool = False  # all copies are queued
    copied: Event | None = None  # after the last copy; None if none was needed


_Load = TypeVar("_Load", bound=BlockLoad)
_Taken = TypeVar("_Taken", bound=BlockLoad, contravariant=True)


class ParamSource(Protocol[_Taken]):
    """Provides the params of chunks in host memory."""

    def chunk_range(self, key: ChunkKey) -> tuple[int, int]:
        """Returns the index in the block of a chunk's first element, and of the element after its last one."""

    def resident_params(self, key: ChunkKey) -> Span | None:
        """Returns the span in which a chunk's params are resident; None if they must be read."""

    def own_slot(self, key: ChunkKey) -> Span | None:
        """Returns the slot in which a chunk's params stay once they are read; None if they take a slot of the pool."""

    def read_params(self, load: _Taken, spans: Mapping[ChunkKey, Span], on_done: Callable[[ChunkKey], None]) -> None:
        """Requests the params of chunks. Calls `on_done` for each when it is in its span."""

    def naming(self, load: _Taken, callback: Callable[[], None]) -> Callable[[], None]:
        """Wraps a callback so that an error in it names the load."""

    def chunk_arrived(self, load: _Taken, key: ChunkKey, params: torch.Tensor) -> None:
        """Takes note that a chunk is in host memory, before its copy is queued."""

    def chunks_copied(self, load: _Taken, nbytes: Mapping[ChunkKey, int], begun: Event, copied: Event) -> None:
        """Takes note that the copies of chunks are over, before their slots are released.

        `nbytes` has the bytes of each. They were copied in this order between the two events.
        """


@dataclass(frozen=True, slots=True, eq=False)
class _Arrival(Generic[_Load]):
    """Params of a chunk that are in host memory."""

    load: _Load
    key: ChunkKey
    span: Span
    is_slot: bool  # the span is a slot of the pool, and is released; else the params stay there


class ParamLoader(Generic[_Load]):
    """Loads blocks in the order of the calls of `start`. All methods are thread-safe."""

    def __init__(
        self,
        source: ParamSource[_Load],
        device: Device,
        arena: TensorArena,
        slots: SlotPool,
        dtype: torch.dtype,
        *,
        batch: int,
    ) -> None:
        """`batch` is the largest number of chunks in a request. The device's token ends waits, and `run`."""
        self._source = source
        self._device = device
        self._arena = arena
        self._slots = slots
        self._dtype = dtype
        self._batch = batch
        self._arrived: TaskQueue[_Arrival[_Load]] = TaskQueue(device.token)
        self._changed = threading.Condition()  # of all loads' `is_ready`

    def start(self, load: _Load, keys: Sequence[ChunkKey]) -> None:
        """Queues the copies of a block's chunks, and requests those that are missing; waits for slots.

        The load's `num_missing` must be the number of chunks.
        """
        resident = {key: span for key in keys if (span := self._source.resident_params(key)) is not None}
        self._arrived.put(*(_Arrival(load, key, span, is_slot=False) for key, span in resident.items()))
        missing = [key for key in keys if key not in resident]
        for start in range(0, len(missing), self._batch):
            self._read(load, missing[start : start + self._batch])

    def wait_for(self, load: _Load, what: What) -> None:
        """Waits until all copies of a block are queued. Raises the errors of `CancelToken.wait_for`."""
        with self._changed:
            self._device.token.wait_for(self._changed, lambda: load.is_ready, what)

    def run(self) -> None:
        """Queues copies, in a thread of the caller."""
        h2d = self._device.h2d
        while arrivals := self._arrived.take_some(self._size_of_next):
            load = arrivals[0].load
            pairs = [self._receive(arrival) for arrival in arrivals]
            begun = h2d.record()
            h2d.run(functools.partial(copy_all, pairs))
            copied = h2d.record()
            # Before the callback, which may be called at once and reads it.
            load.num_missing -= len(arrivals)
            if load.num_missing == 0:
                load.copied = copied
            callback = functools.partial(self._copied, load, arrivals, begun, copied)
            h2d.then(self._source.naming(load, callback))
            if load.copied is not None:
                with self._changed:
                    load.is_ready = True
                    self._changed.notify_all()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _read(self, load: _Load, keys: Sequence[ChunkKey]) -> None:
        # A chunk with a slot of its own still holds one of the pool until it arrives, because more requests in the
        # queues of the SSDs could time out.
        slots = dict(zip(keys, self._slots.acquire(len(keys)), strict=True))
        own = {key: span for key in keys if (span := self._source.own_slot(key)) is not None}
        spans = {**slots, **own}

        def arrived(key: ChunkKey) -> None:
            if key in own:
                self._slots.release([slots[key]])
            self._arrived.put(_Arrival(load, key, spans[key], is_slot=key not in own))

        self._source.read_params(load, spans, arrived)

    def _size_of_next(self, arrived: Iterable[_Arrival[_Load]]) -> int:
        return copy_batch_size((arrival.load, self._nbytes(arrival)) for arrival in arrived)

    def _receive(self, arrival: _Arrival[_Load]) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes a chunk that is in host memory. Returns the part of the buffer that it fills, and the source."""
        load, start, stop = arrival.load, *self._source.chunk_range(arrival.key)
        params = self._arena.view(arrival.span.offset, stop - start, self._dtype)
        self._source.chunk_arrived(load, arrival.key, params)
        if load.holds_chunks and arrival.is_slot:
            load.held.append(arrival.span)
        begin = max(start, load.first)
        part = params[max(0, begin - start) :]
        return load.buffer[begin - load.first : begin - load.first + part.numel()], part

    def _nbytes(self, arrival: _Arrival[_Load]) -> int:
        """Returns the bytes of a chunk that are copied."""
        start, stop = self._source.chunk_range(arrival.key)
        return max(0, stop - max(start, arrival.load.first)) * self._dtype.itemsize

    def _copied(self, load: _Load, arrivals: Sequence[_Arrival[_Load]], begun: Event, copied: Event) -> None:
        nbytes = {arrival.key: self._nbytes(arrival) for arrival in arrivals}
        self._source.chunks_copied(load, nbytes, begun, copied)
        if not load.holds_chunks:
            self._slots.release([arrival.span for arrival in arrivals if arrival.is_slot])
