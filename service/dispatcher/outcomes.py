"""What a runner tells becomes the job's record, and its end: status, error or model, and result file."""

import csv
import hashlib
import io
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import event
from sqlalchemy.orm import Session

from windlass.actors.job import JournalReader, JournalRecord
from windlass.actors.scheduler import INTERRUPTED, PAUSED
from windlass.service.data import output_dir
from windlass.service.installation import Settings, about, node_of
from windlass.service.jobs import journal_path, keep_plan, plans_of
from windlass.storage.files import sync_path
from windlass.storage.sql import Database, Job, JobStatus
from windlass.storage.sql.repositories import (
    EventRepository,
    FileRepository,
    JobFields,
    JobRepository,
    Outcome,
    import_journal,
)

_LOG = logging.getLogger(__name__)

RESULT_FILENAME = "step_metrics.csv"
RESULTS_PURPOSE = "fine-tune-results"
# Attempts in a row without a step that is newly committed, of those that are the first by another plan, before the one
# that they were fruitful by holds again.
_MAX_FRUITLESS_BY_A_PLAN = 2
_NUM_METRICS_TO_SEARCH = 100
_ID_CHARS = 24
# The file's columns, and where the metrics have them.
_COLUMNS = {
    "step": "step",
    "train_loss": "train_loss",
    "train_accuracy": "train_mean_token_accuracy",
    "valid_loss": "valid_loss",
    "valid_mean_token_accuracy": "valid_mean_token_accuracy",
}


def fail_job(session: Session, job: Job, code: str, message: str, param: str | None = None) -> None:
    """End a job as failed; StatusConflict if it has ended or moved on meanwhile."""
    error = {"code": code, "message": message, "param": param}
    _change(session, job, JobStatus.FAILED, f"The job failed: {message}", level="error", error=error)


def fail_attempt(
    settings: Settings, session: Session, job: Job, code: str, message: str, param: str | None = None
) -> None:
    """End a job as failed, unless it may be another plan that made this attempt fail; StatusConflict as `fail_job`."""
    if not _fall_back(settings, session, job, message, job.num_lost):
        fail_job(session, job, code, message, param)


def cancel_job(session: Session, job: Job) -> None:
    """End a job as cancelled; StatusConflict if it has ended or moved on meanwhile."""
    _change(session, job, JobStatus.CANCELLED, "Fine-tuning job cancelled")


def in_words_to(session: Session, job: Job, other: str) -> str:
    """Another job, as this one's owner may know of it: users see their own jobs only."""
    found = JobRepository(session).find(other)
    return f"job {other}" if found is not None and found.owner == job.owner else "a job"


def open_journal(settings: Settings, job: Job) -> JournalReader:
    """What a job's runners have told and is not imported yet."""
    return JournalReader(journal_path(settings, job.id), (job.journal_attempt, job.journal_seq))


def take_in(
    database: Database,
    settings: Settings,
    job: Job,
    records: Sequence[JournalRecord],
    *,
    lost: str | None,
    when_lost: Callable[[Session, Job, str], None],
) -> bool:
    """Import records, and end the attempt if its outcome is among them; True if it is over.

    `lost` says why the runner is gone, should it have left no outcome; None while it is there. `when_lost` decides what
    becomes of the job then, or when the runner tells that it lost a process; it gets the reason. One transaction;
    JournalError or StatusConflict, and nothing written, where it can't be done.
    """
    if not records and lost is None:
        return False
    with database.write() as session:
        JobRepository(session).check_held(job)
        outcome = import_journal(session, job.id, job.attempt, records).outcome
        if outcome is not None and outcome.attempt == job.attempt:
            if outcome.data.get("status") == INTERRUPTED:
                when_lost(session, job, (outcome.data.get("error") or {}).get("message") or outcome.message)
            else:
                _apply(session, settings, job, outcome)
        elif lost is None:
            return False
        else:
            when_lost(session, job, lost)
    return True


