"""Figures of three systems on one server in Ratel's paper, and the server's rates that follow from its statements.

Source: Ratel (arXiv 2403.06504): sections I, III and IV, figure 1, tables III and IV.
"""

from dataclasses import dataclass, replace

from benchmarks.papers.decoder_sizes import gpt_profile
from benchmarks.papers.published.models import RATEL_SHAPES
from windlass.amounts import GB, GIB
from windlass.planner.baselines import POLICIES, Policy, Rest, StageTimes, stage_times
from windlass.planner.cost import ModelProfile
from windlass.planner.hardware import Hardware, example_machines, load

NUM_TOKENS = 1024
NUM_EXAMPLES = 32
_CHUNK_NUMEL = 2**24

# Section III-C: the forward pass computes for 5.96 s. With the shape's operations this gives 146 TFLOPS.
FORWARD_COMPUTE_S = 5.96
# Section IV-D leaves the CPU's Adam out, "because its time is shorter than reading/writing the optimizer states": 28
# bytes a parameter. This is the slowest Adam for which that is true. The real one may be faster.
_STATE_TRAFFIC_NBYTES = 28
# Section III-B: ZeRO-Infinity's SSDs are busy for 6.25 s in the backward pass, where it reads each 16-bit param once.
# It reads tensor by tensor, so this is far below the rate of twelve SSDs.
_BACKWARD_READS_S = 6.25
# Section I: "Ratel only offloads ~34 GB". By the shape, its 12.5, 200 and 213 GB of activations are GiB.
RATEL_SWAPPED_NBYTES = 34 * GIB
# Section V-E: with the first batch, the step time rises with the swapped amount. With the others it first falls.
FIGURE_9B_BATCHES = (24, 36, 48, 60)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedStages:
    """The seconds of forward, backward and optimizer; 0 if it is part of backward."""

    system: str
    seconds: tuple[float, float, float]
    swapped_nbytes: int | None = None  # None: the policy's amount


PUBLISHED_STAGES = (
    PublishedStages(system="ZeRO-Infinity", seconds=(14, 26, 23)),
    PublishedStages(system="G10", seconds=(10, 12, 13)),  # simulated by Ratel's authors
    PublishedStages(system="Ratel", seconds=(5, 20, 0), swapped_nbytes=RATEL_SWAPPED_NBYTES),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A figure that the paper prints beside the stages, and the computed value."""

    what: str
    where: str
    published: float
    computed: float


def ratel_profile(num_examples: int = NUM_EXAMPLES) -> ModelProfile:
    """Returns the profile of the 13B model."""
    return gpt_profile(RATEL_SHAPES[13], num_examples=num_examples, num_tokens=NUM_TOKENS, chunk_numel=_CHUNK_NUMEL)


def ratel_server() -> Hardware:
    """Returns the shipped profile of the server, with estimates replaced by rates from the paper's statements."""
    hardware = load(Hardware, example_machines()["rtx4090-server"])
    assert hardware.ssds.combined_gb_per_s is not None
    adam_params_per_s = hardware.ssds.combined_gb_per_s * GB / _STATE_TRAFFIC_NBYTES
    tflops = ratel_profile().num_flops / 1e12 / FORWARD_COMPUTE_S
    return hardware.model_copy(
        update={
            "gpus": hardware.gpus.model_copy(update={"tflops": tflops}),
            "host": hardware.host.model_copy(update={"adam_params_per_s": adam_params_per_s}),
        }
    )


def with_ssd_rate(hardware: Hardware, gb_per_s: float) -> Hardware:
    """Returns the server with another combined rate of all SSDs."""
    return hardware.model_copy(update={"ssds": hardware.ssds.model_copy(update={"combined_gb_per_s": float(gb_per_s)})})


def with_host_memory(hardware: Hardware, gib: float) -> Hardware:
    """Returns the server with another amount of host memory."""
    return hardware.model_copy(update={"host": hardware.host.model_copy(update={"memory_gib": float(gib)})})


def one_by_one_gb_per_s() -> float:
    """Returns the rate of the server's SSDs for reads tensor by tensor."""
    return 2 * ratel_profile().numel / GB / _BACKWARD_READS_S


def computed_stages(system: str, *, swapped_nbytes: int | None = None) -> StageTimes:
    """Computes the stages of the 13B model on the server, with the same rates for all systems."""
    return _times(POLICIES[system], swapped_nbytes)


def statements() -> list[Statement]:
    """Returns the figures beside the stages."""
    profile, server = ratel_profile(), ratel_server()
    infinity, g10 = computed_stages("ZeRO-Infinity"), computed_stages("G10")
    ratel = computed_stages("Ratel", swapped_nbytes=RATEL_SWAPPED_NBYTES)
    # G10 with gradients that are consumed at once.
    overlapped = _times(replace(POLICIES["G10"], grads=Rest.GPU, updates_in_backward=True), None)
    pcie_s = infinity.backward.h2d_s + infinity.backward.d2h_s
    recompute_share = ratel.recompute_s / (ratel.backward.gpu_s - ratel.recompute_s)
    return [
        Statement(what="all activations, GiB", where="I", published=213, computed=profile.activation_nbytes / GIB),
        Statement(
            what="activations between layers, GiB",
            where="III-B",
            published=12.5,
            computed=profile.interblock_nbytes / GIB,
        ),
        Statement(
            what="model states that G10 moves each way, GB",
            where="III-C",
            published=182,
            computed=g10.optimizer.h2d_s * server.pcie.h2d_gb_per_s,
        ),
        Statement(what="ZeRO-Infinity: recomputation, s", where="I", published=5.7, computed=infinity.recompute_s),
        Statement(
            what="ZeRO-Infinity: GPU in backward, s", where="III-B", published=17.6, computed=infinity.backward.gpu_s
        ),
        Statement(what="ZeRO-Infinity: PCIe in backward, s", where="III-B", published=3.18, computed=pcie_s),
        Statement(
            what="ZeRO-Infinity: GPU busy, of a step", where="III-B", published=0.36, computed=infinity.gpu_share
        ),
        Statement(
            what="G10: GPU busy, of forward",
            where="III-C",
            published=0.59,
            computed=g10.forward.gpu_s / g10.seconds[0],
        ),
        Statement(
            what="G10 with updates in backward: GPU busy, of backward",
            where="III-C",
            published=0.69,
            computed=overlapped.backward.gpu_s / overlapped.seconds[1],
        ),
        Statement(what="Ratel: recomputation, s", where="I, 32% of 11.9 s", published=3.8, computed=ratel.recompute_s),
        Statement(
            what="Ratel: recomputation over the rest of backward", where="I", published=0.32, computed=recompute_share
        ),
    ]


def _times(policy: Policy, swapped_nbytes: int | None) -> StageTimes:
    return stage_times(
        policy,
        ratel_server(),
        ratel_profile(),
        one_by_one_gb_per_s=one_by_one_gb_per_s(),
        swapped_nbytes=swapped_nbytes,
    )
