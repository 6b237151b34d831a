"""The boxes of a service: codes to join with, boxes, and the instructions that they get."""

import secrets
import time
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from sqlalchemy import delete, func, or_, select, update
from sqlalchemy.orm import Session, load_only

from windlass.storage.sql import (
    ACTIVE_STATUSES,
    TERMINAL_STATUSES,
    Box,
    BoxInstruction,
    Dispatcher,
    Job,
    JobPart,
    JobStatus,
    JoinCode,
    NetworkRate,
    NotFound,
    execute_change,
)
from windlass.storage.sql.repositories import EventRepository, JobRepository


class BoxState(StrEnum):
    """A state that the service keeps of a box. Whether it is away follows from the time of its last call."""

    READY = "ready"
    DRAINING = "draining"  # it gets no jobs, and its attempts end at a commit
    REMOVED = "removed"  # its certificate counts no more; its row stays while jobs name it


class Instruction(StrEnum):
    """Kinds of instructions about a job."""

    TAKE = "take"  # its rows and files are to be fetched, and it is to be worked on
    CANCEL = "cancel"
    PAUSE = "pause"
    RESUME = "resume"


# Seconds without a call after which a box counts as away. It calls every second.
AWAY_AFTER_S = 15.0
# The id of a head among the ids of its boxes.
HEAD_ID = "box-head"
_LEASE = "lease_s"  # in the facts of a box, beside what it says itself


def is_away(box: Box) -> bool:
    """Returns whether a box has not called for too long."""
    return time.time() - box.seen_at > AWAY_AFTER_S


def told_lease_s(box: Box) -> float:
    """Returns the lease that a box was told with its last call. It counts until the box calls again; 0: none yet."""
    return float(box.facts.get(_LEASE, 0.0))


