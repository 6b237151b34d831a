"""One optimizer of the pool: updates chunks, read from the SSD servers and written back to them.

Reading, updating and writing back of successive chunks overlap: a feeder thread asks for states as slots come free, one
thread updates what has arrived, and write-backs are reported by the SSD servers.
"""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from windlass.actors.context import GPU_WORKER, SCHEDULER, JobContext, aligned, grad_precision, ssd_name
from windlass.actors.job_spec import Optimizer
from windlass.actors.messages import (
    ActorFailed,
    BlockUpdated,
    ChunkIo,
    ChunkIoDone,
    ChunkPart,
    ExportModel,
    GradChunk,
    GradSlotsReturned,
    KernelChosen,
    LoadModel,
    LoadProgressed,
    Message,
    ModelExported,
    ModelLoaded,
    ReadChunks,
    UpdateBlock,
    WriteChunks,
)
from windlass.actors.model_io import ModelIo
from windlass.engine.formats import TORCH_DTYPE, state_dtype
from windlass.engine.optimizer_formulas import AdamSettings
from windlass.engine.optimizer_kernel import ChunkStates, OptimizerKernel
from windlass.storage.arena import Arena, SlotPool
from windlass.storage.ids import ActorName, ChunkKey, CorrelationId, Formats, Span, StateKind, Step

# A block has fewer elements than this power of two: each element of the model has a place of its own.
_BLOCK_SHIFT = 40


def _read_kinds(formats: Formats) -> tuple[StateKind, ...]:
    """What an update reads: not the param where that follows from the master."""
    return tuple(
        kind for kind in formats.itemsizes if kind is not StateKind.PARAM or StateKind.MASTER not in formats.itemsizes
    )


@dataclass(frozen=True, slots=True)
class _ChunkUpdate:
    """One chunk of an update in flight, with the slot its states lie in."""

    update: UpdateBlock
    grad: GradChunk
    slot: Span


