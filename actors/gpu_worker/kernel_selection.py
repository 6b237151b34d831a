"""Selects the kernels that compute a job's model, before its first step. All attempts keep them."""

from collections.abc import Callable

import torch

from windlass.actors.job import JobContext, evaluation_batch_size
from windlass.engine.memory_plan import RECOMPUTE_ALL
from windlass.engine.model import Partition, apply_kernels, check_kernels, kernels_here
from windlass.engine.optimizer import KernelUnavailable
from windlass.storage.ids import ModelKernel


def choose_kernels(
    context: JobContext, partition: Partition, device: torch.device, announce: Callable[[str], None]
) -> tuple[ModelKernel, ...]:
    """Applies kernels to a job's model, whose layers must be in their places; returns them.

    These are the kernels that the job names. If it names none, they are all that are available and pass a check; a
    failed check is reported through `announce`, and torch's own kernels are used.

    Raises:
        KernelUnavailable: kernels that the job names are not available here, or fail the check.
    """
    hyper = context.spec.training
    named = hyper.model_kernels
    kernels = _available(context, partition, device) if named is None else named
    if not kernels:
        return ()
    choices = set(context.plan.layer_activations) or {RECOMPUTE_ALL}
    try:
        check_kernels(partition.model.config, kernels, hyper.precision, device, choices)
        apply_kernels(partition.model, kernels)
    except KernelUnavailable as error:
        if named is not None:
            raise
        announce(f"The model is computed with torch's own kernels: {error}")
        return ()
    return kernels


def _available(context: JobContext, partition: Partition, device: torch.device) -> tuple[ModelKernel, ...]:
    kernels = kernels_here(partition.model, context.spec.training.precision, device)
    if evaluation_batch_size(context.spec) > 1:
        return kernels
    # With one example in a micro-batch, transformers reads the position values before each call of FlashAttention 2.
    # The host would then wait for the device in every layer. torch's own attention has the same algorithm.
    return tuple(kernel for kernel in kernels if kernel is not ModelKernel.FLASH_ATTENTION_2)
