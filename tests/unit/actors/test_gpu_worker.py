"""One rank, with SSD servers that keep params in memory: it computes what plain autograd does."""

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from tests.training import make_partition, make_spec
from tests.unit.actors.memory_ssds import MemorySsds
from windlass.actors.context import grad_precision, make_context
from windlass.actors.gpu_worker import GpuWorker, evaluation_groups
from windlass.actors.job_spec import JobSpec
from windlass.actors.messages import (
    ActorFailed,
    BlockBackwardDone,
    BlockComputed,
    BlockFlushed,
    BlockUpdated,
    BorrowParams,
    ComputeBlock,
    FlushBlock,
    GradChunk,
    GradDropped,
    GradOffloaded,
    GradSlotsReturned,
    KernelChosen,
    LossComputed,
    OffloadGrad,
    ParamLoan,
    ParamsLent,
    ParamsReturned,
    Phase,
    PrefetchParams,
    ReadChunks,
    RestoreStates,
    StatesRestored,
    UpdateBlock,
    WriteChunks,
)
from windlass.engine.data import NO_TARGET
from windlass.engine.dataset import PreparedDataset
from windlass.engine.formats import TORCH_DTYPE
from windlass.engine.grad_buffer import GradBuffer
from windlass.engine.optimizer_kernel import AdamSettings, ChunkStates, OptimizerKernel
from windlass.planner.plan import Placement
from windlass.storage.arena import Arena
from windlass.storage.ids import ActorName, BlockIndex, ChunkKey, JobId, Precision, Span, StateKind, Step

STEP = Step(1)
OPTIMIZER = ActorName("optimizer-0")


