"""The boxes that have joined, as the queue sees them: their resources, and the jobs that were given to them."""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from windlass.planner.hardware import Hardware
from windlass.service.dispatcher.placement.absent_boxes import away_in_words
from windlass.service.dispatcher.placement.capacity import Demand, MachineCapacity, SsdSpace, demand_by
from windlass.service.jobs import BoxKind, MachineResources, PlanNumbers
from windlass.service.machine.fleet import BoxFacts, CapacityReport, resources_of_box
from windlass.storage.sql import Box, Database, Job, JobPart, JobStatus
from windlass.storage.sql.repositories import (
    AWAY_AFTER_S,
    BoxRepository,
    BoxState,
    JobRepository,
    PartRepository,
    PartState,
    is_away,
)

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedBox:
    """A box at one moment."""

    id: str
    name: str
    node: str
    kind: BoxKind
    capacity: MachineCapacity
    why_closed: str | None = None  # why it gets no jobs; None: it is open
    holders: Sequence[Job] = ()  # jobs that were given to it, and are neither paused nor finished
    spread: Sequence[Job] = ()  # jobs over several boxes whose attempt runs here, or has not ended here yet
    facts: BoxFacts | None = None
    is_draining: bool = False

    @property
    def resources(self) -> MachineResources:
        """Its cores and GPUs."""
        return self.kind.resources

    def demand(self, numbers: PlanNumbers | None, *, num_devices: int, budget_nbytes: int | None) -> Demand:
        """Returns the demand of a job on this box. Without a plan, it is the job's budget of buffers, if it has one."""
        if numbers is None:
            return Demand(num_devices=num_devices, buffers_nbytes=budget_nbytes or 0)
        is_cpu = self.resources.num_gpus == 0
        return demand_by(numbers.peak_gib, numbers.arena_nbytes, num_devices=num_devices, is_cpu=is_cpu)


@dataclass(slots=True)
class Fleet:
    """Reads the boxes. It remembers what the facts of each box mean, because these seldom change."""

    database: Database
    head: str  # this home
    clock: Callable[[], float] = time.monotonic
    is_used: bool = False  # a box has joined once, so that requests may name boxes
    known: Sequence[Box] = ()  # all that were not removed
    absent: Sequence[Box] = ()  # those that are away, or were removed
    unreadable: Collection[str] = ()  # the homes of boxes whose facts cannot be read
    names: Mapping[str, str] = field(default_factory=dict)  # of all boxes, removed ones too, by their homes
    parts: Mapping[str, Sequence[JobPart]] = field(default_factory=dict)  # of jobs over several boxes, by job
    divided: Mapping[str, Job] = field(default_factory=dict)  # those jobs
    _began_at: float | None = None  # when the boxes were first read
    _kinds: dict[str, tuple[Mapping[str, Any], tuple[BoxFacts, BoxKind]]] = field(default_factory=dict)

    def read(self) -> Sequence[JoinedBox]:
        """Returns the boxes that have joined and were not removed, by name."""
        with self.database.read() as session:
            known = BoxRepository(session).all(self.head, with_removed=True)
            self.is_used = bool(known)
            self.names = {row.node: row.name for row in known}
            rows = self.known = [row for row in known if row.state != BoxState.REMOVED.value]
            # No box could call while this home's service was off. Each gets the time for it.
            now = self.clock()
            self._began_at = now if self._began_at is None else self._began_at
            is_early = now - self._began_at <= AWAY_AFTER_S
            self.absent = [row for row in known if row not in rows or (is_away(row) and not is_early)]
            self.parts = PartRepository(session).by_job() if known else {}
            self.divided = JobRepository(session).find_all(self.parts) if self.parts else {}
            if not rows:
                self.unreadable = ()
                return []
            holders = JobRepository(session).held_by([row.node for row in rows])
        boxes = list[JoinedBox]()
        for row in rows:
            if (seen := self._kind(row)) is not None:
                held = [job for job in holders if job.node == row.node]
                mine = [part for parts in self.parts.values() for part in parts if part.node == row.node]
                spread = [
                    job for part in mine if (job := self.divided.get(part.job_id)) is not None and _works(part, job)
                ]
                boxes.append(_box(row, *seen, held, spread))
        readable = {box.node for box in boxes}
        self.unreadable = {row.node for row in rows} - readable
        return boxes

    def _kind(self, row: Box) -> tuple[BoxFacts, BoxKind] | None:
        known = self._kinds.get(row.id)
        if known is not None and known[0] == row.facts:
            return known[1]
        try:
            facts = BoxFacts.model_validate(row.facts)
            kind = kind_of(facts)
        except (ValidationError, ValueError) as error:
            _LOG.warning("box %s gets no jobs, because its facts cannot be read: %s", row.name, error)
            return None
        self._kinds[row.id] = (row.facts, (facts, kind))
        return facts, kind


def kind_of(facts: BoxFacts) -> BoxKind:
    """Returns the kind of a box. Raises ValueError if its profile cannot be read."""
    return BoxKind(
        resources=resources_of_box(facts),
        hardware=None if facts.hardware is None else Hardware.model_validate(facts.hardware),
        num_optimizers=facts.num_cpu_optimizers,
        host_memory_gib=facts.host_memory_gib,
        gpu_memory_gib=facts.gpu_memory_gib,
    )


def _box(row: Box, facts: BoxFacts, kind: BoxKind, holders: Sequence[Job], spread: Sequence[Job]) -> JoinedBox:
    capacity, why_closed = MachineCapacity(room_nbytes=0), None
    if row.state != BoxState.READY.value:
        why_closed = f"is {row.state}"
    elif is_away(row):
        why_closed = away_in_words(row)
    elif row.capacity is None:
        why_closed = "has not yet said what is free on it"
    if row.capacity is not None:
        try:
            capacity = _capacity(CapacityReport.model_validate(row.capacity))
        except ValidationError as error:
            _LOG.warning("what is free on box %s cannot be read: %s", row.name, error)
            why_closed = "said what is free on it in words that this release does not know"
    return JoinedBox(
        id=row.id,
        name=row.name,
        node=row.node,
        kind=kind,
        capacity=capacity,
        why_closed=why_closed,
        holders=holders,
        spread=spread,
        is_draining=row.state == BoxState.DRAINING.value,
        facts=facts,
    )


def _works(part: JobPart, job: Job) -> bool:
    """Returns whether a box works on its part of a job."""
    return job.status in (JobStatus.RUNNING, JobStatus.PAUSING) or part.state == PartState.RUNNING.value


def _capacity(report: CapacityReport) -> MachineCapacity:
    return MachineCapacity(
        host_nbytes=report.host_nbytes,
        room_nbytes=report.room_nbytes,
        buffers=report.buffers,
        ssds=[
            SsdSpace(disk=ssd.disk, free_nbytes=ssd.free_nbytes, rate=ssd.rate, held=ssd.held) for ssd in report.ssds
        ],
    )
