"""Lists kernels for a GPU, and installs FlashAttention 2 and Liger's norms and MLPs into a model.

They are installed into one model after its partition on the meta device, where they cannot run. Other models of the
process are not affected. Liger's rotary embedding is not used: it can be replaced only for the whole process, and it
writes into its inputs. The kernels of the head are not installed into the model, because `BlockRunner` computes the
loss by slices of tokens, and launches them itself.
Sources: liger_kernel.transformers.monkey_patch; transformers, `set_attn_implementation`.
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from transformers.utils import is_flash_attn_2_available

from windlass.engine.device import TORCH_DTYPE
from windlass.engine.model.fused_loss import fused_loss_kernel
from windlass.engine.model.grad_buffer import adds_products_in_fp32
from windlass.engine.optimizer import KernelUnavailable
from windlass.storage.ids import ModelKernel, Precision

_INSTEAD_OF_LIGERS = ("rope", "cross_entropy", "fused_linear_cross_entropy")


def kernels_here(model: Any, precision: Precision, device: torch.device) -> tuple[ModelKernel, ...]:
    """Lists the kernels that a transformers model can use on a device.

    They depend on installed packages, the version of PyTorch, and the model's class.
    """
    kernels = []
    if device.type == "cuda":
        has_half = precision is not Precision.FP32
        if has_half and is_flash_attn_2_available() and getattr(model, "_supports_flash_attn", False):
            kernels.append(ModelKernel.FLASH_ATTENTION_2)
        with contextlib.suppress(KernelUnavailable):
            _liger_function(model)
            kernels.append(ModelKernel.LIGER)
        with contextlib.suppress(KernelUnavailable):
            fused_loss_kernel()
            kernels.append(ModelKernel.LIGER_CROSS_ENTROPY)
        if has_half and adds_products_in_fp32(TORCH_DTYPE[precision], device):
            kernels.append(ModelKernel.FP32_PRODUCT)
    return tuple(kernels)


def apply_kernels(model: Any, kernels: Collection[ModelKernel]) -> None:
    """Installs kernels into the modules of a model, without those of the head. Its layers must be in their places.

    Raises:
        KernelUnavailable: a kernel is not available here.
    """
    if ModelKernel.FLASH_ATTENTION_2 in kernels:
        _attend_with_flash_attention(model)
    if ModelKernel.LIGER in kernels:
        function = _liger_function(model)
        known = inspect.signature(function).parameters
        with _unchanged(sys.modules[type(model).__module__]):
            function(model=model, **{name: False for name in _INSTEAD_OF_LIGERS if name in known})


def _attend_with_flash_attention(model: Any) -> None:
    name = str(ModelKernel.FLASH_ATTENTION_2)
    try:
        model.set_attn_implementation(name)
    except (ImportError, ValueError) as error:
        raise KernelUnavailable(
            f"FlashAttention 2 is not available: {error}; install the package flash-attn"
        ) from error
    if model.config._attn_implementation != name:
        raise KernelUnavailable(f"{type(model).__name__} cannot be computed with FlashAttention 2")


def _liger_function(model: Any) -> Callable[..., None]:
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise KernelUnavailable(
            f"Liger's kernels are not available: {error}; install the package liger-kernel"
        ) from error
    model_type = model.config.model_type
    if model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise KernelUnavailable(f"Liger has no kernels for models of type {model_type}")
    function: Callable[..., None] = MODEL_TYPE_TO_APPLY_LIGER_FN[model_type]
    return function


@contextlib.contextmanager
def _unchanged(module: Any) -> Iterator[None]:
    """Restores the attributes of a Python module at the end of the context."""
    before = dict(vars(module))
    try:
        yield
    finally:
        for name, value in list(vars(module).items()):
            if name not in before:
                delattr(module, name)
            elif value is not before[name]:
                setattr(module, name, before[name])