class Bench:
    """A worker that has begun, its arena, and SSDs with the model's params as step 0 left them."""

    def __init__(self, directory: Path, **changes: Any) -> None:
        self.spec: JobSpec = make_spec(directory, **{"num_microbatches": 2, "clip_norm": 1.0, **changes})
        self.precision = self.spec.hyperparameters.precision
        self.loss_scale = 1.0
        partition = make_partition(self.spec)
        self.layout = partition.layout
        self.context = make_context(self.spec, self.layout, str(directory / "arena"))
        self.arena = Arena.create(self.context.arena_path, self.context.plan.arena_nbytes)
        self.ssds = MemorySsds(self.context, self.arena)
        self.worker = GpuWorker(self.context, partition, self.ssds.send, poison_released=True)
        self.ssds.answer = self.worker.post
        self.model = AutoModelForCausalLM.from_pretrained(
            self.spec.model_dir, dtype=TORCH_DTYPE[self.precision]
        ).train()
        self.store_params()
        self.num_operations = 0

    def store_params(self) -> None:
        """What the model is at this moment."""
        params = dict(self.model.named_parameters())
        for block in self.layout.blocks:
            if block.params:
                flat = torch.cat([params[param.name].detach().flatten() for param in block.params])
                for key in self.layout.chunk_keys(block.index):
                    start, stop = self.layout.chunk_range(key)
                    self.ssds.put(0, key, self.context.formats.param_kind, flat[start:stop])

    def prefetch(self, block: int, op: int, phase: Phase = Phase.FORWARD, group: int = 0) -> None:
        for needed in self.layout.shared[block]:
            self.worker.post(
                PrefetchParams(job=self.spec.job, step=Step(0), op=op, phase=phase, block=needed, group=group)
            )

    def compute(self, phase: Phase, block: int, op: int, group: int = 0) -> None:
        blocks = self.layout.shared[block]
        message = ComputeBlock(
            job=self.spec.job,
            step=STEP,
            op=op,
            phase=phase,
            block=BlockIndex(block),
            blocks=blocks,
            group=group,
            loss_scale=self.loss_scale if phase is Phase.HEAD else 1.0,
        )
        self.worker.post(message)

    def run(self, phase: Phase, block: int, group: int = 0) -> None:
        """One operation, to its end."""
        self.num_operations += 1
        self.prefetch(block, self.num_operations, phase, group)
        self.compute(phase, block, self.num_operations, group)
        self.ssds.receive(BlockComputed, self.num_operations)

    def offload(self, block: int) -> torch.Tensor:
        """A block's gradient, as it arrives in the arena; its slots are given back."""
        before = len(self.ssds.of(GradOffloaded))
        self.worker.post(OffloadGrad(job=self.spec.job, step=STEP, block=BlockIndex(block)))
        return self.received_grad(block, before + 1)

    def received_grad(self, block: int, count: int) -> torch.Tensor:
        """The last of so many gradients that were offloaded."""
        offloaded = self.ssds.receive(GradOffloaded, count)[-1]
        assert [chunk.key for chunk in offloaded.chunks] == self.layout.chunk_keys(BlockIndex(block))
        dtype = TORCH_DTYPE[grad_precision(self.spec)]
        parts = []
        for chunk in offloaded.chunks:
            if chunk.span is None:
                part = self.ssds.state(STEP, chunk.key, StateKind.GRAD, dtype)
            else:
                raw = bytearray(self.arena.buffer(chunk.span))
                part = torch.frombuffer(raw, dtype=dtype)[: self.context.chunk_numel(chunk.key)]
            parts.append(part.float())
        spans = tuple(chunk.span for chunk in offloaded.chunks if chunk.span is not None)
        self.worker.post(GradSlotsReturned(job=self.spec.job, step=STEP, spans=spans))
        return torch.cat(parts)

    def forward_and_head(self, group: int = 0) -> int:
        """The first half of a step, or of one of its groups; the head's block."""
        last = len(self.layout.blocks) - 1
        for block in range(last):
            self.run(Phase.FORWARD, block, group)
        self.run(Phase.HEAD, last, group)
        return last

    def train_step(self) -> dict[int, torch.Tensor]:
        """One step's operations in their order, and the gradient of each block."""
        last_group = self.context.plan.num_groups - 1
        for group in range(last_group):
            for block in reversed(range(self.forward_and_head(group))):
                self.run(Phase.BACKWARD, block, group)
        assert self.ssds.of(BlockBackwardDone) == []
        last = self.forward_and_head(last_group)
        found = {last: self.offload(last)}
        for block in reversed(range(last)):
            self.run(Phase.BACKWARD, block, last_group)
            found[block] = self.offload(block)
        return found

    def plain_step(self) -> tuple[float, int, dict[str, torch.Tensor]]:
        """Sum of the losses, number of targets and scaled gradients of the first step, in plain autograd."""
        hyper = self.spec.hyperparameters
        dataset = PreparedDataset.open(self.spec.dataset_dir, "train")
        batch = dataset.batch(0, hyper.batch_size, hyper.num_microbatches, hyper.seed)
        num_targets = sum(microbatch.num_targets for microbatch in batch)
        total = 0.0
        sums = {name: torch.zeros(param.shape) for name, param in self.model.named_parameters()}
        for microbatch in batch:
            self.model.zero_grad()
            logits = self.model(input_ids=microbatch.input_ids, use_cache=False).logits.float().flatten(0, 1)
            targets = microbatch.targets.flatten()
            loss = F.cross_entropy(logits, targets, ignore_index=NO_TARGET, reduction="sum")
            torch.autograd.backward(loss / num_targets * self.loss_scale)
            total += float(loss.detach())
            for name, param in self.model.named_parameters():
                sums[name] += param.grad.float()
        return total, num_targets, sums


@pytest.fixture
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path, **getattr(request, "param", {}))
    bench.worker.setup()
    yield bench
    bench.worker.stop()
    bench.arena.close()


def of_bench(**options: Any) -> Any:
    return pytest.param(options, id="-".join(str(value) for value in options.values()))


