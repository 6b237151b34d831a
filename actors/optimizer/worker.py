"""A CPU optimizer of the pool: reads chunks from the SSD servers, updates them, and writes them back.

`ChunkPipeline` orders the chunks. Its thread that reads states also runs the optimizer's other commands.
"""

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial

import torch

from windlass.actors.job import SCHEDULER, JobContext, grad_precision
from windlass.actors.lifecycle import ActorThreads, ReportTimer, works_at
from windlass.actors.messages import (
    BlockFlushed,
    BlockUpdated,
    ChunkIo,
    ChunkIoDone,
    DescribeStatus,
    ExportModel,
    ExportProgressed,
    FlushBlock,
    GradChunk,
    GradOffloaded,
    GradSlotsReleased,
    KernelChosen,
    LoadModel,
    LoadProgressed,
    Message,
    ModelExported,
    ModelLoaded,
    OfferParams,
    OfferTaken,
    RestoreStates,
    SkipStep,
    SpanKind,
    SpanPulled,
    StatesRestored,
    UpdateBlock,
    UpdateStep,
    UserMessage,
)
from windlass.actors.optimizer.box_params import BoxParams
from windlass.actors.optimizer.chunk_pipeline import ChunkPipeline
from windlass.actors.optimizer.chunk_updater import ChunkUpdater
from windlass.actors.optimizer.model_io import ModelIo, ModelWorker
from windlass.actors.ssd import SsdClient, chunk_io
from windlass.actors.timeline import SpanRecorder
from windlass.actors.worker_policy import Countdown, GradReleases, UpdateActions, UpdateQueue
from windlass.engine.device import TORCH_DTYPE, TensorArena, release_team, state_dtype
from windlass.storage.cancellation import CancelToken, Permits
from windlass.storage.ids import ActorName, BlockIndex, ChunkKey, Span, StateKind, Step
from windlass.storage.memory import Arena, SlotPool

# Largest number of reads in flight when resident states are restored to host memory.
RESTORE_DEPTH = 4


_Command = FlushBlock | RestoreStates | LoadModel | ExportModel | OfferParams


@dataclass(frozen=True, slots=True, eq=False)
class _ChunkUpdate:
    """One chunk of a block's update."""

    update: UpdateBlock
    grad: GradChunk


