"""Messages between GPU workers and the link of their box, which moves bytes from other boxes.

The receiver pulls into a slot that it has reserved. So memory is limited by slots, and a box that is ahead waits.
"""

from dataclasses import dataclass
from typing import NamedTuple

from windlass.actors.messages.base import Message
from windlass.actors.messages.compute import Phase
from windlass.storage.ids import ActorName, BlockIndex, Span, Step


class Crossing(NamedTuple):
    """Names bytes by the operation on another box that takes them.

    They are the hidden states of a micro-batch, or their gradient. If `is_shared`, they are a chunk of the params that
    embedding and head share, or of the head's gradient of them.
    """

    step: Step
    phase: Phase
    block: BlockIndex
    group: int
    part: int  # index of the micro-batch in the group, or of the chunk in the embedding
    is_shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferSpan(Message):
    """Offers bytes in the arena to another box. They stay there until `OfferTaken`."""

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
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferTaken(Message):
    """Reports that another box has the offered bytes, so that their slot is free."""

    crossing: Crossing
