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
    failed check is reported through `announce`. If not all pass it together, those that pass it alone are checked
    together. If these fail, too, torch's own kernels are used.

    Raises:
        KernelUnavailable: kernels that the job names are not available here, or fail the check.
    """
    hyper = context.spec.training
    choices = set(context.plan.layer_activations) or {RECOMPUTE_ALL}

    def check(kernels: tuple[ModelKernel, ...]) -> None:
        check_kernels(partition.model.config, kernels, hyper.precision, device, choices)

    if (named := hyper.model_kernels) is not None:
        kernels = named
        if kernels:
            check(kernels)
    else:
        kernels = _passing(_available(context, partition, device), check, announce)
    if kernels:
        apply_kernels(partition.model, kernels)
    return kernels


def _passing(
    kernels: tuple[ModelKernel, ...],
    check: Callable[[tuple[ModelKernel, ...]], None],
    announce: Callable[[str], None],
) -> tuple[ModelKernel, ...]:
    """Returns the kernels that pass a check together. Announces why others do not."""
    if not kernels or (failure := _failure(kernels, check)) is None:
        return kernels
    alone = {kernel: _failure((kernel,), check) for kernel in kernels} if len(kernels) > 1 else {}
    passing = tuple(kernel for kernel, reason in alone.items() if reason is None)
    if passing in ((), kernels) or _failure(passing, check) is not None:
        announce(f"The model is computed with torch's own kernels: {failure}")
        return ()
    for kernel, reason in alone.items():
        if reason is not None:
            announce(f"The model is computed without {kernel}: {reason}")
    return passing


def _failure(
    kernels: tuple[ModelKernel, ...], check: Callable[[tuple[ModelKernel, ...]], None]
) -> KernelUnavailable | None:
    try:
        check(kernels)
    except KernelUnavailable as error:
        return error
    return None


def _available(context: JobContext, partition: Partition, device: torch.device) -> tuple[ModelKernel, ...]:
    kernels = kernels_here(partition.model, context.spec.training.precision, device)
    if evaluation_batch_size(context.spec) > 1:
        return kernels
    # With one example in a micro-batch, transformers reads the position values before each call of FlashAttention 2.
    # The host would then wait for the device in every layer. torch's own attention has the same algorithm.
    return tuple(kernel for kernel in kernels if kernel is not ModelKernel.FLASH_ATTENTION_2)
