"""Messages between workers and SSD servers."""

from dataclasses import dataclass

from windlass.actors.messages.base import Message
from windlass.storage.ids import ActorName, Attempt, BlockIndex, ChunkKey, CorrelationId, Span, StateKind, Step


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """One state of a chunk and where in the arena its bytes lie, or shall lie. Spans are 4096-byte aligned."""

    kind: StateKind
    span: Span


@dataclass(frozen=True, slots=True)
class ChunkIo:
    """One chunk of a request: the parts that move; its completion is reported when all of them have."""

    key: ChunkKey
    parts: tuple[ChunkPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdRequest(Message):
    """What all that move bytes have in common. The most urgent goes first."""

    correlation: CorrelationId
    reply_to: ActorName
    priority: tuple[int, int]  # smaller first; ties in order of arrival
    deadline_s: float  # longest that a chunk, or the activations, may take once the request has arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadChunks(SsdRequest):
    """Read the states that `step` produced into the arena."""

    items: tuple[ChunkIo, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteChunks(SsdRequest):
    """Write states of `step` from the arena. They count once the step is committed."""

    items: tuple[ChunkIo, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkIoDone(Message):
    """All parts of one chunk of a request have moved."""

    correlation: CorrelationId
    key: ChunkKey


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteActivations(SsdRequest):
    """Write what the forward pass of `step` left from the arena to slots of the SSD's scratch, all the sender's."""

    block: BlockIndex  # whose activations they are
    slots: tuple[int, ...]  # that the span fills, in this order, but for the end of the last
    span: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadActivations(SsdRequest):
    """Read into the arena what was written to the same slots from a span of this size."""

    block: BlockIndex
    slots: tuple[int, ...]
    span: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationIoDone(Message):
    """All bytes of a WriteActivations or ReadActivations have moved."""

    correlation: CorrelationId


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitStore(Message):
    """Make `step` the state that a restart finds: sync, then append a commit record, then sync again."""

    attempt: Attempt
    states_step: Step  # whose states they are: an earlier one's where the steps since were skipped
    trainer_state: str  # JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCommitted(Message):
    """One SSD server has `step` safe."""

    actor: ActorName
    bytes_read: int  # since the server started
    bytes_written: int
