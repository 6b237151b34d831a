"""The table of jobs: creation, lists, and all changes of status."""

import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

from sqlalchemy import func, or_, select, tuple_, update
from sqlalchemy.orm import Session

from windlass.storage.sql import (
    ACTIVE_STATUSES,
    TERMINAL_STATUSES,
    DeletedJob,
    IllegalTransition,
    Job,
    JobStatus,
    NotFound,
    Page,
    StatusConflict,
    check_transition,
    execute_change,
    page_of,
)
from windlass.storage.sql.repositories.deletions import begins_with
from windlass.storage.sql.repositories.events import EventRepository
from windlass.storage.sql.repositories.webhooks import WebhookRepository


def new_job_id() -> str:
    """Returns a new id that cannot be guessed."""
    return f"ftjob-{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """A requested job, after all checks."""

    model: str
    training_file: str
    validation_file: str | None
    suffix: str | None
    seed: int
    method: dict[str, Any]
    windlass: dict[str, Any]
    metadata: dict[str, str]
    priority: int
    idempotency_key: str | None
    request_digest: str | None
    node: str | None = None  # the home that has its files; None: the home of the dispatcher that will claim it
    owner: str | None = None  # a user; None: no key was needed


class JobFields(TypedDict, total=False):
    """The fields that a change of status may also write, and that `set_fields` may write alone."""

    attempt: int
    hyperparameters: dict[str, Any]
    windlass: dict[str, Any]
    waiting_reason: str | None
    preparation: dict[str, Any] | None
    step: int
    total_steps: int
    trained_tokens: int
    estimated_finish: float | None
    finish_is_measured: bool
    plan_number: int
    num_lost: int
    error: dict[str, Any]
    fine_tuned_model: str
    result_files: list[str]


@dataclass(frozen=True, slots=True)
class _Fence:
    """The attempt and the dispatcher for which a change is valid."""

    attempt: int
    lease_holder: str | None

    def __str__(self) -> str:
        return f"attempt {self.attempt}" + ("" if self.lease_holder is None else f" of {self.lease_holder}")


def _fence(seen: Job | None) -> _Fence | None:
    # Call this before the job is read again, because a read refreshes the row in the same session.
    return None if seen is None else _Fence(seen.attempt, seen.lease_holder)


class JobRepository:
    """Jobs, within the caller's transaction.

    With `only_of`, the methods that look up a job by `get`, and `page`, see only that user's jobs. Without
    `writes_events`, changes leave no events: they repeat what another box's database has recorded.
    """

    def __init__(self, session: Session, only_of: str | None = None, *, writes_events: bool = True) -> None:
        self._session = session
        self._only_of = only_of
        self._writes_events = writes_events

    def create(self, new: NewJob) -> Job:
        """Adds a job, which will be validated first, and its first event."""
        job = Job(
            id=new_job_id(),
            status=JobStatus.VALIDATING_FILES,
            created_at=time.time(),
            owner=new.owner,
            model=new.model,
            training_file=new.training_file,
            validation_file=new.validation_file,
            suffix=new.suffix,
            seed=new.seed,
            method=new.method,
            windlass=new.windlass,
            job_metadata=new.metadata,
            priority=new.priority,
            idempotency_key=new.idempotency_key,
            request_digest=new.request_digest,
            node=new.node,
            result_files=[],
        )
        self._session.add(job)
        self._session.flush()
        self._event(job, f"Created fine-tuning job: {job.id}", "info", {"status": job.status.value})
        return job

    def get(self, job_id: str) -> Job:
        """Returns the job's current row. Raises NotFound if there is none."""
        job = self.find(job_id)
        if job is None or self._only_of not in (None, job.owner):
            raise NotFound("fine-tuning job", job_id)
        return job

    def find(self, job_id: str) -> Job | None:
        """Returns the job's current row regardless of its owner, None if there is none."""
        return self._session.get(Job, job_id, populate_existing=True)

    def find_all(self, job_ids: Collection[str]) -> dict[str, Job]:
        """Returns the current rows of jobs regardless of their owners. Those that do not exist are left out."""
        query = select(Job).where(Job.id.in_(job_ids)).execution_options(populate_existing=True)
        return {job.id: job for job in self._session.scalars(query)}

    def by_idempotency_key(self, owner: str | None, keys: Collection[str]) -> Job | None:
        """Returns the job that a request of this user with one of these keys created, None if there is none."""
        return self._session.scalar(select(Job).where(Job.owner == owner, Job.idempotency_key.in_(keys)).limit(1))

    def owners_by_prefix(self, prefix: str) -> tuple[str | None, ...]:
        """Returns the owners of existing and deleted jobs whose ids begin with a prefix, usually of one job."""
        existing = select(Job.owner).where(*begins_with(Job.id, prefix))
        deleted = select(DeletedJob.owner).where(*begins_with(DeletedJob.id, prefix))
        return tuple(self._session.scalars(existing.union_all(deleted)))

    def all_ids(self) -> frozenset[str]:
        """Returns the ids of all existing and deleted jobs."""
        existing, deleted = select(Job.id), select(DeletedJob.id)
        if self._only_of is not None:
            existing = existing.where(Job.owner == self._only_of)
            deleted = deleted.where(DeletedJob.owner == self._only_of)
        return frozenset(self._session.scalars(existing.union_all(deleted)))

    def by_prefix(self, prefix: str) -> Job | None:
        """Returns the job whose id begins with a prefix, regardless of its owner; None if there is none, or several."""
        jobs = self._session.scalars(select(Job).where(*begins_with(Job.id, prefix)).limit(2)).all()
        return jobs[0] if len(jobs) == 1 else None

    def page(self, *, limit: int, after: str | None, metadata: Mapping[str, str]) -> Page[Job]:
        """Lists jobs with all these metadata pairs, newest first. Raises NotFound if `after` is not a job's id."""
        query = select(Job).order_by(Job.created_at.desc(), Job.id.desc()).limit(limit + 1)
        if self._only_of is not None:
            query = query.where(Job.owner == self._only_of)
        for key, value in metadata.items():
            query = query.where(Job.job_metadata[key].as_string() == value)
        if after is not None:
            last = self.get(after)
            query = query.where(tuple_(Job.created_at, Job.id) < tuple_(last.created_at, last.id))
        return page_of(self._session.scalars(query).all(), limit)

    def with_status(
        self, *statuses: JobStatus, node: str | None = None, lease_holder: str | None = None
    ) -> Sequence[Job]:
        """Lists jobs in any of these statuses, in the order of the queue: (priority, created_at, id).

        `node`: only jobs of this home or of none yet. `lease_holder`: only jobs that this dispatcher holds.
        """
        query = select(Job).where(Job.status.in_(statuses)).order_by(Job.priority, Job.created_at, Job.id)
        if node is not None:
            query = query.where(or_(Job.node == node, Job.node.is_(None)))
        if lease_holder is not None:
            query = query.where(Job.lease_holder == lease_holder)
        return self._session.scalars(query).all()

    def held_by(self, nodes: Collection[str]) -> Sequence[Job]:
        """Lists the jobs of these homes that hold or will hold their resources: neither paused nor finished ones."""
        holding = (JobStatus.QUEUED, JobStatus.RUNNING, JobStatus.PAUSING)
        query = select(Job).where(Job.node.in_(nodes), Job.status.in_(holding))
        return self._session.scalars(query.order_by(Job.priority, Job.created_at, Job.id)).all()

    def count_by_status(self) -> dict[JobStatus, int]:
        """Returns the number of jobs in each status. Statuses without jobs are left out."""
        query = select(Job.status, func.count().label("number")).group_by(Job.status)
        return {row.status: row.number for row in self._session.execute(query)}

    def count_waiting(self, owner: str | None) -> int:
        """Returns the number of a user's unfinished jobs that do not run, including paused ones."""
        waiting = ACTIVE_STATUSES - {JobStatus.RUNNING, JobStatus.PAUSING}
        query = select(func.count()).select_from(Job).where(Job.owner == owner, Job.status.in_(waiting))
        return self._session.scalar(query) or 0

    def last_began(self, owners: Collection[str | None]) -> dict[str | None, float]:
        """Returns the time of the last launch of a job for each owner. Owners without a launched job are left out."""
        is_known = or_(Job.owner.in_([owner for owner in owners if owner is not None]), Job.owner.is_(None))
        query = select(Job.owner, func.max(Job.launched_at).label("at")).where(is_known).group_by(Job.owner)
        return {row.owner: row.at for row in self._session.execute(query) if row.at is not None}

    def oldest_queued_at(self) -> float | None:
        """Returns the creation time of the oldest queued job, None if no job is queued."""
        # The sum makes SQLite use the index of statuses. Otherwise it would scan all jobs by creation time.
        return self._session.scalar(select(func.min(Job.created_at + 0)).where(Job.status == JobStatus.QUEUED))

    def active_using_file(self, file_id: str) -> Sequence[Job]:
        """Lists unfinished jobs that train or validate on a file."""
        uses = or_(Job.training_file == file_id, Job.validation_file == file_id)
        return self._session.scalars(select(Job).where(uses, Job.status.in_(ACTIVE_STATUSES))).all()

    def active_using_models(self, models: Collection[str]) -> Sequence[Job]:
        """Lists unfinished jobs that start from one of these models."""
        return self._session.scalars(select(Job).where(Job.model.in_(models), Job.status.in_(ACTIVE_STATUSES))).all()

    def active_using_checkpoints_of(self, model: str) -> Sequence[Job]:
        """Lists unfinished jobs that start from a checkpoint of this model."""
        is_checkpoint = Job.model.startswith(f"{model}-step-", autoescape=True)
        return self._session.scalars(select(Job).where(is_checkpoint, Job.status.in_(ACTIVE_STATUSES))).all()

    def request_cancel(self, job_id: str) -> Job:
        """Cancels a job without a runner at once. For a job with a runner, requests its stop from the dispatcher.

        Idempotent. Raises IllegalTransition if the job is finished.
        """
        job = self.get(job_id)
        check_transition(job_id, job.status, JobStatus.CANCELLED)
        if job.status in (JobStatus.VALIDATING_FILES, JobStatus.QUEUED, JobStatus.PAUSED):
            return self.transition(job_id, job.status, JobStatus.CANCELLED, message="Fine-tuning job cancelled")
        if not job.cancel_requested:
            self._update(job, (job.status,), None, {"cancel_requested": True})
            self._event(job, "Cancelling: the runner is asked to stop", "info", {})
        return self.get(job_id)

    def request_pause(self, job_id: str) -> Job:
        """Pauses a job without a runner at once. A job with a runner pauses after its step.

        Idempotent while the job is pausing. Raises IllegalTransition if the job is finished or paused, and
        StatusConflict if its cancellation was requested.
        """
        job = self.get(job_id)
        if job.status is JobStatus.PAUSING:
            return job
        if job.status is not JobStatus.RUNNING:
            return self.transition(job_id, job.status, JobStatus.PAUSED, message="Paused")
        if job.cancel_requested:
            raise StatusConflict(job_id, "running", "running and asked to end")
        message = "Pausing: the runner ends its attempt after its step"
        return self.transition(job_id, job.status, JobStatus.PAUSING, message=message)

    def request_resume(
        self, job_id: str, *, gpus: int | str | None = None, boxes: int | list[str] | None = None
    ) -> Job:
        """Resumes a paused job, which is prepared first if it was not. For a pausing job, withdraws the pause.

        `gpus`: the job's number of GPUs from now on; "auto": its plan chooses; None: as before. `boxes`: those of the
        job from now on, their number or their names, the head's own among them; None: as before.

        Raises IllegalTransition if the job is finished. Raises StatusConflict if it is neither paused nor pausing, or
        its cancellation was requested. A job that is still pausing cannot change its GPUs or boxes.
        """
        job = self.get(job_id)
        windlass, with_what = dict(job.windlass), list[str]()
        if gpus is not None and gpus != job.windlass.get("gpus", 1):
            words = {1: "one GPU", "auto": "the number of GPUs that its plan chooses"}
            windlass["gpus"] = gpus
            with_what.append(f"with {words.get(gpus, f'{gpus} GPUs')}")
        number = boxes if boxes is None or isinstance(boxes, int) else len(boxes)
        is_there = boxes == job.windlass.get("boxes") or (number == 1 and job.windlass.get("boxes") is None)
        if boxes is not None and not is_there:
            windlass |= {"boxes": boxes, "box": None}
            over = f"over {boxes} boxes" if isinstance(boxes, int) else f"over the boxes {', '.join(boxes)}"
            with_what.append("on one box" if number == 1 else over)
        changes = bool(with_what)
        if job.status in TERMINAL_STATUSES:
            raise IllegalTransition(job_id, job.status, JobStatus.RUNNING)
        if job.status is JobStatus.PAUSING:
            if job.cancel_requested or changes:
                why = " and asked to end" if job.cancel_requested else "; resume it again once it has paused"
                raise StatusConflict(job_id, JobStatus.PAUSED, f"pausing{why}")
            return self.transition(job_id, job.status, JobStatus.RUNNING, message="Resumed before it had paused")
        target = JobStatus.VALIDATING_FILES if job.hyperparameters is None else JobStatus.QUEUED
        if job.status is not JobStatus.PAUSED:
            first = "; pause it first" if changes and job.status is JobStatus.RUNNING else ""
            raise StatusConflict(job_id, JobStatus.PAUSED, f"{job.status}{first}")
        if not changes:
            return self.transition(job_id, job.status, target, message="Resumed", num_lost=0)
        message = f"Resumed {' '.join(with_what)}"
        return self.transition(job_id, job.status, target, message=message, num_lost=0, windlass=windlass)

    def transition(
        self,
        job_id: str,
        source: JobStatus,
        target: JobStatus,
        *,
        message: str,
        level: str = "info",
        seen: Job | None = None,
        **fields: Unpack[JobFields],
    ) -> Job:
        """Changes a job's status and writes an event. For a final status, also queues webhook deliveries.

        `seen`: the job as the caller has read it; the change is valid only for its attempt and its dispatcher.

        Raises:
            IllegalTransition: the table does not list the pair; nothing was written.
            StatusConflict: the job is not in `source`, or has another attempt or dispatcher; nothing was written.
        """
        check_transition(job_id, source, target)
        fence = _fence(seen)
        job = self.get(job_id)
        values: dict[str, Any] = {
            "waiting_reason": None,
            "preparation": None,
            "yields_to": None,
            **fields,
            "status": target,
        }
        now_s = time.time()
        if target is JobStatus.RUNNING and source is JobStatus.QUEUED:
            values["launched_at"] = now_s
            values["started_at"] = job.started_at or now_s
        if target is JobStatus.QUEUED:
            values["keeps_place"] = source in (JobStatus.RUNNING, JobStatus.PAUSING)
        if target in TERMINAL_STATUSES:
            values |= {"finished_at": now_s, "estimated_finish": None}
        self._update(job, (source,), fence, values)
        data: dict[str, Any] = {"status": target.value}
        if error := fields.get("error"):
            data["error"] = error
        job = self.get(job_id)
        self._event(job, message, level, data)
        if target in TERMINAL_STATUSES:
            WebhookRepository(self._session).enqueue_deliveries(job, target)
        return job

    def set_fields(self, job_id: str, *, seen: Job | None = None, **fields: Unpack[JobFields]) -> Job:
        """Writes fields of an unfinished job. Raises StatusConflict if it is finished, or as in `transition`."""
        fence = _fence(seen)
        job = self.get(job_id)
        self._update(job, ACTIVE_STATUSES, fence, dict(fields))
        return self.get(job_id)

    def check_held(self, seen: Job) -> None:
        """Raises StatusConflict if the job's attempt or dispatcher has changed since the caller read it."""
        fence = _fence(seen)
        job = self._session.get(Job, seen.id, populate_existing=True, with_for_update=True)
        if job is None:
            raise NotFound("fine-tuning job", seen.id)
        assert fence is not None
        if (job.attempt, job.lease_holder) != (fence.attempt, fence.lease_holder):
            raise StatusConflict(job.id, f"in {fence}", f"in {_fence(job)}")

    def set_waiting_reason(self, job_id: str, reason: str, *, seen: Job | None = None) -> None:
        """Sets the reason why a job waits, with an event if it is new. Raises StatusConflict as `set_fields` does."""
        fence = _fence(seen)
        job = self.get(job_id)
        if job.waiting_reason != reason:
            self._update(job, ACTIVE_STATUSES, fence, {"waiting_reason": reason})
            self._event(job, f"Waiting: {reason}", "info", {"waiting_reason": reason})

    def clear_waiting_reason(self, job_id: str, message: str, *, seen: Job) -> None:
        """Clears the reason why a job waits, with an event. Raises StatusConflict as `set_fields` does."""
        fence = _fence(seen)
        job = self.get(job_id)
        if job.waiting_reason is not None:
            self._update(job, ACTIVE_STATUSES, fence, {"waiting_reason": None})
            self._event(job, message, "info", {})

    def ask_to_yield(self, job_id: str, to: str, *, message: str, seen: Job) -> None:
        """Requests that a running job's attempt ends in favour of the job `to`.

        Raises StatusConflict if the job does not run, or as in `transition`.
        """
        fence = _fence(seen)
        job = self.get(job_id)
        self._update(job, (JobStatus.RUNNING,), fence, {"yields_to": to})
        self._event(job, message, "info", {})

    def _update(
        self, job: Job, statuses: Collection[JobStatus], fence: "_Fence | None", values: Mapping[str, Any]
    ) -> None:
        statement = update(Job).where(Job.id == job.id, Job.status.in_(statuses)).values(**values)
        expected = " or ".join(sorted(statuses))
        if fence is not None:
            statement = statement.where(
                Job.attempt == fence.attempt, Job.lease_holder.is_not_distinct_from(fence.lease_holder)
            )
            expected += f" in {fence}"
        if execute_change(self._session, statement) != 1:
            actual = self.get(job.id)
            raise StatusConflict(job.id, expected, f"{actual.status} in {_fence(actual)}")

    def _event(self, job: Job, message: str, level: str, data: dict[str, Any]) -> None:
        if self._writes_events:
            EventRepository(self._session).add(job.id, attempt=job.attempt, message=message, level=level, data=data)