class CpuOptimizer:
    """Updates its share of the chunks. The first of a box's pool also loads and exports the model, see `ModelIo`."""

    def __init__(
        self,
        name: ActorName,
        index: int,
        context: JobContext,
        send: Callable[..., None],
        *,
        start_model_worker: Callable[[], ModelWorker] | None = None,
    ) -> None:
        """Maps the arena and starts the threads. After an error nothing stays open.

        `start_model_worker` starts what loads or exports the model; without it, the optimizer's own thread does.
        """
        self.name = name
        self.context = context
        self.spec = context.spec
        self.send = send
        self._host_slots = {
            key: slot for key, slot in context.host_slots().items() if context.optimizer_of(key) == name
        }
        self._cached_params = context.cached_params()
        self._offsets = context.state_offsets()
        self._formats = context.formats
        self._grad_dtype = TORCH_DTYPE[grad_precision(self.spec)]
        pool, ordering = context.plan.states[index], self.spec.effective_ordering
        self._token = token = CancelToken()
        self._slots = SlotPool(
            pool.offset, pool.slot_nbytes, pool.num_slots, name=f"state slots of {name}", token=token
        )
        self._pipeline: ChunkPipeline[_ChunkUpdate] = ChunkPipeline(
            self, self._slots, ordering.queues, token, num_threads=self.spec.optimizer_threads
        )
        self._io = SsdClient(name, context, send)
        self._spans = SpanRecorder(name, context.spec.job, send)
        self._lock = threading.RLock()  # of `_update_queue`, `_grad_releases` and all countdowns
        self._update_queue = UpdateQueue(ordering.queues, ordering.max_updating, _num_blocks_of(context, name))
        self._grad_releases = GradReleases(context.plan.grads.num_slots, self.spec.num_cpu_optimizers)
        self._flushes = Countdown()
        self._restore_permits = Permits(token, RESTORE_DEPTH)
        self._threads = ActorThreads(name, context.spec.job, token, send, deadline_s=self.spec.deadline_s)
        with self._threads.stopped_on_error():
            self._start(start_model_worker or self._make_model_mover)

    # --- life cycle -------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ends the threads, whatever they wait for, and unmaps the arena.

        Raises:
            TimeoutError: a thread hangs. The arena stays mapped, because the thread may still use it.
        """
        self._threads.stop()

    def _start(self, start_model_worker: Callable[[], ModelWorker]) -> None:
        self._updater = ChunkUpdater(self.context, announce=self._announce)
        arena = Arena.open(self.context.arena_path)
        self._threads.resources.callback(arena.close)
        self._tensors = TensorArena.of(arena)
        self._threads.resources.callback(self._tensors.release)
        self._box_params = BoxParams(self.name, self.context, self.send)
        self._model_io = ModelIo(
            self.context, self._slots, start_model_worker, self.read, self.write, self._box_params, self._token
        )
        self._threads.resources.callback(self._model_io.close)
        if self.name == self.context.optimizers[0] and self.spec.attempt == 1:  # it loads the initial weights
            self._model_io.prepare()
        chosen = KernelChosen(job=self.spec.job, step=Step(0), actor=self.name, kernel=self._updater.kernel)
        self.send(SCHEDULER, chosen)
        self._threads.start(self._pipeline.loops)

    def post(self, message: Message) -> None:
        """Processes or queues a message and returns at once."""
        match message:
            case GradOffloaded() | UpdateStep() | SkipStep():
                with self._lock:
                    self._carry_out(self._update_queue.add(message))
            case FlushBlock() | RestoreStates() | LoadModel() | ExportModel() | OfferParams():
                self._pipeline.call(partial(self._run, message))
            case SpanPulled() | OfferTaken():
                if isinstance(message, SpanPulled):
                    self._spans.note_pulled(message)
                self._box_params.take(message)
            case ChunkIoDone():
                self._io.take(message)
            case DescribeStatus():
                self._threads.report_status(self._io.describe_pending())
            case _:
                raise ValueError(f"{self.name} has no handler for {type(message).__name__}")

    def _make_model_mover(self) -> ModelWorker:
        # Imported late, because it needs the transformers library.
        from windlass.actors.optimizer.model_mover import ModelMover

        return ModelMover(self.context, self.chunk_view)

    def _announce(self, text: str) -> None:
        self.send(SCHEDULER, UserMessage(job=self.spec.job, step=Step(0), text=text, box=self.spec.box))

    # --- states of chunks -------------------------------------------------------------------------------------------

    def chunk_view(self, slot: Span, key: ChunkKey, kind: StateKind) -> torch.Tensor:
        """Returns one state of a chunk in a slot, as a flat tensor with the chunk's number of elements."""
        return self._view(slot.offset + self._offsets[kind], key, self._dtype(kind))

    def grad_view(self, span: Span, key: ChunkKey) -> torch.Tensor:
        """Returns a chunk's gradient in its slot, as a flat tensor."""
        return self._view(span.offset, key, self._grad_dtype)

    def _dtype(self, kind: StateKind) -> torch.dtype:
        return self._grad_dtype if kind is StateKind.GRAD else state_dtype(self._formats, kind)

    def _view(self, offset: int, key: ChunkKey, dtype: torch.dtype) -> torch.Tensor:
        return self._tensors.view(offset, self.context.chunk_numel(key), dtype)

    def _chunk_io(
        self, slot: Span, key: ChunkKey, kinds: tuple[StateKind, ...], cached_params: Span | None = None
    ) -> ChunkIo:
        offsets = {kind: slot.offset + self._offsets[kind] for kind in kinds}
        if cached_params is not None:
            offsets[self._formats.param_kind] = cached_params.offset
        itemsizes = {kind: self._dtype(kind).itemsize for kind in kinds}
        return chunk_io(key, self.context.chunk_numel(key), offsets, itemsizes)

    def read(
        self, slot: Span, key: ChunkKey, kinds: tuple[StateKind, ...], step: Step, on_done: Callable[[], None]
    ) -> None:
        """Requests states of `step`; `on_done` is called when they are in the slot."""
        self._io.read([self._chunk_io(slot, key, kinds)], step, (step + 1, key.block), lambda _: on_done())

    def write(self, slot: Span, key: ChunkKey, step: Step, on_done: Callable[[], None]) -> None:
        """Requests the write of a chunk's states as those of `step`; `on_done` is called when the slot is free."""
        item = self._chunk_io(slot, key, tuple(self._formats.itemsizes))
        self._io.write([item], step, (step, key.block), lambda _: on_done())

    # --- commands ---------------------------------------------------------------------------------------------------

    def _run(self, message: _Command) -> None:
        works_at(message)
        match message:
            case FlushBlock():
                self._flush(message)
            case RestoreStates():
                self._restore(message)
            case LoadModel():
                total = self.context.layout.numel
                self._model_io.load(lambda num_params: self._tell_loaded(num_params, total))
                self.send(SCHEDULER, ModelLoaded(job=self.spec.job, step=Step(0), actor=self.name))
            case ExportModel():
                self._model_io.export(
                    message.path, message.step, message.copy_of, partial(self._tell_exported, message)
                )
                exported = ModelExported(job=self.spec.job, step=message.step, actor=self.name, path=message.path)
                self.send(SCHEDULER, exported)
            case OfferParams():
                self._model_io.offer(message.key, message.step)
        release_team()  # because another actor in the same process may compute on the CPU

    def _flush(self, message: FlushBlock) -> None:
        slots = {key: slot for key, slot in self._host_slots.items() if key.block == message.block}
        with self._lock:
            self._flushes.start((message.step, message.block), len(slots))

        def written(_: ChunkKey) -> None:
            if self._part_done(self._flushes, (message.step, message.block)):
                done = BlockFlushed(job=self.spec.job, step=message.step, block=message.block, actor=self.name)
                self.send(SCHEDULER, done)

        kinds = tuple(self._formats.itemsizes)
        # As urgent as the updates of the next step, but less urgent than the params of its forward pass.
        priority = (message.step + 1, message.block)
        self._io.write(
            [self._chunk_io(slot, key, kinds) for key, slot in slots.items()], message.step, priority, written
        )

    def _restore(self, message: RestoreStates) -> None:
        """Restores the resident states. It reads a few chunks at a time, so that each has the attention of its SSD."""
        kinds, what = tuple(self._formats.itemsizes), f"states of step {message.step} from the SSDs; check the disks"
        total = sum(self.context.chunk_numel(key) for key in self._host_slots)
        timer, num_params = ReportTimer(), 0
        for key, slot in self._host_slots.items():
            self._restore_permits.acquire(what)
            self.read(slot, key, kinds, message.step, self._restore_permits.release)
            num_params += self.context.chunk_numel(key)
            if timer.restart_if_due(time.monotonic()):
                self._tell_loaded(num_params, total)
        for _ in range(RESTORE_DEPTH):  # waits for the last reads
            self._restore_permits.acquire(what)
        self.send(SCHEDULER, StatesRestored(job=self.spec.job, step=message.step, actor=self.name))

    def _tell_loaded(self, num_params: int, total_params: int) -> None:
        progress = LoadProgressed(
            job=self.spec.job, step=Step(0), actor=self.name, num_params=num_params, total_params=total_params
        )
        self.send(SCHEDULER, progress)

    def _tell_exported(self, message: ExportModel, share: float) -> None:
        progress = ExportProgressed(job=self.spec.job, step=message.step, actor=self.name, share=share)
        self.send(SCHEDULER, progress)

    # --- updates ----------------------------------------------------------------------------------------------------

    def _carry_out(self, actions: UpdateActions) -> None:
        """Begins updates and discards gradients. The caller holds the lock."""
        for update in actions.begin:
            self._begin(update)
        for grad in actions.discard:
            if spans := tuple(chunk.span for chunk in grad.chunks if chunk.span is not None):
                self.send(self.context.grads_worker, GradSlotsReleased(job=grad.job, step=grad.step, spans=spans))

    def _begin(self, update: UpdateBlock) -> None:
        self._grad_releases.begin(len(update.chunks))
        self._pipeline.begin(update.step, update.block, [_ChunkUpdate(update, grad) for grad in update.chunks])

    def works_at(self, chunk: _ChunkUpdate) -> None:
        """See UpdateIo."""
        works_at(chunk.update)

    def resident_slot(self, chunk: _ChunkUpdate) -> Span | None:
        """See UpdateIo."""
        return self._host_slots.get(chunk.grad.key)

    def read_states(self, chunk: _ChunkUpdate, slot: Span, on_done: Callable[[], None]) -> None:
        """See UpdateIo."""
        update, key = chunk.update, chunk.grad.key
        kinds = self._formats.kinds_to_update
        if key in self._cached_params:  # the forward pass has read the params
            kinds = tuple(kind for kind in kinds if kind is not self._formats.param_kind)
        reads = [(kinds, update.how.from_step)]
        if chunk.grad.span is None:
            reads.insert(0, ((StateKind.GRAD,), update.step))
        left = Countdown()
        left.start(key, len(reads))

        def arrived(_: ChunkKey) -> None:
            if self._part_done(left, key):
                on_done()

        for its_kinds, step in reads:
            self._io.read([self._chunk_io(slot, key, its_kinds)], step, (update.step, key.block), arrived)

    def update_chunk(self, chunk: _ChunkUpdate, slot: Span) -> None:
        """See UpdateIo."""
        start_s, update, key = time.monotonic(), chunk.update, chunk.grad.key
        held = {kind: self.chunk_view(slot, key, kind) for kind in self._formats.itemsizes}
        if (params := self._cached_params.get(key)) is not None:
            kind = self._formats.param_kind
            held[kind] = self._view(params.offset, key, self._dtype(kind))
        if chunk.grad.span is None:
            grad = self.chunk_view(slot, key, StateKind.GRAD)
        else:
            grad = self.grad_view(chunk.grad.span, key)
        start, _ = self.context.layout.chunk_range(key)
        self._updater.update(update, start, grad, held)
        self._spans.note(self.name, SpanKind.UPDATE, update.step, key.block, key.chunk, start_s, time.monotonic())
        with self._lock:
            released = self._grad_releases.updated(chunk.grad.span)
        if released:
            self.send(self.context.grads_worker, GradSlotsReleased(job=self.spec.job, step=update.step, spans=released))

    def write_states(self, chunk: _ChunkUpdate, slot: Span, on_done: Callable[[], None]) -> None:
        """See UpdateIo."""
        update, key = chunk.update, chunk.grad.key
        item = self._chunk_io(slot, key, tuple(self._formats.itemsizes), self._cached_params.get(key))
        self._io.write([item], update.step, (update.step, key.block), lambda _: on_done())

    def block_updated(self, step: Step, block: BlockIndex) -> None:
        """See UpdateIo."""
        with self._lock:
            actions = self._update_queue.updated(step)
            if actions.is_step_over:
                self._spans.tell(step)  # before the report below, with which the step may be over for the scheduler
            self.send(SCHEDULER, BlockUpdated(job=self.spec.job, step=step, block=block, actor=self.name))
            self._carry_out(actions)

    def _part_done(self, countdown: Countdown, task: Hashable) -> bool:
        with self._lock:
            return countdown.part_done(task)


def _num_blocks_of(context: JobContext, name: ActorName) -> int:
    """Returns the number of blocks of which an optimizer updates a share in each step."""
    layout = context.layout
    blocks = (block.index for block in layout.blocks if block.index not in context.plan.device_blocks)
    return sum(any(context.optimizer_of(key) == name for key in layout.chunk_keys(block)) for block in blocks)
