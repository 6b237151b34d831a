"""Embedding and head whose matrices are cut: the bits of the same parts in every plan."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.engine.activation_runs import MemoryStore, Run
from tests.support.engine.architectures import ARCHITECTURES, make_batch, make_model
from windlass.engine.device.device import Device
from windlass.engine.device.dtypes import TORCH_DTYPE
from windlass.engine.linear_parts.cut_embedding import CutEmbedding
from windlass.engine.linear_parts.whole_matrix import WholeMatrix
from windlass.engine.slices import slice_sizes
from windlass.storage.ids import HeadSlices, Precision

pytestmark = pytest.mark.usefixtures("one_thread")

# Rows of 32 elements, in parts of at most 500: several parts of embedding and head.
CUT_NUMEL = 500
BATCH, TARGETS = make_batch((2, 16), (1, 9), (3, 12))
QUICK = ("GPT-2", "OPT", "Gemma-2", "Llama")


def gradients(model: Any, **options: Any) -> list[dict[str, torch.Tensor]]:
    """The gradients of two steps. From the second one on, pieces are prefetched."""
    run, found = Run(model, store=MemoryStore(), **options), []
    for _ in range(2):
        found.append({name: grad.clone() for name, grad in run.step(BATCH, TARGETS).items()})
        for buffer in run.grads.values():
            buffer.touched.clear()
    return found


def assert_all_plans_alike(name: str, precision: Precision, head_slices: HeadSlices, *, is_tied: bool = False) -> None:
    model = make_model(ARCHITECTURES[name].config(tied=is_tied, dropout=0.1), TORCH_DTYPE[precision])
    options: dict[str, Any] = {"precision": precision, "head_slices": head_slices, "cut_matrices": CUT_NUMEL}
    whole = gradients(model, **options)
    device = Device(torch.device("cpu"), poison_released=True)
    for streams_ends in (False, True):
        streamed = gradients(model, streams_on=device, streams_ends=streams_ends, **options)
        for found, expected in zip(streamed, whole, strict=True):
            assert [param for param, grad in expected.items() if not torch.equal(found[param], grad)] == []
    device.token.cancel()


@pytest.mark.short("GPT-2-one slice", "OPT-sliced")
@pytest.mark.parametrize("is_sliced", [False, True], ids=["one slice", "sliced"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in ARCHITECTURES]
)
def test_gradients_of_every_architecture_are_the_same_in_every_plan(
    name: str, is_sliced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_sliced:
        monkeypatch.setattr(slice_sizes, "MAX_SLICE_TOKENS", 8)
    assert_all_plans_alike(name, Precision.FP32, HeadSlices.LARGE)


@pytest.mark.parametrize("head_slices", HeadSlices)
def test_gradients_in_bf16_are_the_same_in_every_plan(head_slices: HeadSlices) -> None:
    assert_all_plans_alike("Llama", Precision.BF16, head_slices)


@pytest.mark.short("GPT-2-large-fp32")
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("head_slices", HeadSlices)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "GPT-2" else pytest.mark.long) for name in ARCHITECTURES]
)
def test_a_head_has_the_embeddings_matrix_in_pieces(
    name: str, head_slices: HeadSlices, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slice_sizes, "MAX_SLICE_TOKENS", 8)
    assert_all_plans_alike(name, precision, head_slices, is_tied=True)


def test_a_tied_matrix_is_cut_where_both_modules_compute_as_pytorch() -> None:
    cut = {}
    for name in ("GPT-2", "Llama", "Gemma-2"):  # Gemma's embedding scales its rows
        layout = Run(make_model(ARCHITECTURES[name].config(tied=True, dropout=0.0))).layout
        assert layout.shared[-1][1:] == (0,)
        cut[name] = any("[" in part for part, *_ in layout.grad_parts(0, CUT_NUMEL))
    assert cut == {"GPT-2": True, "Llama": True, "Gemma-2": False}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("padding_idx", [None, 0, 13])
def test_a_cut_embedding_gives_the_bits_of_a_whole_one(dtype: torch.dtype, padding_idx: int | None) -> None:
    torch.manual_seed(0)
    module = nn.Embedding(96, 32, padding_idx=padding_idx, dtype=dtype)
    ids, grad = torch.randint(0, 96, (4, 60)), torch.randn(4, 60, 32).to(dtype)
    rows = module(ids)
    torch.autograd.backward(rows, grad)
    assert module.weight.grad is not None
    parts = [("a", 0, 40 * 32), ("b", 40 * 32, 40 * 32), ("c", 80 * 32, 16 * 32)]
    found: dict[int, torch.Tensor] = {}
    cut = CutEmbedding(module, (96, 32), parts, lambda _, offset, each: found.update({offset: each}))
    cut.install(WholeMatrix(module.weight.detach()))
    cut.require_grad()
    in_parts = module(ids)
    torch.autograd.backward(in_parts, grad)
    cut.remove()
    assert torch.equal(in_parts, rows)
    assert list(found) == [80 * 32, 40 * 32, 0]  # as the backward pass goes, from the end to the start
    assert torch.equal(torch.cat([found[offset] for offset in sorted(found)]), module.weight.grad)
    assert module.forward(ids).grad_fn is not None  # its own computation
