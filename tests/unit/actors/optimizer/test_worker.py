"""One optimizer of the pool, with SSD servers that keep states in memory."""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.actors.memory_ssds import MemorySsds
from tests.support.actors.specs import make_spec
from tests.support.storage.stores import FP32
from windlass.actors.job.context import JobContext, make_context
from windlass.actors.lifecycle.threads import ActorThreads
from windlass.actors.messages import (
    ActorFailed,
    BlockFlushed,
    BlockUpdated,
    CommitReached,
    FlushBlock,
    GradChunk,
    GradOffloaded,
    GradSlotsReleased,
    KernelChosen,
    LoadModel,
    LoadProgressed,
    ReadChunks,
    RestoreStates,
    SkipStep,
    StatesRestored,
    UpdateStep,
    WriteChunks,
)
from windlass.actors.optimizer.model_io import ModelIo
from windlass.actors.optimizer.worker import RESTORE_DEPTH, CpuOptimizer
from windlass.actors.worker_policy.block_queue import Ordering, QueueOrder
from windlass.engine.device.dtypes import TORCH_DTYPE, state_dtype
from windlass.engine.memory_plan.plan import Placement
from windlass.engine.model.layout import BlockLayout, ModelLayout, ParamSlice
from windlass.engine.optimizer.split_states import join_master, plain_exp_avg_sq, split_master
from windlass.engine.training_config.training_config import Optimizer
from windlass.storage.ids import (
    ALL_FORMATS,
    ActorName,
    BlockIndex,
    ChunkKey,
    Formats,
    JobId,
    Kernel,
    Precision,
    Span,
    StateKind,
    StatePrecision,
    Step,
)
from windlass.storage.memory.arena import Arena

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
# Two blocks like that one.
TWO_BLOCKS = replace(
    LAYOUT,
    blocks=(*LAYOUT.blocks, replace(LAYOUT.blocks[0], index=BlockIndex(1))),
    shared=((BlockIndex(0),), (BlockIndex(1),)),
)
NUMEL = DECAY_NUMEL + NO_DECAY_NUMEL
KEYS = LAYOUT.chunk_keys(BlockIndex(0))


