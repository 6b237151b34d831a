"""Throughputs that the papers print as numbers, each with its job and machine, and windlass's plan for the same job.

Sources: Ratel (arXiv 2403.06504), sections III-C, V-C and V-F and figure 1c; MemAscend, section VI-B2.
"""

from dataclasses import dataclass, replace
from functools import cache

from benchmarks.papers.published.models import RATEL_SHAPES
from benchmarks.papers.published.stages import (
    FORWARD_COMPUTE_S,
    NUM_EXAMPLES,
    NUM_TOKENS,
    PUBLISHED_STAGES,
    ratel_profile,
    ratel_server,
)
from windlass.engine.training_config import TrainingConfig
from windlass.planner.cost import speeds_of
from windlass.planner.hardware import Hardware, ModelShape, load, machine_of, published_models
from windlass.planner.planning.gpu_choice import plan_without_advice
from windlass.planner.profiling import ShapeConfig
from windlass.planner.question import PlanQuestion, PlanReport, Profiles
from windlass.storage.ids import Precision

_MEMASCEND_TOKENS = 4096
# Batches of which the fastest is taken where the paper prints a maximum without its batch.
OTHER_BATCHES = (32, 64)
# Section V-C: shares of the peak that Ratel reaches, "90%~95%" below 70B and 53% with 175B. It does not print the peak.
# Section III-C gives the rate of the forward pass of its 13B model, which is at most the peak.
_SHARE_OF_SMALL, _SHARE_OF_175B = 0.90, 0.53


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedThroughput:
    """A printed throughput. One of the two numbers is given."""

    paper: str
    where: str
    model: str
    shape: ModelShape
    machine: str  # in words
    hardware: Hardware
    batch_size: int
    num_tokens: int
    tflops: float | None = None
    tokens_per_s: float | None = None
    num_gpus: int = 1
    precision: Precision = Precision.BF16
    has_batch: bool = True  # False: the paper does not print the batch, and `batch_size` is one of `OTHER_BATCHES`


def _of_ratel(
    billions: int, *, num_ssds: int, batch_size: int, tflops: float, where: str, has_batch: bool = True
) -> PublishedThroughput:
    server = server_of_products()
    return PublishedThroughput(
        paper="Ratel",
        where=where,
        model=f"{billions}B",
        shape=RATEL_SHAPES[billions],
        machine=f"RTX 4090, {num_ssds} SSDs",
        hardware=server.model_copy(update={"ssds": server.ssds.model_copy(update={"count": num_ssds})}),
        batch_size=batch_size,
        num_tokens=NUM_TOKENS,
        tflops=tflops,
        has_batch=has_batch,
    )


def _of_memascend(batch_size: int, tokens_per_s: float) -> PublishedThroughput:
    return PublishedThroughput(
        paper="MemAscend",
        where="VI-B2",
        model="Qwen2.5-32B",
        shape=load(ModelShape, published_models()["qwen2.5-32b"]),
        machine="two H100, 1 SSD",
        hardware=machine_of("memascend-1"),
        batch_size=batch_size,
        num_tokens=_MEMASCEND_TOKENS,
        tokens_per_s=tokens_per_s,
        # A step of one sequence has work for one GPU only.
        num_gpus=min(2, batch_size),
        precision=Precision.FP16,
    )


@cache
def server_of_products() -> Hardware:
    """Returns Ratel's server with the rate of large products that the planner expects in a machine's profile.

    The planner counts operators that only move memory apart. The rate is that with which its forward pass of the 13B
    model computes for as long as the paper's.
    """
    server = ratel_server()
    training = TrainingConfig(batch_size=1, sequence_length=NUM_TOKENS, total_steps=1)
    config = ShapeConfig(shape=RATEL_SHAPES[13], num_tokens=NUM_TOKENS)
    profile = Profiles(PlanQuestion(config=config, hardware=server, training=training)).of(1, NUM_TOKENS)
    speeds = speeds_of(server)
    moved_nbytes = sum(2 * layer.work.nbytes for layer in profile.layers)
    one_s = profile.num_flops / speeds.device_flops + moved_nbytes / speeds.device_memory_bytes
    tflops = server.gpus.tflops * NUM_EXAMPLES * one_s / FORWARD_COMPUTE_S
    return server.model_copy(update={"gpus": server.gpus.model_copy(update={"tflops": tflops})})


