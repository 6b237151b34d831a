"""Computes the peak host memory of ZeRO-Infinity and of MemAscend, by the accounting of MemAscend's paper.

It is fp16 training with states on the SSDs and activations recomputed on the GPU. Nothing else is in host memory. W is
the size of the largest 16-bit tensor, the embedding, in bytes.

Source: Liaw and Chen, MemAscend: System Memory Optimization for SSD-Offloaded LLM Fine-Tuning, sections III to VI.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.papers.decoder_sizes import block_numels, kv_size, layer_matrices, mlp_size
from windlass.amounts import GIB
from windlass.planner.hardware import ModelShape, load, published_models

_FP16_NBYTES = 2
_FP32_NBYTES = 4
# Section IV-B: two tensors of the embedding's size, three of the MLP's, two and two of attention's for N layers in
# flight. N is 1: for Qwen2.5-7B section V-A prints 9.14 GiB, nine times the embedding, and 2.46 GiB with fitting sizes.
_NUM_POOL_TENSORS = 2 + 3 + 2 + 2
# Section III-C: the overflow check by `isinf` needs a copy and a Boolean for each gradient.
_OVERFLOW_CHECK_SHARE = 1.25
# Section V-A prints 11.17 GiB of optimizer state buffers and swap-out buffer for Qwen2.5-7B: 11 W. That would be five
# fp32 buffers and a 16-bit one of the largest tensor. The paper does not say how they are divided.
_NUM_OPTIMIZER_TENSORS = 11
# Section V-A: the remaining overhead of MemAscend's allocator, used for both systems and all models.
_REST_NBYTES = int(1.63 * GIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """The bytes of host memory by purpose."""

    flat_grads: int  # of all parameters, fp32
    overflow_check: int
    param_pool: int
    optimizer_buffers: int
    activations: int
    pinned_overhead: int  # from rounding up allocations, and the remaining overhead

    @property
    def total(self) -> int:
        """The peak."""
        held = self.flat_grads + self.overflow_check + self.param_pool
        return held + self.optimizer_buffers + self.activations + self.pinned_overhead


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPeak:
    """The peaks of both systems for a model in GiB: section VI-B2, figure 13."""

    model: str
    shape: ModelShape
    zero_infinity_gib: float
    memascend_gib: float


def _shape(name: str) -> ModelShape:
    return load(ModelShape, published_models()[name])


PUBLISHED_PEAKS = (
    PublishedPeak(
        model="Llama3.1-8B",
        shape=_shape("llama-3.1-8b"),
        zero_infinity_gib=91.06,
        memascend_gib=44.71,
    ),
    PublishedPeak(
        model="Qwen2.5-7B",
        shape=_shape("qwen2.5-7b"),
        zero_infinity_gib=109.06,
        memascend_gib=43.67,
    ),
    PublishedPeak(
        model="Qwen2.5-14B",
        shape=_shape("qwen2.5-14b"),
        zero_infinity_gib=174.5,
        memascend_gib=76.1,
    ),
    PublishedPeak(
        model="Qwen2.5-32B",
        shape=_shape("qwen2.5-32b"),
        zero_infinity_gib=322.3,
        memascend_gib=143.6,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedGrowth:
    """The growth in GiB with longer contexts or larger batches, with activations swapped to host memory: VI-B2."""

    model: str
    num_tokens: tuple[int, int]  # of a GPU's batch, from and to
    zero_infinity_gib: float
    memascend_gib: float


PUBLISHED_GROWTHS = (
    PublishedGrowth(
        model="Llama3.1-8B",
        num_tokens=(4096, 131072),
        zero_infinity_gib=156.88 - 94.88,
        memascend_gib=110.67 - 48.67,
    ),
    PublishedGrowth(
        model="Qwen2.5-32B",
        num_tokens=(4096, 131072),
        zero_infinity_gib=580.12 - 332.12,
        memascend_gib=305.5 - 150.51,
    ),
    PublishedGrowth(
        model="Llama3.1-8B",
        num_tokens=(4096, 96 * 4096),
        zero_infinity_gib=348.91 - 94.89,
        memascend_gib=238.69 - 48.67,
    ),
)
NUM_GPUS_OF_GROWTHS = 2
# MemAscend's savings as shares of ZeRO-Infinity's memory, averages over the four models: of the pool of params (section
# VI-B1), of the peak in fp16 training (VI-B2) and in bf16 training, which has no overflow check (VI-B3).
PUBLISHED_SAVINGS = {"pool": 0.7271, "peak, fp16": 0.557, "peak, bf16": 0.2519}


def zero_infinity_memory(
    shape: ModelShape, *, activations: Sequence[int] = (), checks_overflow: bool = True
) -> HostMemory:
    """Computes ZeRO-Infinity's memory. All pool buffers have the largest tensor's size, pinned ones a power of two.

    `activations`: bytes of each pinned buffer for them. `checks_overflow`: true for fp16 training, false for bf16.
    """
    flat, largest = _flat_grads(shape), _largest_tensor(shape)
    buffers = [flat, *[largest] * (_NUM_POOL_TENSORS + _NUM_OPTIMIZER_TENSORS), *activations]
    return HostMemory(
        flat_grads=flat,
        overflow_check=int(_OVERFLOW_CHECK_SHARE * flat) if checks_overflow else 0,
        param_pool=_NUM_POOL_TENSORS * largest,
        optimizer_buffers=_NUM_OPTIMIZER_TENSORS * largest,
        activations=sum(activations),
        pinned_overhead=sum(_power_of_two(nbytes) - nbytes for nbytes in buffers) + _REST_NBYTES,
    )


def memascend_memory(shape: ModelShape, *, activations: Sequence[int] = ()) -> HostMemory:
    """Computes MemAscend's memory.

    Buffers have their tensors' sizes, without rounding or copies for overflow checks.
    """
    hidden = shape.hidden_size
    pool = 3 * mlp_size(shape) * hidden + 2 * kv_size(shape) * hidden + 2 * hidden * hidden
    return HostMemory(
        flat_grads=_flat_grads(shape),
        overflow_check=0,
        param_pool=2 * _largest_tensor(shape) + _FP16_NBYTES * pool,
        optimizer_buffers=_NUM_OPTIMIZER_TENSORS * _largest_tensor(shape),
        activations=sum(activations),
        pinned_overhead=_REST_NBYTES,
    )


def savings() -> dict[str, float]:
    """Computes the values of `PUBLISHED_SAVINGS`."""
    shares: dict[str, list[float]] = {name: [] for name in PUBLISHED_SAVINGS}
    for peak in PUBLISHED_PEAKS:
        theirs, ours = zero_infinity_memory(peak.shape), memascend_memory(peak.shape)
        in_bf16 = zero_infinity_memory(peak.shape, checks_overflow=False)
        shares["pool"].append(1 - ours.param_pool / theirs.param_pool)
        shares["peak, fp16"].append(1 - ours.total / theirs.total)
        shares["peak, bf16"].append(1 - ours.total / in_bf16.total)
    return {name: statistics.fmean(values) for name, values in shares.items()}


def growths(published: PublishedGrowth) -> tuple[int, int]:
    """Returns the growth of ZeRO-Infinity and MemAscend in bytes, with each GPU's activations in one buffer."""
    (shape,) = (peak.shape for peak in PUBLISHED_PEAKS if peak.model == published.model)
    before, after = (
        [checkpoint_nbytes(shape, num_tokens=num_tokens)] * NUM_GPUS_OF_GROWTHS for num_tokens in published.num_tokens
    )
    return (
        zero_infinity_memory(shape, activations=after).total - zero_infinity_memory(shape, activations=before).total,
        memascend_memory(shape, activations=after).total - memascend_memory(shape, activations=before).total,
    )


def checkpoint_nbytes(shape: ModelShape, *, num_tokens: int) -> int:
    """Returns the bytes of one GPU's activations between layers: equation 1, without its overhead."""
    return num_tokens * shape.num_layers * shape.hidden_size * _FP16_NBYTES


def _flat_grads(shape: ModelShape) -> int:
    return _FP32_NBYTES * sum(block_numels(shape, num_tokens=0, is_tied=False))


def _largest_tensor(shape: ModelShape) -> int:
    return _FP16_NBYTES * max(shape.vocab_size * shape.hidden_size, *layer_matrices(shape))


def _power_of_two(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length() if nbytes else 0
