"""Import of a runner's records into the job's row, and the job's end: status, error or model, and result file."""

import csv
import io
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import event
from sqlalchemy.orm import Session

from windlass.actors.job import JournalReader, JournalRecord
from windlass.actors.runtime.moving import MOVED
from windlass.actors.scheduler import INTERRUPTED, PAUSED
from windlass.service.data import output_dir
from windlass.service.dispatcher.placement import told_boxes
from windlass.service.installation import Settings, about, node_of
from windlass.service.jobs import (
    fields_on_one_box,
    is_for_several,
    journal_path,
    keep_plan,
    keep_stages,
    next_simulated_counts,
    next_stages_of,
    plans_of,
    record_prediction,
    stages_of,
)
from windlass.service.machine.fleet import read_hold, result_file_id
from windlass.storage.files import sync_path
from windlass.storage.sql import Database, Job, JobStatus, StatusConflict
from windlass.storage.sql.repositories import (
    HELD_FOR_PART,
    BoxRepository,
    BoxState,
    EventRepository,
    FileRepository,
    JobFields,
    JobRepository,
    Outcome,
    PartRepository,
    import_journal,
)

_LOG = logging.getLogger(__name__)

RESULT_FILENAME = "step_metrics.csv"
RESULTS_PURPOSE = "fine-tune-results"
# Consecutive attempts by a corrected plan without a newly committed step, after which the previous plan is used again.
_MAX_ATTEMPTS_WITHOUT_PROGRESS = 2
_NUM_METRICS_TO_SEARCH = 100
# Errors before an attempt's first step that say nothing about the job's data.
_DID_NOT_START = ("start_failed", "does_not_fit")
# The columns of the result file, with their names in the metrics.
_COLUMNS = {
    "step": "step",
    "train_loss": "train_loss",
    "train_accuracy": "train_mean_token_accuracy",
    "valid_loss": "valid_loss",
    "valid_mean_token_accuracy": "valid_mean_token_accuracy",
}


def fail_job(session: Session, job: Job, code: str, message: str, param: str | None = None) -> None:
    """Ends a job as failed. Raises StatusConflict if it has ended or changed meanwhile."""
    error = {"code": code, "message": message, "param": param}
    _change(session, job, JobStatus.FAILED, f"The job failed: {message}", level="error", error=error)


def fail_attempt(
    settings: Settings, session: Session, job: Job, code: str, message: str, param: str | None = None
) -> None:
    """Ends a job as failed, unless a corrected plan may have caused the failure, or it has states and did not start.

    A job with committed steps whose attempt could not start is paused: what is missing may come back, and its states
    would be lost otherwise. Raises StatusConflict as `fail_job`.
    """
    if JobRepository(session).get(job.id).cancel_requested:
        cancel_job(session, job)
    elif _fall_back(settings, session, job, message, job.num_lost):
        pass
    elif next_stages_of(settings, job.id) is not None:
        _pause_after_move(session, job, message)
    elif code in _DID_NOT_START and (last := last_attempt_with_progress(session, job.id)):
        told = (
            f"Paused with the states of attempt {last}, because attempt {job.attempt} could not start: {message}. Mend "
            "that, or let it have other numbers of GPUs or budgets, and resume it; or cancel it, which frees its space"
        )
        _change(session, job, JobStatus.PAUSED, told, level="error", estimated_finish=None)
    else:
        fail_job(session, job, code, message, param)


def cancel_job(session: Session, job: Job) -> None:
    """Ends a job as cancelled. Raises StatusConflict if it has ended or changed meanwhile."""
    _change(session, job, JobStatus.CANCELLED, "Fine-tuning job cancelled")


def pause_job(session: Session, job: Job, message: str) -> None:
    """Pauses a queued job whose settings its owner must change. Raises StatusConflict if it has changed meanwhile."""
    if JobRepository(session).get(job.id).windlass != job.windlass:
        raise StatusConflict(job.id, "as it was read", "resumed with other settings")
    _change(session, job, JobStatus.PAUSED, message, level="warn")


