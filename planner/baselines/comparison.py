"""Estimates other systems' step times for a job, as sums of their stages, and their minimum memory.

The comparison favours the other systems. It assumes the whole batch at once, full SSD bandwidth, and the minimum memory
that their policy needs.
"""

from dataclasses import dataclass

from windlass.amounts import GIB
from windlass.planner.baselines.system_stages import (
    POLICIES,
    Policy,
    Rest,
    Stage,
    StageTimes,
    nbytes_on_ssd,
    resting_nbytes,
    stage_times,
)
from windlass.planner.cost import ModelProfile
from windlass.planner.hardware import Hardware

_RESOURCES = ("compute", "h2d", "d2h", "ssd", "optimizer")  # in the order of `Stage.busy_s`
_PARAM_NBYTES = 2  # 16-bit params


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedSystem:
    """The estimate for one system, with one job on one machine."""

    system: str
    step_s: float
    gpu_share: float  # share of the step in which the GPU computes
    tokens_per_s: float
    bottleneck: str  # the resource with the longest busy time in a step
    fits: bool
    missing_gib: dict[str, float]  # by gpu, host, ssd, for those that are too small
    updates_in_backward: bool  # if so, gradients cannot be clipped by their global norm


def compare(hardware: Hardware, profile: ModelProfile) -> list[ComparedSystem]:
    """Estimates all systems on one GPU. `profile`: of the whole batch, in 16 bit; states are fp32.

    Raises:
        ValueError: the machine has no GPU. The stages of these systems need one.
    """
    if hardware.gpus.count == 0:
        raise ValueError("the systems of the papers keep a GPU busy; this machine has none")
    return [_compared(name, policy, hardware, profile) for name, policy in POLICIES.items()]


def least_nbytes(policy: Policy, hardware: Hardware, profile: ModelProfile, swapped_nbytes: int) -> dict[str, int]:
    """Returns the minimum bytes of each memory, for a given amount of swapped activations.

    The GPU holds one layer's params and activations, beside what is resident there.
    """
    layers = profile.layers
    one_layer = max(layer.input_nbytes + layer.saved_nbytes for layer in layers)
    if policy.params is not Rest.GPU:
        one_layer += _PARAM_NBYTES * max(layer.numel for layer in layers)
    on_ssd = nbytes_on_ssd(policy, hardware, profile, swapped_nbytes)
    return {
        "gpu": resting_nbytes(policy, profile, Rest.GPU) + one_layer,
        "host": resting_nbytes(policy, profile, Rest.HOST) + swapped_nbytes - on_ssd,
        "ssd": resting_nbytes(policy, profile, Rest.SSD) + on_ssd,
    }


def _compared(name: str, policy: Policy, hardware: Hardware, profile: ModelProfile) -> ComparedSystem:
    times = stage_times(policy, hardware, profile)
    needs = least_nbytes(policy, hardware, profile, times.swapped_nbytes)
    has = {
        "gpu": hardware.gpus.memory_gib,
        "host": hardware.host.memory_gib,
        "ssd": hardware.ssds.count * hardware.ssds.capacity_gib,
    }
    missing = {memory: nbytes / GIB - has[memory] for memory, nbytes in needs.items() if nbytes > has[memory] * GIB}
    return ComparedSystem(
        system=name,
        step_s=times.iteration_s,
        gpu_share=times.gpu_share,
        tokens_per_s=profile.num_examples * profile.num_tokens / times.iteration_s,
        bottleneck=_bottleneck(times),
        fits=not missing,
        missing_gib=missing,
        updates_in_backward=policy.updates_in_backward,
    )


def _bottleneck(times: StageTimes) -> str:
    step: Stage = times.forward.plus(times.backward).plus(times.optimizer)
    return max(zip(step.busy_s, _RESOURCES, strict=True))[1]