@pytest.mark.parametrize(
    "bench",
    [
        *(of_bench(precision=precision, tied=tied) for precision in Precision for tied in (False, True)),
        *(of_bench(precision=precision, num_microbatches=1) for precision in Precision),
        of_bench(precision=Precision.BF16, tied=True, accumulation_precision=Precision.BF16),
        of_bench(precision=Precision.FP16, tied=False, accumulation_precision=Precision.FP16),
        of_bench(placement=Placement(num_cached_params=100)),
        of_bench(placement=Placement(num_host_grad_blocks=2)),
        of_bench(placement=Placement(group_size=1)),
        of_bench(placement=Placement(group_size=1), tied=True, precision=Precision.BF16),
    ],
    indirect=True,
)
def test_a_step_computes_the_gradients_of_plain_autograd(bench: Bench) -> None:
    bench.loss_scale = 1024.0 if bench.precision is Precision.FP16 else 1.0
    found = bench.train_step()
    loss_sum, num_targets, grads = bench.plain_step()
    *_, loss = bench.ssds.of(LossComputed)
    fp32 = bench.precision is Precision.FP32
    assert loss.num_targets == num_targets
    assert loss.loss_sum == pytest.approx(loss_sum, rel=1e-6 if fp32 else 1e-3)
    for laid_out in bench.layout.blocks:
        for param in laid_out.params:
            if not fp32 and param.name.endswith("k_proj.bias"):
                continue  # has no gradient but rounding errors: attention does not feel a constant added to all keys
            grad = found[laid_out.index][param.offset : param.offset + param.numel]
            expected = grads[param.name].flatten()
            scale = float(expected.abs().max())
            torch.testing.assert_close(grad, expected, rtol=0.0, atol=(1e-5 if fp32 else 0.05) * scale + 1e-7)
    squares = {done.block: done.grad_sq_sum for done in bench.ssds.of(BlockBackwardDone)}
    # Of the sum before it was rounded on its way out.
    rel = 1e-4 if grad_precision(bench.spec) is Precision.FP32 else 1e-2
    assert squares == pytest.approx({block: float((grad**2).sum()) for block, grad in found.items()}, rel=rel)
    assert all(computed.is_finite for computed in bench.ssds.of(BlockComputed))


def test_the_first_output_that_is_not_finite_is_told(bench: Bench) -> None:
    with torch.no_grad():
        bench.model.model.layers[1].mlp.down_proj.weight[0, 0] = float("inf")
    bench.store_params()
    bench.train_step()
    told = [(computed.phase, computed.block) for computed in bench.ssds.of(BlockComputed) if not computed.is_finite]
    first, *_ = told
    assert first == (Phase.FORWARD, 2)  # after the embedding and one layer
    last = len(bench.layout.blocks) - 1
    assert {(Phase.FORWARD, block) for block in range(2, last)} | {(Phase.HEAD, last)} == set(told)
    assert not any(math.isfinite(done.grad_sq_sum) for done in bench.ssds.of(BlockBackwardDone))
    (loss,) = bench.ssds.of(LossComputed)
    assert not math.isfinite(loss.loss_sum)


@pytest.mark.parametrize("bench", [of_bench(precision=Precision.FP16)], indirect=True)
def test_a_loss_scaled_too_far_makes_gradients_that_are_not_finite(bench: Bench) -> None:
    bench.loss_scale = 2.0**40
    bench.train_step()
    assert all(computed.is_finite for computed in bench.ssds.of(BlockComputed))
    assert not all(math.isfinite(done.grad_sq_sum) for done in bench.ssds.of(BlockBackwardDone))


