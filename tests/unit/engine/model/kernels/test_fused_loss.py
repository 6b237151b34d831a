"""Liger's cross-entropy in the head: its loss and gradients are PyTorch's, in the memory of the logits."""

from typing import Any

import pytest
import torch

from tests.support.engine.activation_runs import Run
from tests.support.engine.architectures import ARCHITECTURES, make_batch, make_model
from tests.support.fake_liger import FakeLiger
from windlass.engine.memory_estimate.dry_run import DryRun
from windlass.engine.memory_estimate.live_storages import LiveStorageTracker
from windlass.engine.model.block_runner import BlockRunner
from windlass.engine.model.fused_kernels import add_fused_loss
from windlass.engine.model.grad_buffer import GradBuffer
from windlass.engine.model.head_slices import IGNORED_TARGET, LossSums, add_loss
from windlass.engine.model.model_forward import ModelForward
from windlass.engine.model.partition import Partition, build_meta_model
from windlass.engine.slices import slice_sizes
from windlass.storage.ids import ModelKernel, Precision

CPU = torch.device("cpu")
LOSS = (ModelKernel.LIGER_CROSS_ENTROPY,)
WIDTH = 40_000  # more logits than the kernel reads at once


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> FakeLiger:
    liger = FakeLiger()
    liger.install(monkeypatch)
    return liger


@pytest.mark.parametrize(
    ("dtype", "loss_scale"), [(torch.float32, 1.0), (torch.bfloat16, 1.0), (torch.float16, 2.0**16)], ids=str
)
def test_add_fused_loss_gives_the_loss_and_gradient_of_add_loss(
    liger: FakeLiger, dtype: torch.dtype, loss_scale: float
) -> None:
    torch.manual_seed(0)
    logits, targets = (3 * torch.randn(10, WIDTH)).to(dtype), torch.randint(WIDTH, (10,))
    logits[4, targets[4]] = 30.0
    targets[[2, 7]] = IGNORED_TARGET
    expected, found, evaluated = (LossSums.nothing(20, CPU) for _ in range(3))
    expected_grad = add_loss([logits.clone()], targets, expected, loss_scale)
    place = logits.clone()
    grad = add_fused_loss(place, targets, found, loss_scale)
    assert grad is not None
    assert expected_grad is not None
    assert grad.data_ptr() == place.data_ptr()
    torch.testing.assert_close(grad, expected_grad)
    assert add_fused_loss(logits.clone(), targets, evaluated, None) is None
    for sums in (found, evaluated):
        assert float(sums.loss_sum) == pytest.approx(float(expected.loss_sum), rel=1e-6)
        assert int(sums.num_correct) == int(expected.num_correct) == 1
    across = logits.t().contiguous().t()
    again = add_fused_loss(across, targets, LossSums.nothing(20, CPU), loss_scale)
    assert again is not None
    assert torch.equal(again, grad)
    assert liger.num_losses == 3


@pytest.mark.parametrize("name", ["Qwen2", "Gemma-2"])
def test_a_sliced_head_has_the_same_gradients(name: str, liger: FakeLiger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_sizes, "MIN_SLICE_TOKENS", 64)
    monkeypatch.setattr(slice_sizes, "MAX_SLICE_TOKENS", 64)
    monkeypatch.setattr(slice_sizes, "MAX_PIECE_NUMEL", 1)
    batch, targets = make_batch((4, 40), (3, 30))  # three slices, and two
    model = make_model(ARCHITECTURES[name].config(tied=True, dropout=0.1))
    expected = Run(model).step(batch, targets)
    found = Run(model, kernels=LOSS).step(batch, targets)
    assert liger.num_losses == 5  # the kernel takes a slice at once, not its pieces
    for param, grad in expected.items():
        torch.testing.assert_close(found[param], grad, rtol=1e-4, atol=1e-6)


def test_a_model_whose_backward_pass_needs_its_logits_fails(liger: FakeLiger, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel overwrites them, which autograd would not notice by itself."""
    epilogue = ModelForward.epilogue
    monkeypatch.setattr(ModelForward, "epilogue", lambda *args: torch.tanh(epilogue(*args)))
    batch, targets = make_batch((2, 16))
    model = make_model(ARCHITECTURES["Qwen2"].config(tied=False, dropout=0.0))
    Run(model).step(batch, targets)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Run(model, kernels=LOSS).step(batch, targets)


def test_plans_count_more_than_the_kernel_needs(liger: FakeLiger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans count PyTorch's loss, because a job chooses its kernels after its plan."""
    for name in ("MIN_SLICE_TOKENS", "MAX_SLICE_TOKENS"):
        monkeypatch.setattr(slice_sizes, name, 128)
    config = ARCHITECTURES["Qwen2"].config(tied=False, dropout=0.0)
    config.vocab_size = 4096
    planned = DryRun(
        Partition(build_meta_model(config, Precision.BF16)), {}, grad_dtype=torch.float32, is_summed=True
    ).units(1, 128)[1]
    liger.computes = False  # because the stand-in makes tensors that the kernel does not
    partition = Partition(build_meta_model(config, Precision.BF16))
    runner = BlockRunner(partition, CPU, 0, kernels=LOSS)
    head = partition.layout.blocks[partition.head]
    flat = torch.zeros(head.numel, dtype=torch.bfloat16)
    sums = GradBuffer(torch.zeros(head.numel), [param.name for param in head.params])
    runner.inputs = [[torch.zeros(1, 128, config.hidden_size, dtype=torch.bfloat16)]]
    runner.install(partition.head, {head.index: flat}, {head.index: sums})
    living = LiveStorageTracker(CPU)
    before_nbytes = living.begin()
    with living:
        runner.head(0, [torch.zeros(1, 128, dtype=torch.long)])
    runner.remove(partition.head)
    logits_nbytes = 128 * 4096 * 2
    assert liger.num_losses == 1
    # Of the logits' size there is one tensor, and one more part of the projection's gradient with its copy in fp32.
    assert logits_nbytes < living.peak_nbytes - before_nbytes < 2 * logits_nbytes + 6 * 4096 * config.hidden_size
    assert planned > living.peak_nbytes - before_nbytes + 4 * logits_nbytes


def test_dry_runs_use_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Any] = []
    make = BlockRunner.__init__

    def note(self: BlockRunner, *args: Any, **options: Any) -> None:
        chosen.append(options.get("kernels", ()))
        make(self, *args, **options)

    monkeypatch.setattr(BlockRunner, "__init__", note)
    config = ARCHITECTURES["Qwen2"].config(tied=False, dropout=0.0)
    DryRun(Partition(build_meta_model(config, Precision.BF16)), {}, grad_dtype=torch.float32, is_summed=True)
    assert chosen == [()]
