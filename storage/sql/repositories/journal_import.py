"""Imports a runner's journal into the tables, each record exactly once."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from windlass.storage.sql import Checkpoint, Job, JobEvent, JobMetrics, JournalError, NotFound

_MESSAGE = "message"
_METRICS = "metrics"
_CHECKPOINT = "checkpoint"
_OUTCOME = "outcome"


class MetricsRecord(Protocol):
    """The parts of a record or an event that tell the metrics of a step."""

    @property
    def attempt(self) -> int: ...
    @property
    def created_at(self) -> float: ...
    @property
    def data(self) -> dict[str, Any]: ...


class Record(MetricsRecord, Protocol):
    """The interface of a journal record. The journal's own class implements it."""

    @property
    def seq(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def level(self) -> str: ...
    @property
    def message(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of an attempt, as its runner recorded it."""

    attempt: int
    message: str
    data: dict[str, Any]  # status, error, trained_tokens, model_dir


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The result of an import."""

    num_records: int  # new records
    outcome: Outcome | None  # the caller must apply it in the same transaction, because it is returned only once


def import_journal(session: Session, job_id: str, attempt: int, records: Iterable[Record]) -> Imported:
    """Imports the records after the job's cursor and advances the cursor, in the caller's transaction.

    Records at or before the cursor are skipped, so a batch may be imported again.

    Raises:
        JournalError: a record is of an attempt newer than `attempt`, or an attempt has a gap; nothing was written.
        NotFound: there is no such job.
    """
    job = session.scalar(
        select(Job).where(Job.id == job_id).with_for_update().execution_options(populate_existing=True)
    )
    if job is None:
        raise NotFound("fine-tuning job", job_id)
    fresh = _after_cursor(job, attempt, records)
    outcome = None
    for record in fresh:
        if record.kind == _OUTCOME:
            outcome = Outcome(attempt=record.attempt, message=record.message, data=record.data)
            continue
        _add_event(session, job_id, record)
        if record.kind == _METRICS:
            put_metrics(session, job, record)
        elif record.kind == _CHECKPOINT:
            _put_checkpoint(session, job_id, record)
    if fresh:
        job.journal_attempt, job.journal_seq = fresh[-1].attempt, fresh[-1].seq
    session.flush()
    return Imported(num_records=len(fresh), outcome=outcome)


def _after_cursor(job: Job, attempt: int, records: Iterable[Record]) -> list[Record]:
    fresh: list[Record] = []
    last = (job.journal_attempt, job.journal_seq)
    for record in records:
        position = (record.attempt, record.seq)
        if position <= last:
            continue
        if record.attempt > attempt:
            raise JournalError(job.id, f"record {record.seq} is of attempt {record.attempt}, which is after {attempt}")
        expected = last[1] + 1 if record.attempt == last[0] else 1
        if record.seq != expected:
            reason = f"attempt {record.attempt} goes on with record {record.seq} where {expected} was expected"
            raise JournalError(job.id, reason)
        if record.kind == _METRICS and not isinstance(record.data.get("step"), int):
            raise JournalError(job.id, f"metrics record {record.seq} of attempt {record.attempt} names no step")
        fresh.append(record)
        last = position
    return fresh


def _add_event(session: Session, job_id: str, record: Record) -> None:
    session.add(
        JobEvent(
            job_id=job_id,
            attempt=record.attempt,
            seq=record.seq,
            created_at=record.created_at,
            level=record.level,
            message=record.message,
            type=_METRICS if record.kind == _METRICS else _MESSAGE,
            data=record.data,
        )
    )


def put_metrics(session: Session, job: Job, record: MetricsRecord) -> None:
    """Writes a step's metrics, and the progress that the job's row shows."""
    step = record.data["step"]
    # An earlier attempt may have trained beyond its last commit; this attempt's metrics replace those. A record with
    # only an evaluation belongs to a step that an earlier attempt trained, so that step's metrics stay.
    first = step if "train_loss" in record.data else step + 1
    stale = (JobMetrics.job_id == job.id, JobMetrics.step >= first, JobMetrics.attempt < record.attempt)
    session.execute(delete(JobMetrics).where(*stale))
    row = session.get(JobMetrics, (job.id, step))
    if row is None:
        row = JobMetrics(job_id=job.id, step=step, attempt=record.attempt, created_at=record.created_at, data={})
        session.add(row)
    row.data = {**row.data, **record.data}  # a step's evaluation may come in a record of its own
    job.step = step
    job.total_steps = record.data.get("total_steps", job.total_steps)
    job.trained_tokens = record.data.get("trained_tokens", job.trained_tokens)
    if "remaining_s" in record.data:  # null: the runner has no reliable estimate
        remaining_s = record.data["remaining_s"]
        job.estimated_finish = None if remaining_s is None else record.created_at + remaining_s
        # Runners of earlier releases do not report this field.
        job.finish_is_measured = not record.data.get("remaining_is_estimate", True)
    session.flush()


def _keep_checkpoints(session: Session, job_id: str, kept: dict[int, list[str]]) -> None:
    """Deletes the rows of all checkpoints except the `kept` steps, and updates the reasons of these."""
    for row in session.scalars(select(Checkpoint).where(Checkpoint.job_id == job_id)).all():
        if row.step_number in kept:
            row.reasons = kept[row.step_number]
        else:
            session.delete(row)
    session.flush()


def _put_checkpoint(session: Session, job_id: str, record: Record) -> None:
    values = {
        "attempt": record.attempt,
        "created_at": record.created_at,
        "model": record.data["fine_tuned_model_checkpoint"],
        "path": record.data["path"],
        "metrics": record.data.get("metrics") or {},
        "reasons": record.data.get("reasons") or [],
        "nbytes": record.data.get("nbytes"),
    }
    step = record.data["step_number"]
    if (kept := record.data.get("kept")) is not None:
        _keep_checkpoints(session, job_id, dict(kept))
    where = (Checkpoint.job_id == job_id, Checkpoint.step_number == step)
    # A resumed attempt may write a checkpoint again. Its id does not change, because clients may have stored it.
    checkpoint_id = session.scalar(select(Checkpoint.id).where(*where))
    if checkpoint_id is None:
        session.add(Checkpoint(id=f"ftckpt-{secrets.token_hex(12)}", job_id=job_id, step_number=step, **values))
    else:
        session.execute(update(Checkpoint).where(*where).values(**values))
    session.flush()