@pytest.mark.parametrize(
    "bench",
    [
        of_bench(precision=Precision.FP16, tied=True, num_microbatches=1),
        of_bench(precision=Precision.FP16, tied=True, accumulation_precision=Precision.FP16),
    ],
    indirect=True,
)
def test_what_overflows_on_its_way_out_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of shared tensors are fp32, and may be too large for the fp16 in which gradients travel."""
    add = GradBuffer.add

    def add_much(self: GradBuffer, name: str, offset: int, grad: torch.Tensor) -> None:
        add(self, name, offset, torch.full_like(grad, 60_000.0) if name.endswith("embed_tokens.weight") else grad)

    monkeypatch.setattr(GradBuffer, "add", add_much)
    found = bench.train_step()
    assert not found[0].isfinite().all()
    (told,) = [done.grad_sq_sum for done in bench.ssds.of(BlockBackwardDone) if done.block == 0]
    assert not math.isfinite(told)


def test_evaluation_reads_no_gradient_and_keeps_nothing(bench: Bench) -> None:
    last = len(bench.layout.blocks) - 1
    groups = evaluation_groups(bench.spec)
    assert [len(group) for group in groups] == [2, 2]
    for group in range(2):
        for block in range(last):
            bench.run(Phase.EVALUATE, block, group)
        bench.run(Phase.EVALUATE_HEAD, last, group)
    losses = bench.ssds.of(LossComputed)
    bench.model.eval()
    for loss, microbatches in zip(losses, groups, strict=True):
        total, num_targets, num_correct = 0.0, 0, 0
        for microbatch in microbatches:
            with torch.no_grad():
                logits = bench.model(input_ids=microbatch.input_ids, use_cache=False).logits
            targets = microbatch.targets
            flat = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET, reduction="sum")
            total += float(flat)
            num_targets += microbatch.num_targets
            num_correct += int((logits.argmax(-1) == targets).sum())
        assert loss.phase is Phase.EVALUATE_HEAD
        assert loss.loss_sum == pytest.approx(total, rel=1e-6)
        assert (loss.num_targets, loss.num_correct) == (num_targets, num_correct)
    assert bench.ssds.of(BlockBackwardDone) == []


def test_no_validation_data_no_groups(bench: Bench) -> None:
    assert evaluation_groups(replace(bench.spec, num_validation_examples=0)) == []


def test_params_are_read_before_all_updates_behind_them(bench: Bench) -> None:
    """Whatever the operation's number: those of step 0 before all updates of that step that are still to come."""
    bench.prefetch(0, op=7)
    num_chunks = bench.layout.num_chunks(BlockIndex(0))
    reads = bench.ssds.receive(ReadChunks, 1)
    while sum(len(read.items) for read in reads) < num_chunks:
        reads = bench.ssds.receive(ReadChunks, len(reads) + 1)
    assert {read.priority for read in reads} == {(0, 0)}
    keys = [item.key for read in reads for item in read.items]
    assert sorted(keys) == bench.layout.chunk_keys(BlockIndex(0))


def test_params_that_do_not_arrive_are_an_error(tmp_path: Path) -> None:
    bench = Bench(tmp_path, deadline_s=0.2)
    bench.worker.setup()
    bench.ssds.hold = True
    bench.prefetch(0, op=1)
    bench.compute(Phase.FORWARD, 0, op=1)
    (failed,) = bench.ssds.receive(ActorFailed)
    assert failed.actor == "gpu-0"
    assert "the params of block 0 in step 1 did not arrive within 0.2 s; " in failed.error
    assert "TimeoutError" in failed.detail
    bench.worker.stop()


def test_params_that_nobody_asked_for_are_an_error(tmp_path: Path) -> None:
    bench = Bench(tmp_path, deadline_s=0.2)
    bench.worker.setup()
    bench.compute(Phase.FORWARD, 0, op=1)
    (failed,) = bench.ssds.receive(ActorFailed)
    assert "the params of block 0 in step 1 were never asked for" in failed.error
    bench.worker.stop()


