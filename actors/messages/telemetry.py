"""Messages about a job's progress: spans of time, measured memory, texts for users."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from windlass.actors.messages.base import Event, Message


@dataclass(frozen=True, slots=True, kw_only=True)
class UserMessage(Message):
    """A text for the job's users. The runner writes it into the journal, with the box of a job over several."""

    text: str
    box: int = 0  # the index of the sender's box


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeStatus(Message):
    """Asks an actor what its threads do, because an actor of the job is late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusDescribed(Event):
    """Tells what the threads of an actor wait for or work at, and its oldest pending request to each SSD server."""

    text: str  # empty: the actor has nothing to do


class SpanKind(StrEnum):
    """The kinds of work of a resource in a span of time, and the causes for which compute waits."""

    FORWARD = "forward"  # these five have the meanings of `Phase`
    HEAD = "head"
    BACKWARD = "backward"
    EVALUATE = "evaluate"
    EVALUATE_HEAD = "evaluate_head"
    UPDATE = "update"  # the states of a chunk or, on the device, of a block
    COPY_PARAMS_IN = "copy_params_in"  # host to device
    COPY_GRAD_OUT = "copy_grad_out"  # device to host
    COPY_ACTIVATIONS_OUT = "copy_activations_out"  # device to host, in the forward pass
    COPY_ACTIVATIONS_IN = "copy_activations_in"  # host to device, for the backward pass
    COPY_PARTIAL_OUT = "copy_partial_out"  # gradient sums of the micro-batch groups so far, device to host
    COPY_PARTIAL_IN = "copy_partial_in"
    COPY_STATES_OUT = "copy_states_out"  # states that are resident on the device, before a commit
    READ_PARAMS = "read_params"  # this and the next four: transfers of a chunk from or to an SSD
    READ_STATES = "read_states"
    READ_GRAD = "read_grad"
    WRITE_STATES = "write_states"
    WRITE_GRAD = "write_grad"
    READ_ACTIVATIONS = "read_activations"
    WRITE_ACTIVATIONS = "write_activations"
    PULL_HIDDEN = "pull_hidden"  # this and the next three: bytes from another box. Hidden states of a micro-batch
    PULL_GRADS = "pull_grads"  # the gradients of hidden states
    PULL_SHARED = "pull_shared"  # params that embedding and head share, or the head's gradient of them
    PULL_EXPORTED = "pull_exported"  # params for an export
    COMMIT = "commit"  # of an SSD server; no transfer
    WAIT_OPERATION = "wait_operation"  # compute had no operation
    WAIT_PARAMS = "wait_params"  # compute waited for the params of its operation
    WAIT_GRAD_BUFFER = "wait_grad_buffer"  # compute waited for a free gradient buffer
    WAIT_BOX = "wait_box"  # compute waited for results of another box, or until that took those of this one
    WAIT_ACTIVATIONS = "wait_activations"  # compute waited, in an operation, for transfers of activations

    __hash__ = str.__hash__  # faster: Enum's hash is Python code, and a step has thousands of spans with these as keys


class WorkSpan(NamedTuple):
    """One span of a resource's time. It is a plain tuple because a step has thousands of them."""

    resource: str  # the actor, or the part of one, that worked or waited
    kind: SpanKind
    step: int  # for a transfer, the step in the request to the SSD
    block: int  # -1: no block
    chunk: int  # -1: the whole block
    start_s: float  # on CLOCK_MONOTONIC
    end_s: float
    nbytes: int  # bytes transferred; 0 if the span is no transfer
    box: int = -1  # index of the box that the bytes come from, or that is waited for; -1: none


@dataclass(frozen=True, slots=True, kw_only=True)
class SpansReported(Event):
    """Reports an actor's spans since its last report, in no order."""

    spans: tuple[WorkSpan, ...]


class MemoryKind(StrEnum):
    """The kinds of memory, with the names that a plan's peaks have."""

    DEVICE = "gpu"
    DEVICE_RESERVED = "gpu_reserved"  # memory that torch's allocator has reserved; on a GPU only
    HOST = "host"  # the arena
    SSD = "ssd"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReported(Event):
    """Reports an actor's peak use of one kind of memory, as counted by an allocator or the kernel, not by the plan."""

    kind: MemoryKind
    nbytes: int
