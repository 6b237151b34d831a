"""Deletions: a row is deleted at once, and its files are removed after the commit of a row that records the removal.

This order is safe if the process is killed at any time: no visible row has lost its files, and the next process finds
the pending removals. What is old enough to be deleted is found here too.
"""

import time
from collections.abc import Callable, Sequence
from enum import StrEnum

from sqlalchemy import ColumnElement, delete, exists, or_, select, update
from sqlalchemy.orm import InstrumentedAttribute, Session

from windlass.storage.sql import (
    TERMINAL_STATUSES,
    Checkpoint,
    DeletedJob,
    File,
    Job,
    Removal,
    StatusConflict,
    execute_change,
)
from windlass.storage.sql.repositories.stored import StoredRepository


class RemovalKind(StrEnum):
    """The kind of a removal from the disk."""

    FILE = "file"
    MODEL = "model"  # a folder


class DeletionRepository:
    """Deleted jobs and pending removals, within the caller's transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def delete_job(self, job: Job, *, model: str, keeps_model: bool) -> None:
        """Deletes a finished job with its events, metrics and checkpoints.

        `model`: the name of the job's model, which need not exist. Raises StatusConflict, without writing, if the job
        is not finished.
        """
        statement = delete(Job).where(Job.id == job.id, Job.status.in_(TERMINAL_STATUSES))
        if execute_change(self._session, statement) != 1:
            raise StatusConflict(job.id, " or ".join(sorted(TERMINAL_STATUSES)), job.status)
        deleted = DeletedJob(
            id=job.id,
            owner=job.owner,
            node=job.node,
            attempt=job.attempt,
            model=model,
            keeps_model=keeps_model,
            deleted_at=time.time(),
        )
        self._session.add(deleted)
        self._session.flush()
        StoredRepository(self._session).forget_job(job.id, but=model if keeps_model else None)

    def deleted_job(self, job_id: str) -> DeletedJob | None:
        """Returns the record of a deleted job, None if there is none."""
        return self._session.get(DeletedJob, job_id)

    def jobs_to_remove(self, node: str) -> Sequence[DeletedJob]:
        """Lists deleted jobs that may have files in this home or on its SSDs, in order of deletion."""
        here = or_(DeletedJob.node == node, DeletedJob.node.is_(None))
        query = select(DeletedJob).where(DeletedJob.removed_at.is_(None), here)
        return self._session.scalars(query.order_by(DeletedJob.deleted_at, DeletedJob.id)).all()

    def job_removed(self, job_id: str) -> None:
        """Records that all files of a deleted job are removed."""
        self._session.execute(update(DeletedJob).where(DeletedJob.id == job_id).values(removed_at=time.time()))

    def forget_checkpoints(self, is_there: Callable[[str], bool]) -> None:
        """Deletes the rows of checkpoints whose models do not exist."""
        for row in self._session.scalars(select(Checkpoint)).all():
            if not is_there(row.model):
                self._session.delete(row)
        self._session.flush()

    # --- files and models ---------------------------------------------------------------------------------------------

    def doom(self, kind: RemovalKind, name: str, node: str) -> Removal:
        """Records a pending removal. The caller must call `removed` after the removal from the disk."""
        removal = Removal(kind=kind.value, name=name, node=node, created_at=time.time())
        self._session.add(removal)
        self._session.flush()
        if kind is RemovalKind.MODEL:
            StoredRepository(self._session).forget_model(name)
        return removal

    def to_remove(self, node: str) -> Sequence[Removal]:
        """Lists the pending removals in this home, the oldest first."""
        return self._session.scalars(select(Removal).where(Removal.node == node).order_by(Removal.ordinal)).all()

    def removed(self, ordinal: int) -> None:
        """Deletes the record of a pending removal, because the removal is complete."""
        self._session.execute(delete(Removal).where(Removal.ordinal == ordinal))

    def is_doomed(self, model: str, job_prefix: str) -> bool:
        """Checks whether a model on the disk counts as deleted, by itself or with the job that made it."""
        removal = select(Removal.ordinal).where(Removal.kind == RemovalKind.MODEL.value, Removal.name == model)
        if self._session.scalar(removal.limit(1)) is not None:
            return True
        jobs = self._session.scalars(select(DeletedJob).where(*begins_with(DeletedJob.id, job_prefix)))
        return any(not (job.keeps_model and job.model == model) for job in jobs if _is_of(model, job))


def begins_with(
    column: ColumnElement[str] | InstrumentedAttribute[str], prefix: str
) -> tuple[ColumnElement[bool], ...]:
    """Returns conditions for jobs whose ids begin with a prefix, which is usually one job."""
    # Ids continue with hexadecimal digits, which sort before "g". A range lets the query use the primary key's index.
    return column >= prefix, column < f"{prefix}g"


def _is_of(model: str, job: DeletedJob) -> bool:
    return model == job.model or model.startswith(f"{job.model}-step-")


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
