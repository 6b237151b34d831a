"""Finds rows that are older than the retention time. Rows that an unfinished job needs are never included."""

from collections.abc import Sequence

from sqlalchemy import ColumnElement, exists, or_, select
from sqlalchemy.orm import Session

from windlass.storage.sql import TERMINAL_STATUSES, Checkpoint, File, Job


class RetentionRepository:
    """Ids of old rows, the oldest first, within the caller's transaction. Times are seconds since the epoch."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def jobs(self, *, before_s: float, node: str) -> Sequence[str]:
        """Lists jobs of this home that finished before `before_s`."""
        query = select(Job.id).where(*_finished(before_s, node))
        return self._session.scalars(query.order_by(Job.finished_at, Job.id)).all()

    def checkpoints(self, *, before_s: float, node: str) -> Sequence[str]:
        """Lists the models of all checkpoints of such jobs, except those that are the jobs' own models."""
        is_more = Checkpoint.model.is_distinct_from(Job.fine_tuned_model)
        query = (
            select(Checkpoint.model).join(Job, Job.id == Checkpoint.job_id).where(*_finished(before_s, node), is_more)
        )
        return self._session.scalars(query.order_by(Job.finished_at, Checkpoint.id)).all()

    def files(self, *, before_s: float) -> Sequence[str]:
        """Lists files that were created before `before_s` and that no job has used since."""
        uses = or_(Job.training_file == File.id, Job.validation_file == File.id)
        in_use = exists().where(uses, or_(Job.finished_at.is_(None), Job.finished_at >= before_s))
        query = select(File.id).where(File.created_at < before_s, ~in_use)
        return self._session.scalars(query.order_by(File.created_at, File.id)).all()


def _finished(before_s: float, node: str) -> tuple[ColumnElement[bool], ...]:
    here = or_(Job.node == node, Job.node.is_(None))
    return Job.status.in_(TERMINAL_STATUSES), Job.finished_at < before_s, here
