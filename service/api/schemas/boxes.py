"""The boxes of a service, and the codes with which further ones join, as the API shows them."""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel

from windlass.service.api import Identified, ListOf
from windlass.service.jobs import shown_gpus_of
from windlass.service.machine.fleet import BoxFacts, SsdFacts
from windlass.storage.sql import Job

_MAX_JOBS = 50  # that a list names


class JobOnBox(BaseModel):
    """An unfinished job on a box."""

    id: str
    model: str
    suffix: str | None
    status: str
    gpus: int
    priority: int
    step: int
    total_steps: int | None
    estimated_finish: int | None
    waiting_reason: str | None

    @classmethod
    def of(cls, job: Job) -> "JobOnBox":
        """Converts a job's row."""
        return cls(
            id=job.id,
            model=job.model,
            suffix=job.suffix,
            status=job.status.value,
            gpus=shown_gpus_of(job),
            priority=job.priority,
            step=job.step,
            total_steps=job.total_steps,
            estimated_finish=None if job.estimated_finish is None else int(job.estimated_finish),
            waiting_reason=job.waiting_reason,
        )


class JobsOnBox(BaseModel):
    """Some of a box's jobs, in the order of the queue. `data`: at most 50 that the caller may see."""

    total: int
    begun: int  # those with an attempt, so that they have states
    of_others: int  # those that the caller may not see
    data: list[JobOnBox]

    @classmethod
    def of(cls, jobs: Sequence[Job], only_of: str | None) -> "JobsOnBox":
        """Converts rows. `only_of`: the user whose jobs the caller may see; None: all."""
        seen = [job for job in jobs if only_of is None or job.owner == only_of]
        data = [JobOnBox.of(job) for job in seen[:_MAX_JOBS]]
        begun = sum(job.attempt > 0 for job in jobs)
        return cls(total=len(jobs), begun=begun, of_others=len(jobs) - len(seen), data=data)


class BoxJobs(BaseModel):
    """A box's unfinished jobs. Waiting ones are prepared, or wait; on the head, also for a box."""

    running: JobsOnBox
    waiting: JobsOnBox
    paused: JobsOnBox


class BoxGpu(BaseModel):
    """A GPU as the driver describes it."""

    name: str
    memory_bytes: int


class BoxDevices(BaseModel):
    """The devices that jobs compute on, each with one GPU worker. Without GPUs, they are parts of the CPU."""

    kind: Literal["gpu", "cpu"]
    total: int
    used: int
    free: int


class BoxMemory(BaseModel):
    """A box's memory. `free_bytes`: what further jobs could have for their buffers; null: not known."""

    total_bytes: int
    free_bytes: int | None


class BoxSsd(BaseModel):
    """An SSD of a box."""

    path: str
    total_bytes: int
    free_bytes: int
    written_bytes: int | None  # by jobs so far; null: not known
    rated_bytes: float | None  # that it may take, by its maker; null: the setting ssd_endurance_tbw is not given
    worn: float | None  # written over rated; 1.0: all that it may take

    @classmethod
    def of(cls, ssd: SsdFacts) -> "BoxSsd":
        """Converts the facts of an SSD."""
        written, rated = ssd.written_nbytes, ssd.rated_nbytes
        return cls(
            path=ssd.path,
            total_bytes=ssd.total_nbytes,
            free_bytes=ssd.free_nbytes,
            written_bytes=written,
            rated_bytes=rated,
            worn=None if written is None or not rated else written / rated,
        )


class BoxVersions(BaseModel):
    """The versions of a box's programs."""

    windlass: str
    python: str
    torch: str
    ray: str

    @classmethod
    def of(cls, facts: BoxFacts) -> "BoxVersions":
        """Converts the facts of a box."""
        return cls(windlass=facts.windlass, python=facts.python, torch=facts.torch, ray=facts.ray)


class BoxFinding(BaseModel):
    """A finding of `windlass doctor` on the box."""

    text: str
    is_problem: bool


class BoxFactsObject(BaseModel):
    """The parts of a box. `hardware`: the profile that `windlass doctor` measured; null: not measured yet."""

    num_cores: int
    gpus: list[BoxGpu]
    hardware: dict[str, Any] | None


class BoxObject(Identified):
    """A box: a machine that works on jobs of this service."""

    object: Literal["box"] = "box"
    name: str
    is_head: bool
    # "away" comes first: a box that is away may be draining, too. A removed box is listed while it holds jobs' states.
    state: Literal["ready", "draining", "away", "removed"]
    is_draining: bool
    state_since: int | None  # when it was drained, resumed or removed; null: never, or not known
    away_since: int | None  # its last call; null: it is not away
    address: str | None  # from which it calls; null: the head
    joined_at: int | None  # null: the head
    seen_at: int
    devices: BoxDevices
    memory: BoxMemory
    ssds: list[BoxSsd]
    link_host: str | None  # the address at which other boxes of a job reach it; null: not known
    link_bytes_per_s: float | None  # between the box and the head; null: the head, or not measured yet
    versions: BoxVersions | None  # null: the box has not told them
    unequal_versions: list[str]  # names of the programs whose versions are not the head's
    findings: list[BoxFinding]
    facts: BoxFactsObject | None  # null: the box has not told them
    jobs: BoxJobs


class ClusterAddress(BaseModel):
    """The address at which further boxes join; null: the service is not open to other boxes."""

    cluster_address: str | None


class BoxList(ListOf[BoxObject]):
    """The head and then all boxes by name."""

    windlass: ClusterAddress


class JoinCodeObject(BaseModel):
    """A code with which one box may join. It is shown once."""

    object: Literal["join_code"] = "join_code"
    code: str
    created_at: int
    expires_at: int
    cluster_address: str
    commands: list[str]  # to type on the box
