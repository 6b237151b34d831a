"""Which kernels compute a job's model: settled before its first step, and kept by all of its attempts."""

from collections.abc import Callable

import torch

from windlass.actors.job import JobContext, evaluation_batch_size
from windlass.engine.memory_plan import RECOMPUTE_ALL
from windlass.engine.model import Partition, apply_kernels, check_kernels, kernels_here
from windlass.engine.optimizer import KernelUnavailable
from windlass.storage.ids import ModelKernel


def settle_kernels(
    context: JobContext, partition: Partition, device: torch.device, announce: Callable[[str], None]
) -> tuple[ModelKernel, ...]:
    """Puts kernels into a job's model, whose layers must be in their places; returns those beside torch's own.

    The job's, or where it names none, all that can be had and are right; `announce` is told of those that are not.

    Raises:
        KernelUnavailable: the job has kernels that cannot be had, or are not right here.
    """
    hyper = context.spec.hyperparameters
    asked = hyper.model_kernels
    kernels = _found(context, partition, device) if asked is None else asked
    if not kernels:
        return ()
    choices = set(context.plan.layer_activations) or {RECOMPUTE_ALL}
    try:
        check_kernels(partition.model.config, kernels, hyper.precision, device, choices)
        apply_kernels(partition.model, kernels)
    except KernelUnavailable as error:
        if asked is not None:
            raise
        announce(f"The model is computed with torch's own kernels: {error}")
        return ()
    return kernels


def _found(context: JobContext, partition: Partition, device: torch.device) -> tuple[ModelKernel, ...]:
    found = kernels_here(partition.model, context.spec.hyperparameters.precision, device)
    if evaluation_batch_size(context.spec) > 1:
        return found
    # With one example in a micro-batch transformers would look at position values before each call, and so the host
    # would wait for the device in every layer; torch's own attention has the same algorithm.
    return tuple(kernel for kernel in found if kernel is not ModelKernel.FLASH_ATTENTION_2)
