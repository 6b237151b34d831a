"""The operations of all blocks need no value of the GPU on the host, and copy nothing there while it waits."""

import pytest
import torch

from tests.support.engine.architectures import ARCHITECTURES
from tests.support.fake_liger import FakeLiger
from tests.support.host_waits import GPU, no_host_waits
from windlass.engine.model.block_runner import BlockRunner
from windlass.engine.model.grad_buffer import GradBuffer
from windlass.engine.model.head_slices import LossSums
from windlass.engine.model.partition import Partition, build_meta_model
from windlass.engine.optimizer.grad_norm import squared_norm
from windlass.engine.slices import slice_sizes
from windlass.storage.ids import BlockIndex, ModelKernel, Precision

HEAD_KERNELS = (ModelKernel.LIGER_CROSS_ENTROPY, ModelKernel.FP32_PRODUCT)
QUICK = ("Qwen2", "GPT-2")
STEP = 1


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.long]) for name in ARCHITECTURES]
)
@pytest.mark.parametrize("kernels", [(), HEAD_KERNELS], ids=["torch's", "of the head"])
def test_operations_of_blocks_make_no_host_wait(
    name: str, kernels: tuple[ModelKernel, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    liger = FakeLiger()
    liger.install(monkeypatch)
    monkeypatch.setattr(slice_sizes, "MIN_SLICE_TOKENS", 16)
    monkeypatch.setattr(slice_sizes, "MAX_SLICE_TOKENS", 16)
    config = ARCHITECTURES[name].config(tied=True, dropout=0.1)
    partition = Partition(build_meta_model(config, Precision.BF16))
    runner = BlockRunner(partition, GPU, seed=0, kernels=kernels)
    batch = [torch.zeros(2, 16, dtype=torch.long, device=GPU)]
    sums = LossSums.nothing(32, GPU)
    in_fp32 = runner.summed_in_fp32(32)
    flats = {
        block.index: torch.empty(block.numel, dtype=torch.bfloat16, device=GPU) for block in partition.layout.blocks
    }
    grads = {
        block: GradBuffer(torch.empty_like(flat, dtype=torch.float32 if block in in_fp32 else flat.dtype))
        for block, flat in flats.items()
    }

    def forward(block: BlockIndex) -> None:
        runner.forward(block, STEP, batch)

    def head(_: BlockIndex) -> None:
        runner.head(STEP, batch, sums=sums)

    def backward(block: BlockIndex) -> None:
        runner.backward(block, STEP, batch)

    blocks = [BlockIndex(index) for index in range(partition.head)]
    operations = [
        *((forward, block) for block in blocks),
        (head, partition.head),
        *((backward, block) for block in reversed(blocks)),
    ]
    with no_host_waits() as launches:
        for operation, block in operations:
            here = partition.layout.shared[block]
            sinks = {} if operation is forward else {each: grads[each] for each in here}
            runner.install(block, {each: flats[each] for each in here}, sinks)
            operation(block)
            if sinks:
                squared_norm(sinks[block].flat.to(torch.bfloat16))
            runner.remove(block)
    assert launches.num_launches > len(operations)
    assert (liger.num_losses > 0) == bool(kernels)
