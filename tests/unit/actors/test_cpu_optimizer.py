"""One optimizer of the pool, with SSD servers that keep states in memory."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.unit.actors.memory_ssds import MemorySsds
from tests.unit.actors.specs import make_spec
from windlass.actors.context import JobContext, make_context
from windlass.actors.cpu_optimizer import CpuOptimizer
from windlass.actors.messages import (
    ActorFailed,
    BlockUpdated,
    GradChunk,
    GradSlotsReturned,
    LoadModel,
    LossComputed,
    Phase,
    ReadChunks,
    UpdateBlock,
    WriteChunks,
)
from windlass.engine.layout import BlockLayout, ModelLayout, ParamSlice
from windlass.storage.arena import Arena
from windlass.storage.ids import ActorName, BlockIndex, ChunkKey, JobId, Precision, Span, StateKind, Step

CHUNK_NUMEL = 2048
# Weight decay ends inside the third of the block's five chunks; the last chunk is short.
DECAY_NUMEL, NO_DECAY_NUMEL = 5000, 4500
LAYOUT = ModelLayout(
    blocks=(
        BlockLayout(
            index=BlockIndex(0),
            name="only",
            params=(
                ParamSlice(name="weight", shape=(DECAY_NUMEL,), offset=0, numel=DECAY_NUMEL, decay=True),
                ParamSlice(name="bias", shape=(NO_DECAY_NUMEL,), offset=DECAY_NUMEL, numel=NO_DECAY_NUMEL, decay=False),
            ),
        ),
    ),
    tied={},
    chunk_numel=CHUNK_NUMEL,
    shared=((BlockIndex(0),),),
)
NUMEL = DECAY_NUMEL + NO_DECAY_NUMEL
KEYS = LAYOUT.chunk_keys(BlockIndex(0))


class Bench:
    """An optimizer that has begun, its arena and its SSDs; step 2's states are stored."""

    def __init__(self, directory: Path, precision: Precision) -> None:
        # Gradients of fp32 in either precision: there are two micro-batches. Clipping keeps slots for all of them.
        spec = make_spec(
            num_cpu_optimizers=1, hyperparameters={"precision": precision, "clip_norm": 1.0, "learning_rate": 1e-2}
        )
        context = make_context(spec, LAYOUT, str(directory / "arena"))
        self.context: JobContext = context
        self.arena = Arena.create(context.arena_path, context.plan.arena_nbytes)
        self.ssds = MemorySsds(context, self.arena)
        self.optimizer = CpuOptimizer(ActorName("optimizer-0"), 0, context, self.ssds.send)
        self.ssds.answer = self.optimizer.post
        generator = torch.Generator().manual_seed(0)
        self.master = torch.randn(NUMEL, generator=generator)
        self.exp_avg = torch.randn(NUMEL, generator=generator) * 0.1
        self.exp_avg_sq = torch.rand(NUMEL, generator=generator) * 0.1
        self.grad = torch.randn(NUMEL, generator=generator)
        for key in KEYS:
            start, stop = LAYOUT.chunk_range(key)
            self.ssds.put(2, key, StateKind.MASTER, self.master[start:stop])
            self.ssds.put(2, key, StateKind.EXP_AVG, self.exp_avg[start:stop])
            self.ssds.put(2, key, StateKind.EXP_AVG_SQ, self.exp_avg_sq[start:stop])

    def grad_chunks(self) -> tuple[GradChunk, ...]:
        """The gradient, laid into grad slots."""
        pool = self.context.plan.grads
        chunks = []
        for i, key in enumerate(KEYS):
            span = Span(pool.offset + i * pool.slot_nbytes, pool.slot_nbytes)
            start, stop = LAYOUT.chunk_range(key)
            memory = torch.frombuffer(self.arena.buffer(span), dtype=torch.float32)
            memory.fill_(float("nan"))
            memory[: stop - start] = self.grad[start:stop]
            chunks.append(GradChunk(key, span))
        return tuple(chunks)

    def update(self, grad_scale: float = 1.0) -> UpdateBlock:
        return UpdateBlock(
            job=self.context.spec.job,
            step=Step(3),
            block=BlockIndex(0),
            chunks=self.grad_chunks(),
            learning_rate=1e-2,
            grad_scale=grad_scale,
        )

    def new_state(self, kind: StateKind, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A state of the whole block, as step 3 left it."""
        return torch.cat([self.ssds.state(3, key, kind, dtype) for key in KEYS])

    def expected(self, grad_scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Master, exp_avg and exp_avg_sq that torch.optim.AdamW makes of the stored ones."""
        parts = []
        for piece, decay in ((slice(0, DECAY_NUMEL), 0.1), (slice(DECAY_NUMEL, NUMEL), 0.0)):
            param = torch.nn.Parameter(self.master[piece].clone())
            adamw = torch.optim.AdamW([param], lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=decay)
            adamw.state[param] = {
                "step": torch.tensor(2.0),
                "exp_avg": self.exp_avg[piece].clone(),
                "exp_avg_sq": self.exp_avg_sq[piece].clone(),
            }
            param.grad = self.grad[piece] * grad_scale
            adamw.step()
            parts.append((param.detach(), adamw.state[param]["exp_avg"], adamw.state[param]["exp_avg_sq"]))
        masters, exp_avgs, exp_avg_sqs = zip(*parts, strict=True)
        return torch.cat(masters), torch.cat(exp_avgs), torch.cat(exp_avg_sqs)


@pytest.fixture(params=list(Precision))
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path, request.param)
    bench.optimizer.setup()
    yield bench
    bench.optimizer.stop()
    bench.arena.close()