def name_for_owner_of(session: Session, job: Job, other: str) -> str:
    """Names another job for this job's owner. Users see the ids of their own jobs only."""
    other_job = JobRepository(session).find(other)
    return f"job {other}" if other_job is not None and other_job.owner == job.owner else "a job"


def open_journal(settings: Settings, job: Job) -> JournalReader:
    """Opens the records of a job's runners that are not imported yet."""
    return JournalReader(journal_path(settings, job.id), (job.journal_attempt, job.journal_seq))


def import_records(
    database: Database,
    settings: Settings,
    job: Job,
    records: Sequence[JournalRecord],
    *,
    lost: str | None,
    when_lost: Callable[[Session, Job, str], None],
) -> bool:
    """Imports records, and ends the attempt if its outcome is among them. Returns True if the attempt is over.

    `lost`: the reason why the runner is gone, used if it left no outcome; None while it lives. `when_lost` decides
    about a job whose runner or other process was lost; it gets the reason. All writes are one transaction. If it raises
    JournalError or StatusConflict, nothing is written.
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
    record_prediction(database, settings, job)
    return True


def handle_loss(settings: Settings, session: Session, job: Job, reason: str) -> None:
    """Handles a lost attempt: queues or pauses the job for another one, or fails it after too many without progress.

    Raises StatusConflict if the job has ended or changed meanwhile.
    """
    _log_once_committed(session, job, f"lost: {reason}")
    last_with_progress = last_attempt_with_progress(session, job.id)
    num_lost = 0 if last_with_progress == job.attempt else job.num_lost + 1
    if JobRepository(session).get(job.id).cancel_requested:
        cancel_job(session, job)
    elif job.status is JobStatus.PAUSING:
        message = f"Paused at the last committed step: attempt {job.attempt} was lost: {reason}"
        _end_attempt(session, job, message, level="warn", num_lost=num_lost)
    elif job.attempt - last_with_progress >= _MAX_ATTEMPTS_WITHOUT_PROGRESS and _fall_back(
        settings, session, job, reason, num_lost
    ):
        pass
    elif num_lost < settings.max_attempts:
        message = f"Attempt {job.attempt} was lost: {reason}; going on from the last committed step"
        _end_attempt(session, job, message, level="warn", num_lost=num_lost)
    elif next_stages_of(settings, job.id) is not None:
        _pause_after_move(session, job, reason)
    else:
        tried = f"; {num_lost} attempts in a row brought no newly committed step" if num_lost > 1 else ""
        advice = "check `windlass doctor` and the kernel log, and submit the job again"
        fail_job(session, job, "runner_lost", f"{reason}{tried}; {advice}")


def _end_attempt(
    session: Session, job: Job, message: str, *, level: str, num_lost: int, changes: JobFields | None = None
) -> None:
    """Ends the attempt but not the job. The next attempt goes ahead of jobs of its priority that have not begun.

    A job that is to pause becomes paused. `changes`: of other fields of its row, which else stay as they are now.
    """
    fields: JobFields = {**(changes or {}), "estimated_finish": None, "num_lost": num_lost}
    target = JobStatus.PAUSED if job.status is JobStatus.PAUSING else JobStatus.QUEUED
    _change(session, job, target, message, level=level, **fields)


def _change(session: Session, job: Job, status: JobStatus, message: str, **fields: Any) -> None:
    JobRepository(session).transition(job.id, job.status, status, message=message, seen=job, **fields)
    error = fields.get("error")  # only its code is logged, because its message may quote the owner's data
    _log_once_committed(session, job, f"ended: {status}" if error is None else f"ended: {status} ({error['code']})")


def _log_once_committed(session: Session, job: Job, line: str) -> None:
    extra = about(job.id, job.attempt)
    event.listen(session, "after_commit", lambda _: _LOG.info(line, extra=extra), once=True)


def _fall_back(settings: Settings, session: Session, job: Job, reason: str, num_lost: int) -> bool:
    """Continues with the plan before the correction if no attempt by the corrected plan has committed a step.

    Returns False otherwise. The corrected plan may be stored several times, for different numbers of GPUs.
    """
    plans = plans_of(settings, job)
    before = next((plan for plan in reversed(plans) if not plan.corrected), None)
    if before is None or not plans[-1].corrected or (first := plans[-1].from_attempt) is None:
        return False
    if job.attempt < first or last_attempt_with_progress(session, job.id) >= first:
        return False
    about = {"measured": True, "from_attempt": job.attempt + 1}
    number = keep_plan(settings, job, before.model_copy(update=about))
    message = f"Attempt {job.attempt} failed: {reason}; going on by the plan before, from the last committed step"
    _end_attempt(session, job, message, level="warn", num_lost=num_lost, changes={"plan_number": number})
    return True


def last_attempt_with_progress(session: Session, job_id: str) -> int:
    """Returns the last attempt that committed a step with a training loss, or 0."""
    # Newest first. Only a few evaluations or attempts without a training loss can be newer.
    page = EventRepository(session).page(job_id, limit=_NUM_METRICS_TO_SEARCH, after=None, type="metrics")
    return next((event.attempt for event in page.rows if "train_loss" in event.data), 0)


def has_step(session: Session, job: Job) -> bool:
    """Returns whether the job's current attempt has committed a step with a training loss."""
    return last_attempt_with_progress(session, job.id) == job.attempt


