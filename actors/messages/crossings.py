"""Messages between actors and the link of their box, which moves bytes from other boxes.

The receiver pulls into a slot that it has reserved. So memory is limited by slots, and a box that is ahead waits.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

from windlass.actors.messages.base import Message
from windlass.actors.messages.compute import Phase
from windlass.storage.ids import ActorName, BlockIndex, ChunkKey, Span, Step


class Crossing(NamedTuple):
    """Names bytes that pass between two boxes.

    Hidden states of a micro-batch, and their gradient, are named by the operation that takes them. So are chunks of the
    params that embedding and head share, and of the head's gradient of them (`is_shared`). Params of a chunk, which the
    first box exports, have no phase.
    """

    step: Step
    phase: Phase | None
    block: BlockIndex
    group: int
    part: int  # the micro-batch's index in the group, or the chunk's in the block
    is_shared: bool = False

    @classmethod
    def of_params(cls, step: Step, key: ChunkKey) -> Self:
        """Names the params of a chunk after a step."""
        return cls(step, None, key.block, 0, key.chunk)

    @property
    def priority(self) -> tuple[int, int]:
        """The priority of its pull. Compute waits for hidden states and their gradients, so they go first.

        Shared params are many bytes, and are needed at the end of a pass only. Exports go last.
        """
        return (2, 0) if self.is_export else (1, 0) if self.is_shared else (0, 0)

    @property
    def is_export(self) -> bool:
        """True if these are params of a chunk, which the first box exports."""
        return self.phase is None


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferSpan(Message):
    """Offers bytes in the arena to another box. They stay there until `OfferTaken`.

    A GPU worker offers shared params to the other ones of its box in the same way.
    """

    reply_to: ActorName
    box: int  # index of the box that takes them
    crossing: Crossing
    span: Span  # only the bytes that are offered


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSpan(Message):
    """Asks the link for bytes that another box offers, or will offer."""

    reply_to: ActorName
    box: int  # index of the box that offers them
    crossing: Crossing
    span: Span  # a slot with room for them


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanPulled(Message):
    """Reports that pulled bytes are in their slot, from its start."""

    crossing: Crossing
    box: int  # index of the box that they came from
    nbytes: int
    start_s: float  # of the transfer, without the time in which nothing was offered; on CLOCK_MONOTONIC
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferTaken(Message):
    """Reports that another box, or another GPU worker, has the offered bytes, so that it needs their slot no more."""

    crossing: Crossing
