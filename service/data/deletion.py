"""Deletion of jobs, files and models, by users and by the retention settings.

Data that an unfinished job needs stays.
"""

import logging
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from sqlalchemy.orm import Session

from windlass.actors.lifecycle import close_attempt
from windlass.service.data.job_remains import free_space, output_dir
from windlass.service.installation import Settings, is_local, node_of
from windlass.service.jobs import job_dir
from windlass.service.validation import ApiError, job_id_prefix, told_jobs
from windlass.storage.ids import Attempt, JobId
from windlass.storage.sql import ACTIVE_STATUSES, Database, DeletedJob, Job, NotFound, Removal
from windlass.storage.sql.repositories import (
    BoxRepository,
    DeletionRepository,
    EventRepository,
    FileRepository,
    JobRepository,
    RemovalKind,
)

_LOG = logging.getLogger(__name__)

_MAX_NAMED = 3
_DOOMED = ".deleted"


# --- rows, in the caller's transaction; `only_of`: the only user whose jobs an error may name -------------------------


def delete_job(
    session: Session, settings: Settings, job: Job, *, with_model: bool = False, only_of: str | None = None
) -> None:
    """Deletes a finished job with its events, checkpoints and result files.

    The dispatcher then removes its data from the disks.

    Its model stays unless `with_model`. Raises ApiError if the job is not finished, one of its processes still lives,
    or its model or checkpoints are in use.
    """
    if job.status in ACTIVE_STATUSES:
        raise ApiError(
            f"job {job.id} is {job.status}; only finished jobs are deleted: cancel it first, or wait until it has "
            "ended",
            code="invalid_state",
        )
    if not is_local(settings, job):
        raise ApiError(
            f"the data of job {job.id} lies with the service that it was sent to; delete it there", code="job_elsewhere"
        )
    if not close_attempt(job_dir(settings, job.id), Attempt(job.attempt)):
        raise ApiError(f"the processes of job {job.id} have not ended yet; try again soon", code="invalid_state")
    jobs, files, deletion = JobRepository(session), FileRepository(session), DeletionRepository(session)
    model = output_dir(settings, job).name
    keeps_model = job.fine_tuned_model is not None and not with_model
    users = [*jobs.active_using_checkpoints_of(model), *(() if keeps_model else jobs.active_using_models([model]))]
    _refuse_if_used(f"a model that job {job.id} made", users, only_of, code="model_in_use")
    for file_id in job.result_files:
        with suppress(NotFound):
            files.delete(file_id)
            deletion.doom(RemovalKind.FILE, file_id, node_of(settings.home))
    deletion.delete_job(job, model=model, keeps_model=keeps_model)


def delete_file(session: Session, settings: Settings, file_id: str, *, only_of: str | None = None) -> Removal:
    """Deletes a file; `carry_out` must follow. Raises NotFound, and ApiError if an unfinished job needs the file."""
    node = FileRepository(session, only_of).delete(file_id)
    _refuse_if_used(f"file {file_id}", JobRepository(session).active_using_file(file_id), only_of, code="file_in_use")
    return DeletionRepository(session).doom(RemovalKind.FILE, file_id, node or node_of(settings.home))


def delete_model(session: Session, settings: Settings, model: str, *, only_of: str | None = None) -> Removal:
    """Deletes a fine-tuned model or a checkpoint; `carry_out` must follow. Raises ApiError if it is in use."""
    _refuse_if_used(f"model {model!r}", JobRepository(session).active_using_models([model]), only_of, "model_in_use")
    _refuse_if_its_job_needs_it(session, model)
    EventRepository(session).remove_checkpoint(model)
    job = _job_of(session, model)
    node = (job and job.node) or node_of(settings.home)
    if BoxRepository(session).by_node(node) is not None:
        node = node_of(settings.home)  # a box's checkpoints are here, too
    return DeletionRepository(session).doom(RemovalKind.MODEL, model, node)


def refuse_if_it_may_go(session: Session, model: str) -> None:
    """Raises ApiError for a checkpoint of a job that still trains and may remove it."""
    job = _job_of(session, model)
    if job is None or job.status not in ACTIVE_STATUSES:
        return
    checkpoint = EventRepository(session).checkpoint_of(model)
    keeps_all = job.windlass.get("keep_checkpoints") is None
    if checkpoint is None or not keeps_all or set(checkpoint.reasons) == {"best"}:
        raise ApiError(
            f"model: {model!r} may be removed by job {job.id}, which still trains and keeps its last or its best "
            "checkpoints only; start from it when that job has ended, or export it into the models directory",
            param="model",
            code="model_may_go",
        )