def _apply(session: Session, settings: Settings, job: Job, outcome: Outcome) -> None:
    status = outcome.data.get("status")
    if status == JobStatus.SUCCEEDED:
        _succeed(session, settings, job, outcome)
    elif status == JobStatus.CANCELLED:
        cancel_job(session, job)
    elif status == PAUSED:
        _requeue_after_pause(settings, session, job)
    elif status == MOVED:
        _go_on_after_move(settings, session, job)
    elif status == JobStatus.FAILED:
        error = outcome.data.get("error") or {}
        message = error.get("message") or outcome.message
        code = error.get("code") or "runner_failed"
        fail_attempt(settings, session, job, code, message, error.get("param"))
    else:
        fail_job(session, job, "runner_failed", f"the runner ended with the unknown status {status!r}")


def _pause_after_move(session: Session, job: Job, reason: str) -> None:
    """Pauses a job whose states could not be moved. They are whole where they are."""
    message = (
        f"Paused, because its states could not be moved: {reason}. Resume it when that is mended, or with --boxes "
        "and the boxes that it had, on which it then goes on"
    )
    _change(session, job, JobStatus.PAUSED, message, level="error", estimated_finish=None, num_lost=0)


def _go_on_after_move(settings: Settings, session: Session, job: Job) -> None:
    """Puts the new division into force, to which an attempt has moved the job's states."""
    after = next_stages_of(settings, job.id)
    if after is not None:  # else it is in force already, and this process was killed then
        keep_stages(settings, job.id, replace(after, from_attempt=job.attempt + 1))
    next_simulated_counts(settings, job.id)
    plan = stages_of(settings, job.id)
    if plan is None:
        raise ValueError("the job's plan over its boxes cannot be read")
    positions = {box: position for position, box in enumerate(plan.boxes)}
    parts, boxes = PartRepository(session), BoxRepository(session)
    for part in parts.of_job(job.id):
        box = boxes.by_node(part.node)
        parts.place(job.id, part.node, None if box is None else positions.get(box.name))
    if JobRepository(session).get(job.id).cancel_requested:
        cancel_job(session, job)
        return
    changes: JobFields = {}
    if plan.is_over_several:
        message = f"Goes on over the boxes {', '.join(plan.boxes)}, which have its states now"
    else:
        message = f"Goes on on box {plan.boxes[0]}, which has all of its states now"
        if not is_for_several(job):  # else its owner has changed the boxes since, and its states move again
            changes = fields_on_one_box(settings, job, plan)
    _end_attempt(session, job, message, level="info", num_lost=0, changes=changes)