@pytest.mark.parametrize("waits_for", ["params", "prefetch", "slots"])
def test_stopping_does_not_wait_for_what_never_comes(tmp_path: Path, waits_for: str) -> None:
    """The deadline, which is longer than the test may take, is for jobs that go on."""
    bench = Bench(tmp_path, deadline_s=3600.0)
    bench.worker.setup()
    bench.ssds.hold = True
    if waits_for != "prefetch":
        bench.prefetch(1, op=1)
        bench.ssds.receive(ReadChunks, 2)
        bench.prefetch(2, op=2)  # all slots are taken
    if waits_for != "slots":
        bench.compute(Phase.FORWARD, 1, op=1)
    time.sleep(0.2)  # for its threads to begin to wait
    bench.worker.stop()
    assert bench.ssds.of(ActorFailed) == []


def test_what_it_has_no_use_for(bench: Bench) -> None:
    stray = BlockUpdated(job=JobId("ftjob-1"), step=STEP, block=BlockIndex(0), actor=GpuWorker.name)
    with pytest.raises(ValueError, match="gpu-0 does not take BlockUpdated"):
        bench.worker.post(stray)


# --- params that stay in host memory ----------------------------------------------------------------------------------


def keys_read(bench: Bench) -> list[ChunkKey]:
    return [item.key for read in bench.ssds.of(ReadChunks) for item in read.items]


@pytest.mark.parametrize("bench", [of_bench(placement=Placement(num_cached_params=100))], indirect=True)
def test_params_that_stay_are_read_once(bench: Bench) -> None:
    bench.train_step()
    every = [key for block in bench.layout.blocks for key in bench.layout.chunk_keys(block.index)]
    assert sorted(keys_read(bench)) == every


def borrow(bench: Bench, block: int) -> list[ParamLoan]:
    """What the worker lends for the update of a block."""
    keys = tuple(bench.layout.chunk_keys(BlockIndex(block)))
    before = len(bench.ssds.of(ParamsLent))
    message = BorrowParams(
        job=bench.spec.job, step=STEP, actor=OPTIMIZER, block=BlockIndex(block), from_step=Step(0), keys=keys
    )
    bench.worker.post(message)
    lent = bench.ssds.receive(ParamsLent, before + 1)[-1]
    assert (lent.step, lent.block) == (STEP, block)
    return list(lent.loans)


@pytest.mark.parametrize("bench", [of_bench(placement=Placement(num_cached_params=100))], indirect=True)
def test_the_next_forward_pass_takes_params_from_where_they_were_updated(bench: Bench) -> None:
    bench.train_step()
    num_read = len(keys_read(bench))
    loans = borrow(bench, 1)
    assert [loan.key for loan in loans] == bench.layout.chunk_keys(BlockIndex(1))
    kind = bench.context.formats.param_kind
    for loan in loans:
        assert loan.is_filled
        stored = bench.ssds.states[(Step(0), loan.key, kind)]
        buffer = bench.arena.buffer(loan.span)
        assert bytes(buffer[: len(stored)]) == stored
        buffer[:] = b"\0" * len(buffer)  # the update
        bench.worker.post(ParamsReturned(job=bench.spec.job, step=STEP, key=loan.key, span=loan.span))
    for step, op, block in ((STEP, 90, BlockIndex(1)), (Step(0), 91, BlockIndex(2))):
        bench.worker.post(
            PrefetchParams(job=bench.spec.job, step=step, op=op, phase=Phase.FORWARD, block=block, group=0)
        )
    compute = ComputeBlock(
        job=bench.spec.job,
        step=Step(2),
        op=90,
        phase=Phase.FORWARD,
        block=BlockIndex(1),
        blocks=(BlockIndex(1),),
        group=0,
        loss_scale=1.0,
    )
    fetch = bench.worker._feed.wait_for(compute, BlockIndex(1))
    assert fetch.ready.wait(10)
    assert not fetch.buffer.any()
    assert len(keys_read(bench)) == num_read


