"""Simulates the prefetch of params to the device, as the GPU worker's real `ParamFeed` does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from windlass.actors.messages import (
    ComputeBlock,
    ParamChunk,
    ParamRequest,
    ParamsCopied,
    ParamUse,
    RequestParams,
    SpanKind,
)
from windlass.actors.ssd import ParamRequests
from windlass.engine.memory_plan import Acquired, BlockBuffers, param_buffer_numels, param_buffers
from windlass.planner.simulation import PARAMS, Future, Process, ProcessReturning, Queue, Signal, SimulatedGpu
from windlass.storage.ids import BlockIndex, ChunkKey, Step

# A block's params, by the step under which they are stored.
_Params = tuple[BlockIndex, Step]


@dataclass(slots=True, eq=False)
class _Load:
    """A transfer of one block's params to a buffer, or to host memory if the block is streamed."""

    request: ParamRequest  # the first one for these params
    arrived: Future
    num_missing: int
    held: list[ChunkKey] = field(default_factory=list)  # chunks of a streamed block in slots until it is computed


@dataclass(slots=True, eq=False)
class Fetch:
    """The params of one block for one operation."""

    request: ParamRequest
    ready: Future  # set after their arrival, when `on_params_ready` has been called
    buffer: int | None = None  # None: the params are resident
    load: _Load | None = None  # None: no transfer is needed
    num_rounded: int = 0  # elements that are derived on the device from the resident master, when they are needed