def resume(settings: Settings, session: Session, job: Job, reason: str) -> None:
    """Put a job whose attempt was lost back into the queue, unless that has been of no use lately; or let it rest.

    StatusConflict if it has ended or moved on meanwhile.
    """
    _log_once_committed(session, job, f"lost: {reason}")
    last_fruitful = last_fruitful_attempt(session, job.id)
    num_lost = 0 if last_fruitful == job.attempt else job.num_lost + 1
    if JobRepository(session).get(job.id).cancel_requested:
        cancel_job(session, job)
    elif job.status is JobStatus.PAUSING:
        message = f"Paused at the last committed step: attempt {job.attempt} was lost: {reason}"
        _leave(session, job, message, level="warn", num_lost=num_lost)
    elif job.attempt - last_fruitful >= _MAX_FRUITLESS_BY_A_PLAN and _fall_back(
        settings, session, job, reason, num_lost
    ):
        pass
    elif num_lost < settings.max_attempts:
        message = f"Attempt {job.attempt} was lost: {reason}; going on from the last committed step"
        _leave(session, job, message, level="warn", num_lost=num_lost)
    else:
        tried = f"; {num_lost} attempts in a row brought no newly committed step" if num_lost > 1 else ""
        advice = "check `windlass doctor` and the kernel log, and submit the job again"
        fail_job(session, job, "runner_lost", f"{reason}{tried}; {advice}")


def _leave(
    session: Session, job: Job, message: str, *, level: str, num_lost: int, plan_number: int | None = None
) -> None:
    """The job is not over, but its attempt is: another one goes on, before those of its priority that have not begun.

    One that is to pause waits to be resumed.
    """
    fields: JobFields = {"estimated_finish": None, "num_lost": num_lost}
    if plan_number is not None:  # else the row may have another one by now
        fields["plan_number"] = plan_number
    target = JobStatus.PAUSED if job.status is JobStatus.PAUSING else JobStatus.QUEUED
    _change(session, job, target, message, level=level, **fields)


def _change(session: Session, job: Job, status: JobStatus, message: str, **fields: Any) -> None:
    JobRepository(session).transition(job.id, job.status, status, message=message, seen=job, **fields)
    error = fields.get("error")  # its message may quote the owner's data
    _log_once_committed(session, job, f"ended: {status}" if error is None else f"ended: {status} ({error['code']})")


def _log_once_committed(session: Session, job: Job, line: str) -> None:
    extra = about(job.id, job.attempt)
    event.listen(session, "after_commit", lambda _: _LOG.info(line, extra=extra), once=True)


def _fall_back(settings: Settings, session: Session, job: Job, reason: str, num_lost: int) -> bool:
    """Go on by the plan before, where no attempt by a corrected one has brought a step. False: it is not so."""
    plans = plans_of(settings, job)
    if len(plans) < 2 or not plans[-1].get("corrected") or (first := plans[-1]["from_attempt"]) is None:
        return False
    if job.attempt < first or last_fruitful_attempt(session, job.id) >= first:
        return False
    number = keep_plan(settings, job, {**plans[-2], "from_attempt": job.attempt + 1})
    message = f"Attempt {job.attempt} failed: {reason}; going on by the plan before, from the last committed step"
    _leave(session, job, message, level="warn", num_lost=num_lost, plan_number=number)
    return True


def last_fruitful_attempt(session: Session, job_id: str) -> int:
    """The attempt that told a training loss last, which is told once its step is committed; 0 if none ever did."""
    # Newest first. A few evaluations may have come since; attempts that brought nothing else are few.
    page = EventRepository(session).page(job_id, limit=_NUM_METRICS_TO_SEARCH, after=None, type="metrics")
    return next((event.attempt for event in page.rows if "train_loss" in event.data), 0)


