"""Computes forward, backward and optimizer times on one GPU, from where a system keeps its data and what it overlaps.

This is arithmetic on bytes, operations and rates, after Ratel's equations 1 to 5. With overlap, a stage takes as long
as its busiest resource. Without overlap, it takes the sum of all resources' times. P is the number of parameters:
16-bit params and gradients take 2P bytes each, fp32 params and moments 12P.

Source: Ratel (arXiv 2403.06504), section IV-D and table II.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from windlass.amounts import GB, GIB, bytes_text
from windlass.planner.baselines.ratel_swap import SwapAmount, best_swap, candidates_of, recomputed_flops
from windlass.planner.cost import ModelProfile
from windlass.planner.hardware import Hardware


class Rest(StrEnum):
    """The memory where data is kept between its uses."""

    GPU = "GPU"
    HOST = "host"
    SSD = "SSD"


class Swapped(StrEnum):
    """The activations that leave the GPU. The others are recomputed."""

    INTERBLOCK = "between layers"
    ALL = "all"
    BEST = "the best amount"  # by Ratel's Algorithm 1
    BEST_ALONE = "the best amount, were there no other traffic"


class SwapTo(StrEnum):
    """The memory that swapped activations go to."""

    HOST = "host"  # at most the free host memory
    HOST_THEN_SSD = "host, then SSD"
    SSD = "SSD"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A system's policy: where it keeps its data, and when it updates."""

    params: Rest  # in 16 bit
    states: Rest  # fp32 params and moments
    grads: Rest  # from the backward pass to the update
    updates_on_gpu: bool
    updates_in_backward: bool
    swapped: Swapped
    swap_to: SwapTo
    overlaps: bool  # transfers, compute and updates of a stage run in parallel; else one at a time


