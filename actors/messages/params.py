"""Messages between GPU workers and the actor that reads params for them, and between GPU workers."""

from dataclasses import dataclass
from typing import NamedTuple

from windlass.actors.messages.base import Message
from windlass.actors.messages.compute import Phase
from windlass.storage.ids import ActorName, BlockIndex, ChunkKey, Span, Step


class ParamUse(NamedTuple):
    """Names a use of a block's params: by one operation of each GPU worker that takes part in the round."""

    step: Step  # of the operations
    phase: Phase
    round_index: int  # of the groups of micro-batches
    user: BlockIndex  # the block of the operations
    block: BlockIndex  # the block with the params


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestParams(Message):
    """Asks for params in host memory. Each GPU worker of the round sends one for each use, whether it needs any.

    `step` is the one under which the SSDs store the params.
    """

    reply_to: ActorName
    use: ParamUse
    num_users: int  # GPU workers that send a request for this use
    keys: tuple[ChunkKey, ...]  # chunks to read; empty: the GPU worker still has the params


@dataclass(frozen=True, slots=True)
class ParamChunk:
    """A chunk's params in host memory."""

    key: ChunkKey
    span: Span
    is_slot: bool  # the span is for this use only; else the params stay there


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamsArrived(Message):
    """Reports that requested params are in host memory."""

    use: ParamUse
    chunks: tuple[ParamChunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamsCopied(Message):
    """Reports that a GPU worker does not read these slots any more."""

    actor: ActorName
    use: ParamUse
    keys: tuple[ChunkKey, ...]


class SumParts(NamedTuple):
    """A sum of gradients in host memory."""

    dtype: str  # the name of the numbers' type in torch
    touched: tuple[str, ...]  # names of the tensors in the sum; the rest is undefined
    slots: tuple[Span, ...]  # one for each chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class SumPassed(Message):
    """Tells a GPU worker that the group of micro-batches before its own has left a sum in host memory."""

    user: BlockIndex  # the block whose operation has computed the sum
    block: BlockIndex  # the block whose gradient it is
    total: SumParts
    lane: SumParts | None  # an unfinished lane beside the total


@dataclass(frozen=True, slots=True, kw_only=True)
class SumTaken(Message):
    """Tells a GPU worker that the next one has copied its sum, and does not need the slots any more."""

    slots: tuple[Span, ...]
    lane_slots: tuple[Span, ...]
