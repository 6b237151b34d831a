"""One rank whose params and gradients are resident in memory or on the device, or whose gradients spill to the SSDs."""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.actors.worker_bench import STEP, Bench, of_bench, running
from windlass.actors.gpu_worker.device_optimizer import DeviceStates
from windlass.actors.gpu_worker.param_prefetcher import Fetch
from windlass.actors.messages import (
    BlockFlushed,
    BlockUpdated,
    ComputeBlock,
    FlushBlock,
    GradOffloaded,
    KernelChosen,
    LoadProgressed,
    Phase,
    ReadChunks,
    RestoreStates,
    SkipStep,
    StatesRestored,
    StoredParams,
    UpdateStep,
    WriteChunks,
)
from windlass.engine.device.dtypes import TORCH_DTYPE
from windlass.engine.memory_plan.plan import Placement
from windlass.engine.optimizer.adam_kernel import AdamSettings, ChunkStates, OptimizerKernel
from windlass.storage.ids import ActorName, BlockIndex, ChunkKey, Precision, Span, StateKind, Step

OPTIMIZER = ActorName("optimizer-0")


@pytest.fixture
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    with running(Bench(tmp_path, **getattr(request, "param", {}))) as bench:
        yield bench


# --- params that stay in host memory ------------------------------------------------------------------------------


def keys_read(bench: Bench) -> list[ChunkKey]:
    return [item.key for read in bench.ssds.of(ReadChunks) for item in read.items]


@pytest.mark.parametrize("bench", [of_bench(placement=Placement(num_cached_params=100))], indirect=True)
def test_params_that_stay_are_read_once(bench: Bench) -> None:
    bench.train_step()
    every = [key for block in bench.layout.blocks for key in bench.layout.chunk_keys(block.index)]
    assert sorted(keys_read(bench)) == every


@pytest.mark.parametrize("bench", [of_bench(placement=Placement(num_cached_params=100))], indirect=True)
def test_the_next_forward_pass_takes_params_from_where_they_were_updated(bench: Bench) -> None:
    bench.train_step()
    num_read = len(keys_read(bench))
    kind, cached = bench.context.formats.param_kind, bench.context.cached_params()
    for key in bench.layout.chunk_keys(BlockIndex(1)):
        stored = bench.ssds.states[(Step(0), key, kind)]
        buffer = bench.arena.buffer(cached[key])
        assert bytes(buffer[: len(stored)]) == stored
        buffer[:] = b"\0" * len(buffer)  # stands for the update
    operation = replace(
        bench.operation(Phase.FORWARD, 1, 90), step=Step(2), params=(StoredParams(BlockIndex(1), STEP),)
    )
    bench.worker._feed.request(operation)
    fetch = bench.worker._feed.wait_for(operation, BlockIndex(1))
    assert isinstance(fetch.params, torch.Tensor)
    assert not fetch.params.any()
    assert len(keys_read(bench)) == num_read


# --- params that are still on the device --------------------------------------------------------------------------


def fetched(bench: Bench, *operations: ComputeBlock) -> list[Fetch]:
    """The params of operations on one block. All are requested before the first ones arrive."""
    bench.ssds.hold, feed, num_reads = True, bench.worker._feed, len(bench.ssds.of(ReadChunks))
    for operation in operations:
        feed.request(operation)
    bench.ssds.receive(ReadChunks, num_reads + 2)  # then all slots are in use
    bench.ssds.hold = False
    for read in bench.ssds.held:
        bench.ssds.serve(read)
    bench.ssds.held.clear()
    return [feed.wait_for(operation, operation.block) for operation in operations]


def of_step(bench: Bench, op: int, step: int) -> ComputeBlock:
    """An operation on the first layer with the params of a step."""
    return replace(bench.operation(Phase.FORWARD, 1, op), params=(StoredParams(BlockIndex(1), Step(step)),))


@pytest.mark.parametrize("bench", [of_bench(placement=Placement(num_cached_params=0))], indirect=True)
def test_operations_on_the_same_params_share_a_transfer_in_flight(bench: Bench) -> None:
    first, second = fetched(bench, of_step(bench, 1, 0), of_step(bench, 2, 0))
    assert first.params is second.params
    assert sorted(keys_read(bench)) == bench.layout.chunk_keys(BlockIndex(1))
    for fetch in (first, second):
        bench.worker._feed.release(fetch)
    third = of_step(bench, 3, 0)
    bench.worker._feed.request(third)
    assert bench.worker._feed.wait_for(third, third.block).params is first.params
    assert len(keys_read(bench)) == bench.layout.num_chunks(BlockIndex(1))


