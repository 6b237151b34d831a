"""What a runner tells becomes the job's record, and its end: status, error or model, and result file."""

import csv
import io
import os
from collections.abc import Sequence
from typing import Any

from sqlalchemy.orm import Session

from windlass.actors.journal import JournalReader, JournalRecord
from windlass.service.files import RESULTS_PURPOSE
from windlass.service.job_specs import ARENA_DIR, journal_path
from windlass.service.model_ids import fine_tuned_model_id, model_dir
from windlass.service.settings import Settings
from windlass.storage.arena import remove_leftovers
from windlass.storage.ids import JobId
from windlass.storage.sql.database import Database
from windlass.storage.sql.events import EventRepository
from windlass.storage.sql.files import FileRepository, new_file_id
from windlass.storage.sql.jobs import JobRepository
from windlass.storage.sql.journal import Outcome, import_journal
from windlass.storage.sql.models import Job
from windlass.storage.sql.statuses import JobStatus
from windlass.storage.tensor_store import store_path

RESULT_FILENAME = "step_metrics.csv"
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
    JobRepository(session).transition(
        job.id,
        job.status,
        JobStatus.FAILED,
        message=f"The job failed: {message}",
        level="error",
        expected_attempt=job.attempt,
        error={"code": code, "message": message, "param": param},
    )


def cancel_job(session: Session, job: Job) -> None:
    """End a job as cancelled; StatusConflict if it has ended or moved on meanwhile."""
    JobRepository(session).transition(
        job.id,
        job.status,
        JobStatus.CANCELLED,
        message="Fine-tuning job cancelled",
        expected_attempt=job.attempt,
    )


def open_journal(settings: Settings, job: Job) -> JournalReader:
    """What a job's runners have told and is not imported yet."""
    return JournalReader(journal_path(settings, job.id), (job.journal_attempt, job.journal_seq))


def take_in(
    database: Database, settings: Settings, job: Job, records: Sequence[JournalRecord], *, lost: tuple[str, str] | None
) -> bool:
    """Import records, and end the job if its outcome is among them; True if it has ended.

    `lost`: code and message of the error that the job ends with if its runner is gone and left no outcome; None while
    the runner is there. One transaction; JournalError or StatusConflict, and nothing written, where it can't be done.
    """
    if not records and lost is None:
        return False
    with database.write() as session:
        outcome = import_journal(session, job.id, job.attempt, records).outcome
        if outcome is not None and outcome.attempt == job.attempt:
            _apply(session, settings, job, outcome)
        elif lost is None:
            return False
        elif job.cancel_requested:
            cancel_job(session, job)
        else:
            code, message = lost
            fail_job(session, job, code, message)
    return True


def has_states(settings: Settings, job_id: str) -> bool:
    """Whether model states of a job lie on an SSD."""
    return any(store_path(ssd_dir, JobId(job_id)).exists() for ssd_dir in settings.ssd_dirs)


def remove_states(settings: Settings, job_id: str) -> None:
    """Free the SSD space and the memory of a job whose runner is gone; one that was killed could not."""
    for ssd_dir in settings.ssd_dirs:
        store_path(ssd_dir, JobId(job_id)).unlink(missing_ok=True)
    remove_leftovers(ARENA_DIR)


def _apply(session: Session, settings: Settings, job: Job, outcome: Outcome) -> None:
    status = outcome.data.get("status")
    if status == JobStatus.SUCCEEDED:
        _succeed(session, settings, job, outcome)
    elif status == JobStatus.CANCELLED:
        cancel_job(session, job)
    elif status == JobStatus.FAILED:
        error = outcome.data.get("error") or {}
        fail_job(session, job, error.get("code") or "runner_failed", error.get("message") or outcome.message)
    else:
        fail_job(session, job, "runner_failed", f"the runner ended with the unknown status {status!r}")


def _succeed(session: Session, settings: Settings, job: Job, outcome: Outcome) -> None:
    model = fine_tuned_model_id(job.model, job.suffix, job.id)
    folder = model_dir(model, models_dir=settings.models_dir, fine_tuned_dir=settings.fine_tuned_dir)
    if not (folder / "config.json").is_file():
        fail_job(session, job, "model_missing", f"the runner reported success, but there is no model in {folder}")
        return
    fields: dict[str, Any] = {}
    if (trained_tokens := outcome.data.get("trained_tokens")) is not None:
        fields["trained_tokens"] = trained_tokens
    JobRepository(session).transition(
        job.id,
        job.status,
        JobStatus.SUCCEEDED,
        message=f"The job has successfully completed. New fine-tuned model created: {model}",
        expected_attempt=job.attempt,
        fine_tuned_model=model,
        result_files=[_write_result_file(session, settings, job.id)],
        **fields,
    )


def _write_result_file(session: Session, settings: Settings, job_id: str) -> str:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(_COLUMNS)
    for metrics in EventRepository(session).metrics(job_id):
        values = (metrics.data.get(name) for name in _COLUMNS.values())
        table.writerow(["" if value is None else value for value in values])
    content = text.getvalue().encode()
    file_id = new_file_id()
    fd = os.open(settings.files_dir / file_id, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
    FileRepository(session).add(file_id=file_id, filename=RESULT_FILENAME, purpose=RESULTS_PURPOSE, nbytes=len(content))
    return file_id
