"""The state of each box, from its row, its last report and the jobs that are on it."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import ValidationError
from sqlalchemy.orm import Session

from windlass.service.installation import Settings, node_of
from windlass.service.jobs import ARENA_DIR, shown_gpus_of
from windlass.service.machine.fleet import BoxFacts, CapacityReport, SsdFacts
from windlass.storage.ids import HEAD_NAME
from windlass.storage.memory import arena_room_nbytes
from windlass.storage.sql import Box, Job, JobStatus
from windlass.storage.sql.repositories import (
    BoxRepository,
    BoxState,
    PartRepository,
    is_away,
)

_RUNNING = frozenset((JobStatus.RUNNING, JobStatus.PAUSING))


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxView:
    """A box as the service sees it."""

    row: Box | None  # None: the head
    node: str
    facts: BoxFacts | None  # None: it has sent none that can be read
    capacity: CapacityReport | None  # None: it has reported none
    jobs: Sequence[Job]  # unfinished ones, in the order of the queue

    @property
    def name(self) -> str:
        """The box's name."""
        return HEAD_NAME if self.row is None else self.row.name

    @property
    def is_removed(self) -> bool:
        """True once the box was removed."""
        return self.row is not None and self.row.state == BoxState.REMOVED.value

    @property
    def is_draining(self) -> bool:
        """True while the box gets no jobs and ends its attempts."""
        return self.row is not None and self.row.state == BoxState.DRAINING.value

    @property
    def is_away(self) -> bool:
        """True while the box has not called for too long."""
        return self.row is not None and is_away(self.row)

    @property
    def num_devices(self) -> int:
        """The devices that jobs compute on: GPUs, or what the CPU counts as; 0: not known yet."""
        if self.capacity is not None:
            return self.capacity.num_devices
        return 0 if self.facts is None else self.facts.num_gpus or self.facts.cpu_ranks

    @property
    def num_used_devices(self) -> int:
        """The devices of the jobs that run."""
        return sum(shown_gpus_of(job) for job in self.running)

    @property
    def free_memory_nbytes(self) -> int | None:
        """The bytes that further jobs could have for their buffers; None: not known."""
        return None if self.capacity is None else self.capacity.room_nbytes

    @property
    def ssds(self) -> Sequence[SsdFacts]:
        """The SSDs, with the free space of the last report."""
        if self.facts is None:
            return ()
        reported = () if self.capacity is None else self.capacity.ssds
        if len(reported) != len(self.facts.ssds):
            return self.facts.ssds
        free = zip(self.facts.ssds, reported, strict=True)
        return tuple(ssd.model_copy(update={"free_nbytes": report.free_nbytes}) for ssd, report in free)

    @property
    def running(self) -> Sequence[Job]:
        """The jobs that have a runner."""
        return [job for job in self.jobs if job.status in _RUNNING]

    @property
    def paused(self) -> Sequence[Job]:
        """The paused jobs."""
        return [job for job in self.jobs if job.status is JobStatus.PAUSED]

    @property
    def waiting(self) -> Sequence[Job]:
        """The jobs that are prepared, or wait for their turn, for space or for the box."""
        return [job for job in self.jobs if job.status in (JobStatus.VALIDATING_FILES, JobStatus.QUEUED)]


def view_boxes(session: Session, settings: Settings, here: BoxFacts, *, with_removed: bool = False) -> list[BoxView]:
    """Returns the head and then the boxes by name.

    `here`: the facts of this box, the head. `with_removed`: removed boxes, too, also those that hold no job's states.
    """
    boxes, head = BoxRepository(session), node_of(settings.home)
    jobs: defaultdict[str, list[Job]] = defaultdict(list)
    parts = PartRepository(session).by_job()
    for job in boxes.unfinished_jobs():
        jobs[job.node or head].append(job)
        for part in parts.get(job.id, ()):
            jobs[part.node].append(job)
    capacity = CapacityReport(
        num_devices=here.num_gpus or here.cpu_ranks, room_nbytes=max(0, arena_room_nbytes(ARENA_DIR))
    )
    views = [BoxView(row=None, node=head, facts=here, capacity=capacity, jobs=jobs[head])]
    for row in boxes.all(head, with_removed=True):
        view = BoxView(row=row, node=row.node, facts=_facts(row), capacity=_capacity(row), jobs=jobs[row.node])
        if with_removed or not view.is_removed or view.jobs:
            views.append(view)
    return views


def _facts(row: Box) -> BoxFacts | None:
    try:
        return BoxFacts.model_validate(row.facts)
    except ValidationError:  # of another version
        return None


def _capacity(row: Box) -> CapacityReport | None:
    try:
        return None if row.capacity is None else CapacityReport.model_validate(row.capacity)
    except ValidationError:
        return None
