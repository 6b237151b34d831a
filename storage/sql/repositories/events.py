"""The events of jobs, and the checkpoints and metrics that come with them."""

import functools
import time
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Select, and_, bindparam, delete, func, select
from sqlalchemy.orm import Session, aliased

from windlass.storage.sql import Checkpoint, Job, JobEvent, JobMetrics, NotFound, Page, page_of

_NUM_TO_SEARCH = 10  # last steps in which a value is searched


@functools.cache
def _last_metrics() -> Select[tuple[str, dict[str, Any]]]:
    """Returns the query for the metrics of jobs' last steps. Cached, because building it is slower than running it."""
    # A subquery finds each job's last step by the index, because a job may have hundreds of thousands of steps.
    other = aliased(JobMetrics)
    last = select(func.max(other.step)).where(other.job_id == Job.id).correlate(Job).scalar_subquery()
    query = select(JobMetrics.job_id, JobMetrics.data)
    query = query.join(Job, and_(Job.id == JobMetrics.job_id, JobMetrics.step == last))
    return query.where(Job.id.in_(bindparam("job_ids", expanding=True)))


class EventRepository:
    """Events, metrics and checkpoints of jobs, within the caller's transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(
        self,
        job_id: str,
        *,
        attempt: int,
        message: str,
        level: str = "info",
        data: dict[str, Any] | None = None,
    ) -> JobEvent:
        """Writes an event of the service, as opposed to one from a runner's journal."""
        event = JobEvent(
            job_id=job_id,
            attempt=attempt,
            seq=None,
            created_at=time.time(),
            level=level,
            message=message,
            type="message",
            data=data or {},
        )
        self._session.add(event)
        self._session.flush()
        return event

    def page(self, job_id: str, *, limit: int, after: int | None, type: str | None = None) -> Page[JobEvent]:
        """Lists a job's events, newest first, of one type or both, older than `after` if given.

        Raises NotFound if `after` is not one of them.
        """
        query = select(JobEvent).where(JobEvent.job_id == job_id).order_by(JobEvent.ordinal.desc()).limit(limit + 1)
        if type is not None:
            query = query.where(JobEvent.type == type)
        if after is not None:
            last = self._session.get(JobEvent, after)
            if last is None or last.job_id != job_id:
                raise NotFound("event", f"ftevent-{after}")
            query = query.where(JobEvent.ordinal < after)
        return page_of(self._session.scalars(query).all(), limit)

    def first(self, job_id: str, attempt: int) -> JobEvent | None:
        """Returns the first event of an attempt, which records its start; None if there is none."""
        where = (JobEvent.job_id == job_id, JobEvent.attempt == attempt)
        return self._session.scalar(select(JobEvent).where(*where).order_by(JobEvent.ordinal).limit(1))

    def since(
        self,
        ordinal: int,
        *,
        limit: int,
        until: int | None = None,
        job_id: str | None = None,
        only_of: str | None = None,
    ) -> Sequence[JobEvent]:
        """Lists events after an ordinal, oldest first, for a live stream: of one job, of one user's jobs, or of all.

        `until`: the last ordinal that is included.
        """
        query = select(JobEvent).where(JobEvent.ordinal > ordinal).order_by(JobEvent.ordinal).limit(limit)
        if until is not None:
            query = query.where(JobEvent.ordinal <= until)
        if job_id is not None:
            query = query.where(JobEvent.job_id == job_id)
        if only_of is not None:
            query = query.join(Job, Job.id == JobEvent.job_id).where(Job.owner == only_of)
        return self._session.scalars(query).all()

    def with_owners(self, ordinal: int, *, limit: int) -> Sequence[tuple[JobEvent, str | None]]:
        """Lists events after an ordinal, oldest first, each with the owner of its job."""
        query = select(JobEvent, Job.owner).join(Job, Job.id == JobEvent.job_id).where(JobEvent.ordinal > ordinal)
        rows = self._session.execute(query.order_by(JobEvent.ordinal).limit(limit))
        return [(event, owner) for event, owner in rows]

    def last_ordinal(self) -> int:
        """Returns the newest event's ordinal, 0 if there is none."""
        return self._session.scalar(select(func.max(JobEvent.ordinal))) or 0

    def metrics(self, job_id: str) -> Sequence[JobMetrics]:
        """Lists a job's metrics in order of steps."""
        query = select(JobMetrics).where(JobMetrics.job_id == job_id).order_by(JobMetrics.step)
        return self._session.scalars(query).all()

    def first_metrics(self, job_id: str, attempt: int, *, limit: int) -> Sequence[JobMetrics]:
        """Lists the metrics of an attempt's first steps, in order of steps."""
        where = (JobMetrics.job_id == job_id, JobMetrics.attempt == attempt)
        return self._session.scalars(select(JobMetrics).where(*where).order_by(JobMetrics.step).limit(limit)).all()

    def last_metrics(self, job_ids: Collection[str]) -> dict[str, dict[str, Any]]:
        """Returns the metrics of each job's last step, by job id. Jobs without metrics are left out."""
        return {row.job_id: row.data for row in self._session.execute(_last_metrics(), {"job_ids": list(job_ids)})}

    def last_paced_step(self, job_id: str) -> JobMetrics | None:
        """Returns the last step with an entry for the remaining time, which may be null; None if there is none.

        Steps that so far were only evaluated have no such entry.
        """
        query = select(JobMetrics).where(JobMetrics.job_id == job_id).order_by(JobMetrics.step.desc())
        return next(
            (row for row in self._session.scalars(query.limit(_NUM_TO_SEARCH)) if "remaining_s" in row.data), None
        )

    def last_measured(self, job_id: str) -> dict[str, Any] | None:
        """Returns the last resource usage that a job's runner reported, None if it never did."""
        query = select(JobMetrics).where(JobMetrics.job_id == job_id).order_by(JobMetrics.step.desc())
        # Several steps are searched, because the last ones may have been only evaluated so far.
        rows = self._session.scalars(query.limit(_NUM_TO_SEARCH))
        return next((row.data["measured"] for row in rows if "measured" in row.data), None)

    def checkpoint_of(self, model: str) -> Checkpoint | None:
        """Returns the checkpoint with this model name, None if there is none."""
        return self._session.scalar(select(Checkpoint).where(Checkpoint.model == model))

    def checkpoint(self, job_id: str, checkpoint_id: str) -> Checkpoint:
        """Returns one of a job's checkpoints. Raises NotFound if it has none with this id."""
        checkpoint = self._session.get(Checkpoint, checkpoint_id)
        if checkpoint is None or checkpoint.job_id != job_id:
            raise NotFound("checkpoint", checkpoint_id)
        return checkpoint

    def remove_checkpoint(self, model: str) -> None:
        """Deletes the row of the checkpoint with this model name, if there is one."""
        self._session.execute(delete(Checkpoint).where(Checkpoint.model == model))

    def checkpoints(self, job_id: str, *, limit: int, after: str | None) -> Page[Checkpoint]:
        """Lists a job's checkpoints, latest step first. Raises NotFound if `after` is not one of them."""
        query = select(Checkpoint).where(Checkpoint.job_id == job_id).order_by(Checkpoint.step_number.desc())
        if after is not None:
            query = query.where(Checkpoint.step_number < self.checkpoint(job_id, after).step_number)
        return page_of(self._session.scalars(query.limit(limit + 1)).all(), limit)
