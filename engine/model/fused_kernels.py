"""Lists kernels for a GPU, installs FlashAttention 2 and Liger's norms and MLPs, and computes Liger's cross-entropy.

Kernels are installed into one model after its partition on the meta device, where they cannot run. Other models of the
process are not affected. Liger's rotary embedding is not used: it can be replaced only for the whole process, and it
writes into its inputs.

Cross-entropy is computed by slices of the head, so it is not installed. Its kernel reads 16-bit logits, computes in
fp32, and writes the gradient over the logits. So there are no fp32 logits, no softmax and no separate gradient. It is
launched here, because Liger's own function for it (`LigerCrossEntropyFunction`) does not fit. There the host waits for
the device several times a call, and losses and the gradient's factor are rounded to the type of the logits.

Shapes: S tokens of a slice, V vocabulary.
Sources: liger_kernel.transformers.monkey_patch; liger_kernel.ops.cross_entropy, versions 0.8.0 to 0.8.5; transformers,
`set_attn_implementation`.
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from transformers.utils import is_flash_attn_2_available

from windlass.engine.device import TORCH_DTYPE
from windlass.engine.model.grad_buffer import adds_products_in_fp32
from windlass.engine.model.head_slices import IGNORED_TARGET, LossSums, add_loss
from windlass.engine.optimizer import KernelUnavailable
from windlass.storage.ids import ModelKernel, Precision

_INSTEAD_OF_LIGERS = ("rope", "cross_entropy", "fused_linear_cross_entropy")
_NUM_WARPS = 32  # Triton's, for the logits of one token; Liger's number on GPUs up to Hopper
_NUM_CHECKED = 16  # tokens of the comparison with PyTorch
# Of the comparison: the gradient's factor for fp16, which jobs scale, too.
_CHECKED_SCALE = 2.0**16
# Relative to PyTorch's loss. Both compute it in fp32, whatever the type of the logits.
_LOSS_TOLERANCE = 1e-3


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


# --- the loss -------------------------------------------------------------------------------------------------------


def fused_loss_kernel() -> tuple[Any, int]:
    """Returns Liger's kernel, and the largest number of logits that it reads at once.

    Raises:
        KernelUnavailable: the package is not installed.
    """
    try:
        from liger_kernel.ops.cross_entropy import MAX_FUSED_SIZE, liger_cross_entropy_kernel
    except ImportError as error:
        raise KernelUnavailable(
            f"Liger's cross-entropy is not available: {error}; install the package liger-kernel"
        ) from error
    return liger_cross_entropy_kernel, MAX_FUSED_SIZE


def add_fused_loss(
    logits: torch.Tensor, targets: torch.Tensor, sums: LossSums, loss_scale: float | None
) -> torch.Tensor | None:
    """Adds the cross-entropy of a slice to `sums`, and returns the gradient of its logits, which overwrites them.

    Args:
        logits: (S, V), without gradients. They are lost, also where no gradient is computed.
        targets: token ids, (S,).
        sums: the loss is normalised by its number of targets.
        loss_scale: the factor of the gradient; None: no gradient is computed.
    """
    kernel, max_block = fused_loss_kernel()
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_tokens, width = logits.shape
    losses = torch.zeros(num_tokens, dtype=torch.float32, device=logits.device)
    is_correct = torch.zeros_like(losses)
    # With the reduction "mean" the kernel divides losses and gradients by this, in fp32. So gradients are scaled before
    # they are rounded.
    divisor = 1.0 if loss_scale is None else sums.num_targets / loss_scale
    kernel[(num_tokens,)](
        X_ptr=logits,
        X_stride=logits.stride(0),
        Y_ptr=targets,
        Y_stride=targets.stride(0),
        weight_ptr=None,
        loss_ptr=losses,
        z_loss_ptr=None,
        loss_stride=1,
        token_accuracy_ptr=is_correct,
        token_accuracy_stride=1,
        predicted_tokens_ptr=None,
        predicted_tokens_stride=0,
        n_cols=width,
        n_non_ignore=divisor,
        sum_non_ignore_weight=1.0,
        weight_sum=1.0,
        ignore_index=IGNORED_TARGET,
        lse_square_scale=0.0,
        label_smoothing=0.0,
        reduction="mean",
        softcap=None,
        RETURN_Z_LOSS=False,
        RETURN_TOKEN_ACCURACY=True,
        RETURN_PREDICTED_TOKENS=False,
        BLOCK_SIZE=min(max_block, 1 << (width - 1).bit_length()),
        HAS_WEIGHT=False,
        HAS_SOFTCAPPING=False,
        HAS_GRADIENTS=loss_scale is not None,
        num_warps=_NUM_WARPS,
    )
    # Autograd does not see what the kernel writes. A model whose backward pass needs its logits must fail.
    torch.autograd.graph.increment_version(logits)
    sums.terms.append(losses.sum(dtype=torch.float64) * divisor)
    sums.num_correct += is_correct.sum(dtype=torch.int64)
    return None if loss_scale is None else logits


def check_fused_loss(vocab_size: int, dtype: torch.dtype, device: torch.device, tolerance: float) -> None:
    """Compares the kernel with PyTorch on logits as wide as a job's, which the kernel reads in several blocks.

    `tolerance`: of the gradient, relative to its norm.

    Raises:
        KernelUnavailable: losses, gradients or the number of correct tokens differ by more than rounding.
    """
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(_NUM_CHECKED, vocab_size, generator=generator)
    targets = torch.randint(vocab_size, (_NUM_CHECKED,), generator=generator)
    logits[::2].scatter_(1, targets[::2, None], 25.0)  # tokens that the model has learned
    targets[::4] = IGNORED_TARGET
    logits, targets = logits.to(device, dtype), targets.to(device)
    scale = _CHECKED_SCALE if dtype is torch.float16 else 1.0
    expected, found, evaluated = (LossSums.nothing(_NUM_CHECKED, device) for _ in range(3))
    grad = add_fused_loss(logits.clone(), targets, found, scale)
    add_fused_loss(logits.clone(), targets, evaluated, None)
    expected_grad = add_loss([logits], targets, expected, scale)
    assert grad is not None
    assert expected_grad is not None
    if not float((grad.float() - expected_grad.float()).norm()) <= tolerance * float(expected_grad.float().norm()):
        raise KernelUnavailable("Liger's cross-entropy has another gradient than PyTorch's")
    for sums in (found, evaluated):
        difference, loss = float(sums.loss_sum - expected.loss_sum), float(expected.loss_sum)
        if not abs(difference) <= _LOSS_TOLERANCE * loss or int(sums.num_correct) != int(expected.num_correct):
            raise KernelUnavailable("Liger's cross-entropy has another loss than PyTorch's")