class CpuOptimizer:
    """Updates its share of the chunks. The first of the pool also loads and exports the model."""

    def __init__(self, name: ActorName, index: int, context: JobContext, send: Callable[..., None]) -> None:
        self.name = name
        self.context = context
        self.spec = context.spec
        self.send = send
        self._geometry = context.geometry(0)
        self._pool = context.plan.states[index]
        self._offsets = context.state_offsets()
        self._formats = context.formats
        self._grad_dtype = TORCH_DTYPE[grad_precision(self.spec)]
        self._read_kinds = _read_kinds(context.formats)
        self._updates: queue.Queue[UpdateBlock | LoadModel | ExportModel | None] = queue.Queue()
        self._arrived: queue.Queue[_ChunkUpdate | None] = queue.Queue()
        self._lock = threading.Lock()
        self._correlation = 0
        self._on_done: dict[CorrelationId, Callable[[], None]] = {}
        self._num_unwritten: dict[tuple[Step, int], int] = {}
        self._threads: list[threading.Thread] = []
        self._stopping = False

    # --- life cycle -------------------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Maps the arena and starts the threads."""
        hyper = self.spec.hyperparameters
        self._kernel = OptimizerKernel(
            AdamSettings(
                beta1=hyper.beta1,
                beta2=hyper.beta2,
                epsilon=hyper.epsilon,
                weight_decay=hyper.weight_decay,
                decoupled=hyper.optimizer is Optimizer.ADAMW,
            ),
            grad_dtype=self._grad_dtype,
            param_dtype=None if self._formats.param_kind is StateKind.MASTER else TORCH_DTYPE[self._formats.precision],
            state_precision=self._formats.states,
            kernel=hyper.kernel,
            cache_dir=None if self.spec.kernel_dir is None else Path(self.spec.kernel_dir),
        )
        self._arena = Arena.open(self.context.arena_path)
        self._memory = torch.frombuffer(self._arena.buffer(Span(0, self._arena.nbytes)), dtype=torch.uint8)
        pool = self._pool
        self._slots = SlotPool(pool.offset, pool.slot_nbytes, pool.num_slots, name=f"state slots of {self.name}")
        self._model_io = ModelIo(self.context, self._slots, self.chunk_view, self.read, self.write)
        chosen = KernelChosen(job=self.spec.job, step=Step(0), actor=self.name, kernel=self._kernel.kernel)
        self.send(SCHEDULER, chosen)
        for target in (self._run_feeder, self._run_updates):
            thread = threading.Thread(target=self._guard, args=(target,), name=target.__name__, daemon=True)
            thread.start()
            self._threads.append(thread)

    def post(self, message: Message) -> None:
        """Takes a message and returns at once."""
        match message:
            case UpdateBlock() | LoadModel() | ExportModel():
                self._updates.put(message)
            case ChunkIoDone():
                with self._lock:
                    on_done = self._on_done.pop(message.correlation)
                on_done()
            case _:
                raise ValueError(f"{self.name} does not take {type(message).__name__}")

    def stop(self) -> None:
        """Ends the threads, whatever they wait for, and unmaps the arena."""
        self._stopping = True
        self._model_io.abort()
        self._slots.close()
        self._updates.put(None)
        self._arrived.put(None)
        for thread in self._threads:
            thread.join(self.spec.deadline_s)
        del self._memory
        self._arena.close()

    def _guard(self, target: Callable[[], None]) -> None:
        try:
            target()
        except Exception as error:  # noqa: BLE001 - an actor's thread has nobody else to tell
            if not self._stopping:
                self.send(SCHEDULER, ActorFailed.of(error, job=self.spec.job, step=Step(0), actor=self.name))

    # --- what a chunk's states are ----------------------------------------------------------------------------------

    def chunk_view(self, slot: Span, key: ChunkKey, kind: StateKind) -> torch.Tensor:
        """One state of a chunk inside a slot: a flat tensor of as many elements as the chunk holds."""
        dtype = state_dtype(self._formats, kind)
        return self._view(slot.offset + self._offsets[kind], self.context.chunk_numel(key), dtype)

    def _view(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._memory[offset : offset + numel * dtype.itemsize].view(dtype)

    def _chunk_io(self, slot: Span, key: ChunkKey, kinds: tuple[StateKind, ...]) -> ChunkIo:
        numel = self.context.chunk_numel(key)
        parts = []
        for kind in kinds:
            nbytes = aligned(numel * self._formats.itemsizes[kind])
            parts.append(ChunkPart(kind, Span(slot.offset + self._offsets[kind], nbytes)))
        return ChunkIo(key, tuple(parts))

    def read(
        self, slot: Span, key: ChunkKey, kinds: tuple[StateKind, ...], step: Step, on_done: Callable[[], None]
    ) -> None:
        """Asks for states of `step`; `on_done` is called when they lie in the slot."""
        self._request(ReadChunks, self._chunk_io(slot, key, kinds), step, step + 1, on_done)

    def write(self, slot: Span, key: ChunkKey, step: Step, on_done: Callable[[], None]) -> None:
        """Writes all states of a chunk as those of `step`; `on_done` is called when the slot is free again."""
        kinds = tuple(self._formats.itemsizes)
        self._request(WriteChunks, self._chunk_io(slot, key, kinds), step, step, on_done)

    def _request(
        self,
        kind: type[ReadChunks] | type[WriteChunks],
        item: ChunkIo,
        step: Step,
        urgency: int,
        on_done: Callable[[], None],
    ) -> None:
        with self._lock:
            self._correlation += 1
            correlation = CorrelationId(self._correlation)
            self._on_done[correlation] = on_done
        request = kind(
            job=self.spec.job,
            step=step,
            correlation=correlation,
            reply_to=self.name,
            priority=(urgency, item.key.block),
            deadline_s=self.spec.deadline_s,
            items=(item,),
        )
        self.send(ssd_name(self._geometry.ssd_of(item.key)), request)

    # --- updates ----------------------------------------------------------------------------------------------------

    def _run_feeder(self) -> None:
        while (message := self._updates.get()) is not None:
            match message:
                case UpdateBlock():
                    self._feed(message)
                case LoadModel():
                    for progress in self._model_io.load():
                        self.send(SCHEDULER, LoadProgressed(job=self.spec.job, step=Step(0), **progress))
                    self.send(SCHEDULER, ModelLoaded(job=self.spec.job, step=Step(0)))
                case ExportModel():
                    self._model_io.export(message.path, message.step)
                    exported = ModelExported(job=self.spec.job, step=message.step, path=message.path)
                    self.send(SCHEDULER, exported)

    def _feed(self, update: UpdateBlock) -> None:
        with self._lock:
            self._num_unwritten[(update.step, update.block)] = len(update.chunks)
        for grad in update.chunks:
            (slot,) = self._slots.acquire(1, self.spec.deadline_s)
            chunk = _ChunkUpdate(update, grad, slot)

            def arrived(chunk: _ChunkUpdate = chunk) -> None:
                self._arrived.put(chunk)

            self.read(slot, grad.key, self._read_kinds, Step(update.step - 1), arrived)

    def _run_updates(self) -> None:
        torch.set_num_threads(self.spec.optimizer_threads)
        while (chunk := self._arrived.get()) is not None:
            self._update(chunk)
            self.send(
                GPU_WORKER,
                GradSlotsReturned(job=self.spec.job, step=chunk.update.step, spans=(chunk.grad.span,)),
            )

            def written(chunk: _ChunkUpdate = chunk) -> None:
                self._written(chunk)

            self.write(chunk.slot, chunk.grad.key, chunk.update.step, written)

    def _update(self, chunk: _ChunkUpdate) -> None:
        key, update, layout = chunk.grad.key, chunk.update, self.context.layout
        start, stop = layout.chunk_range(key)
        held = {kind: self.chunk_view(chunk.slot, key, kind) for kind in self._formats.itemsizes}
        states = ChunkStates(
            grad=self._view(chunk.grad.span.offset, stop - start, self._grad_dtype),
            param=held.get(StateKind.PARAM),
            master=held.get(StateKind.MASTER),
            residual=held.get(StateKind.RESIDUAL),
            exp_avg=held[StateKind.EXP_AVG],
            exp_avg_sq=held[StateKind.EXP_AVG_SQ],
        )
        self._kernel.update(
            states,
            learning_rate=update.learning_rate,
            step=update.optimizer_step,
            grad_scale=update.grad_scale,
            decay_numel=min(max(layout.blocks[key.block].decay_numel - start, 0), stop - start),
            seed=self.spec.hyperparameters.seed,
            position=(key.block << _BLOCK_SHIFT) + start,
        )

    def _written(self, chunk: _ChunkUpdate) -> None:
        self._slots.release([chunk.slot])
        key = (chunk.update.step, int(chunk.update.block))
        with self._lock:
            self._num_unwritten[key] -= 1
            done = self._num_unwritten[key] == 0
            if done:
                del self._num_unwritten[key]
        if done:
            updated = BlockUpdated(job=self.spec.job, step=chunk.update.step, block=chunk.update.block, actor=self.name)
            self.send(SCHEDULER, updated)
