"""Prefetches params to the device: from the SSDs, or from chunks that stay in host memory.

Params that are resident on the device are used in place. Two threads work. One requests missing chunks from the param
server, which reads them for all GPU workers. One queues the copies of chunks that are in host memory. A chunk of cached
params is read once in an attempt; the optimizer then replaces its params in the same slot.

A block's params are one flat buffer, held from its request until its operation is queued on the device. They stay there
until the buffer is needed for others, so an operation that finds them needs no transfer. The buffers are allocated at
set-up. The next user of a buffer waits for the last one on the device, not in these threads.

Of a streamed block, only the norms and biases are prefetched. The operation copies its matrices in pieces, and their
chunks stay in host memory until then.
"""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from windlass.actors.job import JobContext, piece_bounds
from windlass.actors.lifecycle import working_at, works_at
from windlass.actors.messages import (
    ComputeBlock,
    Message,
    ParamRequest,
    ParamsArrived,
    ParamUse,
    SpanKind,
)
from windlass.actors.ssd import ParamRequests
from windlass.actors.timeline import TO_DEVICE, WHOLE_BLOCK, SpanRecorder
from windlass.engine.device import (
    TORCH_DTYPE,
    BlockLoad,
    Device,
    DeviceBuffers,
    Event,
    OnArrival,
    ParamLoader,
    TensorArena,
    copy,
)
from windlass.engine.linear_parts import Columns, require_column_copies
from windlass.engine.memory_plan import NUM_PIECE_BUFFERS, largest_piece, param_buffer_numels, param_buffers
from windlass.engine.model import PieceBuffers, StreamedParams
from windlass.storage.cancellation import TaskQueue
from windlass.storage.ids import BlockIndex, ChunkKey, Span


