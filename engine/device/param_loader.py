"""Copies the params of blocks to device buffers, chunk by chunk, from host memory or from the SSDs.

One thread queues the copies of chunks that are in host
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


@dataclass(slots=True, eq=False, kw_only=True)
class BlockLoad:
    """The params of one block on their way to a device buffer."""

    buffer: torch.Tensor
    first: int = 0  # the index in the block of the buffer's first element; elements before it are not copied
    holds_chunks: bool = False  # chunks stay in host memory until the caller releases those in `held`
    num_missing: int = 0  # chunks whose copies are not queued
    held: dict[ChunkKey, Span] = field(default_factory=dict)  # the slots of chunks that are held
    is_ready: bool = False  # all copies are queued
    copied: Event | None = None  # after the last copy; None if none was needed


# Called for each requested chunk when its params are in the span. True: the span is a slot, released after the copy.
OnArrival = Callable[[ChunkKey, Span, bool], None]

_Load = TypeVar("_Load", bound=BlockLoad)
_Taken = TypeVar("_Taken", bound=BlockLoad, contravariant=True)


class ParamSource(Protocol[_Taken]):
    """Provides the params of chunks in host memory."""

    def chunk_range(self, key: ChunkKey) -> tuple[int, int]:
        """Returns the index in the block of a chunk's first element, and of the element after its last one."""

    def resident_params(self, key: ChunkKey) -> Span | None:
        """Returns the span in which a chunk's params are resident; None if they must be read."""

    def request_params(self, load: _Taken, keys: Sequence[ChunkKey], on_arrival: OnArrival) -> None:
        """Requests the params of chunks that are not resident. May wait for slots."""

    def release_params(self, load: _Taken, slots: Mapping[ChunkKey, Span]) -> None:
        """Takes note that the slots of chunks are not read any more."""

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
        dtype: torch.dtype,
    ) -> None:
        """The device's token ends waits, and `run`."""
        self._source = source
        self._device = device
        self._arena = arena
        self._dtype = dtype
        self._arrived: TaskQueue[_Arrival[_Load]] = TaskQueue(device.token)
        self._changed = threading.Condition()  # of all loads' `is_ready`

    def start(self, load: _Load, keys: Sequence[ChunkKey]) -> None:
        """Queues the copies of a block's chunks, and requests those that are missing.

        The load's `num_missing` must be the number of chunks.
        """
        resident = {key: span for key in keys if (span := self._source.resident_params(key)) is not None}
        self._arrived.put(*(_Arrival(load, key, span, is_slot=False) for key, span in resident.items()))
        if missing := [key for key in keys if key not in resident]:
            self._source.request_params(load, missing, functools.partial(self._has_arrived, load))

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

    def _has_arrived(self, load: _Load, key: ChunkKey, span: Span, is_slot: bool) -> None:
        self._arrived.put(_Arrival(load, key, span, is_slot=is_slot))

    def _size_of_next(self, arrived: Iterable[_Arrival[_Load]]) -> int:
        return copy_batch_size((arrival.load, self._nbytes(arrival)) for arrival in arrived)

    def _receive(self, arrival: _Arrival[_Load]) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes a chunk that is in host memory. Returns the part of the buffer that it fills, and the source."""
        load, start, stop = arrival.load, *self._source.chunk_range(arrival.key)
        params = self._arena.view(arrival.span.offset, stop - start, self._dtype)
        self._source.chunk_arrived(load, arrival.key, params)
        if load.holds_chunks and arrival.is_slot:
            load.held[arrival.key] = arrival.span
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
        slots = {arrival.key: arrival.span for arrival in arrivals if arrival.is_slot}
        if slots and not load.holds_chunks:
            self._source.release_params(load, slots)
