"""What actors say to each other: ids and descriptors, never tensors.

Commands are imperative, events past tense, failures are events too. Every message carries its job and a correlation:
a step and block, or a correlation id. The scheduler speaks blocks; workers speak chunks, directly to each other.
"""

import errno
import re
import traceback
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from windlass.storage.ids import (
    ActorName,
    Attempt,
    BlockIndex,
    ChunkKey,
    CorrelationId,
    JobId,
    Kernel,
    ModelKernel,
    Span,
    StateKind,
    Step,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Base of all messages."""

    job: JobId
    step: Step  # the step this is about: for a command, the step whose states it produces


# --- workers to SSD servers, and back -------------------------------------------------------------------------------


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


# --- scheduler to GPU worker, and back ------------------------------------------------------------------------------


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
class LossComputed(Message):
    """The loss of a step, over its groups so far, or of one group of an evaluation."""

    phase: Phase  # HEAD or EVALUATE_HEAD
    loss_sum: float
    num_targets: int
    num_correct: int
    group: int


# --- scheduler to CPU optimizer, and back ---------------------------------------------------------------------------


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
class GradSlotsReturned(Message):
    """To the GPU worker, from an optimizer: these are yours again."""

    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BorrowParams(Message):
    """To the GPU worker, from an optimizer: slots are wanted to update params in, so that the forward pass finds them.

    `step` is the one whose params will lie there.
    """

    actor: ActorName
    block: BlockIndex
    from_step: Step  # whose params the update begins with
    keys: tuple[ChunkKey, ...]


@dataclass(frozen=True, slots=True)
class ParamLoan:
    """A slot for a chunk's params; the borrower's until it returns it."""

    key: ChunkKey
    span: Span
    is_filled: bool  # the params that the update begins with lie there


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamsLent(Message):
    """The answer to BorrowParams: slots for as many of the chunks as there are."""

    block: BlockIndex
    loans: tuple[ParamLoan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamsReturned(Message):
    """To the GPU worker: the slot it lent is its own again, and holds the params of `step`."""

    key: ChunkKey
    span: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class GradDropped(Message):
    """To the GPU worker, from the scheduler: the step is skipped, so nothing was done with this gradient."""

    block: BlockIndex
    chunks: tuple[GradChunk, ...]  # none where it still lies on the device


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


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChosen(Message):
    """What an actor updates states with; kernels differ in the last bit."""

    actor: ActorName
    kernel: Kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKernelsChosen(Message):
    """What an actor computes the model with, beside torch's own kernels."""

    actor: ActorName
    kernels: tuple[ModelKernel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement(Message):
    """What people who watch the job should know at once; it goes into the journal as it is."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadModel(Message):
    """Stream the initial weights into the store, as the states of step 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgressed(Message):
    """So many parameters of the model are in the store or, where an attempt goes on, back in this actor's memory."""

    actor: ActorName
    num_params: int
    total_params: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoaded(Message):
    """The initial states are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportModel(Message):
    """Write the params of `step` as a Hugging Face model folder."""

    path: str
    copy_of: str | None = None  # an earlier export that it is to be instead


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelExported(Message):
    """The folder is complete: it was renamed into place."""

    path: str


# --- the timeline ---------------------------------------------------------------------------------------------------


class SpanKind(StrEnum):
    """What a resource did in a stretch of time, or what compute waited for."""

    FORWARD = "forward"  # these five as in Phase
    HEAD = "head"
    BACKWARD = "backward"
    EVALUATE = "evaluate"
    EVALUATE_HEAD = "evaluate_head"
    UPDATE = "update"  # of the states of a chunk or, on the device, of a block
    COPY_PARAMS_IN = "copy_params_in"  # host to device
    COPY_GRAD_OUT = "copy_grad_out"  # device to host
    COPY_ACTIVATIONS_OUT = "copy_activations_out"  # device to host, in the forward pass
    COPY_ACTIVATIONS_IN = "copy_activations_in"  # host to device, for the backward pass
    COPY_PARTIAL_OUT = "copy_partial_out"  # of a gradient: what one group of micro-batches leaves to the next
    COPY_PARTIAL_IN = "copy_partial_in"
    COPY_STATES_OUT = "copy_states_out"  # of what rests on the device, before a commit
    READ_PARAMS = "read_params"  # a chunk's way from or to an SSD
    READ_STATES = "read_states"
    READ_GRAD = "read_grad"
    WRITE_STATES = "write_states"
    WRITE_GRAD = "write_grad"
    READ_ACTIVATIONS = "read_activations"
    WRITE_ACTIVATIONS = "write_activations"
    COMMIT = "commit"  # an SSD server's; no transfer
    WAIT_OPERATION = "wait_operation"  # compute had none
    WAIT_PARAMS = "wait_params"  # ... had one, whose params were not there
    WAIT_GRAD_BUFFER = "wait_grad_buffer"  # ... nowhere to put the gradient
    WAIT_ACTIVATIONS = "wait_activations"  # in the middle of one: activations did not leave, or come back, fast enough

    __hash__ = str.__hash__  # Enum's is Python code, and these are keys of thousands of spans a step


class WorkSpan(NamedTuple):
    """One stretch of time. A plain tuple, as there are thousands a step."""

    resource: str  # what was busy, or waited: an actor, or a part of one
    kind: SpanKind
    step: int  # a transfer's: as the SSD's request has it
    block: int  # -1: about none
    chunk: int  # -1: the whole block
    start_s: float  # of CLOCK_MONOTONIC
    end_s: float
    nbytes: int  # that moved; 0 for what moves none


@dataclass(frozen=True, slots=True, kw_only=True)
class SpansTold(Message):
    """What an actor has done since it last told of it, in no order."""

    actor: ActorName
    spans: tuple[WorkSpan, ...]


# --- what a job really takes ------------------------------------------------------------------------------------------


class MemoryKind(StrEnum):
    """In the words of a plan's peaks."""

    DEVICE = "gpu"
    DEVICE_RESERVED = "gpu_reserved"  # what torch's allocator has taken for that; on a GPU only
    HOST = "host"  # the arena
    SSD = "ssd"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryMeasured(Message):
    """The most of a kind of memory that an actor's part of the job has taken so far: by an allocator's or the kernel's
    count, never by the plan's."""

    actor: ActorName
    kind: MemoryKind
    nbytes: int


# --- failures -------------------------------------------------------------------------------------------------------


_FULL = frozenset((errno.ENOSPC, errno.EDQUOT))


class FailureKind(StrEnum):
    """What a failure says of another attempt."""

    LASTING = "lasting"  # it would only fail again: a broken disk, a wrong input
    NO_ROOM = "no_room"  # a disk is full; where there is room again, another attempt gets on
    STALLED = "stalled"  # something did not come in time; in other processes it may
    UNFORESEEN = "unforeseen"  # nobody has a name for it: as good as the death of the process

    @classmethod
    def of(cls, error: Exception) -> "FailureKind":
        """Of what an actor raised. What the house foresees has a class of its own, or is a wrong value or a file's."""
        if isinstance(error, TimeoutError):
            return cls.STALLED
        if getattr(error, "errno", None) in _FULL:
            return cls.NO_ROOM
        is_named = type(error).__module__.startswith("windlass.") or isinstance(error, ValueError | OSError)
        return cls.LASTING if is_named else cls.UNFORESEEN


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorFailed(Message):
    """Something an actor could not do. The attempt ends."""

    actor: ActorName
    kind: FailureKind
    error: str  # one line for people: what was wrong, with the values, and what to do
    detail: str  # traceback
    room_path: str = ""  # the directory whose disk had too little room; "" for other failures
    room_nbytes: int = 0  # that must be free there for another attempt

    @classmethod
    def of(cls, error: Exception, *, actor: ActorName, about: Message) -> "ActorFailed":
        """The failure that is being handled. `about`: what the actor was working on; a plain Message: on nothing."""
        text = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        return cls(
            job=about.job,
            step=about.step,
            actor=actor,
            kind=FailureKind.of(error),
            error=text if type(about) is Message else f"{text} (at {in_words(about)})",
            detail="".join(traceback.format_exception(error)),
            room_path=(path := getattr(error, "directory", "")),
            room_nbytes=error.needed_nbytes if path else 0,  # type: ignore[attr-defined]
        )


def in_words(message: Message) -> str:
    """What a message is and what it is about, for people: "compute block, backward, of step 3, block 2"."""
    words = re.sub("(?<=[a-z])(?=[A-Z])", " ", type(message).__name__).lower()
    if phase := getattr(message, "phase", None):
        words += f", {phase},"
    block = getattr(message, "block", None)
    if isinstance(message, ReadChunks | WriteChunks):
        block = message.items[0].key.block  # a request is about one
    if isinstance(message, ChunkIoDone | ParamsReturned):
        block = message.key.block
    return f"{words} of step {message.step}" + ("" if block is None else f", block {block}")
