"""Messages between the scheduler, the CPU optimizers and the GPU worker about updates."""

from dataclasses import dataclass

from windlass.actors.messages.base import Event, Message
from windlass.storage.ids import BlockIndex, ChunkKey, Span, Step


@dataclass(frozen=True, slots=True)
class GradChunk:
    """A chunk's gradient in the arena. The actor that received this owns the slot until it releases it."""

    key: ChunkKey
    span: Span | None  # None: on the SSD


@dataclass(frozen=True, slots=True, kw_only=True)
class GradOffloaded(Message):
    """Tells an optimizer, from the GPU worker, where the gradient of its share of `block` is.

    Of a gradient that stays on the device, the GPU worker tells itself, without chunks.
    """

    block: BlockIndex
    chunks: tuple[GradChunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStep(Message):
    """Lets an actor update its share of all blocks, each as soon as its gradient is there.

    It reads the states of `from_step` and writes those of `step`. States that are resident in memory are updated in
    place, and written when FlushBlock asks for it. The GPU worker receives this message for blocks whose states are
    resident on the device.
    """

    from_step: Step  # the step under which the states are stored
    optimizer_step: int  # number of updates including this one; skipped steps do not count
    learning_rate: float
    grad_scale: float  # factor on the gradients: the clipping factor divided by the loss scale


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipStep(Message):
    """Tells an actor that the step is skipped: it discards the gradients of its share of all blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateBlock(Message):
    """The update of an actor's share of one block. The actor makes it itself, so it is never sent."""

    block: BlockIndex
    chunks: tuple[GradChunk, ...]  # empty if the gradient is on the device
    how: UpdateStep


@dataclass(frozen=True, slots=True, kw_only=True)
class GradSlotsReleased(Message):
    """Returns grad slots to the GPU worker, from an optimizer."""

    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockUpdated(Event):
    """Reports that this actor's share of `block` is updated and stored, so that the next forward pass may read it."""

    block: BlockIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushBlock(Message):
    """Asks an actor to write its share of `block`, which is resident in memory, to the SSDs.

    `step` is the last step that changed these states.
    """

    block: BlockIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFlushed(Event):
    """Reports that this actor's share of `block` is written. Its states may change again."""

    block: BlockIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreStates(Message):
    """Asks an actor to read all states that are resident in its memory, as of `step`.

    It is sent before an attempt's first operation.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesRestored(Event):
    """Reports that all states that are resident in this actor's memory were read."""
