"""A job that begins again on another box, because its own is lost: a new job from the newest exported model."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import Session

from windlass.engine.training_config import Initialization
from windlass.service.installation import Settings, node_of, was_restored
from windlass.service.jobs.spec_builder import is_for_several
from windlass.service.validation import ApiError, model_dir
from windlass.storage.sql import TERMINAL_STATUSES, Box, Checkpoint, Job, JobPart, JobStatus
from windlass.storage.sql.repositories import (
    BoxRepository,
    BoxState,
    EventRepository,
    JobRepository,
    MirrorRepository,
    NewJob,
    PartRepository,
    PartState,
    is_away,
    told_lease_s,
)

_MOST_CHECKPOINTS = 100  # that are searched for one whose files are here


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A new job that goes on for another one, and what its owner is to know."""

    new: NewJob
    message: str


def plan_restart(session: Session, settings: Settings, job: Job, *, box: str | None) -> Restart:
    """Describes the job that goes on for `job`: from its newest checkpoint here, else from its base model.

    `box`: the box that it is to run on; None: any.
    """
    checkpoint = _newest_checkpoint(session, settings, job)
    windlass: dict[str, Any] = {**job.windlass, "box": box}
    names = windlass.get("boxes")
    if box is not None or not is_for_several(job):
        windlass["boxes"] = None
    elif isinstance(names, list):
        here = {box.name for box in BoxRepository(session).all(node_of(settings.home)) if not is_away(box)}
        if len(set(names) - here) > 1:  # the head, and one that is not here
            windlass["boxes"] = len(names)
    method = job.method
    resolved = job.hyperparameters or {}
    if checkpoint is not None and job.total_steps and "epochs" in resolved:
        left = 1 - checkpoint.step_number / job.total_steps
        windlass["epochs"] = max(1, math.ceil(resolved["epochs"] * left))
        method = _without_epochs(method)
    if checkpoint is not None:
        windlass["initialization"] = Initialization.WEIGHTS.value
    origin = "its base model" if checkpoint is None else f"its checkpoint {checkpoint.model}"
    new = NewJob(
        model=job.model if checkpoint is None else checkpoint.model,
        training_file=job.training_file,
        validation_file=job.validation_file,
        suffix=job.suffix,
        seed=job.seed,
        method=method,
        windlass=windlass,
        metadata=job.job_metadata,
        priority=job.priority,
        idempotency_key=None,
        request_digest=None,
        node=node_of(settings.home),
        owner=job.owner,
    )
    message = (
        f"Goes on for job {job.id} from {origin}. The optimizer's states and the position in the data are lost, so its "
        "results differ from those of an uninterrupted job"
    )
    if "epochs" in windlass and checkpoint is not None:
        count = windlass["epochs"]
        message += f"; it trains {count} epoch{'s' if count != 1 else ''}"
    return Restart(new=new, message=message)


def end_for_restart(session: Session, settings: Settings, job: Job) -> None:
    """Ends a job whose box is lost, so that another one may go on for it. Ended jobs stay as they are.

    Raises ApiError if the job goes on by itself, or its box may still work on it.
    """
    if job.status is JobStatus.SUCCEEDED:
        raise _refusal(f"job {job.id} has succeeded; submit a job with its model {job.fine_tuned_model} instead")
    if job.status in TERMINAL_STATUSES:
        return
    box = BoxRepository(session).by_node(job.node)
    parts = PartRepository(session).of_job(job.id)
    if box is None and parts:
        _end_with_lost_part(session, settings, job, parts)
        return
    if box is None:
        raise _refusal(f"job {job.id} is {job.status} and goes on by itself; cancel it first to begin it again")
    _check_box_is_lost(settings, job, box)
    message = f"Cancelled, because box {box.name} {_why_gone(box)} and another job goes on for it"
    JobRepository(session).transition(job.id, job.status, JobStatus.CANCELLED, message=message)
    MirrorRepository(session).end_here(job.id, node_of(settings.home))


def _end_with_lost_part(session: Session, settings: Settings, job: Job, parts: Sequence[JobPart]) -> None:
    """Ends a job over several boxes of which one has lost its part, has left, or is away for longer than its lease.

    Raises ApiError if none is, or the job may go on by itself.
    """
    rows = [(BoxRepository(session).by_node(part.node), part) for part in parts]
    lost = [box for box, part in rows if box is not None and part.state == PartState.LOST.value]
    gone = [box for box, _ in rows if box is not None and (is_away(box) or box.state == BoxState.REMOVED.value)]
    if job.status in (JobStatus.RUNNING, JobStatus.PAUSING) or not (lost or gone):
        raise _refusal(
            f"job {job.id} is {job.status} and goes on by itself when its boxes are there; cancel it first to begin it "
            "again"
        )
    if not lost:
        _check_box_is_lost(settings, job, gone[0])
    box, what = (lost[0], "has lost its part of it") if lost else (gone[0], _why_gone(gone[0]))
    message = f"Cancelled, because box {box.name} {what} and another job goes on for it"
    JobRepository(session).transition(job.id, job.status, JobStatus.CANCELLED, message=message)


def _why_gone(box: Box) -> str:
    return "was removed" if box.state == BoxState.REMOVED.value else "is away"


def note_restart(session: Session, job_id: str, restart: Restart) -> None:
    """Tells the owner of the new job what is lost."""
    EventRepository(session).add(job_id, attempt=0, message=restart.message, level="warn")


def _check_box_is_lost(settings: Settings, job: Job, box: Box) -> None:
    if box.state == BoxState.REMOVED.value:
        return
    if was_restored(settings.home):
        raise _refusal(
            f"box {box.name} may still work on job {job.id}: the service was restored from a backup, and not all boxes "
            "have called since; try again later, or remove the box"
        )
    if not is_away(box):
        raise _refusal(
            f"box {box.name}, which has the states of job {job.id}, is here, and the job goes on there; to move it, "
            "cancel it, and submit it again from its last checkpoint"
        )
    lease_s = max(settings.box_lease_minutes * 60, told_lease_s(box))  # the setting may be shorter than it was
    left_s = box.seen_at + lease_s - time.time()
    if left_s > 0:
        minutes = math.ceil(left_s / 60)
        raise _refusal(
            f"box {box.name} may still work on job {job.id}: it last called {time.time() - box.seen_at:.0f} s ago; try "
            f"again in {minutes} minute{'s' if minutes != 1 else ''} if it stays away, or remove the box"
        )


def _newest_checkpoint(session: Session, settings: Settings, job: Job) -> Checkpoint | None:
    page = EventRepository(session).checkpoints(job.id, limit=_MOST_CHECKPOINTS, after=None)
    for row in page.rows:
        folder = model_dir(row.model, models_dir=settings.models_dir, fine_tuned_dir=settings.fine_tuned_dir)
        if (folder / "config.json").is_file():
            return row
    return None


def _without_epochs(method: dict[str, Any]) -> dict[str, Any]:
    supervised = method.get("supervised") or {}
    hyperparameters = {**(supervised.get("hyperparameters") or {}), "n_epochs": "auto"}
    return {**method, "supervised": {**supervised, "hyperparameters": hyperparameters}}


def _refusal(message: str) -> ApiError:
    return ApiError(message, code="invalid_state")
