"""Messages about what a job does and takes: spans of time, measured memory, texts for users."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from windlass.actors.messages.base import Message
from windlass.storage.ids import ActorName


@dataclass(frozen=True, slots=True, kw_only=True)
class UserMessage(Message):
    """What people who watch the job should know at once; it goes into the journal as it is."""

    text: str


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
class SpansReported(Message):
    """What an actor has done since it last told of it, in no order."""

    actor: ActorName
    spans: tuple[WorkSpan, ...]


class MemoryKind(StrEnum):
    """In the words of a plan's peaks."""

    DEVICE = "gpu"
    DEVICE_RESERVED = "gpu_reserved"  # what torch's allocator has taken for that; on a GPU only
    HOST = "host"  # the arena
    SSD = "ssd"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReported(Message):
    """The most of a kind of memory that an actor's part of the job has taken so far: by an allocator's or the kernel's
    count, never by the plan's."""

    actor: ActorName
    kind: MemoryKind
    nbytes: int
