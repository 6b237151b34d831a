"""Messages between a box and its head. Boxes call; the head answers."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from windlass.service.machine.fleet.facts import BoxFacts
from windlass.service.machine.fleet.reports import JobId
from windlass.storage.sql.repositories import BoxState, Instruction, JobReport, PartState

MOST_JOBS = 1000  # in one call


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")  # a newer version may say more


class ProbeAsk(_Message):
    """A measurement of the network to another box. One of the two listens, and the other one connects."""

    id: str
    name: str  # of this box on links
    peer: str  # the name of the other one
    secret: str = Field(pattern=r"^[0-9a-f]{64}$", repr=False)  # for this measurement only, in hex
    # The address at which the other one listens; None: this one listens.
    peer_host: str | None = None
    peer_port: int | None = None
    seconds: float = Field(gt=0)  # after which it is given up


class ProbeResult(_Message):
    """The measurement, as the box that connected tells it."""

    received_bytes_per_s: float
    sent_bytes_per_s: float
    round_trip_s: float


class ProbeAnswer(_Message):
    """The state of a measurement on one of its two boxes."""

    id: str
    port: int | None = None  # at which this box listens
    error: str | None = None  # why it has failed
    is_unreachable: bool = False  # the other box's address and port cannot be reached
    result: ProbeResult | None = None


class SsdSpaceReport(_Message):
    """The space on one of a box's SSDs, as `dispatcher.placement.capacity.SsdSpace`."""

    disk: str
    free_nbytes: int
    rate: float | None = None
    held: dict[str, int] = {}


class CapacityReport(_Message):
    """The free space of a box, as `dispatcher.placement.capacity.MachineCapacity`, and its devices."""

    num_devices: int
    host_nbytes: int | None = None
    room_nbytes: int
    buffers: dict[str, int] = {}
    ssds: tuple[SsdSpaceReport, ...] = ()


class PartMove(_Message):
    """A move of a job's states to a new division, as one box is told of it."""

    before: dict[str, Any]  # the plan of the division that the states have
    after: dict[str, Any]
    boxes: tuple[str, ...]  # the names of all boxes of both, the head's first
    box: int = Field(ge=0)  # the index of this one


class PartLink(_Message):
    """The way by which a box reaches the other boxes of a job in one attempt."""

    names: tuple[str, ...]  # of the job's boxes, in their order
    port: int = Field(ge=0, le=65535)  # at which this box listens
    addresses: dict[str, tuple[str, int]]  # host and port of each box
    secret: str = Field(repr=False)  # of the attempt, in hex
    move: PartMove | None = None  # which is all that the attempt does; None: it trains


class PartOrder(_Message):
    """An order about a box's part of a job over several boxes, as the head wants it."""

    position: int = Field(ge=1)  # of the box among the boxes of the job
    attempt: int = Field(default=0, ge=0)  # the attempt that it is to serve; 0: none
    ended: int = Field(default=0, ge=0)  # the last attempt that has ended; it is not to be begun any more
    # That attempt had no step, so that processes that are left of it are killed. Else they may end by themselves.
    ends_at_once: bool = False
    # Of that attempt. None: it has not begun, and the box begins no other job before it.
    link: PartLink | None = None
    plan: str | None = None  # the SHA-256 of the job's plan over its boxes; None: the head has none
    division: dict[str, Any] | None = None  # that plan, if the box has told that it has an earlier division
    gets_blocks: bool = False  # the box has no blocks yet, so its part cannot have lost states


class PartReport(_Message):
    """A report of a box about its part."""

    position: int = Field(ge=1)  # of the box among the boxes of the job
    state: PartState
    served: int = 0  # the attempt that it serves, or has served last
    port: int | None = Field(default=None, ge=1, le=65535)  # at which it listens for the next attempt
    told: str | None = None  # how far it is, or why it cannot, in words for users
    plan: str | None = None  # the SHA-256 of the job's plan over its boxes, as this box has it; None: not yet
    # That plan, if the head has another one or none: blocks have moved since, or the head was restored from a backup.
    division: dict[str, Any] | None = None


class SyncRequest(_Message):
    """A box's call, every second."""

    # The ordinals of instructions that were carried out, and that the head has listed since.
    done: tuple[int, ...] = Field(default=(), max_length=MOST_JOBS)
    capacity: CapacityReport | None = None
    facts: BoxFacts | None = None  # None: as before
    probe: ProbeAnswer | None = None  # until the head asks for it no more
    held: tuple[str, ...] = ()  # all jobs that its database has
    jobs: tuple[JobReport, ...] = Field(default=(), max_length=MOST_JOBS)
    copying: dict[str, str] = {}  # by job: how far its files, or its model, are copied
    parts: dict[str, PartReport] = {}  # by job over several boxes: the box's part of it


class InstructionMessage(_Message):
    """An instruction about a job."""

    ordinal: int
    job_id: JobId  # it becomes the name of a folder on the box
    kind: Instruction
    body: dict[str, Any] = {}


class SyncReply(_Message):
    """The head's answer."""

    state: BoxState
    lease_s: float  # without another answer within this time, the box ends its attempts
    instructions: tuple[InstructionMessage, ...] = ()
    # The jobs that the box works on, each with the last of its events that the head has. A job that the box holds and
    # that is not among them is to be discarded. -1: the head asks for the job's whole row.
    cursors: dict[JobId, int] = {}
    # The parts of jobs over several boxes that the box is to have. It removes any other.
    parts: dict[JobId, PartOrder] = {}
    # By job: the results that a report names and the head does not have.
    missing: dict[JobId, tuple[str, ...]] = {}
    windlass: str  # the head's version
    probe: ProbeAsk | None = None  # to be measured now
