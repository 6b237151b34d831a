"""Names of the things every part of windlass talks about.

Ids are types, not bare strings and integers, so that a block index never lands where a step was meant.
Standard library only: the scheduler's policy and the messages import this file and nothing else of windlass.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

JobId = NewType("JobId", str)
# One launch of a job, from 1. Every record and every write carries it; the highest wins.
Attempt = NewType("Attempt", int)
Rank = NewType("Rank", int)
# The number of optimizer steps done. Model states of step 0 are the initial weights; step t turns t-1's into t's.
Step = NewType("Step", int)
BlockIndex = NewType("BlockIndex", int)
ChunkIndex = NewType("ChunkIndex", int)
SsdIndex = NewType("SsdIndex", int)
# Ties an answer to its request; unique within the actor that made it.
CorrelationId = NewType("CorrelationId", int)
# An actor's name within its job: "scheduler", "gpu-0", "optimizer-0", "ssd-1".
ActorName = NewType("ActorName", str)


class StateKind(StrEnum):
    """One of the model states of a chunk, or its gradient."""

    PARAM = "param"  # what the forward pass reads, in bf16 or fp16. In fp32 training that is the master itself
    MASTER = "master"  # fp32
    RESIDUAL = "residual"  # what rounding the master to the param cut off: its low 16 bits
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    GRAD = "grad"  # kept from the backward pass to the update; never a part of a commit


class Precision(StrEnum):
    """The number format that the model computes in."""

    BF16 = "bf16"
    FP16 = "fp16"  # with dynamic loss scaling
    FP32 = "fp32"


class StatePrecision(StrEnum):
    """How the optimizer's states rest."""

    FP32 = "fp32"  # master and moments in fp32
    SPLIT = "split"  # the same bits in less space: a bf16 param and what its rounding cut off are the master
    BF16 = "bf16"  # master and moments in bf16, stochastically rounded; the master is the param itself


# Bytes an element of each state takes at rest, in the order in which they lie there. In fp32 the master serves as the
# param, and with bf16 states the param as the master: it is stored once.
_FP32_MOMENTS = {StateKind.EXP_AVG: 4, StateKind.EXP_AVG_SQ: 4}
_ITEMSIZES: dict[tuple[Precision, StatePrecision], dict[StateKind, int]] = {
    (Precision.FP32, StatePrecision.FP32): {StateKind.MASTER: 4, **_FP32_MOMENTS},
    (Precision.FP16, StatePrecision.FP32): {StateKind.PARAM: 2, StateKind.MASTER: 4, **_FP32_MOMENTS},
    (Precision.BF16, StatePrecision.FP32): {StateKind.PARAM: 2, StateKind.MASTER: 4, **_FP32_MOMENTS},
    (Precision.BF16, StatePrecision.SPLIT): {StateKind.PARAM: 2, StateKind.RESIDUAL: 2, **_FP32_MOMENTS},
    (Precision.BF16, StatePrecision.BF16): {StateKind.PARAM: 2, StateKind.EXP_AVG: 2, StateKind.EXP_AVG_SQ: 2},
}


class Kernel(StrEnum):
    """How updates are computed. The two differ in the last bit, so a job keeps to the one that it began with."""

    COMPILED = "compiled"  # plain PyTorch compiled into one pass over memory; needs a C++ compiler
    FUSED = "fused"  # torch's own fused optimizer, slice by slice


class ModelKernel(StrEnum):
    """Kernels that compute parts of a model in place of torch's; their results differ in the last bits from torch's."""

    FLASH_ATTENTION_2 = "flash_attention_2"  # as transformers names it
    LIGER = "liger"


@dataclass(frozen=True, slots=True)
class Formats:
    """The number formats of a job. Raises ValueError for a pair that does not exist."""

    precision: Precision
    states: StatePrecision

    def __post_init__(self) -> None:
        if (self.precision, self.states) not in _ITEMSIZES:
            raise ValueError(f"{self.states} states go with bf16 training; in {self.precision} states are fp32")

    @property
    def itemsizes(self) -> dict[StateKind, int]:
        """Bytes an element of each state takes at rest, in the order in which they lie there."""
        return _ITEMSIZES[(self.precision, self.states)]

    @property
    def kinds_to_update(self) -> tuple[StateKind, ...]:
        """What an update reads: all states, but for a param that follows from its master.

        Of a block whose states rest on the device it is all that lies there (AutoHete, footnote 2).
        """
        kinds = tuple(self.itemsizes)
        return tuple(kind for kind in kinds if kind is not StateKind.PARAM or StateKind.MASTER not in kinds)

    @property
    def update_itemsize(self) -> int:
        """Bytes of what an update reads of one parameter's states."""
        return sum(self.itemsizes[kind] for kind in self.kinds_to_update)

    @property
    def derives_param(self) -> bool:
        """Whether the param follows from its master: by rounding."""
        return self.param_kind not in self.kinds_to_update

    def lent(self, resident: tuple[int, ...]) -> tuple[int, ...]:
        """Of blocks whose states rest on the device, those whose params lie there as they are used."""
        return () if self.derives_param else resident

    @property
    def param_kind(self) -> StateKind:
        """The state that the forward pass reads."""
        return StateKind.MASTER if self.precision is Precision.FP32 else StateKind.PARAM


ALL_FORMATS = tuple(Formats(*pair) for pair in _ITEMSIZES)


@dataclass(frozen=True, slots=True, order=True)
class ChunkKey:
    """A chunk of a job: a fixed number of consecutive elements of one block's flat parameter vector."""

    block: BlockIndex
    chunk: ChunkIndex


@dataclass(frozen=True, slots=True)
class Span:
    """A range of bytes in the job's arena on this node."""

    offset: int
    nbytes: int