def _refuse_if_used(what: str, users: Sequence[Job], only_of: str | None, code: str) -> None:
    if not users:
        return
    named = [job.id for job in users if only_of in (None, job.owner)][:_MAX_NAMED]
    who = told_jobs(named) if named else "a job of another user"
    raise ApiError(f"{what} is in use by {who}; cancel it first, or wait until it has ended", code=code)


def _refuse_if_its_job_needs_it(session: Session, model: str) -> None:
    job = _job_of(session, model)
    if job is None or job.status not in ACTIVE_STATUSES:
        return
    checkpoint = EventRepository(session).checkpoint_of(model)
    if checkpoint is None:
        raise ApiError(f"model {model!r} is just being made by job {job.id}; cancel it first", code="model_in_use")
    if "best" in checkpoint.reasons:
        raise ApiError(
            f"model {model!r} is the best that job {job.id} has so far; the job removes it when there is a better one; "
            "cancel it first",
            code="model_in_use",
        )


def _job_of(session: Session, model: str) -> Job | None:
    prefix = job_id_prefix(model)
    return None if prefix is None else JobRepository(session).by_prefix(prefix)


# --- disks, after the transaction is committed ------------------------------------------------------------------------


def carry_out(database: Database, settings: Settings, removal: Removal) -> bool:
    """Removes a deleted file or model from the disk.

    If that fails, the home's dispatcher retries. Returns whether it succeeded.
    """
    if removal.node != node_of(settings.home):
        return False
    try:
        if removal.kind == RemovalKind.FILE:
            (settings.files_dir / removal.name).unlink(missing_ok=True)
        else:
            _remove_folder(settings.fine_tuned_dir / removal.name)
    except OSError as error:
        _LOG.warning("%s %s is deleted but could not be removed yet: %s", removal.kind, removal.name, error)
        return False
    with database.write() as session:
        DeletionRepository(session).removed(removal.ordinal)
    return True


def remove_deleted_job(database: Database, settings: Settings, job: DeletedJob) -> bool:
    """Removes a deleted job's data from this home and its SSDs. Returns False if a process of its last attempt lives.

    Raises OSError if some data cannot be removed. A later call removes the rest.
    """
    if not remove_job_files(settings, job.id, attempt=job.attempt, model=job.model, keeps_model=job.keeps_model):
        return False
    with database.write() as session:
        DeletionRepository(session).job_removed(job.id)
    return True


def remove_job_files(settings: Settings, job_id: str, *, attempt: int, model: str, keeps_model: bool = False) -> bool:
    """Removes a finished job's folder, states, checkpoints and model. Returns False if one of its processes lives.

    Raises OSError if some data cannot be removed. A later call removes the rest.
    """
    folder, model_folder = job_dir(settings, job_id), settings.fine_tuned_dir / model
    if not close_attempt(folder, Attempt(attempt)):
        return False
    free_space(settings, JobId(job_id), model_folder)
    for checkpoint in _checkpoints_beside(model_folder):
        _remove_folder(checkpoint)
    if not keeps_model:
        _remove_folder(model_folder)
    _remove_tree(folder)
    return True


def remove_job_folder(settings: Settings, job_id: str) -> None:
    """Removes the folder of a job that never began. Raises OSError."""
    _remove_tree(job_dir(settings, job_id))


def _checkpoints_beside(model: Path) -> list[Path]:
    """Lists the checkpoints of a model, also those whose removal has begun."""
    found = []
    for folder in model.parent.iterdir() if model.parent.is_dir() else ():
        name = folder.name.removeprefix(".").removesuffix(_DOOMED)
        if name.startswith(f"{model.name}-step-") and name.removeprefix(f"{model.name}-step-").isdecimal():
            found.append(model.with_name(name))
    return found


def _remove_folder(folder: Path) -> None:
    """Renames the folder before its removal, so that no process reads a partly removed folder."""
    doomed = folder.with_name(f".{folder.name}{_DOOMED}")
    _remove_tree(doomed)  # left by a process that was killed during a removal
    with suppress(FileNotFoundError):
        folder.rename(doomed)
    _remove_tree(doomed)


def _remove_tree(folder: Path) -> None:
    while folder.exists():
        with suppress(FileNotFoundError):  # another process may remove it at the same time
            shutil.rmtree(folder)
