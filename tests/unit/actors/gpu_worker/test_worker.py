"""One rank, with SSD servers that keep params in memory, computes the same as plain autograd."""

import math
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from tests.support.actors.worker_bench import STEP, Bench, of_bench, running
from windlass.actors.gpu_worker import worker
from windlass.actors.gpu_worker.worker import evaluation_groups
from windlass.actors.job.context import GPU_WORKER, grad_precision
from windlass.actors.messages import (
    ActorFailed,
    BlockUpdated,
    ComputeProgressed,
    GradOffloaded,
    Phase,
    ReadChunks,
    UserMessage,
)
from windlass.actors.worker_policy import worker_queues
from windlass.engine.data.examples import NO_TARGET
from windlass.engine.device.device import Device
from windlass.engine.memory_plan.plan import Placement
from windlass.engine.model.grad_buffer import GradBuffer
from windlass.storage.ids import BlockIndex, JobId, Precision
from windlass.storage.memory.arena import Arena


@pytest.fixture
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    with running(Bench(tmp_path, **getattr(request, "param", {}))) as bench:
        yield bench


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
    loss = bench.losses[-1]
    fp32 = bench.precision is Precision.FP32
    assert loss.num_targets == num_targets
    assert sum(sum(loss.terms) for loss in bench.losses) == pytest.approx(loss_sum, rel=1e-6 if fp32 else 1e-3)
    for laid_out in bench.layout.blocks:
        for param in laid_out.params:
            if not fp32 and param.name.endswith("k_proj.bias"):
                continue  # its gradient is only rounding errors: attention ignores a constant added to all keys
            grad = found[laid_out.index][param.offset : param.offset + param.numel]
            expected = grads[param.name].flatten()
            scale = float(expected.abs().max())
            torch.testing.assert_close(grad, expected, rtol=0.0, atol=(1e-5 if fp32 else 0.05) * scale + 1e-7)
    squares = {done.block: sum(done.sq_sums) for done in bench.grads}
    # Relative to the sum before it was rounded for its transfer.
    rel = 1e-4 if grad_precision(bench.spec) is Precision.FP32 else 1e-2
    assert squares == pytest.approx({block: float((grad**2).sum()) for block, grad in found.items()}, rel=rel)
    assert all(computed.is_finite for computed in bench.computed)


def test_the_first_output_that_is_not_finite_is_told(bench: Bench) -> None:
    with torch.no_grad():
        bench.model.model.layers[1].mlp.down_proj.weight[0, 0] = float("inf")
    bench.store_params()
    bench.train_step()
    told = [(computed.phase, computed.block) for computed in bench.computed if not computed.is_finite]
    first, *_ = told
    assert first == (Phase.FORWARD, 2)  # after the embedding and one layer
    last = len(bench.layout.blocks) - 1
    assert {(Phase.FORWARD, block) for block in range(2, last)} | {(Phase.HEAD, last)} == set(told)
    assert not any(math.isfinite(sum(done.sq_sums)) for done in bench.grads)
    (loss,) = bench.losses
    assert not math.isfinite(sum(loss.terms))


@pytest.mark.parametrize("bench", [of_bench(precision=Precision.FP16)], indirect=True)
def test_a_loss_scaled_too_far_makes_gradients_that_are_not_finite(bench: Bench) -> None:
    bench.loss_scale = 2.0**40
    bench.train_step()
    assert all(computed.is_finite for computed in bench.computed)
    assert not all(math.isfinite(sum(done.sq_sums)) for done in bench.grads)


