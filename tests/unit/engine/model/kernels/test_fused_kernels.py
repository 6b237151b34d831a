"""Kernels for GPUs in a model. Kernels of the same form stand in for Liger's, and for one of PyTorch's."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen2 import modeling_qwen2

from tests.support.engine.architectures import ARCHITECTURES
from tests.support.fake_fp32_product import FakeFp32Product
from tests.support.fake_liger import FakeLiger
from windlass.engine.memory_plan.activation_policy import ActivationChoice
from windlass.engine.model import fused_kernels as model_kernels
from windlass.engine.model.fused_kernels import apply_kernels, kernels_here
from windlass.engine.model.gradient_check import check_kernels
from windlass.engine.model.partition import Partition, build_meta_model
from windlass.engine.optimizer.kernel_cache import KernelUnavailable
from windlass.storage.ids import ModelKernel, Precision

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LIGER, FLASH = ModelKernel.LIGER, ModelKernel.FLASH_ATTENTION_2
LOSS, PRODUCT = ModelKernel.LIGER_CROSS_ENTROPY, ModelKernel.FP32_PRODUCT
CONFIG = ARCHITECTURES["Qwen2"].config(tied=False, dropout=0.0)
CHOICES = {choice for each in ActivationChoice for choice in each.of_layers(1)}


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> FakeLiger:
    liger = FakeLiger()
    liger.install(monkeypatch)
    return liger


def meta_model(precision: Precision = Precision.BF16) -> Any:
    return build_meta_model(CONFIG, precision)


@pytest.mark.parametrize("has_flash", [True, False])
def test_kernels_are_for_gpus_and_flash_attention_for_16_bits(
    liger: FakeLiger, monkeypatch: pytest.MonkeyPatch, has_flash: bool
) -> None:
    monkeypatch.setattr(model_kernels, "is_flash_attn_2_available", lambda: has_flash)
    model, flash = meta_model(), (FLASH,) * has_flash
    assert kernels_here(model, Precision.BF16, CPU) == ()
    assert kernels_here(model, Precision.BF16, CUDA) == (*flash, LIGER, LOSS)
    assert kernels_here(model, Precision.FP16, CUDA) == (*flash, LIGER, LOSS)
    assert kernels_here(model, Precision.FP32, CUDA) == (LIGER, LOSS)
    liger.model_types = {"llama"}
    assert kernels_here(model, Precision.BF16, CUDA) == (*flash, LOSS)  # a loss is the same for every model


def test_fp32_product_is_for_16_bits_where_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def adds(*where: object) -> bool:
        asked.append(where)
        return True

    monkeypatch.setattr(model_kernels, "adds_products_in_fp32", adds)
    monkeypatch.setattr(model_kernels, "is_flash_attn_2_available", lambda: False)
    for name in ("liger_kernel", "liger_kernel.ops.cross_entropy"):
        monkeypatch.setitem(sys.modules, name, None)
    found = [kernels_here(meta_model(), precision, CUDA) for precision in Precision]
    assert found == [() if precision is Precision.FP32 else (PRODUCT,) for precision in Precision]
    assert asked == [(torch.bfloat16, CUDA), (torch.float16, CUDA)]
    assert kernels_here(meta_model(), Precision.BF16, CPU) == ()


def test_without_their_packages_there_are_none() -> None:
    if "liger_kernel" in sys.modules:
        pytest.skip("Liger is installed")
    assert kernels_here(meta_model(), Precision.FP32, CUDA) == ()
    with pytest.raises(
        KernelUnavailable, match=r"Liger's kernels are not available: .* install the package liger-kernel"
    ):
        apply_kernels(meta_model(), (LIGER,))
    with pytest.raises(
        KernelUnavailable, match=r"Liger's cross-entropy is not available: .* install the package liger-kernel"
    ):
        check_kernels(CONFIG, (LOSS,), Precision.FP32, CPU)
    with pytest.raises(
        KernelUnavailable, match=r"FlashAttention 2 is not available: .* install the package flash-attn"
    ):
        apply_kernels(meta_model(), (FLASH,))


def test_liger_goes_into_one_model_and_no_other(liger: FakeLiger) -> None:
    before = dict(vars(modeling_qwen2))
    model = meta_model()
    partition = Partition(model)
    apply_kernels(model, (LIGER,))
    assert liger.calls == [{"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False}]
    assert vars(modeling_qwen2) == before
    again = Partition(meta_model())
    assert again.layout == partition.layout
    ids = torch.randint(1, 90, (2, 8))
    liger.num_norms = 0
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(CONFIG)
    expected = plain(input_ids=ids, use_cache=False).logits
    assert liger.num_norms == 0
    apply_kernels(plain, (LIGER,))
    torch.testing.assert_close(plain(input_ids=ids, use_cache=False).logits, expected)
    assert liger.num_norms == 2 * len(plain.model.layers) + 1


def test_a_model_that_liger_does_not_know_is_an_error(liger: FakeLiger) -> None:
    liger.model_types = {"llama"}
    with pytest.raises(KernelUnavailable, match="no kernels for models of type qwen2"):
        apply_kernels(meta_model(), (LIGER,))


def test_a_model_without_flash_attention_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = meta_model()
    monkeypatch.setattr(model, "set_attn_implementation", lambda name: None)  # it warns, and changes nothing
    with pytest.raises(KernelUnavailable, match="Qwen2ForCausalLM cannot be computed with FlashAttention 2"):
        apply_kernels(model, (FLASH,))


@pytest.mark.parametrize("precision", Precision)
def test_kernels_that_are_right_pass_with_every_choice_of_activations(liger: FakeLiger, precision: Precision) -> None:
    """Also kernels whose backward passes overwrite what autograd saved, and gradients that they got, as Liger's do."""
    check_kernels(CONFIG, (LIGER,), precision, CPU, CHOICES)
    assert liger.num_norms > 0
    assert liger.num_products > 0


