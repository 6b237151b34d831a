"""Runs the optimizer as an actor, chunk by chunk from arena slots, and its bare kernel, for `benchmarks.optimizer`.

The SSD servers answer at once and move nothing. What is left is the kernel, and the actor's own work.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.peers.windlass_runner import job_spec
from benchmarks.peers.workload import ModelShape, Workload
from windlass.actors.job import JobContext, make_context, optimizer_name
from windlass.actors.messages import (
    ActorFailed,
    BlockUpdated,
    ChunkIoDone,
    GradChunk,
    GradOffloaded,
    Message,
    ReadChunks,
    UpdateBlock,
    UpdateStep,
    WriteChunks,
)
from windlass.actors.optimizer import ChunkUpdater, CpuOptimizer
from windlass.engine.memory_plan import Placement
from windlass.engine.model import BlockLayout, ModelLayout, ParamSlice
from windlass.storage.ids import ActorName, BlockIndex, Span, StatePrecision, Step
from windlass.storage.memory import Arena, arena_path

_CHUNK_NUMEL = 8 << 20
_NUM_CHUNKS = 6
_DEADLINE_S = 60.0


def _context(folder: Path, states: StatePrecision, num_threads: int) -> JobContext:
    shape = ModelShape(hidden=1024, num_layers=1, vocab=4096, intermediate=2816, num_heads=8)
    workload = Workload(
        shape=shape,
        batch_size=1,
        sequence_length=8,
        num_warmup_steps=0,
        num_timed_steps=1,
        num_threads=num_threads,
        seed=1,
    )
    spec = job_spec(workload, folder, folder, [folder / "ssd"])
    placement = Placement(num_cached_params=0)  # no other actor can lend slots
    spec = replace(
        spec.with_training(state_precision=states),
        optimizer_threads=num_threads,
        kernel_dir=str(folder),
        placement=placement,
    )
    numel = _NUM_CHUNKS * _CHUNK_NUMEL
    param = ParamSlice(name="layers.0.weight", shape=(numel,), offset=0, numel=numel, decay=True)
    block = BlockLayout(index=BlockIndex(0), name="layers.0", params=(param,))
    layout = ModelLayout(blocks=(block,), tied={}, chunk_numel=_CHUNK_NUMEL, shared=((BlockIndex(0),),))
    return make_context(spec, layout, str(arena_path(Path(spec.arena_dir), spec.job, spec.attempt)))


class ActorRun:
    """An optimizer whose states are always in memory."""

    def __init__(self, context: JobContext, arena: Arena) -> None:
        self.context = context
        self._updated = threading.Event()
        self._error: str | None = None
        self.optimizer = CpuOptimizer(optimizer_name(0), 0, context, self._send)
        self._step = 0
        grads = context.plan.grads
        # Fill the arena, because the kernel should not compute with zeros: 0.5 in bf16, and nearly 0.5 in fp32.
        whole = arena.buffer(Span(0, context.plan.arena_nbytes))
        torch.frombuffer(whole, dtype=torch.bfloat16).fill_(0.5)
        keys = context.layout.chunk_keys(BlockIndex(0))
        self.chunks = tuple(
            GradChunk(key, Span(grads.offset + i % grads.num_slots * grads.slot_nbytes, grads.slot_nbytes))
            for i, key in enumerate(keys)
        )

    def run(self) -> float:
        """Returns the seconds of one update of all chunks."""
        update = self.next_update()
        self._updated.clear()
        start_s = time.perf_counter()
        self.optimizer.post(update.how)
        self.optimizer.post(GradOffloaded(job=update.job, step=update.step, block=update.block, chunks=update.chunks))
        if not self._updated.wait(_DEADLINE_S) or self._error is not None:
            raise RuntimeError(f"the optimizer did not update: {self._error}")
        return time.perf_counter() - start_s

    def next_update(self) -> UpdateBlock:
        """Returns the update of the next step."""
        self._step += 1
        job, step, before = self.context.spec.job, Step(self._step), Step(self._step - 1)
        how = UpdateStep(
            job=job, step=step, from_step=before, optimizer_step=self._step, learning_rate=1e-4, grad_scale=1.0
        )
        return UpdateBlock(job=job, step=step, block=BlockIndex(0), chunks=self.chunks, how=how)

    def _send(self, to: ActorName, message: Message) -> None:
        if isinstance(message, ReadChunks | WriteChunks):
            for item in message.items:
                done = ChunkIoDone(job=message.job, step=message.step, correlation=message.correlation, key=item.key)
                self.optimizer.post(done)
        elif isinstance(message, BlockUpdated | ActorFailed):
            self._error = message.error if isinstance(message, ActorFailed) else None
            self._updated.set()


class BareRun:
    """The kernel alone, on the same slots in turn."""

    def __init__(self, actor: ActorRun) -> None:
        context = actor.context
        self._actor = actor
        self._updater = ChunkUpdater(context)
        pool = context.plan.states[0]
        self._chunks = []
        for i, chunk in enumerate(actor.chunks):
            assert chunk.span is not None, "all gradients lie in the arena"
            slot = Span(pool.offset + i % pool.num_slots * pool.slot_nbytes, pool.slot_nbytes)
            states = {kind: actor.optimizer.chunk_view(slot, chunk.key, kind) for kind in context.formats.itemsizes}
            self._chunks.append((actor.optimizer.grad_view(chunk.span, chunk.key), states))

    def run(self) -> float:
        """Returns the seconds of one update of all chunks."""
        update = self._actor.next_update()
        start_s = time.perf_counter()
        for i, (grad, states) in enumerate(self._chunks):
            self._updater.update(update, i * _CHUNK_NUMEL, grad, states)
        return time.perf_counter() - start_s


@contextmanager
def actor_and_bare(folder: Path, states: StatePrecision, num_threads: int) -> Iterator[tuple[ActorRun, BareRun]]:
    """Creates both runs on one arena."""
    context = _context(folder, states, num_threads)
    arena = Arena.create(Path(context.arena_path), context.plan.arena_nbytes)
    actor = None
    try:
        actor = ActorRun(context, arena)
        yield actor, BareRun(actor)
    finally:
        if actor is not None:
            actor.optimizer.stop()
        arena.close()
        arena.unlink()
