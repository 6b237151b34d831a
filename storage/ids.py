"""Identifiers and number formats that all parts of windlass share.

Ids are types, not plain strings and integers, so that the type checker finds a block index in place of a step. This
file uses only the standard library, because the scheduler's policy and the messages import it.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, NewType

JobId = NewType("JobId", str)
# One launch of a job, counted from 1. Every record and every write carries it; the highest attempt wins.
Attempt = NewType("Attempt", int)
# Counts how often a job's chunks were dealt to its SSDs, from 0. States of different layout epochs never mix.
LayoutEpoch = NewType("LayoutEpoch", int)
FIRST_EPOCH = LayoutEpoch(0)  # also that of stores of older versions, which name none
Rank = NewType("Rank", int)
# The number of completed optimizer steps. The states of step 0 are the initial weights; step t updates those of t-1.
Step = NewType("Step", int)
BlockIndex = NewType("BlockIndex", int)
ChunkIndex = NewType("ChunkIndex", int)
SsdIndex = NewType("SsdIndex", int)
# Matches a reply with its request; unique within the actor that created it.
CorrelationId = NewType("CorrelationId", int)
# An actor's name within its job: "scheduler", "gpu-0", "optimizer-0", "ssd-1".
ActorName = NewType("ActorName", str)
# A box's name within its cluster.
BoxName = NewType("BoxName", str)
HEAD_NAME = BoxName("head")


class StateKind(StrEnum):
    """One of the model states of a chunk, or its gradient."""

    PARAM = "param"  # the weights for the forward pass, bf16 or fp16; in fp32 training the master serves as the param
    MASTER = "master"  # fp32
    RESIDUAL = "residual"  # the master's low 16 bits, which rounding to the param cuts off
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    GRAD = "grad"  # kept from the backward pass to the update; never part of a commit


class Precision(StrEnum):
    """The number format that the model computes in."""

    BF16 = "bf16"
    FP16 = "fp16"  # with dynamic loss scaling
    FP32 = "fp32"

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return 4 if self is Precision.FP32 else 2


class StatePrecision(StrEnum):
    """The format in which the optimizer's states are stored."""

    FP32 = "fp32"  # master and moments in fp32
    SPLIT = "split"  # the same bits in less space: the master is stored as a bf16 param and a 16-bit residual
    BF16 = "bf16"  # master and moments in bf16, stochastically rounded; the param serves as the master


# Bytes of an element of each stored state, in storage order. In fp32 training the master serves as the param, and with
# bf16 states the param serves as the master; it is stored once.
_FP32_MOMENTS = {StateKind.EXP_AVG: 4, StateKind.EXP_AVG_SQ: 4}
_ITEMSIZES: dict[tuple[Precision, StatePrecision], dict[StateKind, int]] = {
    (Precision.FP32, StatePrecision.FP32): {StateKind.MASTER: 4, **_FP32_MOMENTS},
    (Precision.FP16, StatePrecision.FP32): {StateKind.PARAM: 2, StateKind.MASTER: 4, **_FP32_MOMENTS},
    (Precision.BF16, StatePrecision.FP32): {StateKind.PARAM: 2, StateKind.MASTER: 4, **_FP32_MOMENTS},
    (Precision.BF16, StatePrecision.SPLIT): {StateKind.PARAM: 2, StateKind.RESIDUAL: 2, **_FP32_MOMENTS},
    (Precision.BF16, StatePrecision.BF16): {StateKind.PARAM: 2, StateKind.EXP_AVG: 2, StateKind.EXP_AVG_SQ: 2},
}


class Kernel(StrEnum):
    """The kernels that compute updates. Results differ in the last bit, so a job keeps the kernel it began with."""

    COMPILED = "compiled"  # C++ compiled into one pass over memory; needs a C++ compiler
    FUSED = "fused"  # torch's own fused optimizer, slice by slice


class ModelKernel(StrEnum):
    """Kernels that replace PyTorch's usual ones for parts of a model. Results differ from theirs in the last bits."""

    FLASH_ATTENTION_2 = "flash_attention_2"  # the name in transformers
    LIGER = "liger"  # norms and MLPs
    LIGER_CROSS_ENTROPY = "liger_cross_entropy"  # the loss, and the gradient of the logits
    FP32_PRODUCT = "fp32_product"  # PyTorch's, from 16-bit factors: the gradient of the head's projection


class HeadSlices(StrEnum):
    """The ways in which the head goes over the tokens of a micro-batch. Their gradients differ in the last bits."""

    SMALL = "small"  # at most 64 Mi logits in a slice; the projection's gradient is made for each slice and then added
    LARGE = "large"  # 1024 to 4096 tokens in a slice; the projection's gradient is added in place


@dataclass(frozen=True, slots=True)
class Formats:
    """The number formats of a job. Raises ValueError for an unsupported pair."""

    precision: Precision
    states: StatePrecision

    def __post_init__(self) -> None:
        if (self.precision, self.states) not in _ITEMSIZES:
            raise ValueError(f"{self.states} states go with bf16 training; in {self.precision} states are fp32")

    @property
    def itemsizes(self) -> dict[StateKind, int]:
        """The bytes of an element of each stored state, in storage order."""
        return _ITEMSIZES[(self.precision, self.states)]

    def offsets(self, chunk_numel: int) -> dict[StateKind, int]:
        """Returns the offset in bytes of each stored state in a slot for a chunk's states."""
        offsets, offset = {}, 0
        for kind, itemsize in self.itemsizes.items():
            offsets[kind] = offset
            offset += itemsize * chunk_numel
        return offsets

    @property
    def kinds_to_update(self) -> tuple[StateKind, ...]:
        """The states that an update reads: all except a param that follows from its master.

        A block whose states are resident on the device has only these there. Source: AutoHete, footnote 2.
        """
        kinds = tuple(self.itemsizes)
        return tuple(kind for kind in kinds if kind is not StateKind.PARAM or StateKind.MASTER not in kinds)

    @property
    def update_itemsize(self) -> int:
        """The bytes that an update reads for one parameter."""
        return sum(self.itemsizes[kind] for kind in self.kinds_to_update)

    @property
    def derives_param(self) -> bool:
        """True if the param follows from its master by rounding."""
        return self.param_kind not in self.kinds_to_update

    def lent(self, resident: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the blocks with states on the device (`resident`) whose stored params the forward pass can use."""
        return () if self.derives_param else resident

    @property
    def param_kind(self) -> StateKind:
        """The state that the forward pass reads."""
        return StateKind.MASTER if self.precision is Precision.FP32 else StateKind.PARAM


ALL_FORMATS = tuple(Formats(*pair) for pair in _ITEMSIZES)


class ChunkKey(NamedTuple):
    """A chunk of a job: a fixed number of consecutive elements of one block's flat parameter vector.

    A tuple, because keys are hashed very often.
    """

    block: BlockIndex
    chunk: ChunkIndex


@dataclass(frozen=True, slots=True)
class Span:
    """A range of bytes in the job's arena on this node."""

    offset: int
    nbytes: int
