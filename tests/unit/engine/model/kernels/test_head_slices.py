"""The size of slices follows from the vocabulary, and their losses and gradients are those of PyTorch."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.engine.activation_runs import Run
from tests.support.engine.architectures import ARCHITECTURES, make_batch, make_model
from tests.support.fake_fp32_product import FakeFp32Product
from windlass.engine.device.dtypes import TORCH_DTYPE
from windlass.engine.memory_estimate.live_storages import LiveStorageTracker
from windlass.engine.model.grad_buffer import GradBuffer, adds_products_in_fp32
from windlass.engine.model.head_slices import (
    IGNORED_TARGET,
    LossSums,
    add_loss,
    projections_in_place,
)
from windlass.engine.model.layout import ParamSlice
from windlass.engine.model.partition import ParamSite
from windlass.engine.slices import slice_sizes
from windlass.engine.slices.slice_sizes import num_piece_tokens, num_slice_tokens
from windlass.storage.ids import BlockIndex, HeadSlices, Precision

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("vocab_size", "large", "small"),
    [
        (96, 4096, 699050),
        (32000, 4096, 2097),
        (50257, 4096, 1335),
        (128256, 2048, 523),
        (152064, 1664, 441),
        (256000, 1024, 262),
        (1_000_000, 1024, 67),
        (2_000_000, 1024, 64),
    ],
)
def test_num_slice_tokens_follows_from_the_vocabulary(vocab_size: int, large: int, small: int) -> None:
    # Must never change: a resumed job must compute with the same slices as the interrupted one.
    assert num_slice_tokens(HeadSlices.LARGE, vocab_size) == large
    assert num_slice_tokens(HeadSlices.SMALL, vocab_size) == small
    assert num_piece_tokens(HeadSlices.SMALL, vocab_size) == small


@pytest.mark.parametrize(("vocab_size", "tokens"), [(96, 349525), (152064, 220), (256000, 131), (50_000_000, 1)])
def test_num_piece_tokens_follows_from_the_vocabulary(vocab_size: int, tokens: int) -> None:
    assert num_piece_tokens(HeadSlices.LARGE, vocab_size) == tokens


@pytest.mark.parametrize("piece", [1, 3, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_add_loss_in_pieces_gives_the_bits_of_cross_entropy(dtype: torch.dtype, piece: int) -> None:
    torch.manual_seed(0)
    logits, targets = (3 * torch.randn(10, 33)).to(dtype), torch.randint(33, (10,))
    targets[[2, 7]] = IGNORED_TARGET
    whole = logits.clone().requires_grad_(True)
    loss = F.cross_entropy(whole.float(), targets, ignore_index=IGNORED_TARGET, reduction="sum")
    (loss / 20 * 8.0).backward()
    sums = LossSums.nothing(20, CPU)
    pieces = list(logits.split(piece))  # type: ignore[no-untyped-call]
    grad = add_loss(pieces, targets, sums, 8.0)
    assert grad is not None
    assert (grad.dtype, pieces) == (dtype, [])
    assert torch.equal(grad, whole.grad)  # type: ignore[arg-type]
    assert float(sums.loss_sum) == pytest.approx(float(loss.detach()), rel=1e-6)
    assert int(sums.num_correct) == int((logits.argmax(-1) == targets).sum())
    assert add_loss([logits], targets, again := LossSums.nothing(20, CPU), None) is None
    assert float(again.loss_sum) == pytest.approx(float(loss.detach()), rel=1e-6)


@pytest.mark.parametrize("factors", [torch.bfloat16, torch.float16])
def test_add_product_in_fp32_rounds_no_product(factors: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    products = FakeFp32Product()
    products.install(monkeypatch)
    buffer = GradBuffer(torch.full((2 + 5 * 6,), torch.nan))
    expected = torch.zeros(5, 6)
    for seed in range(3):
        torch.manual_seed(seed)
        left, right = torch.randn(7, 5).to(factors), torch.randn(7, 6).to(factors)
        buffer.add_product("weight", 2, left, right, in_fp32=True)
        expected += left.float().t() @ right.float()
    torch.testing.assert_close(buffer.flat[2:].view(5, 6), expected, rtol=1e-6, atol=1e-6)
    assert buffer.flat[:2].isnan().all()
    assert products.num_products == 3
    for dtype in (torch.float32, factors):
        ones = torch.ones(7, 5, dtype=dtype), torch.ones(7, 6, dtype=dtype)
        GradBuffer(torch.zeros(30, dtype=dtype)).add_product("weight", 0, *ones, in_fp32=True)
    assert products.num_products == 3  # sums of the factors' type take the product in place anyway


def test_a_device_adds_products_in_fp32_only_if_torch_does_it_right(monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes = (torch.bfloat16, torch.float16)
    for device in ("cpu", "cuda"):
        if device == "cpu" or not torch.cuda.is_available():
            assert not any(adds_products_in_fp32(dtype, torch.device(device)) for dtype in dtypes)
    products = FakeFp32Product()
    products.install(monkeypatch)
    assert all(adds_products_in_fp32(dtype, CPU) for dtype in dtypes)
    products.is_wrong = True
    assert not any(adds_products_in_fp32(dtype, CPU) for dtype in dtypes)
    products.is_wrong, products.rounds = False, True
    assert not any(adds_products_in_fp32(dtype, CPU) for dtype in dtypes)


@pytest.mark.parametrize("sums", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factors", [torch.float32, torch.bfloat16])
def test_add_product_sums_products_in_the_type_of_the_buffer(
    factors: torch.dtype, sums: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slice_sizes, "MAX_PRODUCT_NUMEL", 16)
    monkeypatch.setattr(slice_sizes, "ROWS_UNIT", 2)  # parts of two rows, and one of a single row
    buffer = GradBuffer(torch.full((2 + 5 * 6,), torch.nan, dtype=sums))
    expected = torch.zeros(5, 6, dtype=torch.float64)
    for seed in range(3):
        torch.manual_seed(seed)
        left, right = torch.randn(7, 5).to(factors), torch.randn(7, 6).to(factors)
        buffer.add_product("weight", 2, left, right)
        expected += left.double().t() @ right.double()
    exact = factors is sums is torch.float32
    torch.testing.assert_close(
        buffer.flat[2:].view(5, 6).double(), expected, rtol=1e-5 if exact else 0.02, atol=1e-5 if exact else 0.1
    )
    assert buffer.flat[:2].isnan().all()
    assert buffer.touched == {"weight"}


def test_projection_in_place_makes_no_gradient_of_its_weight() -> None:
    linear, biased = nn.Linear(64, 1000, bias=False), nn.Linear(64, 8)
    sites = []
    for name, module in (("linear", linear), ("biased", biased)):
        shape = tuple(module.weight.shape)
        param = ParamSlice(name=name, shape=shape, offset=0, numel=module.weight.numel(), decay=True)
        sites.append(ParamSite(module, "weight", param, BlockIndex(0), module.weight))
    buffer = GradBuffer(torch.zeros(64 * 1000), ["linear"])
    hidden, grad = torch.randn(1, 4, 64, requires_grad=True), torch.randn(1, 4, 1000)
    living = LiveStorageTracker(CPU)
    with projections_in_place(sites, {BlockIndex(0): buffer}):
        assert "forward" not in vars(biased)
        before_nbytes = living.begin()
        with living:
            torch.autograd.backward(linear(hidden), grad)
    assert "forward" not in vars(linear)
    assert living.peak_nbytes - before_nbytes < 4 * 64 * 1000
    assert linear.weight.grad is None
    torch.testing.assert_close(buffer.flat.view(1000, 64), grad[0].t() @ hidden[0].detach())
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad, grad @ linear.weight.detach())


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_small_and_large_slices_differ_in_the_last_bits_only(
    precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slice_sizes, "MAX_LOGITS_NUMEL", 64 * 96)
    monkeypatch.setattr(slice_sizes, "MIN_SLICE_TOKENS", 128)
    monkeypatch.setattr(slice_sizes, "MAX_SLICE_TOKENS", 128)
    batch, targets = make_batch((4, 40), (3, 30))
    found = []
    for slices, num_tokens in ((HeadSlices.SMALL, 64), (HeadSlices.LARGE, 128)):
        model = make_model(ARCHITECTURES["Gemma-2"].config(tied=True, dropout=0.1), TORCH_DTYPE[precision])
        run = Run(model, precision=precision, head_slices=slices)
        assert run.runner.num_tokens_of_head_slice == num_tokens
        found.append(run.step(batch, targets))
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if precision is Precision.FP32 else {"rtol": 0.05, "atol": 1e-3}
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, **tolerance)
