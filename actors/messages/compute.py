"""Messages between the scheduler and the GPU worker."""

from dataclasses import dataclass
from enum import StrEnum

from windlass.actors.messages.base import Message
from windlass.storage.ids import BlockIndex, ChunkKey, Span


class Phase(StrEnum):
    """The kinds of compute operations on a block."""

    FORWARD = "forward"  # without an autograd graph; only the block's input is kept
    HEAD = "head"  # the last block: forward, loss and backward in one operation, over slices of tokens
    BACKWARD = "backward"  # recompute the forward pass, then backward
    EVALUATE = "evaluate"  # forward only, nothing kept
    EVALUATE_HEAD = "evaluate_head"  # loss only


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchParams(Message):
    """Asks the GPU worker to copy the params of `block`, as of `step`, into a device buffer.

    The buffer is held until the operation is done. `step` is the step under which the SSDs store the params: the last
    one that changed them, or a later skipped step that was committed.
    """

    op: int  # number of the compute operation that needs the params
    phase: Phase  # of that operation
    block: BlockIndex
    group: int  # as in ComputeBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeBlock(Message):
    """Asks the GPU worker to run one operation once its params have arrived. Operations run in order of arrival."""

    op: int
    phase: Phase
    block: BlockIndex
    blocks: tuple[BlockIndex, ...]  # the blocks whose params it needs: first `block`, then those it shares tensors with
    group: int  # index of the group of micro-batches; gradients are summed over the groups of a step
    loss_scale: float  # factor on the loss before the backward pass


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadGrad(Message):
    """Asks the GPU worker to copy the gradient of `block` to grad slots in the arena, or through them to the SSDs."""

    block: BlockIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockComputed(Message):
    """Reports that an operation is done and its param buffers are free."""

    op: int
    phase: Phase
    block: BlockIndex
    compute_s: float
    is_finite: bool  # the block's output has neither infinities nor NaNs


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBackwardDone(Message):
    """Reports that the gradient of `block` for this step, summed over all groups of micro-batches, is on the device."""

    block: BlockIndex
    grad_sq_sum: float  # sum of squares of the scaled loss's gradient; finite if and only if every element is


@dataclass(frozen=True, slots=True)
class GradChunk:
    """A chunk's gradient in the arena. The actor that received this owns the slot until it releases it."""

    key: ChunkKey
    span: Span | None  # None: on the SSD


@dataclass(frozen=True, slots=True, kw_only=True)
class GradOffloaded(Message):
    """Reports that the gradient of `block` is in host memory or on the SSDs, where it stays until the update."""

    block: BlockIndex
    chunks: tuple[GradChunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradDiscarded(Message):
    """Tells the GPU worker, from the scheduler, that the step is skipped and this gradient will not be used."""

    block: BlockIndex
    chunks: tuple[GradChunk, ...]  # empty if the gradient is still on the device


@dataclass(frozen=True, slots=True, kw_only=True)
class LossComputed(Message):
    """The loss of a step, summed over its groups so far, or of one group of an evaluation."""

    phase: Phase  # HEAD or EVALUATE_HEAD
    loss_sum: float
    num_targets: int
    num_correct: int
    group: int
