"""Messages between workers and SSD servers."""

from dataclasses import dataclass

from windlass.actors.messages.base import Event, Message
from windlass.storage.ids import ActorName, Attempt, BlockIndex, ChunkKey, CorrelationId, Span, StateKind, Step


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """One state of a chunk and its place in the arena. Spans are aligned to 4096 bytes."""

    kind: StateKind
    span: Span


@dataclass(frozen=True, slots=True)
class ChunkIo:
    """One chunk of a request, with the parts to transfer. The SSD server reports it once all parts are transferred."""

    key: ChunkKey
    parts: tuple[ChunkPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdRequest(Message):
    """Base of the requests that transfer bytes. The SSD server serves them in order of priority."""

    correlation: CorrelationId
    reply_to: ActorName
    priority: tuple[int, int]  # the smallest goes first; ties in order of arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadChunks(SsdRequest):
    """Asks an SSD server to read states of `step` into the arena."""

    items: tuple[ChunkIo, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteChunks(SsdRequest):
    """Asks an SSD server to write states of `step` from the arena. They become valid when the step is committed."""

    items: tuple[ChunkIo, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkIoDone(Message):
    """Reports that all parts of one chunk of a request are transferred."""

    correlation: CorrelationId
    key: ChunkKey


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteActivations(SsdRequest):
    """Asks an SSD server to write activations of `step` from the arena to scratch slots that the sender holds."""

    block: BlockIndex  # the block that the activations belong to
    slots: tuple[int, ...]  # the slots that the span fills, in this order; the last may be filled in part
    span: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadActivations(SsdRequest):
    """Asks an SSD server to read activations into the arena, from the slots and with the size of their write."""

    block: BlockIndex
    slots: tuple[int, ...]
    span: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationIoDone(Message):
    """Reports that all bytes of a WriteActivations or ReadActivations are transferred."""

    correlation: CorrelationId


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitStore(Message):
    """Asks an SSD server to commit `step`: sync, append a commit record, sync again.

    A restart resumes from it once all SSDs of the job have it. The states of the commit before stay until
    `CommitDecided`.
    """

    attempt: Attempt
    states_step: Step  # the step that produced the states; earlier than `step` if the steps between were skipped
    trainer_state: str = ""  # JSON; the scheduler's shell adds it


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCommitted(Event):
    """Reports that one SSD server has committed `step`."""

    bytes_read: int  # since the server started
    bytes_written: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitDecided(Message):
    """Tells an SSD server that all SSDs of the job have committed `step`, and that this is noted durably.

    From then on the states of the commit before may be overwritten. It has no reply.
    """