@pytest.mark.parametrize("grad_scale", [1.0, 0.25])
def test_an_update_is_adamw(bench: Bench, grad_scale: float) -> None:
    bench.optimizer.post(bench.update(grad_scale))
    (updated,) = bench.ssds.receive(BlockUpdated)
    assert (updated.step, updated.block, updated.actor) == (3, 0, "optimizer-0")
    master, exp_avg, exp_avg_sq = bench.expected(grad_scale)
    torch.testing.assert_close(bench.new_state(StateKind.MASTER), master, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(bench.new_state(StateKind.EXP_AVG), exp_avg, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(bench.new_state(StateKind.EXP_AVG_SQ), exp_avg_sq, rtol=1e-6, atol=1e-7)
    if bench.context.precision is Precision.BF16:
        param = bench.new_state(StateKind.PARAM, torch.bfloat16)
        assert torch.equal(param, bench.new_state(StateKind.MASTER).bfloat16())


def test_each_grad_slot_is_returned_once(bench: Bench) -> None:
    update = bench.update()
    bench.optimizer.post(update)
    returned = bench.ssds.receive(GradSlotsReturned, len(KEYS))
    bench.ssds.receive(BlockUpdated)
    assert sorted(span.offset for message in returned for span in message.spans) == [
        chunk.span.offset for chunk in update.chunks
    ]
    assert {to for to, message in bench.ssds.sent if isinstance(message, GradSlotsReturned)} == {"gpu-0"}


def test_no_more_chunks_in_flight_than_slots(bench: Bench) -> None:
    num_slots = bench.context.plan.states[0].num_slots
    assert num_slots < len(KEYS)
    bench.ssds.hold = True
    bench.optimizer.post(bench.update())
    reads = bench.ssds.receive(ReadChunks, num_slots)
    # Each read is answered only now, and a slot comes free only when its write has been.
    spans = {part.span.offset for read in reads for item in read.items for part in item.parts}
    assert len(spans) == 3 * num_slots
    for read in tuple(bench.ssds.held):
        bench.ssds.serve(read)
    writes = bench.ssds.receive(WriteChunks, num_slots)
    assert len(bench.ssds.of(ReadChunks)) == num_slots
    assert bench.ssds.of(BlockUpdated) == []
    bench.ssds.hold = False
    for write in writes:
        bench.ssds.serve(write)
    bench.ssds.receive(BlockUpdated)
    assert len(bench.ssds.of(ReadChunks)) == len(bench.ssds.of(WriteChunks)) == len(KEYS)


def test_reads_are_as_urgent_as_their_step_and_block(bench: Bench) -> None:
    bench.optimizer.post(bench.update())
    bench.ssds.receive(BlockUpdated)
    requests: list[ReadChunks | WriteChunks] = [*bench.ssds.of(ReadChunks), *bench.ssds.of(WriteChunks)]
    assert {request.priority for request in requests} == {(3, 0)}
    assert {request.step for request in bench.ssds.of(ReadChunks)} == {2}
    assert {request.step for request in bench.ssds.of(WriteChunks)} == {3}


def test_a_failure_is_told_with_its_traceback(bench: Bench) -> None:
    """The model folder of this job does not exist."""
    bench.optimizer.post(LoadModel(job=bench.context.spec.job, step=Step(0)))
    (failed,) = bench.ssds.receive(ActorFailed)
    assert failed.actor == "optimizer-0"
    assert "/models/base" in failed.error
    assert failed.detail.startswith("Traceback")


def test_a_slot_that_never_comes_free_is_an_error(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Precision.FP32)
    bench.optimizer.spec = replace(bench.optimizer.spec, deadline_s=0.1)
    bench.optimizer.setup()
    bench.ssds.hold = True
    bench.optimizer.post(bench.update())
    (failed,) = bench.ssds.receive(ActorFailed)
    assert "state slots of optimizer-0" in failed.error
    bench.optimizer.stop()


def test_stopping_does_not_wait_for_slots(tmp_path: Path) -> None:
    """The deadline, which is longer than the test may take, is for jobs that go on."""
    bench = Bench(tmp_path, Precision.FP32)
    bench.optimizer.spec = replace(bench.optimizer.spec, deadline_s=3600.0)
    bench.optimizer.setup()
    bench.ssds.hold = True
    bench.optimizer.post(bench.update())
    bench.ssds.receive(ReadChunks, bench.context.plan.states[0].num_slots)
    bench.optimizer.stop()
    assert bench.ssds.of(ActorFailed) == []


def test_what_it_has_no_use_for(bench: Bench) -> None:
    stray = LossComputed(
        job=JobId("ftjob-1"), step=Step(1), phase=Phase.HEAD, loss_sum=1.0, num_targets=1, num_correct=0, group=0
    )
    with pytest.raises(ValueError, match="optimizer-0 does not take LossComputed"):
        bench.optimizer.post(stray)


def test_a_key_belongs_to_one_ssd(bench: Bench) -> None:
    bench.optimizer.post(bench.update())
    bench.ssds.receive(BlockUpdated)
    receivers: dict[ChunkKey, set[str]] = {}
    for to, message in bench.ssds.sent:
        if isinstance(message, ReadChunks | WriteChunks):
            receivers.setdefault(message.items[0].key, set()).add(to)
    assert [receivers[key] for key in KEYS] == [{f"ssd-{i % 2}"} for i in range(len(KEYS))]
