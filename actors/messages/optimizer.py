"""Messages between the scheduler, the CPU optimizers and the GPU worker about updates."""

from dataclasses import dataclass

from windlass.actors.messages.base import Message
from windlass.actors.messages.compute import GradChunk
from windlass.storage.ids import ActorName, BlockIndex, ChunkKey, Span, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateBlock(Message):
    """Update chunks of `block`: read the states of `from_step`, update them, write those of `step`.

    States that rest in memory are updated where they are, and written when FlushBlock asks for it. To the GPU worker it
    comes for blocks whose states rest on the device, without chunks, as their gradients never left.
    """

    block: BlockIndex
    from_step: Step  # under which they are read
    optimizer_step: int  # updates so far, this one included: steps less those that were skipped
    chunks: tuple[GradChunk, ...]
    learning_rate: float
    grad_scale: float  # what gradients are multiplied by: the clipping factor over the loss scale


@dataclass(frozen=True, slots=True, kw_only=True)
class GradSlotsReleased(Message):
    """To the GPU worker, from an optimizer: these are yours again."""

    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AcquireParamSlots(Message):
    """To the GPU worker, from an optimizer: slots are wanted to update params in, so that the forward pass finds them.

    `step` is the one whose params will lie there.
    """

    actor: ActorName
    block: BlockIndex
    from_step: Step  # whose params the update begins with
    keys: tuple[ChunkKey, ...]


@dataclass(frozen=True, slots=True)
class ParamSlotLease:
    """A slot for a chunk's params; the borrower's until it returns it."""

    key: ChunkKey
    span: Span
    is_filled: bool  # the params that the update begins with lie there


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSlotsGranted(Message):
    """The answer to AcquireParamSlots: slots for as many of the chunks as there are."""

    block: BlockIndex
    loans: tuple[ParamSlotLease, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSlotReleased(Message):
    """To the GPU worker: the slot it lent is its own again, and holds the params of `step`."""

    key: ChunkKey
    span: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockUpdated(Message):
    """This actor's share of `block` lies where it rests; the next forward pass may read it."""

    block: BlockIndex
    actor: ActorName


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushBlock(Message):
    """Write this actor's share of `block`, which rests in memory, as the states of `step`, the last to change them."""

    block: BlockIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFlushed(Message):
    """This actor's share of `block` is written; its states may change again."""

    block: BlockIndex
    actor: ActorName


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreStates(Message):
    """Read all states that rest in this actor's memory, as `step` left them, before an attempt's first operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesRestored(Message):
    """What rests in this actor's memory is there."""

    actor: ActorName
