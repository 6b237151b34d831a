"""Messages between the scheduler and the GPU worker."""

import math
from dataclasses import dataclass
from enum import StrEnum

from windlass.actors.messages.base import Event, Message
from windlass.storage.ids import BlockIndex, Step


class Phase(StrEnum):
    """The kinds of compute operations on a block."""

    FORWARD = "forward"  # without an autograd graph; only the block's input is kept
    HEAD = "head"  # the last block: forward, loss and backward in one operation, over slices of tokens
    BACKWARD = "backward"  # recompute the forward pass, then backward
    EVALUATE = "evaluate"  # forward only, nothing kept
    EVALUATE_HEAD = "evaluate_head"  # loss only


@dataclass(frozen=True, slots=True)
class StoredParams:
    """The params of a block, as an operation needs them."""

    block: BlockIndex
    # The step under which the SSDs store them: the last one that changed them, or a later skipped step that was
    # committed.
    step: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeBlock(Message):
    """One operation on a block. The GPU worker prefetches its params and computes it when they have arrived.

    Operations run in order of arrival.
    """

    op: int
    phase: Phase
    block: BlockIndex
    params: tuple[StoredParams, ...]  # those that it needs: first of `block`, then of those it shares tensors with
    group: int  # index of the group of micro-batches; gradients are summed over the groups of a step
    loss_scale: float  # factor on the loss before the backward pass

    @property
    def blocks(self) -> tuple[BlockIndex, ...]:
        """The blocks whose params the operation needs, its own first."""
        return tuple(params.block for params in self.params)


@dataclass(frozen=True, slots=True)
class ParamRequest:
    """The GPU worker's own request of a block's params, in a device buffer that is held until the operation is done."""

    operation: ComputeBlock
    block: BlockIndex
    step: Step  # as in StoredParams

    @classmethod
    def of(cls, operation: ComputeBlock) -> "tuple[ParamRequest, ...]":
        """Returns the requests of an operation, for each block whose params it needs."""
        return tuple(cls(operation, params.block, params.step) for params in operation.params)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeBlocks(Message):
    """Grants the GPU worker its next operations. The worker decides how many of them it prefetches and queues."""

    operations: tuple[ComputeBlock, ...]


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of one group of a step or of an evaluation."""

    terms: tuple[
        float, ...
    ]  # of a step they are added in order of the groups, so that the bits do not depend on groups
    num_targets: int  # of the whole step, or of the evaluation's group
    num_correct: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockComputed(Message):
    """Reports that an operation is done and its param buffers are free."""

    op: int
    phase: Phase
    block: BlockIndex
    group: int
    compute_s: float
    is_finite: bool  # the block's output has neither infinities nor NaNs
    loss: Loss | None = None  # of each head


@dataclass(frozen=True, slots=True, kw_only=True)
class GradReady(Message):
    """Reports that a block's gradient is where it stays until the update: in host memory, on the SSDs or the device.

    It is the sum over all groups of micro-batches of the step.
    """

    block: BlockIndex
    # Sums of squares of the scaled loss's gradient: one for the block or, if the job has lanes, one for each chunk.
    # They are finite if and only if every element is.
    sq_sums: tuple[float, ...]

    @property
    def is_finite(self) -> bool:
        """True if every element of the gradient is finite."""
        return all(map(math.isfinite, self.sq_sums))


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeProgressed(Event):
    """Reports the GPU worker's finished operations and gradients since the last report, each in order.

    `step` is that of the last gradient or, without one, of the last operation.
    """

    computed: tuple[BlockComputed, ...]
    grads: tuple[GradReady, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitReached(Message):
    """Tells the GPU worker that `step` is committed, so that gradients may overwrite the states of earlier commits.

    It is sent only if gradients are spilled to the SSDs.
    """