@pytest.mark.parametrize("bench", [of_bench(placement=Placement(num_cached_params=0))], indirect=True)
def test_params_of_another_step_are_fetched_although_older_ones_are_on_the_device(bench: Bench) -> None:
    for key in bench.layout.chunk_keys(BlockIndex(1)):
        numel, kind = bench.context.chunk_numel(key), bench.context.formats.param_kind
        bench.ssds.put(1, key, kind, torch.full((numel,), 3.0, dtype=TORCH_DTYPE[bench.precision]))
    (old,) = fetched(bench, of_step(bench, 1, 0))
    bench.worker._feed.release(old)
    (new,) = fetched(bench, of_step(bench, 2, 1))
    assert isinstance(new.params, torch.Tensor)
    assert (new.params == 3.0).all()
    assert len(keys_read(bench)) == 2 * bench.layout.num_chunks(BlockIndex(1))


@pytest.mark.parametrize("bench", [of_bench(placement=Placement(num_cached_params=3))], indirect=True)
def test_only_the_first_chunks_are_cached(bench: Bench) -> None:
    bench.train_step()
    counts = Counter(keys_read(bench))
    every = [key for block in bench.layout.blocks for key in bench.layout.chunk_keys(block.index)]
    assert list(bench.context.cached_params()) == every[:3]
    # All others but the first layer's are on the device until they are needed again.
    assert counts == {key: 2 if key.block == 1 and key not in every[:3] else 1 for key in every}


# --- gradients on the SSDs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bench", [of_bench(placement=Placement(num_host_grad_blocks=2))], indirect=True)
def test_gradients_that_the_plan_spills_go_to_the_ssds(bench: Bench) -> None:
    bench.train_step()
    spilled = {item.key.block for write in bench.ssds.of(WriteChunks) for item in write.items}
    assert spilled == set(range(2, len(bench.layout.blocks)))
    for grad in bench.ssds.of(GradOffloaded):
        assert all((chunk.span is None) == (grad.block in spilled) for chunk in grad.chunks)


@pytest.mark.parametrize(
    "bench", [of_bench(placement=Placement(num_host_grad_blocks=0), is_committed=False)], indirect=True
)
def test_a_gradient_is_told_as_offloaded_when_all_of_it_is_written(bench: Bench) -> None:
    bench.forward_and_head()
    bench.ssds.hold = True
    bench.commit(0)
    for write in bench.ssds.receive(WriteChunks, 2):  # one to each SSD
        assert bench.grads == []
        bench.ssds.serve(write)
    bench.receive_grads(1)


@pytest.mark.parametrize(
    "bench", [of_bench(placement=Placement(num_host_grad_blocks=4), is_committed=False)], indirect=True
)
def test_a_gradient_on_the_ssds_waits_for_the_commit_before_its_step_and_holds_no_other_up(bench: Bench) -> None:
    last = bench.forward_and_head()
    for i in (1, 2):
        bench.run(Phase.BACKWARD, last - i)
        assert [grad.block for grad in bench.receive_grads(i)] == [last - 1, last - 2][:i]
    assert bench.ssds.of(WriteChunks) == []
    bench.commit(0)
    assert [grad.block for grad in bench.receive_grads(3)] == [last - 1, last - 2, last]
    assert {item.key.block for write in bench.ssds.of(WriteChunks) for item in write.items} == {last}


# --- resident states ----------------------------------------------------------------------------------------------


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
    """Stores fp32 moments beside the params of step 0."""
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
    bench.receive_grads(1)
    for block in reversed(range(last)):
        bench.run(Phase.BACKWARD, block)
        if block in resident:
            bench.receive_grads(last - block + 1)
        else:
            bench.received_grad(block, last - block + 1)
    assert {message.block for message in bench.ssds.of(GradOffloaded)} == {0, 2, 3}
    (chosen,) = bench.ssds.of(KernelChosen)
    assert chosen.actor == "gpu-0"
    hyper = bench.spec.training
    flats = {block: bench.worker._grads._complete[block].flat.clone() for block in resident}
    how: dict[str, Any] = {"optimizer_step": 1, "learning_rate": hyper.learning_rate, "grad_scale": 0.5}
    bench.worker.post(UpdateStep(job=job, step=STEP, from_step=Step(0), **how))
    for i, block in enumerate(sorted(resident)):
        expected = expected_update(bench, block, flats[block])
        updated = bench.ssds.receive(BlockUpdated, i + 1)[i]
        assert (updated.block, updated.actor) == (block, "gpu-0")
        bench.worker.post(FlushBlock(job=job, step=STEP, block=block))
        flushed = bench.ssds.receive(BlockFlushed, i + 1)[i]
        assert (flushed.block, flushed.step, flushed.actor) == (block, STEP, "gpu-0")
        keys = bench.layout.chunk_keys(block)
        for kind, state in expected.items():
            assert torch.equal(torch.cat([bench.ssds.state(1, key, kind) for key in keys]), state)


