"""A job as it would run on a machine that may not exist: discrete events, in no time and with no bytes.

The scheduler's policy is the real one, and so are the plan's slots and the cache of params; what is simulated are the
other actors, chunk by chunk, as far as they use resources: compute, the two ways to the device, each SSD, each
optimizer. A resource does one thing at a time and takes as long as its rate says. What comes out are the spans that the
real actors would tell, and from them the same timeline.
"""

import functools
import itertools
from bisect import bisect_right
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import simpy

from windlass.actors.context import JobContext, grad_itemsize, ssd_name
from windlass.actors.messages import (
    BlockBackwardDone,
    BlockComputed,
    BlockFlushed,
    BlockUpdated,
    CommitStore,
    ComputeBlock,
    ExportModel,
    FlushBlock,
    GradChunk,
    GradOffloaded,
    Message,
    ModelExported,
    OffloadGrad,
    Phase,
    PrefetchParams,
    RestoreStates,
    SpanKind,
    StatesRestored,
    StoreCommitted,
    UpdateBlock,
    WorkSpan,
)
from windlass.actors.param_cache import ParamCache
from windlass.actors.policy.pipeline import Pipeline
from windlass.actors.policy.shape import JobShape
from windlass.actors.policy.trainer import Trainer
from windlass.actors.policy.waits import Instruction
from windlass.actors.read_ahead import Ahead
from windlass.actors.spans import COMPUTE, FROM_DEVICE, NO_BLOCK, TO_DEVICE, WHOLE_BLOCK
from windlass.actors.spans_file import StepSpans
from windlass.actors.timeline import Timeline
from windlass.actors.urgent_queue import UrgentQueue
from windlass.planner.device_buffers import MAX_GRAD_BUFFERS, grad_buffers, param_buffers
from windlass.storage.arena import SlotPool
from windlass.storage.ids import ActorName, BlockIndex, ChunkKey, Span, Step

