"""What the systems that windlass is compared with would take for a job: the sums of their stages, and the least memory.

Each is given the whole batch at once, SSDs that read as fast for it as for anybody, and only the memory that its policy
cannot do without. So the figures are kinder to them than their programs would be.
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
_PARAM_NBYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedSystem:
    """One system with one job on one machine."""

    system: str
    step_s: float
    gpu_share: float  # part of it in which the GPU computes
    tokens_per_s: float
    bottleneck: str  # the resource that is busy longest in a step
    fits: bool
    missing_gib: dict[str, float]  # gpu, host, ssd: where it lacks some
    updates_in_backward: bool  # so that gradients cannot be clipped by the norm of all of them


def compare(hardware: Hardware, profile: ModelProfile) -> list[ComparedSystem]:
    """All of them, on one GPU. `profile`: of the whole batch, in 16 bit; states are fp32.

    Raises:
        ValueError: the machine has no GPU, of which these systems' stages are.
    """
    if hardware.gpus.count == 0:
        raise ValueError("the systems of the papers keep a GPU busy; this machine has none")
    return [_compared(name, policy, hardware, profile) for name, policy in POLICIES.items()]


def least_nbytes(policy: Policy, hardware: Hardware, profile: ModelProfile, swapped_nbytes: int) -> dict[str, int]:
    """Bytes of each memory that there is no way without, so much being swapped.

    On the GPU one layer, its params and its activations, beside what rests there.
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