class BoxRepository:
    """Boxes and their instructions, within the caller's transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session

    # --- codes

    def add_code(self, digest: str, *, lasts_s: float) -> None:
        """Stores a new join code by its digest, and forgets codes that expired a day ago or earlier."""
        now = time.time()
        self._session.execute(delete(JoinCode).where(JoinCode.expires_at < now - 86400))
        self._session.add(JoinCode(digest=digest, created_at=now, expires_at=now + lasts_s))
        self._session.flush()

    def last_code_expires_at(self) -> float:
        """Returns when the code expires that was added last. There is one."""
        return self._session.scalars(select(JoinCode.expires_at).order_by(JoinCode.created_at.desc()).limit(1)).one()

    def why_code_is_invalid(self, digest: str) -> str | None:
        """Returns what is wrong with a code, in words; None for a code that a box may join with."""
        code = self._session.get(JoinCode, digest, populate_existing=True)
        if code is None:
            return "is wrong"
        if code.used_at is not None:
            return "was used already"
        return "has expired" if code.expires_at <= time.time() else None

    def use_code(self, digest: str, box_id: str) -> bool:
        """Marks a code as used. Returns False if there is none that is unused and has not expired."""
        now = time.time()
        valid = (JoinCode.digest == digest, JoinCode.used_at.is_(None), JoinCode.expires_at > now)
        statement = update(JoinCode).where(*valid).values(used_at=now, box_id=box_id)
        return execute_change(self._session, statement) == 1

    # --- boxes

    def add(self, *, name: str, node: str, head: str, certificate: str, address: str, facts: dict[str, Any]) -> Box:
        """Adds a box of a head. The caller has checked that no other box has the name or the home."""
        now = time.time()
        box = Box(
            id=f"box-{secrets.token_hex(12)}",
            name=name,
            node=node,
            head=head,
            state=BoxState.READY.value,
            certificate=certificate,
            address=address,
            joined_at=now,
            seen_at=now,
            facts=facts,
            capacity=None,
        )
        self._session.add(box)
        self._session.flush()
        return box

    def all(self, head: str, *, with_removed: bool = False) -> Sequence[Box]:
        """Lists the boxes of a head by name. `head`: its home."""
        query = select(Box).where(Box.head == head).order_by(Box.name)
        return self._session.scalars(query if with_removed else query.where(Box.state != BoxState.REMOVED.value)).all()

    def get(self, box_id: str) -> Box:
        """Returns a box. Raises NotFound."""
        box = self._session.get(Box, box_id, populate_existing=True)
        if box is None:
            raise NotFound("box", box_id)
        return box

    def by_name(self, name: str) -> Box | None:
        """Returns the box with this name, removed ones too, or None."""
        return self._session.scalar(select(Box).where(Box.name == name))

    def by_node(self, node: str | None) -> Box | None:
        """Returns the box whose home this is, removed ones too; None if it is no box's, so that it is this home's."""
        return None if node is None else self._session.scalar(select(Box).where(Box.node == node))

    def is_home(self, node: str) -> bool:
        """Returns whether a home has a dispatcher or jobs in this database, as a service has."""
        dispatches = select(Dispatcher.id).where(Dispatcher.node == node).limit(1)
        works = select(Job.id).where(Job.node == node).limit(1)
        return self._session.scalar(dispatches) is not None or self._session.scalar(works) is not None

    def by_certificate(self, certificate: str) -> Box | None:
        """Returns the box that has this certificate, removed ones too, or None."""
        return self._session.scalar(select(Box).where(Box.certificate == certificate))

    def set(self, box_id: str, **values: Any) -> None:
        """Writes columns of a box."""
        statement = update(Box).where(Box.id == box_id).values(**values)
        if execute_change(self._session, statement) != 1:
            raise NotFound("box", box_id)

    def note_lease(self, box: Box, lease_s: float) -> None:
        """Notes the lease that a box is told now."""
        if box.facts.get(_LEASE) != lease_s:
            self.set(box.id, facts={**box.facts, _LEASE: lease_s})

    def names(self) -> dict[str, str]:
        """Returns the names of all boxes, removed ones too, by their homes."""
        return {row.node: row.name for row in self._session.execute(select(Box.node, Box.name))}

    def set_state(self, box_id: str, state: BoxState) -> Box:
        """Changes a box's state, and notes when. A box that is in that state already keeps the time."""
        box = self.get(box_id)
        if box.state != state.value:
            self.set(box_id, state=state.value, state_at=time.time())
        return self.get(box_id)

    # --- jobs

    def unfinished_jobs(self) -> Sequence[Job]:
        """Lists all unfinished jobs in the order of the queue, with the columns that tell where each is and why."""
        columns = load_only(
            Job.owner,
            Job.node,
            Job.status,
            Job.attempt,
            Job.model,
            Job.suffix,
            Job.windlass,
            Job.hyperparameters,
            Job.priority,
            Job.step,
            Job.total_steps,
            Job.estimated_finish,
            Job.waiting_reason,
            Job.created_at,
            raiseload=True,
        )
        query = select(Job).options(columns).where(Job.status.in_(ACTIVE_STATUSES))
        return self._session.scalars(query.order_by(Job.priority, Job.created_at, Job.id)).all()

    def trained_at(self, node: str, *, ended_after_s: float) -> Sequence[tuple[str, float | None]]:
        """Lists ids and ends of the jobs that this home trained: unfinished ones, and those that ended after a time.

        Jobs that another box trained for this home are left out.
        """
        is_here = (or_(Job.node == node, Job.node.is_(None)), Job.attempt > 0, Job.box_cursor == 0)
        is_new = or_(Job.status.in_(ACTIVE_STATUSES), Job.finished_at > ended_after_s)
        rows = self._session.execute(select(Job.id, Job.finished_at).where(*is_here, is_new))
        return [(row.id, row.finished_at) for row in rows]

    def remove(self, box_id: str, *, head: str) -> Box:
        """Removes a box, and takes its unfinished jobs from it. `head`: the home of the service.

        A job that has not begun goes back to the queue. One that has begun waits for a person: its states are on the
        box. What the box reports of either does not count any more, because its certificate does not.
        """
        box = self.set_state(box_id, BoxState.REMOVED)
        self._session.execute(delete(BoxInstruction).where(BoxInstruction.box_id == box_id))
        jobs = JobRepository(self._session)
        query = select(Job.id).where(Job.node == box.node, Job.status.in_(ACTIVE_STATUSES))
        for job_id in self._session.scalars(query).all():
            job = jobs.get(job_id)
            if job.attempt == 0:
                job.node, job.lease_holder, job.waiting_reason, job.box_cursor = head, None, None, 0
                self._tell(job, f"Back in the queue: box {box.name} was removed before the job began there")
            else:
                self._strand(jobs, job, box)
        self._session.flush()
        self._forget_parts(jobs, box)
        ended = (Job.node == box.node, Job.status.in_(TERMINAL_STATUSES))
        execute_change(self._session, update(Job).where(*ended).values(node=head, lease_holder=None))
        return box

    def _forget_parts(self, jobs: JobRepository, box: Box) -> None:
        """Forgets a removed box's parts of jobs, except of those that have states there and may begin again by hand.

        A job that never began gets other boxes, so it loses all of its parts.
        """
        for job_id in self._session.scalars(select(JobPart.job_id).where(JobPart.node == box.node)).all():
            job = jobs.find(job_id)
            if job is None or job.status in TERMINAL_STATUSES:
                mine = (JobPart.job_id == job_id, JobPart.node == box.node)
                self._session.execute(delete(JobPart).where(*mine))
            elif job.attempt == 0:
                self._session.execute(delete(JobPart).where(JobPart.job_id == job_id))
                self._tell(job, f"Its parts are given anew: box {box.name} was removed before the job began")
            else:
                self._tell(
                    job,
                    f"Box {box.name}, which has a part of the job's states, was removed, so the job cannot go on; "
                    "`windlass restart` begins it again from its newest exported model",
                )

    def _strand(self, jobs: JobRepository, job: Job, box: Box) -> None:
        reason = f"box {box.name}, which holds its states, was removed; `windlass restart` starts it elsewhere"
        if job.status in (JobStatus.RUNNING, JobStatus.PAUSING):
            if job.cancel_requested:
                jobs.transition(job.id, job.status, JobStatus.CANCELLED, message="Fine-tuning job cancelled")
                return
            target = JobStatus.QUEUED if job.status is JobStatus.RUNNING else JobStatus.PAUSED
            jobs.transition(job.id, job.status, target, message=f"Its attempt is over: box {box.name} was removed")
        else:
            self._tell(job, f"Box {box.name}, which holds the job's states, was removed")
        jobs.set_fields(job.id, waiting_reason=reason)

    def _tell(self, job: Job, message: str) -> None:
        EventRepository(self._session).add(job.id, attempt=job.attempt, message=message)

    # --- the network

    def ask_probe(self, box_id: str, probe: dict[str, Any] | None) -> None:
        """Sets the measurement that a box is to take part in; None: none. Its last answer is forgotten."""
        self.set(box_id, probe=probe, probe_answer=None)

    def answer_probe(self, box: Box, answer: dict[str, Any]) -> None:
        """Stores what a box has answered, unless it was asked for another measurement since."""
        if box.probe is not None and box.probe["id"] == answer["id"] and box.probe_answer != answer:
            self.set(box.id, probe_answer=answer)

    def keep_rate(self, head: str, source: str, target: str, *, bytes_per_s: float, round_trip_s: float) -> None:
        """Stores what the network from one box to another was measured to do, in place of what was known.

        `head`: the home of the service. `source`, `target`: ids of its boxes, or HEAD_ID.
        """
        rate = NetworkRate(head=head, source=source, target=target, bytes_per_s=bytes_per_s)
        rate.round_trip_s, rate.measured_at = round_trip_s, time.time()
        self._session.merge(rate)
        self._session.flush()

    def rates(self, head: str) -> Sequence[NetworkRate]:
        """Lists what the network between the boxes of a head was measured to do. Removed boxes are left out."""
        present = {HEAD_ID, *(box.id for box in self.all(head))}
        query = select(NetworkRate).where(NetworkRate.head == head).order_by(NetworkRate.source, NetworkRate.target)
        return [rate for rate in self._session.scalars(query) if {rate.source, rate.target} <= present]

    # --- instructions

    def instruct(self, box_id: str, job_id: str, kind: Instruction, body: dict[str, Any] | None = None) -> int:
        """Adds an instruction. Returns its ordinal."""
        now = time.time()
        # By the clock, because a database that was restored from a backup does not know the ordinals that were used
        # after the backup, and the boxes do.
        last = self._session.scalar(select(func.max(BoxInstruction.ordinal))) or 0
        ordinal = max(last + 1, int(now * 1e6))
        row = BoxInstruction(
            ordinal=ordinal, box_id=box_id, job_id=job_id, kind=kind.value, body=body or {}, created_at=now
        )
        self._session.add(row)
        self._session.flush()
        return row.ordinal

    def instructions(self, box_id: str, *, after: int = 0, limit: int = 100) -> Sequence[BoxInstruction]:
        """Lists the instructions that a box has not carried out yet, oldest first."""
        query = select(BoxInstruction).where(BoxInstruction.box_id == box_id, BoxInstruction.ordinal > after)
        return self._session.scalars(query.order_by(BoxInstruction.ordinal).limit(limit)).all()

    def instructions_about(self, job_id: str) -> Sequence[BoxInstruction]:
        """Lists the instructions about a job that its box has not carried out yet, oldest first."""
        query = select(BoxInstruction).where(BoxInstruction.job_id == job_id)
        return self._session.scalars(query.order_by(BoxInstruction.ordinal)).all()

    def withdraw(self, ordinal: int) -> bool:
        """Removes an instruction: the box has carried it out, or is not to. Returns False if it is gone already."""
        return execute_change(self._session, delete(BoxInstruction).where(BoxInstruction.ordinal == ordinal)) == 1