_Process = Generator[simpy.Event, Any, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Of each resource; bytes and params are per second."""

    h2d_bytes: float
    d2h_bytes: float
    ssd_read_bytes: tuple[float, ...]  # of each SSD
    ssd_write_bytes: tuple[float, ...]
    optimizer_params: float  # of each optimizer
    device_params: float  # updated on the device, for blocks that rest there
    message_s: float = 0.0  # to the scheduler or from it; those between workers take no time
    commit_s: float = 0.0  # of an SSD, once everything is written


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What operations take: seconds of compute for all micro-batches of a step, by phase and block."""

    compute_s: Mapping[tuple[Phase, int], float]


class Stuck(RuntimeError):
    """A simulated job that does not end: what it waits for never comes."""


class NotSimulated(ValueError):
    """The job does something that is not simulated yet; a step would come out too short. The text names it."""


class _Signal:
    """What several processes may wait for, again and again."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self.next = env.event()

    def tell(self) -> None:
        """Something has changed: who waits looks again."""
        told, self.next = self.next, self._env.event()
        told.succeed()


class _Resource:
    """Does one thing after the other, the most urgent first."""

    def __init__(self, simulation: "_Simulation", name: str) -> None:
        self._simulation = simulation
        self._name = name
        self._turns = simpy.PriorityResource(simulation.env, capacity=1)

    def work(
        self,
        duration_s: float,
        kind: SpanKind,
        step: int,
        block: int,
        chunk: int = WHOLE_BLOCK,
        nbytes: int = 0,
        priority: tuple[int, int] = (0, 0),
        num_pieces: int = 1,
    ) -> _Process:
        """`num_pieces`: after each of them something more urgent may go first."""
        start_s = None
        for _ in range(num_pieces):
            with self._turns.request(priority=priority) as turn:  # type: ignore[arg-type]
                yield turn
                start_s = self._simulation.env.now if start_s is None else start_s
                yield self._simulation.env.timeout(duration_s / num_pieces)
        assert start_s is not None, "there is at least one piece"
        self._simulation.note(self._name, kind, step, block, chunk, start_s, nbytes)


@dataclass(slots=True, eq=False)
class _Fetch:
    """Params of one block on their way to the device."""

    request: PrefetchParams
    num_missing: int
    numel: int | None  # of the buffer; None: where they rest
    ready: simpy.Event


@dataclass(slots=True, eq=False)
class _Chunk:
    """A chunk at an optimizer."""

    update: UpdateBlock
    grad: GradChunk
    loan: Any = None


class _Optimizer:
    """One of the pool: as `cpu_optimizer.CpuOptimizer`."""

    def __init__(self, simulation: "_Simulation", name: ActorName, num_slots: int) -> None:
        self.sim = simulation
        self.name = name
        self._resource = _Resource(simulation, name)
        self._slots = simpy.Container(simulation.env, capacity=num_slots, init=num_slots)
        self._to_begin: UrgentQueue[_Chunk] = UrgentQueue(simulation.pipeline.shape.ordering.queues)
        self._arrived = simpy.Store(simulation.env)
        self._ahead = Ahead()
        self._changed = _Signal(simulation.env)
        self._num_left: dict[tuple[int, int], int] = {}
        self._loans: dict[tuple[int, int], dict[ChunkKey, Any]] = {}
        simulation.env.process(self._feed())
        simulation.env.process(self._run_updates())

    def update(self, message: UpdateBlock) -> None:
        self._num_left[(message.step, message.block)] = len(message.chunks)
        for grad in message.chunks:
            self._to_begin.put(message.step, message.block, _Chunk(message, grad))
        self._changed.tell()

    def _feed(self) -> _Process:
        sim, ahead = self.sim, self._ahead
        while True:
            while not (self._to_begin and ahead.may_begin):
                yield self._changed.next
            ahead.num_ahead += 1
            yield self._slots.get(1)
            chunk = self._to_begin.get()
            if chunk.grad.key in sim.host_slots:
                self._slots.put(1)
                ahead.num_at_hand += 1
                self._arrived.put(chunk)
                continue
            chunk.loan = self._borrow(chunk)
            sim.env.process(self._read(chunk))

    def _borrow(self, chunk: _Chunk) -> Any:
        sim, update = self.sim, chunk.update
        if not sim.context.plan.num_cached_params:
            return None
        key = (update.step, update.block)
        if key not in self._loans:
            loans = (sim.cache.lend(each.key, update.from_step) for each in update.chunks)
            self._loans[key] = {loan.key: loan for loan in loans if loan is not None}
        return self._loans[key].get(chunk.grad.key)

    def _read(self, chunk: _Chunk) -> _Process:
        sim, update, key = self.sim, chunk.update, chunk.grad.key
        formats, numel = sim.context.formats, sim.context.chunk_numel(key)
        kinds = set(formats.kinds_to_update)
        if chunk.loan is not None and chunk.loan.is_filled:
            kinds.discard(formats.param_kind)
        reads = [(sum(formats.itemsizes[kind] for kind in kinds) * numel, SpanKind.READ_STATES)]
        if chunk.grad.span is None:
            reads.append((sim.grad_itemsize * numel, SpanKind.READ_GRAD))
        moves = [
            sim.env.process(sim.ssd_read(key, nbytes, kind, update.from_step, (update.step, key.block)))
            for nbytes, kind in reads
        ]
        yield sim.env.all_of(moves)
        self._ahead.num_at_hand += 1
        self._arrived.put(chunk)

    def _run_updates(self) -> _Process:
        sim = self.sim
        while True:
            chunk = yield self._arrived.get()
            self._ahead.num_ahead -= 1
            self._changed.tell()
            update, key = chunk.update, chunk.grad.key
            duration_s = sim.context.chunk_numel(key) / sim.rates.optimizer_params
            yield from self._resource.work(duration_s, SpanKind.UPDATE, update.step, key.block, key.chunk)
            self._ahead.num_at_hand -= 1
            self._changed.tell()
            if chunk.grad.span is not None:
                sim.grad_slots.put(1)
            if key in sim.host_slots:
                self._done(update)
            else:
                sim.env.process(self._write_back(chunk))

    def _write_back(self, chunk: _Chunk) -> _Process:
        sim, update, key = self.sim, chunk.update, chunk.grad.key
        nbytes = sim.state_itemsize * sim.context.chunk_numel(key)
        yield from sim.ssd_write(key, nbytes, SpanKind.WRITE_STATES, update.step, (update.step, key.block))
        self._slots.put(1)
        if chunk.loan is not None:
            sim.cache.take_back(key, update.step, chunk.loan.span)
        self._done(update)

    def _done(self, update: UpdateBlock) -> None:
        key = (update.step, update.block)
        self._num_left[key] -= 1
        if not self._num_left[key]:
            del self._num_left[key]
            self._loans.pop(key, None)
            self.sim.tell(BlockUpdated(job=update.job, step=update.step, block=update.block, actor=self.name))


class _Worker:
    """The GPU worker: params in, compute, gradients out."""

    def __init__(self, simulation: "_Simulation") -> None:
        self.sim = simulation
        env, context = simulation.env, simulation.context
        self._requests, self._arrived = simpy.Store(env), simpy.Store(env)
        self._to_compute, self._to_offload, self._commands = simpy.Store(env), simpy.Store(env), simpy.Store(env)
        self._fetches: dict[tuple[int, BlockIndex], _Fetch] = {}
        self._created = _Signal(env)
        numbers = param_buffers(
            [block.numel for block in context.layout.blocks],
            context.layout.shared,
            resident=context.plan.device_blocks,
            num_ahead=context.spec.effective_ordering.max_prefetched,
        )
        self._buffers = {numel: simpy.Container(env, capacity=n, init=n) for numel, n in numbers.items()}
        self._permits = simpy.Container(env, capacity=MAX_GRAD_BUFFERS, init=MAX_GRAD_BUFFERS)
        numels: dict[int, int] = {block.index: block.numel for block in context.layout.blocks}
        flats = grad_buffers(numels, resident=context.plan.device_blocks, num_waiting=MAX_GRAD_BUFFERS)
        self._flats = {numel: simpy.Container(env, capacity=n, init=n) for numel, n in flats.items()}
        num_transit = max(1, context.plan.transit.num_slots)
        self._transit = simpy.Container(env, capacity=num_transit, init=num_transit)
        self._batch = context.plan.fetch_batch
        for loop in (self._run_requests, self._run_arrivals, self._run_compute, self._run_offloads, self._run_commands):
            env.process(loop())

    def post(self, message: Message) -> None:
        match message:
            case PrefetchParams():
                self._requests.put(message)
            case ComputeBlock():
                self._to_compute.put(message)
            case OffloadGrad():
                self._to_offload.put(message)
            case UpdateBlock() | FlushBlock():
                self._commands.put(message)

    def _run_requests(self) -> _Process:
        sim = self.sim
        while True:
            request = yield self._requests.get()
            keys = sim.context.layout.chunk_keys(request.block)
            if request.block in sim.context.plan.device_blocks:
                fetch = _Fetch(request, 0, None, sim.env.event())
                fetch.ready.succeed()
            else:
                numel = sim.context.layout.blocks[request.block].numel
                yield self._buffers[numel].get(1)
                fetch = _Fetch(request, len(keys), numel, sim.env.event())
            self._fetches[(request.op, request.block)] = fetch
            self._created.tell()
            if fetch.numel is None:
                continue
            missing = []
            for key in keys:
                if key in sim.host_slots:
                    self._arrived.put((fetch, key, None))
                elif (kept := sim.cache.take(key, request.step)) is not None:
                    self._arrived.put((fetch, key, kept))
                else:
                    missing.append(key)
            for start in range(0, len(missing), self._batch):
                some = missing[start : start + self._batch]
                while not (spans := sim.param_slots.try_acquire(len(some))):
                    yield sim.param_slots_changed.next
                for key, span in zip(some, spans, strict=True):
                    sim.env.process(self._read(fetch, key, span))

    def _read(self, fetch: _Fetch, key: ChunkKey, span: Span) -> _Process:
        sim, step = self.sim, fetch.request.step
        nbytes = sim.param_itemsize * sim.context.chunk_numel(key)
        yield from sim.ssd_read(key, nbytes, SpanKind.READ_PARAMS, step, (step, 0))
        self._arrived.put((fetch, key, span))

    def _run_arrivals(self) -> _Process:
        sim = self.sim
        while True:
            fetch, key, span = yield self._arrived.get()
            nbytes = sim.param_itemsize * sim.context.chunk_numel(key)
            request = fetch.request
            duration_s = nbytes / sim.rates.h2d_bytes
            yield from sim.h2d.work(duration_s, SpanKind.COPY_PARAMS_IN, request.step, key.block, key.chunk, nbytes)
            if span is not None:
                sim.cache.put(key, request.step, span, request.phase, is_last_group=True)
                sim.param_slots_changed.tell()
            fetch.num_missing -= 1
            if not fetch.num_missing:
                fetch.ready.succeed()

    def _run_compute(self) -> _Process:
        sim = self.sim
        while True:
            start_s = sim.env.now
            operation = yield self._to_compute.get()
            sim.note(COMPUTE, SpanKind.WAIT_OPERATION, operation.step, operation.block, WHOLE_BLOCK, start_s)
            fetches = []
            for block in operation.blocks:
                start_s = sim.env.now
                while (operation.op, block) not in self._fetches:
                    yield self._created.next
                fetch = self._fetches.pop((operation.op, block))
                yield fetch.ready
                fetches.append(fetch)
                sim.note(COMPUTE, SpanKind.WAIT_PARAMS, operation.step, block, WHOLE_BLOCK, start_s)
            has_grad = operation.phase in (Phase.HEAD, Phase.BACKWARD)
            stays = operation.block in sim.context.plan.device_blocks
            if has_grad and not stays:
                start_s = sim.env.now
                yield self._permits.get(1)
                yield self._flats[sim.context.layout.blocks[operation.block].numel].get(1)
                sim.note(COMPUTE, SpanKind.WAIT_GRAD_BUFFER, operation.step, operation.block, WHOLE_BLOCK, start_s)
            duration_s = sim.work.compute_s[(operation.phase, operation.block)]
            kind = SpanKind(operation.phase)
            yield from sim.compute.work(duration_s, kind, operation.step, operation.block)
            for fetch in fetches:
                if fetch.numel is not None:
                    self._buffers[fetch.numel].put(1)
            if has_grad:
                sim.tell(
                    BlockBackwardDone(job=operation.job, step=operation.step, block=operation.block, grad_sq_sum=1.0)
                )
            sim.tell(
                BlockComputed(
                    job=operation.job,
                    step=operation.step,
                    op=operation.op,
                    phase=operation.phase,
                    block=operation.block,
                    compute_s=duration_s,
                    is_finite=True,
                )
            )

    def _run_offloads(self) -> _Process:
        sim = self.sim
        while True:
            request = yield self._to_offload.get()
            keys = sim.context.layout.chunk_keys(request.block)
            yield sim.grad_slots.get(len(keys))
            self._permits.put(1)
            for key in keys:
                nbytes = sim.grad_itemsize * sim.context.chunk_numel(key)
                duration_s = nbytes / sim.rates.d2h_bytes
                yield from sim.d2h.work(duration_s, SpanKind.COPY_GRAD_OUT, request.step, key.block, key.chunk, nbytes)
            self._flats[sim.context.layout.blocks[request.block].numel].put(1)
            if request.block in sim.context.plan.spilled_blocks:
                sim.env.process(self._spill(request, keys))
            else:
                self._offloaded(request, tuple(GradChunk(key, Span(0, 0)) for key in keys))

    def _spill(self, request: OffloadGrad, keys: Sequence[ChunkKey]) -> _Process:
        sim = self.sim

        def spill(key: ChunkKey) -> _Process:
            nbytes = sim.grad_itemsize * sim.context.chunk_numel(key)
            yield from sim.ssd_write(key, nbytes, SpanKind.WRITE_GRAD, request.step, (request.step, request.block))
            sim.grad_slots.put(1)

        yield sim.env.all_of([sim.env.process(spill(key)) for key in keys])
        self._offloaded(request, tuple(GradChunk(key, None) for key in keys))

    def _offloaded(self, request: OffloadGrad, chunks: tuple[GradChunk, ...]) -> None:
        self.sim.tell(GradOffloaded(job=request.job, step=request.step, block=request.block, chunks=chunks))

    def _run_commands(self) -> _Process:
        """Of blocks whose states rest on the device: one after the other, as `device_states.DeviceStates`."""
        sim = self.sim
        while True:
            command = yield self._commands.get()
            block, name = command.block, sim.pipeline.shape.gpu_worker
            if isinstance(command, UpdateBlock):
                duration_s = sim.context.layout.blocks[block].numel / sim.rates.device_params
                yield from sim.compute.work(duration_s, SpanKind.UPDATE, command.step, block)
                sim.tell(BlockUpdated(job=command.job, step=command.step, block=block, actor=name))
            else:
                keys = sim.context.layout.chunk_keys(block)
                yield sim.env.all_of([sim.env.process(self._flush(command, key)) for key in keys])
                sim.tell(BlockFlushed(job=command.job, step=command.step, block=block, actor=name))

    def _flush(self, command: FlushBlock, key: ChunkKey) -> _Process:
        sim, step = self.sim, command.step
        nbytes = sim.state_itemsize * sim.context.chunk_numel(key)
        yield self._transit.get(1)
        duration_s = nbytes / sim.rates.d2h_bytes
        yield from sim.d2h.work(duration_s, SpanKind.COPY_STATES_OUT, step, key.block, key.chunk, nbytes)
        yield from sim.ssd_write(key, nbytes, SpanKind.WRITE_STATES, step, (step, key.block))
        self._transit.put(1)


class _Simulation:
    """The world that the simulated actors share."""

    def __init__(self, context: JobContext, shape: JobShape, rates: Rates, work: Work) -> None:
        self.env = simpy.Environment()
        self.context = context
        self.rates = rates
        self.work = work
        self.spans: list[WorkSpan] = []
        self.host_slots = context.host_slots()
        formats, plan = context.formats, context.plan
        self.param_itemsize = formats.itemsizes[formats.param_kind]
        self.state_itemsize = sum(formats.itemsizes.values())
        self.grad_itemsize = grad_itemsize(context.spec)
        pool = plan.params
        self.param_slots = SlotPool(pool.offset, pool.slot_nbytes, pool.num_slots)
        self.param_slots_changed = _Signal(self.env)
        self.cache = ParamCache.of_job(context, self.param_slots)
        self.grad_slots = simpy.Container(self.env, capacity=plan.grads.num_slots, init=plan.grads.num_slots)
        self.compute, self.h2d, self.d2h = (_Resource(self, name) for name in (COMPUTE, TO_DEVICE, FROM_DEVICE))
        self._ssds = [_Resource(self, ssd_name(index)) for index in range(len(context.ssds))]
        self._geometry = context.geometry(0) if context.ssds else None
        self.pipeline = Pipeline(shape, Trainer(scales_loss=False), Step(0))
        self._optimizers = {
            name: _Optimizer(self, name, plan.states[index].num_slots) for index, name in enumerate(shape.optimizers)
        }
        self._worker = _Worker(self)

    # --- between actors ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until the last step is committed. Raises `Stuck`."""
        self._issue(self.pipeline.start(0.0))
        self.env.run()
        if not self.pipeline.finished:
            waits = ", ".join(f"{wait}" for wait in itertools.islice(self.pipeline.waits.outstanding.values(), 5))
            raise Stuck(f"the simulated job ends at step {self.pipeline.committed} and waits for: {waits or 'nothing'}")

    def tell(self, event: Message) -> None:
        """To the scheduler."""
        self._later(lambda: self._issue(self.pipeline.handle(event, self.env.now)))

    def _issue(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            self._later(functools.partial(self._deliver, instruction))

    def _later(self, call: Callable[[], None]) -> None:
        self.env.timeout(self.rates.message_s).callbacks.append(lambda _: call())

    def _deliver(self, instruction: Instruction) -> None:
        message, to = instruction.message, instruction.to
        match message:
            case CommitStore():
                self.env.process(self._commit(message, to))
            case FlushBlock() if to in self._optimizers:
                self.env.process(self._flush(message, to))
            case RestoreStates():
                self.tell(StatesRestored(job=message.job, step=message.step, actor=to))
            case ExportModel():
                self.tell(ModelExported(job=message.job, step=message.step, path=message.path))
            case UpdateBlock() if to in self._optimizers:
                self._optimizers[to].update(message)
            case _:
                self._worker.post(message)

    # --- what actors use --------------------------------------------------------------------------------------------

    def note(
        self, resource: str, kind: SpanKind, step: int, block: int, chunk: int, start_s: float, nbytes: int = 0
    ) -> None:
        """Something that began then is over."""
        self.spans.append(WorkSpan(resource, kind, step, block, chunk, start_s, self.env.now, nbytes))

    def ssd_read(self, key: ChunkKey, nbytes: int, kind: SpanKind, step: int, priority: tuple[int, int]) -> _Process:
        """A chunk's states come from its SSD."""
        return self._ssd_move(self.rates.ssd_read_bytes, key, nbytes, kind, step, priority)

    def ssd_write(self, key: ChunkKey, nbytes: int, kind: SpanKind, step: int, priority: tuple[int, int]) -> _Process:
        """... and go there."""
        return self._ssd_move(self.rates.ssd_write_bytes, key, nbytes, kind, step, priority)

    def _ssd_move(
        self, rates: Sequence[float], key: ChunkKey, nbytes: int, kind: SpanKind, step: int, priority: tuple[int, int]
    ) -> _Process:
        assert self._geometry is not None
        index = self._geometry.ssd_of(key)
        num_pieces = max(1, -(-nbytes // self.context.ssds[index].io.piece_nbytes))
        duration_s = nbytes / rates[index]
        ssd = self._ssds[index]
        yield from ssd.work(duration_s, kind, step, key.block, key.chunk, nbytes, priority, num_pieces)

    def _commit(self, message: CommitStore, ssd: ActorName) -> _Process:
        start_s = self.env.now
        yield self.env.timeout(self.rates.commit_s)
        self.note(ssd, SpanKind.COMMIT, message.step, NO_BLOCK, WHOLE_BLOCK, start_s)
        self.tell(StoreCommitted(job=message.job, step=message.step, actor=ssd, bytes_read=0, bytes_written=0))

    def _flush(self, message: FlushBlock, holder: ActorName) -> _Process:
        """Of a block whose states rest in host memory."""
        keys = self.context.layout.chunk_keys(message.block)
        priority = (message.step + 1, message.block)
        writes = [
            self.ssd_write(
                key, self.state_itemsize * self.context.chunk_numel(key), SpanKind.WRITE_STATES, message.step, priority
            )
            for key in keys
            if self.pipeline.shape.optimizer_of(key) == holder
        ]
        yield self.env.all_of([self.env.process(write) for write in writes])
        self.tell(BlockFlushed(job=message.job, step=message.step, block=message.block, actor=holder))


def simulate(context: JobContext, shape: JobShape, rates: Rates, work: Work) -> list[StepSpans]:
    """The timelines of all steps of a job, as the real job would tell them; evaluations are left out.

    Raises:
        NotSimulated: the plan has something that is not simulated.
        Stuck: the job does not end. That would be a defect of the policy, the plan or this simulation.
    """
    _check(context, rates)
    shape = replace(shape, num_evaluation_groups=0)
    simulation = _Simulation(context, shape, rates, work)
    simulation.run()
    timeline = Timeline(
        shape.num_blocks,
        keeps_grads=shape.keeps_grads,
        overlaps_steps=shape.ordering.overlaps_steps,
        max_spans=len(simulation.spans),
    )
    timeline.begin(0.0)
    spans, told = sorted(simulation.spans, key=attrgetter("end_s")), 0
    found = []
    # Actors tell of a step while the next one runs.
    ends = [span.end_s for span in spans if span.kind is SpanKind.BACKWARD and span.block == 0]
    for step in range(1, shape.total_steps + 1):
        known = bisect_right(spans, ends[step], key=attrgetter("end_s")) if step < len(ends) else len(spans)
        timeline.add(spans[told:known])
        told = known
        ended = timeline.end_step(step)
        assert ended is not None, f"the simulated job has no step {step}"
        found.append(ended)
    return found


def _check(context: JobContext, rates: Rates) -> None:
    plan, num_ssds = context.plan, len(context.ssds)
    if len(rates.ssd_read_bytes) != num_ssds or len(rates.ssd_write_bytes) != num_ssds:
        raise ValueError(f"the job has {num_ssds} SSDs; rates are given for {len(rates.ssd_read_bytes)}")
    if any(choice.swaps for choice in plan.layer_activations):
        raise NotSimulated("activations are to be swapped, and what they move is not simulated")
    if plan.streamed_blocks:
        raise NotSimulated(f"blocks {plan.streamed_blocks} come to the device in pieces, which is not simulated")
    if plan.num_groups > 1:
        raise NotSimulated(f"a step has {plan.num_groups} groups of micro-batches, whose sums are not simulated")
