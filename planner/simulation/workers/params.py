"""Simulates the prefetch of params to the device, as the GPU worker's real `ParamFeed` does."""

from collections.abc import Callable
from dataclasses import dataclass

import simpy

from windlass.actors.messages import ComputeBlock, ParamRequest, SpanKind
from windlass.engine.memory_plan import MemoryTier, param_buffers
from windlass.planner.simulation import PARAMS, Process, ProcessReturning, Queue, Signal, SimulatedMachine
from windlass.storage.ids import BlockIndex, ChunkKey


@dataclass(slots=True, eq=False)
class Fetch:
    """A transfer of one block's params to the device, or to host memory if the block is streamed."""

    request: ParamRequest
    arrived: simpy.Event
    ready: simpy.Event  # set after `arrived`, when `on_params_ready` has been called
    num_missing: int = 0
    numel: int | None = None  # elements of the buffer; None: the params are resident
    is_rounded: bool = False  # derived on the device from the resident master, when they are needed
    num_held: int = 0  # slots with chunks of a streamed block, held until it is computed


class ParamFeed:
    """Copies chunks of params from their tier to a block's buffer."""

    def __init__(self, world: SimulatedMachine, on_params_ready: Callable[[Fetch], None]) -> None:
        """`on_params_ready` is called with each fetch when it is complete, in the order of the requests."""
        self.world = world
        self._on_params_ready = on_params_ready
        env, context = world.env, world.context
        self._requests: Queue[ParamRequest] = Queue(env)
        self._arrived: Queue[tuple[Fetch, ChunkKey, bool]] = Queue(env)  # True: the chunk is in a slot
        self._filled: set[ChunkKey] = set()  # cached params that were read
        self._fetching: Queue[Fetch] = Queue(env)
        self._fetches: dict[tuple[int, BlockIndex], Fetch] = {}
        self._created = Signal(env)
        numbers = param_buffers(
            [block.numel - self._first(block.index) for block in context.layout.blocks],
            context.layout.shared,
            resident=context.formats.lent(context.plan.device_blocks),
            num_ahead=context.spec.effective_ordering.max_prefetched,
        )
        self._buffers = {
            numel: world.slots(MemoryTier.DEVICE, PARAMS, numel * world.param_itemsize, n)
            for numel, n in numbers.items()
        }
        for loop in (self._run_requests, self._run_arrivals, self._tell):
            env.process(loop())

    def request(self, operation: ComputeBlock) -> None:
        """Begins to prefetch an operation's params."""
        for request in ParamRequest.of(operation):
            self._requests.put(request)

    def wait_for(self, operation: ComputeBlock, block: BlockIndex) -> ProcessReturning[Fetch]:
        """Returns the params of a block for an operation, when they are ready."""
        key = (operation.op, block)
        yield from self._created.until(lambda: key in self._fetches)
        fetch = self._fetches.pop(key)
        yield fetch.ready
        return fetch

    def release(self, fetch: Fetch) -> None:
        """Releases the params after the operation."""
        if fetch.numel is not None:
            self._buffers[fetch.numel].give_back()
        if fetch.num_held:
            self.world.param_slots.give_back(fetch.num_held)

    def _first(self, block: BlockIndex) -> int:
        """Returns the first element with a buffer of its own. The elements before it are copied in pieces."""
        bounds = self.world.bounds
        return bounds[block][-1] if block in bounds else 0

    def _run_requests(self) -> Process:
        world = self.world
        while True:
            request = yield from self._requests.get()
            keys = world.context.layout.chunk_keys(request.block)
            fetch = Fetch(request, world.env.event(), world.env.event())
            is_resident = request.block in world.context.plan.device_blocks
            if is_resident:
                fetch.arrived.succeed()
            if is_resident and world.context.formats.derives_param:
                fetch.numel, fetch.is_rounded = world.context.layout.blocks[request.block].numel, True
                yield from self._buffers[fetch.numel].take()
            elif not is_resident:
                fetch.numel = world.context.layout.blocks[request.block].numel - self._first(request.block)
                fetch.num_missing = len(keys)
                yield from self._buffers[fetch.numel].take()
            self._fetches[(request.operation.op, request.block)] = fetch
            self._created.notify()
            self._fetching.put(fetch)
            if fetch.num_missing:
                yield from self._fetch(fetch, keys)

    def _fetch(self, fetch: Fetch, keys: list[ChunkKey]) -> Process:
        world, missing = self.world, []
        for key in keys:
            if key in world.host_slots or key in self._filled:
                self._arrived.put((fetch, key, False))
            else:
                missing.append(key)
        batch = world.context.plan.fetch_batch
        for start in range(0, len(missing), batch):
            some = missing[start : start + batch]
            yield from world.param_slots.take(len(some))
            for key in some:
                world.env.process(self._read(fetch, key))

    def _read(self, fetch: Fetch, key: ChunkKey) -> Process:
        world, step = self.world, fetch.request.step
        is_cached = key in world.cached_params
        nbytes = world.param_itemsize * world.chunk_numel(key)
        yield from world.chunk_move(key, nbytes, SpanKind.READ_PARAMS, step, (step, 0))
        if is_cached:
            self._filled.add(key)
            world.param_slots.give_back()
        self._arrived.put((fetch, key, not is_cached))

    def _run_arrivals(self) -> Process:
        world = self.world
        while True:
            fetch, key, is_slot = yield from self._arrived.get()
            start, stop = world.chunk_ranges[key]
            nbytes = world.param_itemsize * max(0, stop - max(start, self._first(key.block)))
            if nbytes:
                yield from world.copy_in(nbytes, SpanKind.COPY_PARAMS_IN, fetch.request.step, key.block, key.chunk)
            if is_slot and key.block in world.bounds:
                fetch.num_held += 1
            elif is_slot:
                world.param_slots.give_back()
            fetch.num_missing -= 1
            if not fetch.num_missing:
                fetch.arrived.succeed()

    def _tell(self) -> Process:
        while True:
            fetch = yield from self._fetching.get()
            yield fetch.arrived
            self._on_params_ready(fetch)
            fetch.ready.succeed()
