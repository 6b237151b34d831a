"""The schedules of other systems, followed by windlass's own engine on the same machine."""

from dataclasses import replace
from enum import StrEnum

from windlass.actors.job import JobSpec
from windlass.actors.policy import QueueOrder
from windlass.engine.memory_plan import ActivationChoice, UpdateOrder


class System(StrEnum):
    """Other systems whose schedules the engine can follow, so that one machine shows what each idea is worth."""

    ZERO_OFFLOAD = "zero_offload"  # states rest in host memory, updated after the backward pass
    # States rest on the SSDs, updated after the backward pass; each layer's input goes to host memory.
    ZERO_INFINITY = "zero_infinity"


def behaving_as(spec: JobSpec, system: System, num_blocks: int) -> JobSpec:
    """The job in another system's order: same results, nothing of a step beside the updates of the one before.

    Params come from where the states rest, ZeRO-Infinity's for each micro-batch: ZeRO-Offload's own stay on the device
    throughout. Both compute activations again; for the inputs of layers that ZeRO-Infinity swaps, the job's placement
    must have room.
    Sources: ZeRO-Offload, arXiv:2101.06840; ZeRO-Infinity, arXiv:2104.07857.
    """
    is_infinity = system is System.ZERO_INFINITY
    activations = ActivationChoice.RECOMPUTE_SWAP_INPUT if is_infinity else ActivationChoice.RECOMPUTE
    return replace(
        spec,
        hyperparameters=replace(spec.hyperparameters, update_order=UpdateOrder.AFTER_BACKWARD),
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