@pytest.mark.parametrize(
    "bench",
    [
        of_bench(precision=Precision.FP16, tied=True, num_microbatches=1),
        of_bench(precision=Precision.FP16, tied=True, accumulation_precision=Precision.FP16),
    ],
    indirect=True,
)
def test_gradient_that_overflows_in_transfer_is_reported(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of shared tensors are fp32, and may be too large for fp16, in which gradients are transferred."""
    add = GradBuffer.add

    def add_much(self: GradBuffer, name: str, offset: int, grad: torch.Tensor) -> None:
        add(self, name, offset, torch.full_like(grad, 60_000.0) if name.endswith("embed_tokens.weight") else grad)

    def add_much_product(
        self: GradBuffer, name: str, offset: int, left: torch.Tensor, right: torch.Tensor, *, in_fp32: bool
    ) -> None:
        add_much(self, name, offset, left.t() @ right)

    monkeypatch.setattr(GradBuffer, "add", add_much)
    monkeypatch.setattr(GradBuffer, "add_product", add_much_product)
    found = bench.train_step()
    assert not found[0].isfinite().all()
    (told,) = [sum(done.sq_sums) for done in bench.grads if done.block == 0]
    assert not math.isfinite(told)


def test_evaluation_reads_no_gradient_and_keeps_nothing(bench: Bench) -> None:
    last = len(bench.layout.blocks) - 1
    groups = evaluation_groups(bench.spec)
    assert [len(group) for group in groups] == [2, 2]
    for group in range(2):
        for block in range(last):
            bench.run(Phase.EVALUATE, block, group)
        bench.run(Phase.EVALUATE_HEAD, last, group)
    heads = [computed for computed in bench.computed if computed.loss is not None]
    bench.model.eval()
    for head, microbatches in zip(heads, groups, strict=True):
        total, num_targets, num_correct = 0.0, 0, 0
        for microbatch in microbatches:
            with torch.no_grad():
                logits = bench.model(input_ids=microbatch.input_ids, use_cache=False).logits
            targets = microbatch.targets
            flat = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET, reduction="sum")
            total += float(flat)
            num_targets += microbatch.num_targets
            num_correct += int((logits.argmax(-1) == targets).sum())
        assert head.phase is Phase.EVALUATE_HEAD
        loss = head.loss
        assert loss is not None
        assert sum(loss.terms) == pytest.approx(total, rel=1e-6)
        assert (loss.num_targets, loss.num_correct) == (num_targets, num_correct)
    assert bench.grads == []
    runner = bench.worker.runner
    assert (runner.inputs, runner.grads, runner._units) == ([], [], {})


def test_no_validation_data_no_groups(bench: Bench) -> None:
    assert evaluation_groups(replace(bench.spec, num_validation_examples=0)) == []


def ops_reported(bench: Bench) -> list[list[int]]:
    """The operations of each report."""
    return [[computed.op for computed in report.computed] for report in bench.ssds.of(ComputeProgressed)]


@pytest.mark.parametrize(
    ("report_every_s", "expected"),
    [(math.inf, [[1, 2, 3, 4], [5], [6, 7]]), (-1.0, [[1], [2], [3], [4], [5], [6], [7]])],
    ids=["in time", "late"],
)
def test_operations_are_reported_together_unless_the_report_is_late_or_has_a_loss_or_the_worker_is_idle(
    bench: Bench, report_every_s: float, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_queues, "REPORT_EVERY_S", report_every_s)
    last = len(bench.layout.blocks) - 1
    whole = [(Phase.EVALUATE, block) for block in range(last)] + [(Phase.EVALUATE_HEAD, last)]
    some = [(Phase.EVALUATE, block) for block in (0, 1)]
    bench.grant(*(bench.operation(phase, block, op) for op, (phase, block) in enumerate((*whole, *some), start=1)))
    bench.receive_computed(len(whole) + len(some))
    assert ops_reported(bench) == expected


@pytest.mark.parametrize("bench", [of_bench(placement=Placement(num_cached_params=0))], indirect=True)
def test_finished_work_is_reported_together_while_the_worker_is_not_idle(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = bench.forward_and_head()
    bench.run(Phase.BACKWARD, last - 1)
    bench.receive_grads(2)
    num_reports, num_offloaded = len(ops_reported(bench)), len(bench.ssds.of(GradOffloaded))
    monkeypatch.setattr(worker_queues, "REPORT_EVERY_S", math.inf)
    bench.ssds.hold = True
    num_reads = len(bench.ssds.of(ReadChunks))
    # The params of the first one are on the device, from its forward operation.
    bench.grant(*(bench.operation(Phase.BACKWARD, last - i, op=90 + i) for i in (2, 3)))
    # The optimizers have the gradient at once. The scheduler learns of it with the second operation, whose params have
    # not arrived yet.
    bench.ssds.receive(GradOffloaded, num_offloaded + 1)
    assert ops_reported(bench)[num_reports:] == []
    num_missing = bench.layout.num_chunks(BlockIndex(last - 3))
    while num_missing > 0:
        num_reads += 1
        read = bench.ssds.receive(ReadChunks, num_reads)[num_reads - 1]
        num_missing -= len(read.items)
        bench.ssds.serve(read)
    assert [grad.block for grad in bench.receive_grads(4)] == [last, last - 1, last - 2, last - 3]
    assert ops_reported(bench)[num_reports] == [92, 93]


def test_params_are_read_before_all_updates_behind_them(bench: Bench) -> None:
    """Regardless of the operation's number: reads of params of step 0 come before all later updates of that step."""
    bench.grant(bench.operation(Phase.FORWARD, 0, op=7))
    num_chunks = bench.layout.num_chunks(BlockIndex(0))
    reads = bench.ssds.receive(ReadChunks, 1)
    while sum(len(read.items) for read in reads) < num_chunks:
        reads = bench.ssds.receive(ReadChunks, len(reads) + 1)
    assert {read.priority for read in reads} == {(0, 0)}
    keys = [item.key for read in reads for item in read.items]
    assert sorted(keys) == bench.layout.chunk_keys(BlockIndex(0))


def test_status_names_params_that_do_not_arrive_and_late_ssd_servers(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.start()
    bench.ssds.hold = True
    bench.grant(bench.operation(Phase.FORWARD, 0, op=1))
    text = bench.ssds.await_status(r"has waited .* s for the params of block 0 in step 1; \d chunks are missing")
    assert "GpuWorker._run_compute has waited" in text
    assert "(at compute block, forward, of step 1, block 0)" in text
    assert re.search(r"ssd-\d has not finished a read of block 0, chunk \d, step 0", text)
    bench.worker.stop()
    assert bench.ssds.of(ActorFailed) == []


@pytest.mark.parametrize(("num_ranks", "expected"), [(1, "it took long"), (2, "GPU 0: it took long")])
def test_message_to_the_user_names_the_gpu_if_there_are_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int, expected: str
) -> None:
    monkeypatch.setattr(worker, "choose_kernels", lambda _, __, ___, announce: announce("it took long") or ())
    bench = Bench(tmp_path, num_ranks=num_ranks)
    bench.start()
    bench.worker.stop()
    assert [message.text for message in bench.ssds.of(UserMessage)] == [expected]


def test_status_of_several_gpu_workers_points_to_the_actor_that_reads_their_params(tmp_path: Path) -> None:
    bench = Bench(tmp_path, num_ranks=2)
    bench.start()
    bench.grant(bench.operation(Phase.FORWARD, 0, op=1))
    bench.ssds.await_status(r"chunks are missing; see the status of params-0, because other GPU workers may not")
    bench.worker.stop()


def test_status_names_params_that_were_not_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    bench.start()
    monkeypatch.setattr(bench.worker._feed, "request", lambda operation: None)
    bench.grant(bench.operation(Phase.FORWARD, 0, op=1))
    bench.ssds.await_status("has waited .* s for a request of the params of block 0 in step 1")
    bench.worker.stop()


@pytest.mark.parametrize("waits_for", ["params", "prefetch", "slots"])
def test_stop_does_not_wait_for_missing_params(tmp_path: Path, waits_for: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeout is longer than the test may take, so the stop itself must end the waits."""
    bench = Bench(tmp_path, deadline_s=3600.0)
    bench.start()
    bench.ssds.hold = True
    first, second = (bench.operation(Phase.FORWARD, block, op=block) for block in (1, 2))
    match waits_for:
        case "params":
            bench.grant(first)
            bench.ssds.receive(ReadChunks, 2)
            bench.grant(second)  # all slots are in use
        case "prefetch":
            monkeypatch.setattr(bench.worker._feed, "request", lambda operation: None)
            bench.grant(first)
        case "slots":
            bench.worker._feed.request(first)
            bench.ssds.receive(ReadChunks, 2)
            bench.worker._feed.request(second)  # all slots are in use
    time.sleep(0.2)  # lets its threads begin to wait
    bench.worker.stop()
    assert bench.ssds.of(ActorFailed) == []


@pytest.mark.parametrize("step", ["choose_kernels", "DeviceStates", "PreparedDataset", "evaluation_groups"])
def test_start_that_fails_leaves_no_thread_and_closes_what_it_opened(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, closed = Bench(tmp_path), list[str]()
    close, unpin = Arena.close, Device.unpin
    monkeypatch.setattr(Arena, "close", lambda arena: (closed.append("arena"), close(arena)))
    monkeypatch.setattr(Device, "unpin", lambda device, memory: (closed.append("pinned memory"), unpin(device, memory)))

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("broken for the test")

    monkeypatch.setattr(worker, step, SimpleNamespace(open=fail) if step == "PreparedDataset" else fail)
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="broken for the test"):
        bench.start()
    assert set(threading.enumerate()) <= before
    assert closed == ["pinned memory", "arena"]
    bench.arena.close()


def test_stop_closes_what_the_start_opened_and_may_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, closed, before = Bench(tmp_path), list[str](), set(threading.enumerate())
    close = Arena.close
    monkeypatch.setattr(Arena, "close", lambda arena: (closed.append("arena"), close(arena)))
    bench.start()
    for _ in range(2):
        bench.worker.stop()
        assert closed == ["arena"]
    assert set(threading.enumerate()) <= before


def test_worker_with_foreign_message_raises(bench: Bench) -> None:
    stray = BlockUpdated(job=JobId("ftjob-1"), step=STEP, block=BlockIndex(0), actor=GPU_WORKER)
    with pytest.raises(ValueError, match="gpu-0 has no handler for BlockUpdated"):
        bench.worker.post(stray)
