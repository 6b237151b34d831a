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
    """One of the model states of a chunk."""

    PARAM = "param"  # what the forward pass reads; bf16. In fp32 training it is the master itself
    MASTER = "master"  # fp32
    EXP_AVG = "exp_avg"  # fp32
    EXP_AVG_SQ = "exp_avg_sq"  # fp32


class Precision(StrEnum):
    """The number format that the model computes in; the optimizer's states are fp32 in both."""

    BF16 = "bf16"
    FP32 = "fp32"


class StatePrecision(StrEnum):
    """How the optimizer's states rest."""

    FP32 = "fp32"  # master and moments in fp32
    SPLIT = "split"  # the same bits in less space: a bf16 param and what its rounding cut off are the master
    BF16 = "bf16"  # master and moments in bf16, stochastically rounded; the master is the param itself


# Bytes an element of each state takes at rest. In fp32 the master serves as the param: it is stored once.
STATE_ITEMSIZE: dict[Precision, dict[StateKind, int]] = {
    Precision.BF16: {StateKind.PARAM: 2, StateKind.MASTER: 4, StateKind.EXP_AVG: 4, StateKind.EXP_AVG_SQ: 4},
    Precision.FP32: {StateKind.MASTER: 4, StateKind.EXP_AVG: 4, StateKind.EXP_AVG_SQ: 4},
}


def param_kind(precision: Precision) -> StateKind:
    """The state that the forward pass reads."""
    return StateKind.PARAM if precision is Precision.BF16 else StateKind.MASTER


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
