"""Imitates the schedules of other systems with windlass's engine on the same machine."""

from dataclasses import replace
from enum import StrEnum

from windlass.actors.job import JobSpec
from windlass.actors.worker_policy import QueueOrder
from windlass.engine.memory_plan import ActivationChoice, UpdateOrder


class System(StrEnum):
    """A system whose schedule the engine can imitate, to measure the gain from each idea on one machine."""

    ZERO_OFFLOAD = "zero_offload"  # states in host memory, updated after the backward pass
    # States on the SSDs, updated after the backward pass; each layer's input goes to host memory.
    ZERO_INFINITY = "zero_infinity"


def behaving_as(spec: JobSpec, system: System, num_blocks: int) -> JobSpec:
    """Returns the job with another system's schedule, which gives the same results.

    No part of a step runs during the updates of the previous step. Params are fetched from the tier of the states,
    ZeRO-Infinity's for each micro-batch. Real ZeRO-Offload keeps its params on the device throughout. Both recompute
    activations. ZeRO-Infinity swaps the inputs of layers, so the job's placement must have space for them.

    Sources: ZeRO-Offload, arXiv:2101.06840; ZeRO-Infinity, arXiv:2104.07857.
    """
    is_infinity = system is System.ZERO_INFINITY
    activations = ActivationChoice.RECOMPUTE_SWAP_INPUT if is_infinity else ActivationChoice.RECOMPUTE
    return replace(
        spec.with_training(update_order=UpdateOrder.AFTER_BACKWARD),
        ordering=replace(spec.ordering, queues=QueueOrder.FIFO, overlaps_steps=False),
        placement=replace(
            spec.placement,
            host_blocks=() if is_infinity else tuple(range(num_blocks)),
            device_blocks=(),
            num_cached_params=0,
            group_size=1 if is_infinity else spec.placement.group_size,
            activations=activations.of_layers(num_blocks - 2),
        ),
    )
