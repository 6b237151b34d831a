"""What is deleted: rows at once, and what lies on disks once the row that says so is there.

The row comes first. So nothing that answers has lost its files, whenever a process is killed, and whoever starts next
finds what is left to be removed.
"""

import time
from collections.abc import Callable, Sequence
from enum import StrEnum

from sqlalchemy import ColumnElement, CursorResult, delete, or_, select, update
from sqlalchemy.orm import InstrumentedAttribute, Session

from windlass.storage.sql import TERMINAL_STATUSES, Checkpoint, DeletedJob, Job, Removal, StatusConflict


class RemovalKind(StrEnum):
    """What lies on the disk."""

    FILE = "file"
    MODEL = "model"  # a folder


class DeletionRepository:
    """Deleted jobs and pending removals, within the caller's transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def delete_job(self, job: Job, *, model: str, keeps_model: bool) -> None:
        """Take a finished job out of the tables, with its events, metrics and checkpoints.

        `model`: what its model is called, there or not. Raises StatusConflict, and nothing is written, unless the job
        is finished.
        """
        statement = delete(Job).where(Job.id == job.id, Job.status.in_(TERMINAL_STATUSES))
        result = self._session.execute(statement.execution_options(synchronize_session=False))
        assert isinstance(result, CursorResult)
        if result.rowcount != 1:
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

    def deleted_job(self, job_id: str) -> DeletedJob | None:
        """A job that was deleted, whatever is left of it."""
        return self._session.get(DeletedJob, job_id)

    def jobs_to_remove(self, node: str) -> Sequence[DeletedJob]:
        """Deleted jobs of which something may be left in this home, or on its SSDs; the first one first."""
        here = or_(DeletedJob.node == node, DeletedJob.node.is_(None))
        query = select(DeletedJob).where(DeletedJob.removed_at.is_(None), here)
        return self._session.scalars(query.order_by(DeletedJob.deleted_at, DeletedJob.id)).all()

    def job_removed(self, job_id: str) -> None:
        """Nothing is left of it."""
        self._session.execute(update(DeletedJob).where(DeletedJob.id == job_id).values(removed_at=time.time()))

    def forget_checkpoints(self, is_there: Callable[[str], bool]) -> None:
        """Take those out of the table whose models are not there."""
        for row in self._session.scalars(select(Checkpoint)).all():
            if not is_there(row.model):
                self._session.delete(row)
        self._session.flush()

    # --- files and models ---------------------------------------------------------------------------------------------

    def doom(self, kind: RemovalKind, name: str, node: str) -> Removal:
        """From the commit on it is deleted; `removed` must follow when it is gone from the disk."""
        removal = Removal(kind=kind.value, name=name, node=node, created_at=time.time())
        self._session.add(removal)
        self._session.flush()
        return removal

    def to_remove(self, node: str) -> Sequence[Removal]:
        """What is still to be removed in this home, the first one first."""
        return self._session.scalars(select(Removal).where(Removal.node == node).order_by(Removal.ordinal)).all()

    def removed(self, ordinal: int) -> None:
        """It is gone."""
        self._session.execute(delete(Removal).where(Removal.ordinal == ordinal))

    def is_doomed(self, model: str, job_prefix: str) -> bool:
        """Whether a model that may still be on the disk is deleted, by itself or with the job that made it."""
        removal = select(Removal.ordinal).where(Removal.kind == RemovalKind.MODEL.value, Removal.name == model)
        if self._session.scalar(removal.limit(1)) is not None:
            return True
        jobs = self._session.scalars(select(DeletedJob).where(*begins_with(DeletedJob.id, job_prefix)))
        return any(not (job.keeps_model and job.model == model) for job in jobs if _is_of(model, job))


def begins_with(
    column: ColumnElement[str] | InstrumentedAttribute[str], prefix: str
) -> tuple[ColumnElement[bool], ...]:
    """Conditions for jobs whose ids begin so: as a rule one."""
    # Ids go on in hexadecimal digits, which come before g. Thus the primary key's index serves.
    return column >= prefix, column < f"{prefix}g"


def _is_of(model: str, job: DeletedJob) -> bool:
    return model == job.model or model.startswith(f"{job.model}-step-")