class ParamFeed:
    """Copies chunks of params from their tier to a block's buffer."""

    def __init__(
        self,
        gpu: SimulatedGpu,
        ask: Callable[[RequestParams | ParamsCopied], None],
        on_params_ready: Callable[[Fetch], None],
    ) -> None:
        """`ask` sends a message to the param server.

        `on_params_ready` is called with each fetch when it is complete, in the order of the requests.
        """
        self.gpu, self.world = gpu, gpu.world
        world = gpu.world
        self._ask = ask
        self._messages = ParamRequests(world.context, gpu.rank)
        self._on_params_ready = on_params_ready
        clock, context = world.clock, world.context
        self._requests: Queue[ParamRequest] = Queue(clock)
        self._arriving: dict[ParamUse, tuple[int, _Load]] = {}  # the number of chunks to come, and for which load
        self._arrived: Queue[tuple[_Load, ChunkKey, bool]] = Queue(clock)  # True: the chunk is in a slot
        self._filled: set[ChunkKey] = set()  # cached params that were read
        self._fetching: Queue[Fetch] = Queue(clock)
        self._fetches: dict[tuple[int, BlockIndex], Fetch] = {}
        self._loads: dict[BlockIndex, _Load] = {}  # the last ones
        self._created = Signal(clock)
        self._numels = param_buffer_numels(
            [block.numel - self._first(block.index) for block in context.layout.blocks],
            ends_share=context.plan.ends_share_params,
        )
        numbers = param_buffers(
            self._numels,
            context.layout.shared,
            resident=(*context.formats.lent(context.plan.device_blocks), *context.layout.borrowed),
            num_ahead=context.spec.effective_ordering.max_prefetched,
        )
        self._buffers: BlockBuffers[int, _Params] = BlockBuffers(numbers)
        self._released = Signal(clock)
        gpu.allocate(PARAMS, sum(map(self._nbytes, range(len(self._buffers.sizes)))))
        for loop in (self._run_requests, self._run_arrivals, self._tell):
            clock.process(loop())

    def request(self, operation: ComputeBlock) -> None:
        """Begins to prefetch an operation's params."""
        for request in ParamRequest.of(operation):
            self._requests.put(request)

    def wait_for(self, operation: ComputeBlock, block: BlockIndex) -> ProcessReturning[Fetch]:
        """Returns the params of a block for an operation, when they are ready."""
        key = (operation.op, block)
        while key not in self._fetches:
            yield self._created.next
        fetch = self._fetches.pop(key)
        yield fetch.ready
        return fetch

    def release(self, fetch: Fetch) -> None:
        """Releases the params after the operation."""
        if fetch.buffer is not None:
            self._buffers.release(fetch.buffer)
            if not self._buffers.num_users(fetch.buffer):
                self.gpu.level(PARAMS, -self._nbytes(fetch.buffer))
            self._released.notify()
        if fetch.load is not None and fetch.load.held:
            self._ask(self._messages.copied(fetch.load.request, fetch.load.held))

    def take(self, use: ParamUse, chunks: Sequence[ParamChunk]) -> None:
        """Queues the copies of params that were read."""
        num_left, load = self._arriving.pop(use)
        if num_left := num_left - len(chunks):
            self._arriving[use] = num_left, load
        for chunk in chunks:
            if not chunk.is_slot:
                self._filled.add(chunk.key)
            self._arrived.put((load, chunk.key, chunk.is_slot))

    def _first(self, block: BlockIndex) -> int:
        """Returns the first element with a buffer of its own. The elements before it are copied in pieces."""
        bounds = self.world.bounds
        return bounds[block][-1] if block in bounds else 0

    def _nbytes(self, buffer: int) -> int:
        return self._buffers.sizes[buffer] * self.world.param_itemsize

    def _run_requests(self) -> Process:
        while True:
            request = yield from self._requests.get()
            fetch = yield from self._fetch(request)
            self._fetches[(request.operation.op, request.block)] = fetch
            self._created.notify()
            self._fetching.put(fetch)
            if (load := fetch.load) is None:
                continue
            if load.request is request:
                self._load(load)
            elif self._messages.must_tell(request.block):
                self._ask(self._messages.of_chunks(request, ()))

    def _fetch(self, request: ParamRequest) -> ProcessReturning[Fetch]:
        """Returns an operation's params in a buffer, and waits for a free one if no buffer has them."""
        world, block = self.world, request.block
        fetch = Fetch(request, world.clock.future())
        is_resident = block in world.context.plan.device_blocks
        if (is_resident and not world.context.formats.derives_param) or block in world.context.layout.borrowed:
            return fetch  # params of another box have a buffer of their own
        acquired = yield from self._acquire(
            self._numels[block], None if block in world.bounds else (block, request.step)
        )
        fetch.buffer = acquired.buffer
        if is_resident:
            fetch.num_rounded = 0 if acquired.has_contents else world.numels[block] - self._first(block)
            return fetch
        if not acquired.has_contents:
            self._loads[block] = _Load(request, world.clock.future(), len(world.chunk_keys[block]))
        fetch.load = self._loads[block]
        return fetch

    def _acquire(self, numel: int, contents: _Params | None) -> ProcessReturning[Acquired[_Params]]:
        while (acquired := self._buffers.acquire(numel, contents)) is None:
            yield self._released.next
        if self._buffers.num_users(acquired.buffer) == 1:
            self.gpu.level(PARAMS, self._nbytes(acquired.buffer))
        return acquired

    def _load(self, load: _Load) -> None:
        world, missing = self.world, []
        for key in world.chunk_keys[load.request.block]:
            if key in world.host_slots or key in self._filled:
                self._arrived.put((load, key, False))
            else:
                missing.append(key)
        if missing:
            self._arriving[self._messages.use_of(load.request)] = len(missing), load
            self._ask(self._messages.of_chunks(load.request, missing))

    def _run_arrivals(self) -> Process:
        world, bounds, chunk_numel = self.world, self.world.bounds, self.world.context.layout.chunk_numel
        while True:
            load, key, is_slot = yield from self._arrived.get()
            # Of a streamed block, only the elements after its pieces are copied here.
            numel = world.chunk_numel(key)
            if key.block in bounds:
                numel -= min(max(0, self._first(key.block) - key.chunk * chunk_numel), numel)
            nbytes = world.param_itemsize * numel
            if nbytes:
                yield from self.gpu.copy_in(nbytes, SpanKind.COPY_PARAMS_IN, load.request.step, key.block, key.chunk)
            if is_slot and key.block in bounds:
                load.held.append(key)
            elif is_slot:
                self._ask(self._messages.copied(load.request, (key,)))
            load.num_missing -= 1
            if not load.num_missing:
                load.arrived.set_done()

    def _tell(self) -> Process:
        while True:
            fetch = yield from self._fetching.get()
            if fetch.load is not None:
                yield fetch.load.arrived
            self._on_params_ready(fetch)
            fetch.ready.set_done()