class Bench:
    """An optimizer that `start` starts, its arena and its SSDs, which store the states of step 2."""

    def __init__(
        self,
        directory: Path,
        formats: Formats,
        *,
        placement: Placement | None = None,
        layout: ModelLayout = LAYOUT,
        ordering: Ordering | None = None,
        deadline_s: float | None = None,
        **training: Any,
    ) -> None:
        # Gradients are fp32 in any precision, because there are two micro-batches. Clipping reserves slots for all of
        # them.
        hyper = {"precision": formats.precision, "state_precision": formats.states, "clip_norm": 1.0}
        spec = make_spec(num_cpu_optimizers=1, training={**hyper, **training})
        spec = replace(spec, placement=placement or Placement(num_cached_params=0), ordering=ordering or Ordering())
        if deadline_s is not None:
            spec = replace(spec, deadline_s=deadline_s)
        context = make_context(spec, layout, str(directory / "arena"))
        self.context: JobContext = context
        self.arena = Arena.create(context.arena_path, context.plan.arena_nbytes)
        self.ssds = MemorySsds(context, self.arena)
        generator = torch.Generator().manual_seed(0)
        master = torch.randn(NUMEL, generator=generator)
        exp_avg = torch.randn(NUMEL, generator=generator) * 0.1
        exp_avg_sq = torch.rand(NUMEL, generator=generator) * 0.1
        self.grad = torch.randn(NUMEL, generator=generator)
        states = _at_rest(formats, master, exp_avg, exp_avg_sq)
        self.master, self.exp_avg, self.exp_avg_sq = _as_fp32(formats, states)
        for block in layout.blocks:
            for key in layout.chunk_keys(block.index):
                start, stop = layout.chunk_range(key)
                for kind, state in states.items():
                    self.ssds.put(2, key, kind, state[start:stop])

    def start(self) -> None:
        """Starts the optimizer."""
        self.optimizer = CpuOptimizer(ActorName("optimizer-0"), 0, self.context, self.ssds.send)
        self.ssds.answer = self.optimizer.post

    def grad_chunks(self) -> tuple[GradChunk, ...]:
        """Writes the gradient into grad slots."""
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

    def how(self, grad_scale: float = 1.0) -> UpdateStep:
        """The update of step 3, after a step that was skipped."""
        return UpdateStep(
            job=self.context.spec.job,
            step=Step(3),
            from_step=Step(2),
            optimizer_step=2,
            learning_rate=1e-2,
            grad_scale=grad_scale,
        )

    def update(self, grad_scale: float = 1.0) -> None:
        """Lets the optimizer update block 0."""
        self.optimizer.post(self.how(grad_scale))
        self.offload(0, self.grad_chunks())

    def offload(self, block: int, chunks: tuple[GradChunk, ...]) -> None:
        """Gives the optimizer the gradient of a block."""
        self.optimizer.post(
            GradOffloaded(job=self.context.spec.job, step=Step(3), block=BlockIndex(block), chunks=chunks)
        )

    def new_states(self) -> dict[StateKind, torch.Tensor]:
        """The states of the whole block as of step 3."""
        formats = self.context.formats
        return {
            kind: torch.cat([self.ssds.state(3, key, kind, state_dtype(formats, kind)) for key in KEYS])
            for kind in formats.itemsizes
        }

    def expected(self, grad_scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The master, exp_avg and exp_avg_sq after torch's own optimizer has updated the stored ones."""
        is_adamw = self.context.spec.training.optimizer is Optimizer.ADAMW
        kind = torch.optim.AdamW if is_adamw else torch.optim.Adam
        parts = []
        for piece, decay in ((slice(0, DECAY_NUMEL), 0.1), (slice(DECAY_NUMEL, NUMEL), 0.0)):
            param = torch.nn.Parameter(self.master[piece].clone())
            adam = kind([param], lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=decay)
            adam.state[param] = {
                "step": torch.tensor(1.0),
                "exp_avg": self.exp_avg[piece].clone(),
                "exp_avg_sq": self.exp_avg_sq[piece].clone(),
            }
            param.grad = self.grad[piece] * grad_scale
            adam.step()
            parts.append((param.detach(), adam.state[param]["exp_avg"], adam.state[param]["exp_avg_sq"]))
        masters, exp_avgs, exp_avg_sqs = zip(*parts, strict=True)
        return torch.cat(masters), torch.cat(exp_avgs), torch.cat(exp_avg_sqs)


def _at_rest(
    formats: Formats, master: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor
) -> dict[StateKind, torch.Tensor]:
    if formats.states is StatePrecision.SPLIT:
        param, residual, marked = split_master(master, exp_avg_sq)
        whole = {StateKind.PARAM: param, StateKind.RESIDUAL: residual, StateKind.EXP_AVG_SQ: marked}
    else:
        whole = {StateKind.PARAM: master, StateKind.MASTER: master, StateKind.EXP_AVG_SQ: exp_avg_sq}
    whole[StateKind.EXP_AVG] = exp_avg
    return {kind: whole[kind].to(state_dtype(formats, kind)) for kind in formats.itemsizes}


def _as_fp32(
    formats: Formats, states: dict[StateKind, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns master, exp_avg and exp_avg_sq in fp32."""
    exp_avg, exp_avg_sq = states[StateKind.EXP_AVG].float(), states[StateKind.EXP_AVG_SQ].float()
    match formats.states:
        case StatePrecision.FP32:
            return states[StateKind.MASTER], exp_avg, exp_avg_sq
        case StatePrecision.SPLIT:
            master = join_master(states[StateKind.PARAM], states[StateKind.RESIDUAL], exp_avg_sq)
            return master, exp_avg, plain_exp_avg_sq(exp_avg_sq)
        case StatePrecision.BF16:
            return states[StateKind.PARAM].float(), exp_avg, exp_avg_sq


def _started(bench: Bench) -> Iterator[Bench]:
    bench.start()
    yield bench
    bench.optimizer.stop()
    bench.arena.close()


@pytest.fixture(params=ALL_FORMATS, ids=lambda formats: f"{formats.precision}-{formats.states}-states")
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    yield from _started(Bench(tmp_path, request.param))


def check_update(bench: Bench, grad_scale: float = 1.0) -> None:
    """Updates the block, and compares the result with torch's."""
    bench.update(grad_scale)
    (updated,) = bench.ssds.receive(BlockUpdated)
    assert (updated.step, updated.block, updated.actor) == (3, 0, "optimizer-0")
    check_new_states(bench, grad_scale)


def check_new_states(bench: Bench, grad_scale: float = 1.0) -> None:
    formats, states = bench.context.formats, bench.new_states()
    # bf16 states are rounded stochastically: at most one unit in the last place.
    rtol, atol = (2**-7, 1e-6) if formats.states is StatePrecision.BF16 else (1e-6, 1e-7)
    for found, expected in zip(_as_fp32(formats, states), bench.expected(grad_scale), strict=True):
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
    if StateKind.MASTER in states and StateKind.PARAM in states:
        assert torch.equal(states[StateKind.PARAM], states[StateKind.MASTER].to(TORCH_DTYPE[formats.precision]))


@pytest.mark.parametrize("grad_scale", [1.0, 0.25])
def test_an_update_is_adamw(bench: Bench, grad_scale: float) -> None:
    check_update(bench, grad_scale)


@pytest.mark.parametrize("formats", ALL_FORMATS)
def test_update_of_adam_job_is_adam(tmp_path: Path, formats: Formats) -> None:
    for bench in _started(Bench(tmp_path, formats, optimizer=Optimizer.ADAM)):
        check_update(bench)


def test_optimizer_reports_its_kernel(bench: Bench) -> None:
    (chosen,) = bench.ssds.of(KernelChosen)
    assert (chosen.actor, chosen.kernel) == ("optimizer-0", Kernel.FUSED)


def test_each_grad_slot_is_returned_once(bench: Bench) -> None:
    bench.update()
    returned = bench.ssds.receive(GradSlotsReleased, len(KEYS))
    bench.ssds.receive(BlockUpdated)
    assert sorted(span.offset for message in returned for span in message.spans) == [
        chunk.span.offset for chunk in bench.grad_chunks() if chunk.span is not None
    ]
    assert {to for to, message in bench.ssds.sent if isinstance(message, GradSlotsReleased)} == {"gpu-0"}


@pytest.mark.parametrize("is_early", [False, True])
def test_the_grad_slots_of_a_skipped_step_are_returned(bench: Bench, is_early: bool) -> None:
    skip = SkipStep(job=bench.context.spec.job, step=Step(3))
    if is_early:
        bench.optimizer.post(skip)
    bench.offload(0, bench.grad_chunks())
    if not is_early:
        bench.optimizer.post(skip)
    (returned,) = bench.ssds.receive(GradSlotsReleased)
    assert returned.spans == tuple(chunk.span for chunk in bench.grad_chunks())
    assert bench.ssds.of(ReadChunks) == bench.ssds.of(BlockUpdated) == []


def test_no_more_chunks_in_flight_than_slots(bench: Bench) -> None:
    num_slots = bench.context.plan.states[0].num_slots
    assert num_slots < len(KEYS)
    bench.ssds.hold = True
    bench.update()
    reads = bench.ssds.receive(ReadChunks, num_slots)
    kinds = set(bench.context.formats.itemsizes)
    num_read = len(kinds - {StateKind.PARAM} if StateKind.MASTER in kinds else kinds)  # it follows from the master
    # Each read is answered only now. A slot becomes free only when its write has been answered.
    spans = {part.span.offset for read in reads for item in read.items for part in item.parts}
    assert len(spans) == num_read * num_slots
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
    bench.update()
    bench.ssds.receive(BlockUpdated)
    requests: list[ReadChunks | WriteChunks] = [*bench.ssds.of(ReadChunks), *bench.ssds.of(WriteChunks)]
    assert {request.priority for request in requests} == {(3, 0)}
    assert {request.step for request in bench.ssds.of(ReadChunks)} == {2}
    assert {request.step for request in bench.ssds.of(WriteChunks)} == {3}


def offload_of(bench: Bench, block: int) -> None:
    """Gives the optimizer the gradient of block 0 as that of a block; those of both may be in the same slots."""
    chunks = tuple(GradChunk(ChunkKey(BlockIndex(block), each.key.chunk), each.span) for each in bench.grad_chunks())
    bench.offload(block, chunks)


@pytest.mark.parametrize(
    ("queues", "expected"),
    [
        # Three slots are in use when the more urgent block arrives; no further chunk of the other block goes first.
        (QueueOrder.PRIORITY, [1, 1, 1, 0, 0, 0, 0, 0, 1, 1]),
        (QueueOrder.FIFO, [1, 1, 1, 1, 1, 0, 0, 0, 0, 0]),
    ],
)
def test_a_more_urgent_block_goes_before_the_rest_of_another(
    tmp_path: Path, queues: QueueOrder, expected: list[int]
) -> None:
    for bench in _started(Bench(tmp_path, FP32, layout=TWO_BLOCKS, ordering=Ordering(queues=queues))):
        bench.ssds.hold = True
        bench.optimizer.post(bench.how())
        offload_of(bench, 1)
        bench.ssds.receive(ReadChunks, bench.context.plan.states[0].num_slots)
        offload_of(bench, 0)
        bench.ssds.hold = False
        for request in tuple(bench.ssds.held):
            bench.ssds.serve(request)
        bench.ssds.receive(BlockUpdated, 2)
        assert [item.key.block for read in bench.ssds.of(ReadChunks) for item in read.items] == expected
        first, last = (0, 1) if queues is QueueOrder.PRIORITY else (1, 0)
        assert [updated.block for updated in bench.ssds.of(BlockUpdated)] == [first, last]


def test_a_failure_is_told_with_its_traceback(bench: Bench) -> None:
    """The model folder of this job does not exist."""
    bench.optimizer.post(LoadModel(job=bench.context.spec.job, step=Step(0)))
    (failed,) = bench.ssds.receive(ActorFailed)
    assert failed.actor == "optimizer-0"
    assert "/models/base" in failed.error
    assert failed.detail.startswith("Traceback")


def test_status_names_slots_that_never_come_free_and_late_ssd_servers(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FP32)
    bench.start()
    bench.ssds.hold = True
    bench.update()
    text = bench.ssds.await_status("1 slots .* of pool state slots of optimizer-0: 3 of 3 are in use")
    assert "ChunkPipeline._run_reads has waited" in text
    assert "(at update block of step 3, block 0)" in text
    for ssd in (0, 1):
        assert f"ssd-{ssd} has not finished a read of block 0, chunk {ssd}, step 2" in text
    bench.optimizer.stop()
    assert bench.ssds.of(ActorFailed) == []


def test_stopping_does_not_wait_for_slots(tmp_path: Path) -> None:
    """The timeout is longer than the test may take, so the stop itself must end the waits."""
    bench = Bench(tmp_path, FP32, deadline_s=3600.0)
    bench.start()
    bench.ssds.hold = True
    bench.update()
    bench.ssds.receive(ReadChunks, bench.context.plan.states[0].num_slots)
    bench.optimizer.stop()
    assert bench.ssds.of(ActorFailed) == []


def test_optimizer_with_foreign_message_raises(bench: Bench) -> None:
    stray = CommitReached(job=JobId("ftjob-1"), step=Step(1))
    with pytest.raises(ValueError, match="optimizer-0 has no handler for CommitReached"):
        bench.optimizer.post(stray)


def test_a_key_belongs_to_one_ssd(bench: Bench) -> None:
    bench.update()
    bench.ssds.receive(BlockUpdated)
    receivers: dict[ChunkKey, set[str]] = {}
    for to, message in bench.ssds.sent:
        if isinstance(message, ReadChunks | WriteChunks):
            receivers.setdefault(message.items[0].key, set()).add(to)
    assert [receivers[key] for key in KEYS] == [{f"ssd-{i % 2}"} for i in range(len(KEYS))]


# --- params updated in slots of the GPU worker ----------------------------------------------------------------------


def fill_cached(bench: Bench) -> dict[ChunkKey, Span]:
    """Fills the slots of cached params as the GPU worker does; the SSDs no longer have these params."""
    cached, kind = bench.context.cached_params(), bench.context.formats.param_kind
    for key, span in cached.items():
        state, buffer = bench.ssds.states.pop((Step(2), key, kind)), bench.arena.buffer(span)
        buffer[:] = b"\xff" * len(buffer)
        buffer[: len(state)] = state
    return cached


@pytest.mark.parametrize("formats", ALL_FORMATS)
def test_cached_params_are_updated_in_their_slots_and_written_from_there(tmp_path: Path, formats: Formats) -> None:
    for bench in _started(Bench(tmp_path, formats, placement=Placement(num_cached_params=2))):
        cached = fill_cached(bench)
        assert list(cached) == KEYS[:2]
        check_update(bench)
        for key, span in cached.items():
            state = bench.ssds.states[(Step(3), key, formats.param_kind)]
            assert bytes(bench.arena.buffer(span))[: len(state)] == state


def test_cached_params_are_not_read(tmp_path: Path) -> None:
    formats = Formats(Precision.BF16, StatePrecision.SPLIT)
    for bench in _started(Bench(tmp_path, formats, placement=Placement(num_cached_params=1))):
        fill_cached(bench)
        bench.update()
        bench.ssds.receive(BlockUpdated)
        read = {item.key: {part.kind for part in item.parts} for m in bench.ssds.of(ReadChunks) for item in m.items}
        assert read[KEYS[1]] - read[KEYS[0]] == {StateKind.PARAM}


# --- gradients on an SSD -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("formats", ALL_FORMATS)
def test_a_gradient_on_an_ssd_is_read_beside_the_states(tmp_path: Path, formats: Formats) -> None:
    for bench in _started(Bench(tmp_path, formats, placement=Placement(num_host_grad_blocks=0, num_cached_params=0))):
        for key in KEYS:
            start, stop = LAYOUT.chunk_range(key)
            bench.ssds.put(3, key, StateKind.GRAD, bench.grad[start:stop])
        bench.offload(0, tuple(GradChunk(key, None) for key in KEYS))
        bench.optimizer.post(bench.how())
        bench.ssds.receive(BlockUpdated)
        check_new_states(bench)
        assert bench.ssds.of(GradSlotsReleased) == []


# --- states resident in host memory --------------------------------------------------------------------------------


@pytest.fixture(params=ALL_FORMATS, ids=lambda formats: f"{formats.precision}-{formats.states}-states")
def resident(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path, request.param, placement=Placement(host_blocks=(0,)))
    for started in _started(bench):
        bench.optimizer.post(RestoreStates(job=bench.context.spec.job, step=Step(2)))
        (restored,) = bench.ssds.receive(StatesRestored)
        assert (restored.step, restored.actor) == (2, "optimizer-0")
        yield started


def flush(bench: Bench, step: int) -> None:
    bench.optimizer.post(FlushBlock(job=bench.context.spec.job, step=Step(step), block=BlockIndex(0)))
    (flushed,) = bench.ssds.receive(BlockFlushed)
    assert (flushed.step, flushed.block, flushed.actor) == (step, 0, "optimizer-0")


def test_states_in_host_memory_are_updated_there_and_written_when_asked(resident: Bench) -> None:
    num_reads = len(resident.ssds.of(ReadChunks))
    resident.update()
    resident.ssds.receive(BlockUpdated)
    assert len(resident.ssds.of(ReadChunks)) == num_reads
    assert resident.ssds.of(WriteChunks) == []
    assert len(resident.ssds.of(GradSlotsReleased)) == len(KEYS)
    flush(resident, 3)
    check_new_states(resident)


def test_a_flush_is_told_when_everything_is_written(resident: Bench) -> None:
    resident.ssds.hold = True
    resident.optimizer.post(FlushBlock(job=resident.context.spec.job, step=Step(2), block=BlockIndex(0)))
    writes = resident.ssds.receive(WriteChunks, 2)  # one to each SSD
    assert sum(len(write.items) for write in writes) == len(KEYS)
    for write in writes:
        assert resident.ssds.of(BlockFlushed) == []
        resident.ssds.serve(write)
    resident.ssds.receive(BlockFlushed)


def test_a_flush_waits_for_no_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks wait for their turn; a flush does not."""
    monkeypatch.setattr(ActorThreads, "start", lambda *_: None)
    bench = Bench(tmp_path, FP32, placement=Placement(host_blocks=(0,)))
    bench.start()
    bench.update()
    message = FlushBlock(job=bench.context.spec.job, step=Step(2), block=BlockIndex(0))
    bench.optimizer.post(message)
    task = bench.optimizer._pipeline._next_task()
    assert isinstance(task, functools.partial)
    assert task.args == (message,)
    bench.arena.close()
    bench.arena.unlink()


def test_states_that_do_not_arrive_are_in_the_status_and_do_not_hold_up_a_stop(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FP32, placement=Placement(host_blocks=(0,)))
    bench.start()
    bench.ssds.hold = True
    bench.optimizer.post(RestoreStates(job=bench.context.spec.job, step=Step(2)))
    bench.ssds.receive(ReadChunks, RESTORE_DEPTH)
    bench.ssds.await_status("has waited .* s for states of step 2 from the SSDs.*at restore states of step 2")
    bench.optimizer.stop()
    bench.arena.close()
    bench.arena.unlink()


def test_restore_tells_its_progress_with_each_report_that_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windlass.actors.lifecycle.report_timer.PROGRESS_EVERY_S", 0.0)
    for bench in _started(Bench(tmp_path, FP32, placement=Placement(host_blocks=(0,)))):
        bench.optimizer.post(RestoreStates(job=bench.context.spec.job, step=Step(2)))
        bench.ssds.receive(StatesRestored)
        told = bench.ssds.of(LoadProgressed)
        assert [each.num_params for each in told] == [2048, 4096, 6144, 8192, NUMEL]
        assert {(each.actor, each.total_params) for each in told} == {("optimizer-0", NUMEL)}


# --- life cycle -----------------------------------------------------------------------------------------------------


def test_start_that_fails_leaves_no_thread_and_closes_what_it_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, closed = Bench(tmp_path, FP32), list[str]()
    close = Arena.close
    monkeypatch.setattr(Arena, "close", lambda arena: (closed.append("arena"), close(arena)))
    monkeypatch.setattr(ModelIo, "close", lambda _: closed.append("model"))

    def fail(threads: ActorThreads, targets: Sequence[Callable[[], None]]) -> None:
        start(threads, targets[:1])
        raise RuntimeError("can't start new thread")

    start, before = ActorThreads.start, set(threading.enumerate())
    monkeypatch.setattr(ActorThreads, "start", fail)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        bench.start()
    assert set(threading.enumerate()) <= before
    assert closed == ["model", "arena"]
    assert bench.ssds.of(ActorFailed) == []