def expected_update(bench: Bench, block: BlockIndex, grad: torch.Tensor) -> dict[StateKind, torch.Tensor]:
    """The states after the kernel's update of the stored states."""
    keys, kinds = bench.layout.chunk_keys(block), tuple(bench.context.formats.itemsizes)
    states = {kind: torch.cat([bench.ssds.state(0, key, kind) for key in keys]) for kind in kinds}
    hyper = bench.spec.training
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


class Operators(TorchDispatchMode):
    """Records the operators of a thread that are no views."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self._found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rounds_on_device", [False, True])
@pytest.mark.parametrize(
    "bench", [of_bench(precision=Precision.BF16, placement=Placement(device_blocks=(1,)))], indirect=True
)
def test_params_are_rounded_from_masters_before_the_callback_of_their_copy(
    bench: Bench, rounds_on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A callback that computes would delay all later ones of the stream."""
    in_callbacks: list[str] = []
    num_writes, write = Counter[int](), DeviceStates._write

    def watched(states: DeviceStates, message: FlushBlock, *args: Any) -> None:
        num_writes[message.block] += 1
        with Operators(in_callbacks):
            write(states, message, *args)

    monkeypatch.setattr(DeviceStates, "_write", watched)
    block = BlockIndex(1)
    keys, generator = bench.layout.chunk_keys(block), torch.Generator().manual_seed(0)
    for key in keys:
        master = torch.randn(bench.context.chunk_numel(key), generator=generator)
        bench.ssds.put(0, key, StateKind.MASTER, master)
    store_moments(bench)
    if rounds_on_device:
        numel = bench.layout.chunk_numel
        bench.worker._states._rounded = torch.full((numel,), torch.nan, dtype=torch.bfloat16)
    bench.worker.post(RestoreStates(job=bench.spec.job, step=Step(0)))
    bench.ssds.receive(StatesRestored)
    bench.worker.post(FlushBlock(job=bench.spec.job, step=STEP, block=block))
    bench.ssds.receive(BlockFlushed)
    assert num_writes == {block: len(keys)}
    assert in_callbacks == []
    for key in keys:
        master = bench.ssds.state(0, key, StateKind.MASTER)
        assert torch.equal(bench.ssds.state(1, key, StateKind.MASTER), master)
        stored = bytearray(bench.ssds.states[(STEP, key, StateKind.PARAM)])
        params = torch.frombuffer(stored, dtype=torch.bfloat16)[: master.numel()]
        assert torch.equal(params, master.bfloat16())


@pytest.mark.parametrize("bench", [of_bench(placement=Placement(device_blocks=(3,)))], indirect=True)
def test_a_dropped_gradient_on_the_device_is_forgotten(bench: Bench) -> None:
    store_moments(bench)
    bench.worker.post(RestoreStates(job=bench.spec.job, step=Step(0)))
    bench.ssds.receive(StatesRestored)
    bench.forward_and_head()
    bench.run(Phase.BACKWARD, 3)
    bench.receive_grads(2)
    assert BlockIndex(3) in bench.worker._grads._complete
    bench.worker.post(SkipStep(job=bench.spec.job, step=STEP))
    assert BlockIndex(3) not in bench.worker._grads._complete


@pytest.mark.parametrize("bench", [of_bench(placement=Placement(device_blocks=(1, 4)))], indirect=True)
def test_restore_of_states_on_the_device_tells_its_progress_chunk_by_chunk(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device may hold states that take longer to read than the job's timeout."""
    monkeypatch.setattr("windlass.actors.lifecycle.report_timer.PROGRESS_EVERY_S", 0.0)
    store_moments(bench)
    bench.worker.post(RestoreStates(job=bench.spec.job, step=Step(0)))
    bench.ssds.receive(StatesRestored)
    told, layout = bench.ssds.of(LoadProgressed), bench.layout
    keys = [key for block in (1, 4) for key in layout.chunk_keys(BlockIndex(block))]
    assert len(keys) > 2
    assert [each.num_params for each in told] == list(itertools.accumulate(map(bench.context.chunk_numel, keys)))
    assert {(each.actor, each.total_params) for each in told} == {("gpu-0", told[-1].num_params)}


def test_status_names_states_that_do_not_arrive(tmp_path: Path) -> None:
    bench = Bench(tmp_path, placement=Placement(device_blocks=(3,)))
    bench.start()
    bench.ssds.hold = True
    bench.worker.post(RestoreStates(job=bench.spec.job, step=Step(0)))
    bench.ssds.await_status("has waited .* s for the states of .* as step 0 left them, from the SSDs")
    bench.worker.stop()
    bench.arena.close()