def step_tflops(step_s: float) -> float:
    """Returns the rate of the model's operations in a step of Ratel's 13B model with its batch of 32."""
    return 3 * ratel_profile().num_flops / 1e12 / step_s


def step_s_of(tflops: float) -> float:
    """Returns the seconds of such a step at a rate."""
    return 3 * ratel_profile().num_flops / 1e12 / tflops


def published_throughputs() -> list[PublishedThroughput]:
    """Returns the printed throughputs."""
    peak = ratel_server().gpus.tflops
    (figure_1c,) = (sum(each.seconds) for each in PUBLISHED_STAGES if each.system == "Ratel")
    small = _SHARE_OF_SMALL * peak
    return [
        _of_ratel(13, num_ssds=12, batch_size=32, tflops=step_tflops(figure_1c), where=f"figure 1c: {figure_1c:g} s"),
        _of_ratel(13, num_ssds=12, batch_size=32, tflops=135, where="V-F"),
        _of_ratel(13, num_ssds=6, batch_size=48, tflops=135, where="V-F"),
        _of_ratel(13, num_ssds=3, batch_size=64, tflops=135, where="V-F"),
        _of_ratel(6, num_ssds=12, batch_size=32, tflops=small, where="V-C: 90%", has_batch=False),
        _of_ratel(30, num_ssds=12, batch_size=32, tflops=small, where="V-C: 90%", has_batch=False),
        _of_ratel(175, num_ssds=12, batch_size=32, tflops=_SHARE_OF_175B * peak, where="V-C: 53%", has_batch=False),
        _of_memascend(1, 49.32),
        _of_memascend(48, 1322.55),
    ]


def at_its_best_batch(published: PublishedThroughput) -> tuple[PublishedThroughput, PlanReport]:
    """Plans a job, with the fastest of a few batches if the paper does not print its batch."""
    if published.has_batch:
        return published, planned(published)
    jobs = (replace(published, batch_size=batch_size) for batch_size in OTHER_BATCHES)
    return max(((job, planned(job)) for job in jobs), key=lambda result: result[1].tokens_per_s or 0.0)


def with_faster_adam(published: PublishedThroughput) -> PublishedThroughput:
    """Returns the job on a machine that updates twice as fast."""
    host = published.hardware.host
    host = host.model_copy(update={"adam_params_per_s": 2 * host.adam_params_per_s})
    return replace(published, hardware=published.hardware.model_copy(update={"host": host}))


def planned(published: PublishedThroughput) -> PlanReport:
    """Plans the same job, without clipping, by the search of `windlass plan`."""
    return planned_job(
        published.shape,
        published.hardware,
        batch_size=published.batch_size,
        num_tokens=published.num_tokens,
        num_gpus=published.num_gpus,
        precision=published.precision,
    )


def planned_job(
    shape: ModelShape,
    hardware: Hardware,
    *,
    batch_size: int,
    num_tokens: int,
    num_gpus: int,
    precision: Precision = Precision.BF16,
) -> PlanReport:
    """Plans a job without clipping by the search of `windlass plan`. `batch_size` is that of all GPUs together."""
    training = TrainingConfig(
        batch_size=batch_size,
        num_microbatches=num_gpus,
        sequence_length=num_tokens,
        precision=precision,
        clip_norm=None,
        total_steps=1,
    )
    question = PlanQuestion(
        config=ShapeConfig(shape=shape, num_tokens=num_tokens),
        hardware=hardware,
        training=training,
        chooses_microbatches=True,
        chooses_cut=True,
        num_ranks=num_gpus,
        num_optimizers=num_gpus,
    )
    return plan_without_advice(question, Profiles(question)).report
