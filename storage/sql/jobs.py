"""The jobs table: creation, lists, and the only place where a status changes."""

import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

from sqlalchemy import CursorResult, func, or_, select, tuple_, update
from sqlalchemy.orm import Session

from windlass.storage.sql.errors import NotFound, StatusConflict
from windlass.storage.sql.events import EventRepository
from windlass.storage.sql.models import Job
from windlass.storage.sql.paging import Page, page_of
from windlass.storage.sql.statuses import ACTIVE_STATUSES, TERMINAL_STATUSES, JobStatus, check_transition
from windlass.storage.sql.webhooks import WebhookRepository


def new_job_id() -> str:
    """An id nobody can guess."""
    return f"ftjob-{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """A job as it was asked for; everything has been checked."""

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


class JobFields(TypedDict, total=False):
    """What a change of status, or of nothing but these, may write beside it."""

    attempt: int
    hyperparameters: dict[str, Any]
    waiting_reason: str | None
    step: int
    total_steps: int
    trained_tokens: int
    estimated_finish: float | None
    plan_number: int
    error: dict[str, Any]
    fine_tuned_model: str
    result_files: list[str]


class JobRepository:
    """Jobs, within the caller's transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def create(self, new: NewJob) -> Job:
        """Add a job, to be validated first, and its first event."""
        job = Job(
            id=new_job_id(),
            status=JobStatus.VALIDATING_FILES,
            created_at=time.time(),
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
            result_files=[],
        )
        self._session.add(job)
        self._session.flush()
        self._event(job, f"Created fine-tuning job: {job.id}", "info", {"status": job.status.value})
        return job

    def get(self, job_id: str) -> Job:
        """The job as it is now; NotFound if there is none."""
        job = self._session.get(Job, job_id, populate_existing=True)
        if job is None:
            raise NotFound("fine-tuning job", job_id)
        return job

    def by_idempotency_key(self, key: str) -> Job | None:
        """The job that a request with this key made."""
        return self._session.scalar(select(Job).where(Job.idempotency_key == key))

    def page(self, *, limit: int, after: str | None, metadata: Mapping[str, str]) -> Page[Job]:
        """Jobs, newest first, that carry all these metadata pairs; NotFound if `after` is not a job's id."""
        query = select(Job).order_by(Job.created_at.desc(), Job.id.desc()).limit(limit + 1)
        for key, value in metadata.items():
            query = query.where(Job.job_metadata[key].as_string() == value)
        if after is not None:
            last = self.get(after)
            query = query.where(tuple_(Job.created_at, Job.id) < tuple_(last.created_at, last.id))
        return page_of(self._session.scalars(query).all(), limit)

    def with_status(self, *statuses: JobStatus) -> Sequence[Job]:
        """Jobs in any of these statuses, in the order in which they get their turn: (priority, created_at, id)."""
        query = select(Job).where(Job.status.in_(statuses)).order_by(Job.priority, Job.created_at, Job.id)
        return self._session.scalars(query).all()

    def count_by_status(self) -> dict[JobStatus, int]:
        """Of all jobs; statuses that none is in are left out."""
        query = select(Job.status, func.count().label("number")).group_by(Job.status)
        return {row.status: row.number for row in self._session.execute(query)}

    def oldest_queued_at(self) -> float | None:
        """When the oldest job that is queued was created."""
        return self._session.scalar(select(func.min(Job.created_at)).where(Job.status == JobStatus.QUEUED))

    def cancel_requests(self) -> Sequence[Job]:
        """Jobs that hold a runner and whose owner wants them cancelled."""
        query = select(Job).where(Job.cancel_requested, Job.status.in_(ACTIVE_STATUSES)).order_by(Job.created_at)
        return self._session.scalars(query).all()

    def active_using_file(self, file_id: str) -> Sequence[Job]:
        """Unfinished jobs that train or validate on a file."""
        uses = or_(Job.training_file == file_id, Job.validation_file == file_id)
        return self._session.scalars(select(Job).where(uses, Job.status.in_(ACTIVE_STATUSES))).all()

    def active_using_model(self, model: str) -> Sequence[Job]:
        """Unfinished jobs that start from a model."""
        return self._session.scalars(select(Job).where(Job.model == model, Job.status.in_(ACTIVE_STATUSES))).all()

    def request_cancel(self, job_id: str) -> Job:
        """Cancel a job that no runner holds; ask the dispatcher to stop one that a runner does.

        Raises IllegalTransition if the job is finished. Asking again changes nothing.
        """
        job = self.get(job_id)
        check_transition(job_id, job.status, JobStatus.CANCELLED)
        if job.status in (JobStatus.VALIDATING_FILES, JobStatus.QUEUED, JobStatus.PAUSED):
            return self.transition(job_id, job.status, JobStatus.CANCELLED, message="Fine-tuning job cancelled")
        if not job.cancel_requested:
            self._update(job, (job.status,), job.attempt, {"cancel_requested": True})
            self._event(job, "Cancelling: the runner is asked to stop", "info", {})
        return self.get(job_id)

    def transition(
        self,
        job_id: str,
        source: JobStatus,
        target: JobStatus,
        *,
        message: str,
        level: str = "info",
        expected_attempt: int | None = None,
        **fields: Unpack[JobFields],
    ) -> Job:
        """Change a status, and write its event.

        Raises IllegalTransition where the table does not list the pair, and StatusConflict where the job is not in
        `source`, or not in `expected_attempt` if one is given; then nothing is written.
        """
        check_transition(job_id, source, target)
        job = self.get(job_id)
        values: dict[str, Any] = {"waiting_reason": None, **fields, "status": target}
        now_s = time.time()
        if target is JobStatus.RUNNING and job.started_at is None:
            values["started_at"] = now_s
        if target in TERMINAL_STATUSES:
            values |= {"finished_at": now_s, "estimated_finish": None}
        self._update(job, (source,), expected_attempt, values)
        data: dict[str, Any] = {"status": target.value}
        if error := fields.get("error"):
            data["error"] = error
        job = self.get(job_id)
        self._event(job, message, level, data)
        if target in TERMINAL_STATUSES:
            WebhookRepository(self._session).tell(job, target)
        return job

    def set_fields(self, job_id: str, *, expected_attempt: int | None = None, **fields: Unpack[JobFields]) -> Job:
        """Write fields of an unfinished job; StatusConflict if it is finished or another attempt has taken over."""
        job = self.get(job_id)
        self._update(job, ACTIVE_STATUSES, expected_attempt, dict(fields))
        return self.get(job_id)

    def set_waiting_reason(self, job_id: str, reason: str) -> None:
        """Say why a job does not run, with an event if the reason is new."""
        job = self.get(job_id)
        if job.waiting_reason != reason:
            self._update(job, ACTIVE_STATUSES, None, {"waiting_reason": reason})
            self._event(job, f"Waiting: {reason}", "info", {"waiting_reason": reason})

    def _update(
        self, job: Job, statuses: Collection[JobStatus], expected_attempt: int | None, values: Mapping[str, Any]
    ) -> None:
        statement = update(Job).where(Job.id == job.id, Job.status.in_(statuses)).values(**values)
        expected = " or ".join(sorted(statuses))
        if expected_attempt is not None:
            statement = statement.where(Job.attempt == expected_attempt)
            expected += f" in attempt {expected_attempt}"
        result = self._session.execute(statement.execution_options(synchronize_session=False))
        assert isinstance(result, CursorResult)
        if result.rowcount != 1:
            actual = self.get(job.id)
            raise StatusConflict(job.id, expected, f"{actual.status} in attempt {actual.attempt}")

    def _event(self, job: Job, message: str, level: str, data: dict[str, Any]) -> None:
        EventRepository(self._session).add(job.id, attempt=job.attempt, message=message, level=level, data=data)