_ZERO_OFFLOAD = Policy(
    params=Rest.GPU,
    states=Rest.HOST,
    grads=Rest.HOST,
    updates_on_gpu=False,
    updates_in_backward=False,
    swapped=Swapped.INTERBLOCK,
    swap_to=SwapTo.HOST,
    overlaps=True,
)
_RATEL = Policy(
    params=Rest.SSD,
    states=Rest.SSD,
    grads=Rest.HOST,
    updates_on_gpu=False,
    updates_in_backward=True,
    swapped=Swapped.BEST,
    swap_to=SwapTo.HOST_THEN_SSD,
    overlaps=True,
)
_FLASH_NEURON = Policy(
    params=Rest.GPU,
    states=Rest.GPU,
    grads=Rest.GPU,
    updates_on_gpu=True,
    updates_in_backward=False,
    swapped=Swapped.ALL,
    swap_to=SwapTo.SSD,
    overlaps=True,
)
# Sources: Ratel (arXiv 2403.06504), sections I to III and V. Capuchin and Checkmate are its versions of section V-E,
# which keep the states on the SSDs. ZeRO-Infinity keeps gradients in host memory: MemAscend, section III-C.
POLICIES: dict[str, Policy] = {
    "ZeRO-Offload": _ZERO_OFFLOAD,
    "ZeRO-Infinity": replace(_ZERO_OFFLOAD, params=Rest.SSD, states=Rest.SSD, overlaps=False),
    "StrongHold, L2L": replace(_ZERO_OFFLOAD, params=Rest.HOST, updates_in_backward=True),
    "FlashNeuron": _FLASH_NEURON,
    "G10": replace(_FLASH_NEURON, params=Rest.SSD, states=Rest.SSD, grads=Rest.SSD),
    "Capuchin, Checkmate": replace(_RATEL, swapped=Swapped.BEST_ALONE, swap_to=SwapTo.HOST),
    "Ratel": _RATEL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The busy seconds of each resource in a stage."""

    gpu_s: float = 0.0
    h2d_s: float = 0.0
    d2h_s: float = 0.0
    ssd_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def busy_s(self) -> tuple[float, ...]:
        """The busy seconds of all resources."""
        return (self.gpu_s, self.h2d_s, self.d2h_s, self.ssd_s, self.cpu_s)

    def time_s(self, *, overlaps: bool) -> float:
        """Returns the seconds of the stage."""
        return max(self.busy_s) if overlaps else sum(self.busy_s)

    def plus(self, other: "Stage") -> "Stage":
        """Returns a stage with the work of both."""
        gpu, h2d, d2h, ssd, cpu = (a + b for a, b in zip(self.busy_s, other.busy_s, strict=True))
        return Stage(gpu_s=gpu, h2d_s=h2d, d2h_s=d2h, ssd_s=ssd, cpu_s=cpu)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """The busy times of one step, and its swapped amount."""

    forward: Stage
    backward: Stage
    optimizer: Stage  # empty if updates are part of backward
    overlaps: bool
    swapped_nbytes: int
    recompute_s: float  # part of the GPU's time in backward

    @property
    def seconds(self) -> tuple[float, float, float]:
        """The seconds of forward, backward and optimizer."""
        forward, backward, optimizer = (
            stage.time_s(overlaps=self.overlaps) for stage in (self.forward, self.backward, self.optimizer)
        )
        return forward, backward, optimizer

    @property
    def iteration_s(self) -> float:
        """The seconds of all three stages."""
        return sum(self.seconds)

    @property
    def gpu_share(self) -> float:
        """The share of the step in which the GPU computes."""
        return sum(stage.gpu_s for stage in (self.forward, self.backward, self.optimizer)) / self.iteration_s


def stage_times(
    policy: Policy,
    hardware: Hardware,
    profile: ModelProfile,
    *,
    one_by_one_gb_per_s: float | None = None,
    swapped_nbytes: int | None = None,
) -> StageTimes:
    """Computes the times of one micro-batch on one GPU. GPU updates count as 0 s (Ratel's figure for 13B: 0.1 s).

    `one_by_one_gb_per_s`: rate of the SSDs for systems without overlap, which wait for each tensor of params; None: the
    full rate. `swapped_nbytes`: used instead of the policy's amount.

    Raises:
        ValueError: the amount is less than the inter-block activations.
    """
    candidates = candidates_of(profile)
    work = _Work(policy, hardware, profile, one_by_one_gb_per_s)
    least = profile.interblock_nbytes
    if swapped_nbytes is not None:
        if swapped_nbytes < least:
            raise ValueError(
                f"swapped_nbytes is {bytes_text(swapped_nbytes)}; the {bytes_text(least)} between layers are always "
                "swapped: give more"
            )
        return work.times(swapped_nbytes, recomputed_flops(candidates, swapped_nbytes - least))
    if policy.swapped is Swapped.INTERBLOCK:
        return work.times(least, recomputed_flops(candidates, 0))
    if policy.swapped is Swapped.ALL:
        return work.times(profile.activation_nbytes, 0)
    swap = best_amount(policy, hardware, profile)
    return work.times(swap.nbytes, swap.num_flops)


def best_amount(policy: Policy, hardware: Hardware, profile: ModelProfile) -> SwapAmount:
    """Returns the amount that a policy with a variable amount chooses."""
    weighed = policy
    if policy.swapped is Swapped.BEST_ALONE:
        weighed = replace(
            policy, params=Rest.GPU, states=Rest.GPU, grads=Rest.GPU, updates_on_gpu=True, updates_in_backward=False
        )
    work = _Work(weighed, hardware, profile, None)

    def iteration_s(nbytes: int, num_flops_again: int) -> float:
        return work.times(nbytes, num_flops_again).iteration_s

    most = host_room_nbytes(policy, hardware, profile) if policy.swap_to is SwapTo.HOST else None
    return best_swap(candidates_of(profile), iteration_s, least_nbytes=profile.interblock_nbytes, most_nbytes=most)


def resting_nbytes(policy: Policy, profile: ModelProfile, where: Rest) -> int:
    """Returns the bytes of model states and gradients that are resident in a memory."""
    parts = ((policy.params, 2), (policy.states, 12), (policy.grads, 2))
    # Gradients that are consumed at once do not accumulate.
    return profile.numel * sum(
        itemsize for rest, itemsize in (parts[:2] if policy.updates_in_backward else parts) if rest is where
    )


def host_room_nbytes(policy: Policy, hardware: Hardware, profile: ModelProfile) -> int:
    """Returns the host memory that is left for activations."""
    return max(0, int(hardware.host.memory_gib * GIB) - resting_nbytes(policy, profile, Rest.HOST))


def nbytes_on_ssd(policy: Policy, hardware: Hardware, profile: ModelProfile, swapped_nbytes: int) -> int:
    """Returns the part of the swapped activations that goes to the SSDs."""
    room = {
        SwapTo.HOST: swapped_nbytes,
        SwapTo.HOST_THEN_SSD: host_room_nbytes(policy, hardware, profile),
        SwapTo.SSD: 0,
    }
    return max(0, swapped_nbytes - room[policy.swap_to])


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRates:
    """The rates of a machine for a policy. The SSDs count together, in one direction at a time."""

    gpu_flops: float
    adam_params: float
    h2d_bytes: float
    d2h_bytes: float
    ssd_read_bytes: float
    ssd_write_bytes: float
    param_read_bytes: float


def stage_rates(policy: Policy, hardware: Hardware, *, one_by_one_gb_per_s: float | None = None) -> StageRates:
    """Returns the rates; for the parameters see `stage_times`."""
    ssds, pcie = hardware.ssds, hardware.pcie
    limit = ssds.combined_gb_per_s or float("inf")
    read = min(ssds.count * ssds.read_gb_per_s, limit)
    params = read if one_by_one_gb_per_s is None or policy.overlaps else one_by_one_gb_per_s
    return StageRates(
        gpu_flops=hardware.gpus.tflops * 1e12,
        adam_params=hardware.host.adam_params_per_s,
        h2d_bytes=pcie.h2d_gb_per_s * GB,
        d2h_bytes=pcie.d2h_gb_per_s * GB,
        ssd_read_bytes=read * GB,
        ssd_write_bytes=min(ssds.count * ssds.write_gb_per_s, limit) * GB,
        param_read_bytes=params * GB,
    )


class _Work:
    """The bytes and operations of a policy's stages, divided by the rates."""

    def __init__(
        self, policy: Policy, hardware: Hardware, profile: ModelProfile, one_by_one_gb_per_s: float | None
    ) -> None:
        self._policy = policy
        self._hardware = hardware
        self._profile = profile
        self._rates = stage_rates(policy, hardware, one_by_one_gb_per_s=one_by_one_gb_per_s)

    def times(self, swapped_nbytes: int, num_flops_again: int) -> StageTimes:
        """Returns the times for a swapped amount and an amount of recomputed operations."""
        policy, num_flops = self._policy, self._profile.num_flops
        grads = 2 * self._profile.numel
        on_ssd = nbytes_on_ssd(policy, self._hardware, self._profile, swapped_nbytes)
        recompute_s = self._gpu_s(num_flops_again)
        params = self._params_in()
        forward = params.plus(self._moved(d2h=swapped_nbytes, write=on_ssd)).plus(Stage(gpu_s=self._gpu_s(num_flops)))
        backward = params.plus(
            self._moved(
                h2d=swapped_nbytes,
                d2h=0 if policy.grads is Rest.GPU else grads,
                read=on_ssd,
                write=grads if policy.grads is Rest.SSD else 0,
            )
        ).plus(Stage(gpu_s=self._gpu_s(2 * num_flops) + recompute_s))
        optimizer = self._optimizer()
        if policy.updates_in_backward:
            backward, optimizer = backward.plus(optimizer), Stage()
        return StageTimes(
            forward=forward,
            backward=backward,
            optimizer=optimizer,
            overlaps=policy.overlaps,
            swapped_nbytes=swapped_nbytes,
            recompute_s=recompute_s,
        )

    def _params_in(self) -> Stage:
        """Returns the time to move all params to the GPU once."""
        params = 2 * self._profile.numel
        if self._policy.params is Rest.GPU:
            return Stage()
        ssd_s = params / self._rates.param_read_bytes if self._policy.params is Rest.SSD else 0.0
        return self._moved(h2d=params).plus(Stage(ssd_s=ssd_s))

    def _optimizer(self) -> Stage:
        """Returns the time to read states and gradients, update, and write states and 16-bit params."""
        policy, numel = self._policy, self._profile.numel
        states, half = 12 * numel, 2 * numel
        states_on_ssd = states if policy.states is Rest.SSD else 0
        read = states_on_ssd + (half if policy.grads is Rest.SSD else 0)
        write = states_on_ssd + (half if policy.params is Rest.SSD else 0)
        if policy.updates_on_gpu:
            states_move = 0 if policy.states is Rest.GPU else states
            return self._moved(
                h2d=states_move + (0 if policy.grads is Rest.GPU else half),
                d2h=states_move + (0 if policy.params is Rest.GPU else half),
                read=read,
                write=write,
            )
        cpu_s = numel / self._rates.adam_params
        h2d = half if policy.params is Rest.GPU else 0
        return self._moved(h2d=h2d, read=read, write=write).plus(Stage(cpu_s=cpu_s))

    def _moved(self, *, h2d: int = 0, d2h: int = 0, read: int = 0, write: int = 0) -> Stage:
        """Divides bytes by rates. PCIe moves in both directions at once, the SSDs in one."""
        rates = self._rates
        return Stage(
            h2d_s=h2d / rates.h2d_bytes,
            d2h_s=d2h / rates.d2h_bytes,
            ssd_s=read / rates.ssd_read_bytes + write / rates.ssd_write_bytes,
        )

    def _gpu_s(self, num_flops: int) -> float:
        return num_flops / self._rates.gpu_flops