def _requeue_after_pause(settings: Settings, session: Session, job: Job) -> None:
    """Handles an attempt that ended on request. Its states stay for the next one."""
    now = JobRepository(session).get(job.id)  # a new read, because the last steps were imported since `job` was read
    if now.cancel_requested:
        cancel_job(session, job)
    elif job.status is JobStatus.PAUSING:
        _end_attempt(session, job, f"Paused after step {now.step}", level="info", num_lost=0)
    elif now.yields_to is not None:
        paused = f"Paused after step {now.step} for {name_for_owner_of(session, now, now.yields_to)} of higher priority"
        message = f"{paused}; it goes on by itself when there is room"
        _end_attempt(session, job, message, level="info", num_lost=0)
    else:
        plans = plans_of(settings, job)
        has_new_plan = bool(plans) and plans[-1].from_attempt == job.attempt + 1
        hold = read_hold(settings.home)
        if hold is None and PartRepository(session).hold(node_of(settings.home)):
            hold = HELD_FOR_PART
        hold = hold or _drained(session, job)
        if hold is not None:
            why = f"because {hold}; the job goes on by itself afterwards"
        else:
            why = "so that another goes on with the new plan" if has_new_plan else "and was resumed before: it goes on"
        message = f"Attempt {job.attempt} ended after step {now.step}, {why}"
        _end_attempt(session, job, message, level="info", num_lost=0)


def _drained(session: Session, job: Job) -> str | None:
    """Names the boxes of a job over several that are draining, None if none is."""
    boxes = (BoxRepository(session).by_node(part.node) for part in PartRepository(session).of_job(job.id))
    names = [box.name for box in boxes if box is not None and box.state == BoxState.DRAINING.value]
    return f"{told_boxes(names)} {'is' if len(names) == 1 else 'are'} draining" if names else None


def handle_preemption(settings: Settings, session: Session, job: Job, reason: str) -> None:
    """Handles an attempt that was ended before its first step for a job of higher priority.

    The next one starts anew.
    """
    now = JobRepository(session).get(job.id)  # its owner may have requested something meanwhile
    if now.yields_to is None or now.cancel_requested or has_step(session, job):
        _requeue_after_pause(settings, session, job)
        return
    _log_once_committed(session, job, f"ended to make room: {reason}")
    other = name_for_owner_of(session, now, now.yields_to)
    message = f"Attempt {job.attempt} ended as it began, for {other} of higher priority; "
    message += "the job goes on by itself when there is room"
    _end_attempt(session, job, message, level="info", num_lost=job.num_lost)


def _succeed(session: Session, settings: Settings, job: Job, outcome: Outcome) -> None:
    folder = output_dir(settings, job)
    if not (folder / "config.json").is_file():
        fail_job(session, job, "model_missing", f"the runner reported success, but there is no model in {folder}")
        return
    fields: dict[str, Any] = {}
    if (trained_tokens := outcome.data.get("trained_tokens")) is not None:
        fields["trained_tokens"] = trained_tokens
    if (total_steps := outcome.data.get("total_steps")) is not None:
        fields["total_steps"] = total_steps  # fewer than planned if it ended early
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
    # The same id for every try: if this transaction is undone, the next try overwrites the file.
    file_id = result_file_id(job.id)
    fd = os.open(settings.files_dir / file_id, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    sync_path(settings.files_dir)  # the folder is durable before a row refers to the file
    FileRepository(session).add(
        file_id=file_id,
        filename=RESULT_FILENAME,
        purpose=RESULTS_PURPOSE,
        nbytes=len(content),
        owner=job.owner,
        node=node_of(settings.home),
    )
    return file_id