@dataclass(slots=True, eq=False)
class HostChunks:
    """A PieceSource that reads from the chunks of one streamed block in host memory."""

    chunk_numel: int
    request: ParamRequest
    spans: SpanRecorder
    _chunks: dict[int, torch.Tensor] = field(default_factory=dict)  # by number in the block

    def add(self, number: int, chunk: torch.Tensor) -> None:
        """Adds a chunk's params, which are now in host memory."""
        self._chunks[number] = chunk

    def load(self, target: torch.Tensor, start: int) -> None:
        """See PieceSource."""
        stop = start + target.numel()
        for number in range(start // self.chunk_numel, -(-stop // self.chunk_numel)):
            chunk, first = self._chunks[number], number * self.chunk_numel
            low, high = max(start, first), min(stop, first + chunk.numel())
            copy(target[low - start : high - start], chunk[low - first : high - first])

    def load_columns(self, target: torch.Tensor, columns: Columns) -> None:
        """See PieceSource."""
        first, last = columns.offset, columns.offset + columns.num_rows * columns.width
        for number in range(first // self.chunk_numel, -(-last // self.chunk_numel)):
            columns.load(target, self._chunks[number], number * self.chunk_numel)

    def loaded(self, begun: Event, copied: Event, nbytes: int) -> None:
        """See PieceSource."""
        kind, request = SpanKind.COPY_PARAMS_IN, self.request
        self.spans.note(
            TO_DEVICE, kind, request.step, request.block, WHOLE_BLOCK, begun.time_s(), copied.time_s(), nbytes
        )


@dataclass(slots=True, eq=False, kw_only=True)
class Load(BlockLoad):
    """The prefetch of one block's params to a device buffer; for a streamed block, to host memory."""

    request: ParamRequest  # the first one for these params
    params: torch.Tensor | StreamedParams  # the buffer, or the buffer and the later pieces
    chunks: HostChunks | None = None  # for a streamed block: the source of its pieces


@dataclass(slots=True, eq=False, kw_only=True)
class Fetch:
    """The params of one block for one operation."""

    request: ParamRequest
    params: torch.Tensor | StreamedParams
    buffer: torch.Tensor | None = None  # released after the operation; None: the params are resident
    load: Load | None = None  # fills the buffer, for this operation or an earlier one; None: no transfer is needed
    master: torch.Tensor | None = None  # the resident master from which the params are rounded before use


class ParamFeed:
    """Prefetches the params of blocks to the device."""

    def __init__(
        self,
        context: JobContext,
        device: Device,
        arena: TensorArena,
        rank: int,
        ask: Callable[[Message], None],
        resident: Callable[[BlockIndex], torch.Tensor | None],
        spans: SpanRecorder,
    ) -> None:
        """`ask` sends a message to the param server. `rank` is that of the GPU worker.

        `resident` returns a block's params on the device, or the master from which they are derived. It returns None
        for blocks that are not resident there. Params of other boxes count as resident.
        """
        self._context = context
        self._spans = spans
        self._device = device
        self._ask = ask
        self._messages = ParamRequests(context, rank)
        self._where_to_look = "see the logs of the SSD servers, and check disks"
        if context.spec.num_ranks > 1:
            server = context.param_server
            self._where_to_look = (
                f"see the status of {server}, because other GPU workers may not have copied params yet; else "
                f"{self._where_to_look}"
            )
        self._resident = resident
        self._dtype = TORCH_DTYPE[context.formats.precision]
        self._host_slots = context.host_slots()
        self._param_offset = context.state_offsets()[context.formats.param_kind]
        self._param_nbytes = context.plan.params.slot_nbytes
        self._cached = context.cached_params()
        self._filled: set[ChunkKey] = set()  # the chunks whose params are in their slot of `_cached`
        self._arriving: dict[ParamUse, tuple[int, OnArrival]] = {}  # chunks to come, and the loader's callback
        self._loader: ParamLoader[Load] = ParamLoader(self, device, arena, self._dtype)
        self._bounds = piece_bounds(context)
        # The elements that are prefetched of each block, and those of the buffers in which they lie.
        self._numels = [block.numel - self._first(block.index) for block in context.layout.blocks]
        self._buffer_numels = param_buffer_numels(self._numels, ends_share=context.plan.ends_share_params)
        num_buffers = param_buffers(
            self._buffer_numels,
            context.layout.shared,
            resident=(*context.formats.lent(context.plan.device_blocks), *context.layout.borrowed),
            num_ahead=context.spec.effective_ordering.max_prefetched,
        )
        self._buffers = DeviceBuffers(
            device,
            {(numel, self._dtype): number for numel, number in num_buffers.items()},
            name="params",
        )
        self._pieces: PieceBuffers | None = None
        if self._bounds:
            if context.spec.training.cut_matrices is not None:
                require_column_copies(device.device)
            numel = largest_piece(list(self._bounds.values()))
            self._pieces = PieceBuffers(device, numel, self._dtype, NUM_PIECE_BUFFERS)
        self._requests: TaskQueue[ParamRequest] = TaskQueue(device.token)
        self._changed = threading.Condition()
        self._fetches: dict[tuple[int, BlockIndex], Fetch] = {}
        self._loads: dict[BlockIndex, Load] = {}  # the last ones of blocks whose buffers can be used again

    @property
    def loops(self) -> tuple[Callable[[], None], ...]:
        """The functions to run in threads."""
        return (self._run_requests, self._run_arrivals)

    # --- calls of the GPU worker ------------------------------------------------------------------------------------

    def request(self, operation: ComputeBlock) -> None:
        """Queues the prefetch of an operation's params."""
        for request in ParamRequest.of(operation):
            self._requests.put(request)

    def wait_for(self, operation: ComputeBlock, block: BlockIndex) -> Fetch:
        """Returns the params of a block that an operation needs, for work queued on the compute stream from now on.

        It waits until the copies are queued, not until they are done. `release` must follow.

        Raises the errors of `CancelToken.wait_for`.
        """
        key, what = (operation.op, block), f"the params of block {block} in step {operation.step}"
        with self._changed:
            self._device.token.wait_for(self._changed, lambda: key in self._fetches, f"a request of {what}")
            fetch = self._fetches.pop(key)
        if (load := fetch.load) is None:
            return fetch
        self._loader.wait_for(
            load,
            lambda: f"{what}; {load.num_missing} chunks are missing; {self._where_to_look}",
        )
        if load.copied is not None:
            self._device.compute.wait(load.copied)
        return fetch

    def round_master(self, fetch: Fetch) -> None:
        """Queues the rounding of a master to params, if `fetch` has one. Called before the operation is queued."""
        if isinstance(fetch.params, torch.Tensor) and fetch.master is not None:
            self._device.compute.run(functools.partial(fetch.params.copy_, fetch.master))

    def release(self, fetch: Fetch) -> None:
        """Releases the params after their operation was queued on the compute stream."""
        if fetch.buffer is not None:
            self._buffers.give(fetch.buffer, self._device.compute)
        if fetch.load is not None and fetch.load.held:
            self._device.compute.then(functools.partial(self.release_params, fetch.load, fetch.load.held))

    def take(self, message: ParamsArrived) -> None:
        """Queues the copies of params that the param server has read."""
        with self._changed:
            num_left, on_arrival = self._arriving.pop(message.use)
            if num_left := num_left - len(message.chunks):
                self._arriving[message.use] = num_left, on_arrival
        for chunk in message.chunks:
            if not chunk.is_slot:  # only now: an earlier request of the same params must not use a slot being filled
                self._filled.add(chunk.key)
            on_arrival(chunk.key, chunk.span, chunk.is_slot)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _first(self, block: BlockIndex) -> int:
        """Returns the index of a block's first element that is prefetched; the elements before it come in pieces."""
        return self._bounds[block][-1] if block in self._bounds else 0

    def _run_requests(self) -> None:
        while (request := self._requests.take()) is not None:
            works_at(request.operation)
            fetch = self._fetch(request)
            with self._changed:
                self._fetches[(request.operation.op, request.block)] = fetch
                self._changed.notify_all()
            if (load := fetch.load) is None:
                continue
            if load.request is request:
                self._loader.start(load, self._context.layout.chunk_keys(request.block))
            elif self._messages.must_tell(request.block):
                self._ask(self._messages.of_chunks(request, ()))

    def _fetch(self, request: ParamRequest) -> Fetch:
        """Returns an operation's params in a buffer, and waits for a free one if no buffer has them."""
        block, resident = request.block, self._resident(request.block)
        if resident is not None and resident.dtype is self._dtype:
            return Fetch(request=request, params=resident)
        # A streamed block's buffer has its norms and biases only, so it saves no transfer. The params of other blocks
        # change together with their step number.
        contents = None if block in self._bounds else (block, request.step)
        numel = self._buffer_numels[block]
        stream = self._device.h2d if resident is None else self._device.compute
        buffer, is_filled = self._buffers.take_with(contents, numel, self._dtype, stream)
        params = buffer[: self._numels[block]]  # embedding and head may share a buffer, and differ in size
        if resident is not None:
            return Fetch(request=request, params=params, buffer=buffer, master=None if is_filled else resident)
        load = self._loads[block] if is_filled else self._new_load(request, params)
        if contents is not None:
            self._loads[block] = load
        return Fetch(request=request, params=load.params, buffer=buffer, load=load)

    def _new_load(self, request: ParamRequest, buffer: torch.Tensor) -> Load:
        layout, block = self._context.layout, request.block
        load = Load(request=request, params=buffer, buffer=buffer, first=self._first(block))
        load.num_missing = layout.num_chunks(block)
        if self._pieces is not None and block in self._bounds:
            load.holds_chunks = True
            load.chunks = HostChunks(layout.chunk_numel, request, self._spans)
            load.params = StreamedParams(self._pieces, load.chunks, self._bounds[block], buffer)
        return load

    def _run_arrivals(self) -> None:
        self._loader.run()

    # --- calls of the loader ----------------------------------------------------------------------------------------

    def chunk_range(self, key: ChunkKey) -> tuple[int, int]:
        """See ParamSource."""
        return self._context.layout.chunk_range(key)

    def resident_params(self, key: ChunkKey) -> Span | None:
        """See ParamSource."""
        if (slot := self._host_slots.get(key)) is not None:
            return Span(slot.offset + self._param_offset, self._param_nbytes)
        return self._cached[key] if key in self._filled else None

    def request_params(self, load: Load, keys: Sequence[ChunkKey], on_arrival: OnArrival) -> None:
        """See ParamSource."""
        with self._changed:
            self._arriving[self._messages.use_of(load.request)] = len(keys), on_arrival
        self._ask(self._messages.of_chunks(load.request, keys))

    def release_params(self, load: Load, slots: Mapping[ChunkKey, Span]) -> None:
        """See ParamSource."""
        self._ask(self._messages.copied(load.request, slots))

    def naming(self, load: Load, callback: Callable[[], None]) -> Callable[[], None]:
        """See ParamSource."""
        return working_at(load.request.operation, callback)

    def chunk_arrived(self, load: Load, key: ChunkKey, params: torch.Tensor) -> None:
        """See ParamSource."""
        works_at(load.request.operation)
        if load.chunks is not None:
            load.chunks.add(key.chunk, params)

    def chunks_copied(self, load: Load, nbytes: Mapping[ChunkKey, int], begun: Event, copied: Event) -> None:
        """See ParamSource."""
        kind, step, start_s, end_s = SpanKind.COPY_PARAMS_IN, load.request.step, begun.time_s(), copied.time_s()
        self._spans.note_batch(TO_DEVICE, kind, step, nbytes, start_s, end_s)