@pytest.mark.parametrize("precision", Precision)
def test_head_kernels_that_are_right_pass(
    liger: FakeLiger, monkeypatch: pytest.MonkeyPatch, precision: Precision
) -> None:
    products = FakeFp32Product()
    products.install(monkeypatch)
    check_kernels(CONFIG, (LIGER, LOSS, PRODUCT), precision, CPU)
    assert liger.num_norms > 0
    assert liger.num_losses == 2 + 2  # training and evaluation at the model's vocabulary, and two micro-batches
    assert products.num_products == (0 if precision is Precision.FP32 else 2)


def scaled(grad: torch.Tensor) -> torch.Tensor:
    return grad * 1.25


def not_finite(grad: torch.Tensor) -> torch.Tensor:
    return grad * float("nan")


def broken(grad: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("an illegal memory access was encountered")


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (scaled, "with liger a tiny model has other gradients, first at model.embed_tokens.weight"),
        (not_finite, "with liger a tiny model has other gradients, first at model.embed_tokens.weight"),
        (broken, "a tiny model with liger failed with RuntimeError: an illegal memory access"),
    ],
)
def test_kernels_that_are_wrong_are_refused(
    liger: FakeLiger, precision: Precision, change: Callable[[torch.Tensor], torch.Tensor], reason: str
) -> None:
    liger.change_grad = change
    with pytest.raises(KernelUnavailable, match=reason):
        check_kernels(CONFIG, (LIGER,), precision, CPU)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"change_logits_grad": scaled}, "Liger's cross-entropy has another gradient than PyTorch's"),
        ({"change_logits_grad": not_finite}, "Liger's cross-entropy has another gradient than PyTorch's"),
        ({"change_losses": scaled}, "Liger's cross-entropy has another loss than PyTorch's"),
        ({"change_losses": broken}, "a tiny model with liger_cross_entropy failed with RuntimeError: an illegal"),
    ],
    ids=["scaled gradient", "NaN", "scaled loss", "broken"],
)
@pytest.mark.parametrize("precision", Precision)
def test_a_wrong_loss_is_refused(
    liger: FakeLiger, precision: Precision, change: dict[str, Callable[[torch.Tensor], torch.Tensor]], reason: str
) -> None:
    for name, function in change.items():
        setattr(liger, name, function)
    with pytest.raises(KernelUnavailable, match=reason):
        check_kernels(CONFIG, (LOSS,), precision, CPU)


def test_a_loss_that_is_wrong_in_a_model_only_is_refused(liger: FakeLiger) -> None:
    liger.change_logits_grad = lambda grad: grad * (0.5 if grad.shape[0] > 16 else 1.0)
    with pytest.raises(KernelUnavailable, match="with liger_cross_entropy a tiny model has other gradients, first at"):
        check_kernels(CONFIG, (LOSS,), Precision.BF16, CPU)


def test_a_product_that_is_wrong_or_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KernelUnavailable, match="a tiny model with fp32_product failed with NotImplementedError"):
        check_kernels(CONFIG, (PRODUCT,), Precision.BF16, CPU)
    products = FakeFp32Product()
    products.install(monkeypatch)
    products.is_wrong = True
    reason = "with fp32_product a tiny model has other gradients, first at lm_head.weight"
    with pytest.raises(KernelUnavailable, match=reason):
        check_kernels(CONFIG, (PRODUCT,), Precision.BF16, CPU)


def test_class_that_liger_replaced_is_restored() -> None:
    module = ModuleType("module")
    module.kept, module.changed = 1, 2  # type: ignore[attr-defined]
    before = dict(vars(module))
    with model_kernels._unchanged(module):
        module.changed, module.new = 3, 4  # type: ignore[attr-defined]
    assert vars(module) == before
