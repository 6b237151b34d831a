"""Messages between a box and its head. Boxes call; the head answers."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from windlass.service.machine.fleet.facts import BoxFacts
from windlass.storage.sql.repositories import BoxState, Instruction

_MOST_ROWS = 1000  # of one job in one call


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")  # a newer version may say more


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


class EventReport(_Message):
    """A job's event, with the box's own ordinal."""

    ordinal: int
    attempt: int
    seq: int | None
    created_at: float
    level: str
    message: str
    type: str
    data: dict[str, Any]


class MetricsReport(_Message):
    """A step's metrics."""

    step: int
    attempt: int
    created_at: float
    data: dict[str, Any]


class CheckpointReport(_Message):
    """A checkpoint whose files the head has. Its path is the head's matter."""

    id: str
    attempt: int
    step_number: int
    created_at: float
    model: str
    metrics: dict[str, Any]
    reasons: list[str]
    nbytes: int | None


class JobReport(_Message):
    """The changes of a job since the last report."""

    id: str
    fields: dict[str, Any]  # columns of its row that the box decides about, in JSON
    events: tuple[EventReport, ...] = Field(default=(), max_length=_MOST_ROWS)
    metrics: tuple[MetricsReport, ...] = Field(default=(), max_length=_MOST_ROWS)
    # All checkpoints that are there; None: as before.
    checkpoints: tuple[CheckpointReport, ...] | None = None


class SyncRequest(_Message):
    """A box's call, every second."""

    instruction_done: int  # the ordinal of the last instruction that was carried out
    capacity: CapacityReport | None = None
    facts: BoxFacts | None = None  # None: as before
    jobs: tuple[JobReport, ...] = ()
    hold: str | None = None  # why it begins no attempts now


class InstructionMessage(_Message):
    """An instruction about a job."""

    ordinal: int
    job_id: str
    kind: Instruction
    body: dict[str, Any] = {}


class SyncReply(_Message):
    """The head's answer."""

    state: BoxState
    lease_s: float  # without another answer within this time, the box ends its attempts
    instructions: tuple[InstructionMessage, ...] = ()
    # By job: the ordinal of the last of the box's events that the head has.
    cursors: dict[str, int] = {}
    windlass: str  # the head's version