def _apply(session: Session, settings: Settings, job: Job, outcome: Outcome) -> None:
    status = outcome.data.get("status")
    if status == JobStatus.SUCCEEDED:
        _succeed(session, settings, job, outcome)
    elif status == JobStatus.CANCELLED:
        cancel_job(session, job)
    elif status == PAUSED:
        _go_on(settings, session, job)
    elif status == JobStatus.FAILED:
        error = outcome.data.get("error") or {}
        message = error.get("message") or outcome.message
        code = error.get("code") or "runner_failed"
        fail_attempt(settings, session, job, code, message, error.get("param"))
    else:
        fail_job(session, job, "runner_failed", f"the runner ended with the unknown status {status!r}")


def _go_on(settings: Settings, session: Session, job: Job) -> None:
    """The attempt ended because it was asked to; its states wait for the next one."""
    now = JobRepository(session).get(job.id)  # the last steps have been imported since `job` was read
    if now.cancel_requested:
        cancel_job(session, job)
    elif job.status is JobStatus.PAUSING:
        _leave(session, job, f"Paused after step {now.step}", level="info", num_lost=0)
    elif now.yields_to is not None:
        paused = f"Paused after step {now.step} for {in_words_to(session, now, now.yields_to)} of higher priority"
        message = f"{paused}; it goes on by itself when there is room"
        _leave(session, job, message, level="info", num_lost=0)
    else:
        plans = plans_of(settings, job)
        has_new_plan = bool(plans) and plans[-1].get("from_attempt") == job.attempt + 1
        why = "so that another goes on with the new plan" if has_new_plan else "and was resumed before: it goes on"
        message = f"Attempt {job.attempt} ended after step {now.step}, {why}"
        _leave(session, job, message, level="info", num_lost=0)


def cut_short(settings: Settings, session: Session, job: Job, _reason: str) -> None:
    """The attempt was ended before its first step, for a job of higher priority; another one begins anew."""
    now = JobRepository(session).get(job.id)  # its owner may have asked for something meanwhile
    if now.yields_to is None or now.cancel_requested or last_fruitful_attempt(session, job.id) == job.attempt:
        _go_on(settings, session, job)
        return
    other = in_words_to(session, now, now.yields_to)
    message = f"Attempt {job.attempt} ended as it began, for {other} of higher priority; "
    message += "the job goes on by itself when there is room"
    _leave(session, job, message, level="info", num_lost=job.num_lost)


def _succeed(session: Session, settings: Settings, job: Job, outcome: Outcome) -> None:
    folder = output_dir(settings, job)
    if not (folder / "config.json").is_file():
        fail_job(session, job, "model_missing", f"the runner reported success, but there is no model in {folder}")
        return
    fields: dict[str, Any] = {}
    if (trained_tokens := outcome.data.get("trained_tokens")) is not None:
        fields["trained_tokens"] = trained_tokens
    if (total_steps := outcome.data.get("total_steps")) is not None:
        fields["total_steps"] = total_steps  # less than planned where it ended early
    remarks = "".join(f"{remark}. " for remark in outcome.data.get("remarks", ()))
    _change(
        session,
        job,
        JobStatus.SUCCEEDED,
        f"The job has successfully completed. {remarks}New fine-tuned model created: {folder.name}",
        fine_tuned_model=folder.name,
        result_files=[_write_result_file(session, settings, job)],
        **fields,
    )


def _write_result_file(session: Session, settings: Settings, job: Job) -> str:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(_COLUMNS)
    for metrics in EventRepository(session).metrics(job.id):
        values = (metrics.data.get(name) for name in _COLUMNS.values())
        table.writerow(["" if value is None else value for value in values])
    content = text.getvalue().encode()
    # Always the same for a job: where this transaction is undone, the next one's file takes the place of this.
    file_id = f"file-{hashlib.sha256(job.id.encode()).hexdigest()[:_ID_CHARS]}"
    fd = os.open(settings.files_dir / file_id, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    sync_path(settings.files_dir)  # before the row that tells of it
    FileRepository(session).add(
        file_id=file_id,
        filename=RESULT_FILENAME,
        purpose=RESULTS_PURPOSE,
        nbytes=len(content),
        owner=job.owner,
        node=node_of(settings.home),
    )
    return file_id
