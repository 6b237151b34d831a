"""The optimizer as an actor, beside its bare kernel: chunk by chunk from arena slots, for `benchmarks.optimizer`.

Its SSD servers answer at once and move nothing, so what is left is the kernel and what the actor does around it.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.windlass_runner import job_spec
from benchmarks.workload import ModelShape, Workload
from windlass.actors.context import JobContext, make_context, optimizer_name
from windlass.actors.cpu_optimizer import CpuOptimizer
from windlass.actors.messages import (
    ActorFailed,
    BlockUpdated,
    ChunkIoDone,
    GradChunk,
    Message,
    ReadChunks,
    UpdateBlock,
    WriteChunks,
)
from windlass.engine.layout import BlockLayout, ModelLayout, ParamSlice
from windlass.engine.optimizer_formulas import AdamSettings
from windlass.engine.optimizer_kernel import ChunkStates, OptimizerKernel
from windlass.storage.arena import Arena, arena_path
from windlass.storage.ids import ActorName, BlockIndex, Span, StateKind, StatePrecision, Step

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
    hyper = replace(spec.hyperparameters, state_precision=states)
    spec = replace(spec, hyperparameters=hyper, optimizer_threads=num_threads, kernel_dir=str(folder))
    numel = _NUM_CHUNKS * _CHUNK_NUMEL
    param = ParamSlice(name="layers.0.weight", shape=(numel,), offset=0, numel=numel, decay=True)
    block = BlockLayout(index=BlockIndex(0), name="layers.0", params=(param,))
    layout = ModelLayout(blocks=(block,), tied={}, chunk_numel=_CHUNK_NUMEL, shared=((BlockIndex(0),),))
    return make_context(spec, layout, str(arena_path(Path(spec.arena_dir), spec.job, spec.attempt)))


class ActorRun:
    """An optimizer whose states are always there."""

    def __init__(self, context: JobContext) -> None:
        self.context = context
        self._updated = threading.Event()
        self._error: str | None = None
        self.optimizer = CpuOptimizer(optimizer_name(0), 0, context, self._send)
        self.optimizer.setup()
        self._step = 0
        grads = context.plan.grads
        # The kernel is to find numbers, not the zeros of fresh memory: 0.5 in bf16, and nearly so in fp32.
        self.optimizer._view(0, context.plan.arena_nbytes // 2, torch.bfloat16).fill_(0.5)
        keys = context.layout.chunk_keys(BlockIndex(0))
        self._chunks = tuple(
            GradChunk(key, Span(grads.offset + i % grads.num_slots * grads.slot_nbytes, grads.slot_nbytes))
            for i, key in enumerate(keys)
        )

    def run(self) -> float:
        """Seconds for one update of all chunks."""
        self._step += 1
        self._updated.clear()
        start_s = time.perf_counter()
        update = UpdateBlock(
            job=self.context.spec.job,
            step=Step(self._step),
            block=BlockIndex(0),
            optimizer_step=self._step,
            chunks=self._chunks,
            learning_rate=1e-4,
            grad_scale=1.0,
        )
        self.optimizer.post(update)
        if not self._updated.wait(_DEADLINE_S) or self._error is not None:
            raise RuntimeError(f"the optimizer did not update: {self._error}")
        return time.perf_counter() - start_s

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
        context, optimizer = actor.context, actor.optimizer
        hyper = context.spec.hyperparameters
        self._kernel = OptimizerKernel(
            AdamSettings(
                beta1=hyper.beta1,
                beta2=hyper.beta2,
                epsilon=hyper.epsilon,
                weight_decay=hyper.weight_decay,
                decoupled=True,
            ),
            grad_dtype=torch.bfloat16,
            param_dtype=torch.bfloat16,
            state_precision=context.formats.states,
            cache_dir=Path(str(context.spec.kernel_dir)),
        )
        pool, grads = context.plan.states[0], context.plan.grads
        keys = context.layout.chunk_keys(BlockIndex(0))
        self._chunks = []
        for i, key in enumerate(keys):
            slot = Span(pool.offset + i % pool.num_slots * pool.slot_nbytes, pool.slot_nbytes)
            held = {kind: optimizer.chunk_view(slot, key, kind) for kind in context.formats.itemsizes}
            grad_offset = grads.offset + i % grads.num_slots * grads.slot_nbytes
            self._chunks.append(
                ChunkStates(
                    grad=optimizer._view(grad_offset, _CHUNK_NUMEL, torch.bfloat16),
                    exp_avg=held[StateKind.EXP_AVG],
                    exp_avg_sq=held[StateKind.EXP_AVG_SQ],
                    param=held.get(StateKind.PARAM),
                    master=held.get(StateKind.MASTER),
                    residual=held.get(StateKind.RESIDUAL),
                )
            )
        self._step = 0

    def run(self) -> float:
        """Seconds for one update of all chunks."""
        self._step += 1
        start_s = time.perf_counter()
        for chunk in self._chunks:
            self._kernel.update(
                chunk, learning_rate=1e-4, step=self._step, grad_scale=1.0, decay_numel=_CHUNK_NUMEL, seed=1
            )
        return time.perf_counter() - start_s


@contextmanager
def actor_and_bare(folder: Path, states: StatePrecision, num_threads: int) -> Iterator[tuple[ActorRun, BareRun]]:
    """Both, on one arena."""
    context = _context(folder, states, num_threads)
    arena = Arena.create(Path(context.arena_path), context.plan.arena_nbytes)
    actor = None
    try:
        actor = ActorRun(context)
        yield actor, BareRun(actor)
    finally:
        if actor is not None:
            actor.optimizer.stop()
        arena.close()
        arena.unlink()