@pytest.mark.parametrize("bench", [of_bench(placement=Placement(num_cached_params=0))], indirect=True)
def test_a_worker_without_room_lends_nothing(bench: Bench) -> None:
    assert borrow(bench, 1) == []


# --- gradients on the SSDs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bench", [of_bench(placement=Placement(num_host_grad_blocks=2))], indirect=True)
def test_gradients_that_the_plan_spills_go_to_the_ssds(bench: Bench) -> None:
    bench.train_step()
    spilled = {item.key.block for write in bench.ssds.of(WriteChunks) for item in write.items}
    assert spilled == set(range(2, len(bench.layout.blocks)))
    for message in bench.ssds.of(GradOffloaded):
        assert all((chunk.span is None) == (message.block in spilled) for chunk in message.chunks)


@pytest.mark.parametrize("bench", [of_bench(placement=Placement(num_host_grad_blocks=0))], indirect=True)
def test_a_gradient_is_told_as_offloaded_when_all_of_it_is_written(bench: Bench) -> None:
    last = bench.forward_and_head()
    bench.ssds.hold = True
    bench.worker.post(OffloadGrad(job=bench.spec.job, step=STEP, block=BlockIndex(last)))
    for write in bench.ssds.receive(WriteChunks, 2):  # one to each SSD
        assert bench.ssds.of(GradOffloaded) == []
        bench.ssds.serve(write)
    bench.ssds.receive(GradOffloaded)


def test_a_dropped_gradient_gives_its_slots_back(bench: Bench) -> None:
    last = bench.forward_and_head()
    bench.worker.post(OffloadGrad(job=bench.spec.job, step=STEP, block=BlockIndex(last)))
    (offloaded,) = bench.ssds.receive(GradOffloaded)
    assert bench.worker._grads._slots.statistics.in_use_nbytes > 0
    chunks = (*offloaded.chunks, GradChunk(bench.layout.chunk_keys(BlockIndex(0))[0], None))
    bench.worker.post(GradDropped(job=bench.spec.job, step=STEP, block=BlockIndex(last), chunks=chunks))
    assert bench.worker._grads._slots.statistics.in_use_nbytes == 0


