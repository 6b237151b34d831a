"""Messages between the scheduler and the GPU worker."""

from dataclasses import dataclass
from enum import StrEnum

from windlass.actors.messages.base import Message
from windlass.storage.ids import BlockIndex, ChunkKey, Span


class Phase(StrEnum):
    """What a compute operation does with a block."""

    FORWARD = "forward"  # without a graph; only the block's input is kept
    HEAD = "head"  # the last block: forward, loss and backward at once, over slices of tokens
    BACKWARD = "backward"  # recompute, then backward
    EVALUATE = "evaluate"  # forward only, nothing kept
    EVALUATE_HEAD = "evaluate_head"  # loss only


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchParams(Message):
    """Bring the params of `block`, as `step` left them, to the device: one buffer, held until its operation is done.

    `step` is the one under which the SSDs know them: the last that changed them, or a skipped one committed since.
    """

    op: int  # the compute operation they are for
    phase: Phase  # what that does
    block: BlockIndex
    group: int  # as in ComputeBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeBlock(Message):
    """Run one operation of the block loop, once its params have arrived. Operations run in the order they come."""

    op: int
    phase: Phase
    block: BlockIndex
    blocks: tuple[BlockIndex, ...]  # whose params it needs: the block's own first, then those it shares tensors with
    group: int  # of micro-batches, of the step or of the evaluation; gradients are summed over the groups of a step
    loss_scale: float  # what the loss is multiplied by before it goes backward


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadGrad(Message):
    """Move the gradient of `block` from the device to grad slots in the arena, or through them to the SSDs."""

    block: BlockIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockComputed(Message):
    """An operation is done and its param buffers are free."""

    op: int
    phase: Phase
    block: BlockIndex
    compute_s: float
    is_finite: bool  # no infinity and no NaN in what the block put out


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBackwardDone(Message):
    """All gradients of `block` for this step, of all groups of micro-batches, lie on the device."""

    block: BlockIndex
    grad_sq_sum: float  # sum of squares, of the scaled loss; finite if and only if every element is


@dataclass(frozen=True, slots=True)
class GradChunk:
    """A chunk's gradient in the arena; its slot belongs to whoever holds this, until it is returned."""

    key: ChunkKey
    span: Span | None  # None: on the SSD


@dataclass(frozen=True, slots=True, kw_only=True)
class GradOffloaded(Message):
    """The gradient of `block` lies where it is kept until the update."""

    block: BlockIndex
    chunks: tuple[GradChunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradDiscarded(Message):
    """To the GPU worker, from the scheduler: the step is skipped, so nothing was done with this gradient."""

    block: BlockIndex
    chunks: tuple[GradChunk, ...]  # none where it still lies on the device


@dataclass(frozen=True, slots=True, kw_only=True)
class LossComputed(Message):
    """The loss of a step, over its groups so far, or of one group of an evaluation."""

    phase: Phase  # HEAD or EVALUATE_HEAD
    loss_sum: float
    num_targets: int
    num_correct: int
    group: int
