"""Parts of jobs over several boxes: what the head wants of each box, and what the box tells of it."""

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from itertools import groupby
from typing import Any

from sqlalchemy import ColumnElement, delete, select, update
from sqlalchemy.orm import Session

from windlass.storage.sql import TERMINAL_STATUSES, Box, Job, JobPart, JobStatus, execute_change
from windlass.storage.sql.repositories.boxes.rows import BoxState

# Why a box begins no jobs of its own, in words for users.
HELD_FOR_PART = "this box works on a part of a job over several boxes"


class PartState(StrEnum):
    """A state of a box's part of a job."""

    COPYING = "copying"  # the job's files are not all there yet
    READY = "ready"  # none of its processes runs
    RUNNING = "running"  # an attempt's processes run, or may still run
    LOST = "lost"  # the box has lost the states that it had
    LEAVING = "leaving"  # the head's only: the job has no blocks there any more, and the box is to remove its part


_STAYS = JobPart.state != PartState.LEAVING.value


def holds(part: JobPart) -> bool:
    """Returns whether a box begins no jobs of its own because of a part.

    It serves an attempt, or will, or the head has not told yet that the attempt has ended which it has served last.
    """
    is_told = part.link is None or part.attempt != part.served
    is_wanted = part.attempt > part.served or not is_told
    return part.state == PartState.RUNNING.value or (is_wanted and not part.is_over)


def is_reserved(job: Job, part: JobPart) -> bool:
    """Returns whether a box with a part of a queued job is kept for the job's next attempt.

    After an attempt it is, until the head has decided whether the next one may begin on all boxes.
    """
    is_decided = part.link is None or part.attempt != job.attempt
    return job.status is JobStatus.QUEUED and ((part.link is None and part.attempt > job.attempt) or not is_decided)


class PartRepository:
    """Parts of jobs, within the caller's transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def by_job(self, job_ids: Collection[str] | None = None) -> dict[str, list[JobPart]]:
        """Returns the parts of these jobs, each job's by position, without those that leave. None: of all jobs."""
        query = select(JobPart).where(_STAYS).order_by(JobPart.job_id, JobPart.position)
        parts = self._session.scalars(query if job_ids is None else query.where(JobPart.job_id.in_(job_ids))).all()
        return {job_id: list(each) for job_id, each in groupby(parts, key=lambda part: part.job_id)}

    def of_job(self, job_id: str) -> Sequence[JobPart]:
        """Lists the parts of a job by position, without those that leave."""
        query = select(JobPart).where(JobPart.job_id == job_id, _STAYS).order_by(JobPart.position)
        return self._session.scalars(query.execution_options(populate_existing=True)).all()

    def on(self, node: str) -> Sequence[JobPart]:
        """Lists the parts that a box has, or is to have."""
        query = select(JobPart).where(JobPart.node == node).order_by(JobPart.job_id)
        return self._session.scalars(query.execution_options(populate_existing=True)).all()

    def hold(self, node: str) -> bool:
        """Returns whether a box works on a part, or is reserved for one, so that its own jobs end at a commit."""
        return any(holds(part) for part in self.on(node))

    def find(self, job_id: str, node: str) -> JobPart | None:
        """Returns a box's part of a job, None if it has none."""
        return self._session.get(JobPart, (job_id, node), populate_existing=True)

    def add(self, job_id: str, node: str, *, position: int, state: PartState) -> None:
        """Adds a part. Nothing changes if it is there."""
        if self.find(job_id, node) is None:
            self._session.add(JobPart(job_id=job_id, node=node, position=position, state=state.value))
            self._session.flush()

    def give(self, job_id: str, node: str, *, position: int) -> None:
        """Gives a box a part of a job that never began, in place of one of an earlier plan."""
        self.add(job_id, node, position=position, state=PartState.COPYING)
        self._change(job_id, node, position=position, state=PartState.COPYING.value, attempt=0, link=None)

    def remove(self, job_id: str, node: str | None = None) -> None:
        """Removes a part, or all parts of a job."""
        mine = JobPart.job_id == job_id if node is None else (JobPart.job_id == job_id) & (JobPart.node == node)
        self._session.execute(delete(JobPart).where(mine))

    def forget_removed(self, job_id: str) -> None:
        """Removes an ended job's parts on boxes that were removed, which tell nothing any more."""
        ended = select(Job.id).where(Job.id == job_id, Job.status.in_(TERMINAL_STATUSES))
        removed = select(Box.node).where(Box.state == BoxState.REMOVED.value)
        self._session.execute(delete(JobPart).where(JobPart.job_id.in_(ended), JobPart.node.in_(removed)))

    def want(self, job_id: str, node: str, *, attempt: int, link: Mapping[str, Any] | None, is_over: bool) -> None:
        """Notes what the head wants of a part."""
        values = {"attempt": attempt, "link": None if link is None else dict(link), "is_over": is_over}
        self._change(job_id, node, **values)

    def tell(
        self, job_id: str, node: str, *, state: PartState, served: int, told: str | None, port: int | None = None
    ) -> None:
        """Notes what a box tells of its part. Nothing changes if the part is gone."""
        self._change(job_id, node, state=state.value, served=served, told=told, port=port)

    def place(self, job_id: str, node: str, position: int | None) -> None:
        """Gives a box's part another position, if it has another one. None: the box is to remove it."""
        if position is None:
            self._change(job_id, node, state=PartState.LEAVING.value, attempt=0, link=None)
        else:
            self._change(job_id, node, JobPart.position != position, position=position)

    def copy_again(self, job_id: str, node: str) -> None:
        """Notes that a part that served no attempt lacks some of the job's files."""
        idle = (JobPart.state == PartState.READY.value, JobPart.served == 0)
        self._change(job_id, node, *idle, state=PartState.COPYING.value)

    def begin(self, job_id: str, node: str, attempt: int) -> bool:
        """Notes that a box serves an attempt from now on. Returns False if it is not to, or not any more."""
        is_wanted = (JobPart.attempt == attempt, JobPart.served < attempt, JobPart.is_over.is_(False))
        ready = (JobPart.state == PartState.READY.value, *is_wanted)
        return self._change(job_id, node, *ready, state=PartState.RUNNING.value, served=attempt, told=None)

    def give_up(self, job_id: str, node: str, ended: int) -> None:
        """Notes that a box begins none of the attempts up to `ended`, unless it serves one now."""
        ready = (JobPart.state == PartState.READY.value, JobPart.served < ended)
        self._change(job_id, node, *ready, served=ended)

    def _change(self, job_id: str, node: str, *conditions: ColumnElement[bool], **values: Any) -> bool:
        mine = (JobPart.job_id == job_id, JobPart.node == node, *conditions)
        return execute_change(self._session, update(JobPart).where(*mine).values(**values)) == 1