# --- states that rest in memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bench", [of_bench(placement=Placement(host_blocks=(1, 2)))], indirect=True)
def test_params_that_rest_in_host_memory_are_taken_from_there(bench: Bench) -> None:
    offset = bench.context.state_offsets()[bench.context.formats.param_kind]
    for key, slot in bench.context.host_slots().items():
        stored = bench.ssds.states.pop((Step(0), key, bench.context.formats.param_kind))
        buffer = bench.arena.buffer(Span(slot.offset + offset, 4096 * -(-len(stored) // 4096)))
        buffer[: len(stored)] = stored
    found = bench.train_step()
    _, _, grads = bench.plain_step()
    param = bench.layout.blocks[1].params[0]
    torch.testing.assert_close(
        found[1][: param.numel], grads[param.name].flatten(), rtol=1e-4, atol=1e-6 * float(grads[param.name].max())
    )
    assert {key.block for key in keys_read(bench)} == set(range(len(bench.layout.blocks))) - {1, 2}


def store_moments(bench: Bench) -> None:
    """Optimizer states beside the params of step 0, in fp32."""
    for block in bench.layout.blocks:
        for key in bench.layout.chunk_keys(block.index):
            for i, kind in enumerate((StateKind.EXP_AVG, StateKind.EXP_AVG_SQ)):
                bench.ssds.put(0, key, kind, torch.full((bench.context.chunk_numel(key),), 0.01 * (i + 1)))


@pytest.mark.parametrize("bench", [of_bench(placement=Placement(device_blocks=(1, 4)))], indirect=True)
def test_states_on_the_device_are_updated_there(bench: Bench) -> None:
    job, resident = bench.spec.job, [BlockIndex(1), BlockIndex(4)]
    store_moments(bench)
    bench.worker.post(RestoreStates(job=job, step=Step(0)))
    (restored,) = bench.ssds.receive(StatesRestored)
    assert (restored.step, restored.actor) == (0, "gpu-0")
    last = bench.forward_and_head()
    for block in reversed(range(last)):
        bench.run(Phase.BACKWARD, block)
        if block not in resident:
            bench.offload(block)
    (chosen,) = bench.ssds.of(KernelChosen)
    assert chosen.actor == "gpu-0"
    hyper = bench.spec.hyperparameters
    for i, block in enumerate(resident):
        flat = bench.worker._grads._complete[block].flat
        expected = expected_update(bench, block, flat.clone())
        update = UpdateBlock(
            job=job,
            step=STEP,
            block=block,
            from_step=Step(0),
            optimizer_step=1,
            chunks=(),
            learning_rate=hyper.learning_rate,
            grad_scale=0.5,
        )
        bench.worker.post(update)
        updated = bench.ssds.receive(BlockUpdated, i + 1)[i]
        assert (updated.block, updated.actor) == (block, "gpu-0")
        bench.worker.post(FlushBlock(job=job, step=STEP, block=block))
        flushed = bench.ssds.receive(BlockFlushed, i + 1)[i]
        assert (flushed.block, flushed.step, flushed.actor) == (block, STEP, "gpu-0")
        keys = bench.layout.chunk_keys(block)
        for kind, state in expected.items():
            assert torch.equal(torch.cat([bench.ssds.state(1, key, kind) for key in keys]), state)


def expected_update(bench: Bench, block: BlockIndex, grad: torch.Tensor) -> dict[StateKind, torch.Tensor]:
    """What the kernel makes of the stored states."""
    keys, kinds = bench.layout.chunk_keys(block), tuple(bench.context.formats.itemsizes)
    states = {kind: torch.cat([bench.ssds.state(0, key, kind) for key in keys]) for kind in kinds}
    hyper = bench.spec.hyperparameters
    kernel = OptimizerKernel(
        AdamSettings(
            beta1=hyper.beta1, beta2=hyper.beta2, epsilon=hyper.epsilon, weight_decay=hyper.weight_decay, decoupled=True
        ),
        grad_dtype=torch.float32,
        param_dtype=None,
        state_precision=hyper.state_precision,
        kernel=hyper.kernel,
    )
    kernel.update(
        ChunkStates(
            grad=grad,
            master=states[StateKind.MASTER],
            exp_avg=states[StateKind.EXP_AVG],
            exp_avg_sq=states[StateKind.EXP_AVG_SQ],
        ),
        learning_rate=hyper.learning_rate,
        step=1,
        grad_scale=0.5,
        decay_numel=bench.layout.blocks[block].decay_numel,
    )
    return states


@pytest.mark.parametrize("bench", [of_bench(placement=Placement(device_blocks=(3,)))], indirect=True)
def test_a_dropped_gradient_on_the_device_is_forgotten(bench: Bench) -> None:
    store_moments(bench)
    bench.worker.post(RestoreStates(job=bench.spec.job, step=Step(0)))
    bench.ssds.receive(StatesRestored)
    bench.forward_and_head()
    bench.run(Phase.BACKWARD, 3)
    bench.worker.post(GradDropped(job=bench.spec.job, step=STEP, block=BlockIndex(3), chunks=()))
    assert BlockIndex(3) not in bench.worker._grads._complete


def test_states_that_do_not_arrive_are_an_error(tmp_path: Path) -> None:
    bench = Bench(tmp_path, placement=Placement(device_blocks=(3,)), deadline_s=0.2)
    bench.worker.setup()
    bench.ssds.hold = True
    bench.worker.post(RestoreStates(job=bench.spec.job, step=Step(0)))
    (failed,) = bench.ssds.receive(ActorFailed)
    assert "as step 0 left them did not come from the SSDs within 0.2 s" in failed.error
    bench.worker.stop()
    bench.arena.close()
