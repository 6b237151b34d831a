"""Computes the loss of a slice of the head, and the gradient of its logits, with Liger's kernel for cross-entropy.

The kernel reads 16-bit logits, computes in fp32, and writes the gradient over the logits. So there are no fp32 logits,
no softmax and no separate gradient. It is launched here directly, because Liger's own function does not fit
(`LigerCrossEntropyFunction`). There the host waits for the device several times a call, and losses and the gradient's
factor are rounded to the type of the logits.

Shapes: S tokens of a slice, V vocabulary.
Source: liger_kernel.ops.cross_entropy, versions 0.8.0 to 0.8.5.
"""

from typing import Any

import torch

from windlass.engine.model.head_slices import IGNORED_TARGET, LossSums, add_loss
from windlass.engine.optimizer import KernelUnavailable

_NUM_WARPS = 32  # Triton's, for the logits of one token; Liger's number on GPUs up to Hopper
_NUM_CHECKED = 16  # tokens of the comparison with PyTorch
# Of the comparison: the gradient's factor for fp16, which jobs scale, too.
_CHECKED_SCALE = 2.0**16
# Relative to PyTorch's loss. Both compute it in fp32, whatever the type of the logits.
_LOSS_TOLERANCE = 1e-3


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
    sums.loss_sum += losses.sum(dtype=torch.float64) * divisor
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
