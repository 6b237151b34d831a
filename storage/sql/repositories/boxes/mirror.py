"""Jobs that another box works on. The head gives them away and keeps copies of their rows, which reports renew.

A job's row in the database of its box is the authority. The head's row is a copy, except for what users have requested
and the box has not carried out yet. Every method may be repeated with the same arguments: a lost answer, a killed
process and a database restored from an older backup need no special case.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, exists, func, select, update
from sqlalchemy.orm import Session

from windlass.storage.sql import (
    ACTIVE_STATUSES,
    TERMINAL_STATUSES,
    Box,
    BoxInstruction,
    Checkpoint,
    File,
    IllegalTransition,
    Job,
    JobEvent,
    JobStatus,
    NotFound,
    StatusConflict,
    execute_change,
)
from windlass.storage.sql.repositories import (
    DeletionRepository,
    EventRepository,
    FileRepository,
    JobRepository,
    WebhookRepository,
    put_metrics,
)
from windlass.storage.sql.repositories.boxes.rows import BoxRepository, BoxState, Instruction

# The columns that the box decides about.
REPORTED_COLUMNS = (
    "status",
    "attempt",
    "started_at",
    "launched_at",
    "finished_at",
    "estimated_finish",
    "finish_is_measured",
    "hyperparameters",
    "cancel_requested",
    "waiting_reason",
    "preparation",
    "step",
    "total_steps",
    "trained_tokens",
    "plan_number",
    "num_lost",
    "yields_to",
    "keeps_place",
    "windlass",
    "error",
    "fine_tuned_model",
    "result_files",
)
# Those of them that a report still renews if the head's row has ended first, because its owner has cancelled the job.
_PROGRESS_COLUMNS = ("attempt", "started_at", "launched_at", "step", "total_steps", "trained_tokens")
# The columns in JSON of which a box decides the number of GPUs only.
_WITH_GPUS = frozenset(("hyperparameters", "windlass"))
_MOST_GPUS = 16
# The columns of a taken job that begin anew in the box's database.
_OF_ONE_DATABASE = frozenset(("node", "lease_holder", "journal_attempt", "journal_seq", "box_cursor", "yields_to"))
# The keys of the data of the event by which the head gives a job to a box. Reports of boxes cannot write them.
_GIVEN_NAME, _GIVEN_ID = "box", "box_id"


@dataclass(frozen=True, slots=True, kw_only=True)
class MirroredEvent:
    """An event of a job, with the ordinal that it has in the box's database."""

    ordinal: int
    attempt: int
    seq: int | None
    created_at: float
    level: str
    message: str
    type: str  # "message", "metrics"
    data: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MirroredCheckpoint:
    """A checkpoint whose files the head has. Its path is the head's own."""

    id: str
    attempt: int
    step_number: int
    created_at: float
    model: str
    metrics: dict[str, Any]
    reasons: list[str]
    nbytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MirroredFile:
    """A result file whose bytes the head has."""

    id: str
    filename: str
    purpose: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """The changes of a job since the last report."""

    id: str
    fields: dict[str, Any]  # `REPORTED_COLUMNS` in JSON; empty: as before
    events: Sequence[MirroredEvent] = ()  # in order, those that follow `after`
    after: int = 0  # the cursor that the box knew; the head leaves a report out that begins after its own one
    until: int | None = None  # the job's last event when `fields` were read; None: not known
    checkpoints: Sequence[MirroredCheckpoint] | None = None  # all that are there; None: as before
    files: Sequence[MirroredFile] = ()  # the result files that `fields` names
    row: dict[str, Any] | None = None  # the whole row in JSON, if the head has asked for it


class MirrorRepository:
    """Jobs of other boxes, within the caller's transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._boxes = BoxRepository(session)

    # --- the head gives jobs away ------------------------------------------------------------------------------------

    def give_away(self, seen: Job, box: Box, *, message: str) -> Job:
        """Gives a queued job that never began to a box, which is to take it. Returns the job's new row.

        `seen`: the job as the caller has read it. Raises StatusConflict if it has changed since.
        """
        fence = (seen.attempt, seen.lease_holder)
        statement = (
            update(Job)
            .where(Job.id == seen.id, Job.status == JobStatus.QUEUED, Job.attempt == 0)
            .where(Job.attempt == fence[0], Job.lease_holder.is_not_distinct_from(fence[1]))
            .values(node=box.node, lease_holder=None, waiting_reason=message, box_cursor=0)
        )
        if execute_change(self._session, statement) != 1:
            raise StatusConflict(seen.id, "queued, and not begun", "something else")
        self._boxes.instruct(box.id, seen.id, Instruction.TAKE)
        EventRepository(self._session).add(
            seen.id, attempt=0, message=f"Given to box {box.name}", data={_GIVEN_NAME: box.name, _GIVEN_ID: box.id}
        )
        return JobRepository(self._session).get(seen.id)

    def take_back(self, job_id: str, here: str) -> bool:
        """Takes a job back whose box has not confirmed that it has it. Returns False if the box has it.

        `here`: the head's own home, to which the job then belongs again.
        """
        takes = self._takes(job_id)
        if not takes:
            return False
        for each in takes:
            self._boxes.withdraw(each.ordinal)
        values = {"node": here, "lease_holder": None, "waiting_reason": None}
        return execute_change(self._session, update(Job).where(Job.id == job_id, Job.attempt == 0).values(values)) == 1

    def is_taken(self, job_id: str) -> bool:
        """Returns whether the box to which a job was given has it, so that it stays there. See `take_back`."""
        return not self._takes(job_id)

    def _takes(self, job_id: str) -> Sequence[BoxInstruction]:
        return [each for each in self._boxes.instructions_about(job_id) if each.kind == Instruction.TAKE]

    def request(
        self,
        kind: Instruction,
        job_id: str,
        *,
        here: str,
        only_of: str | None = None,
        gpus: int | str | None = None,
        boxes: int | list[str] | None = None,
    ) -> Job:
        """Cancels, pauses or resumes a job, wherever it is worked on. Returns its row.

        The row changes at once. A box that works on the job is instructed. `here`: the head's own home. Raises as the
        methods of JobRepository do.
        """
        jobs = JobRepository(self._session, only_of)
        box = self._boxes.by_node(jobs.get(job_id).node)
        if box is not None and box.head != here:
            box = None  # of another service with the same database
        is_removed = box is not None and box.state == BoxState.REMOVED.value
        if is_removed and kind is Instruction.RESUME:
            assert box is not None
            raise StatusConflict(job_id, "on a box of this service", f"on {box.name}, which was removed")
        is_elsewhere = box is not None and not is_removed and not self.take_back(job_id, here)
        if kind is Instruction.CANCEL:
            job = jobs.request_cancel(job_id)
        elif kind is Instruction.PAUSE:
            job = jobs.request_pause(job_id)
        else:
            job = jobs.request_resume(job_id, gpus=gpus, boxes=boxes)
        if is_elsewhere:
            assert box is not None
            self._boxes.instruct(box.id, job_id, kind, {} if gpus is None else {"gpus": gpus})
        elif is_removed:
            self.end_here(job_id, here)
            job = jobs.get(job_id)
        return job

    def was_given(self, job_id: str, box: Box) -> bool:
        """Returns whether the head has given a job to a box, which may then read the job's files.

        The head's own event says so. No report of a box can write such an event.
        """
        events = select(JobEvent).where(JobEvent.job_id == job_id, JobEvent.attempt == 0, JobEvent.seq.is_(None))
        return any(_names(event.data, box) for event in self._session.scalars(events))

    def end_here(self, job_id: str, here: str) -> None:
        """Lets an ended job belong to the head, because its box was removed or is to discard it."""
        ended = (Job.id == job_id, Job.status.in_(TERMINAL_STATUSES))
        execute_change(self._session, update(Job).where(*ended).values(node=here, lease_holder=None))

    # --- the head's copies -------------------------------------------------------------------------------------------

    def cursors(self, box: Box, held: Collection[str], *, is_restored: bool = False) -> dict[str, int]:
        """Returns the jobs that the box works on, each with the last of its events that the head has.

        `held`: the jobs that the box has. A job that is among them and not in the answer is to be discarded there. -1:
        the head does not know the job, and asks for its whole row. `is_restored`: the head's database is that of a
        backup, by which a job may wait for another box.
        """
        taken = ~exists().where(BoxInstruction.job_id == Job.id, BoxInstruction.kind == Instruction.TAKE.value)
        query = select(Job.id, Job.box_cursor).where(Job.node == box.node, taken)
        found = {row.id: row.box_cursor for row in self._session.execute(query)}
        for job_id in set(held) - found.keys():
            job = self._session.get(Job, job_id, populate_existing=True)
            if job is None and not self._is_deleted(job_id):
                found[job_id] = -1
            elif job is not None and self._claim(box, job, is_restored=is_restored):
                found[job_id] = job.box_cursor
        return found

    def apply(self, box: Box, report: JobReport, *, here: str, path_of: Callable[[str], str]) -> Sequence[str]:
        """Writes a report of the box that works on a job. Reports about other jobs are left out.

        Returns the models of the checkpoints that the job no longer has.

        `path_of`: returns the folder of a model on the head. `here`: the head's own home, to which a finished job
        belongs again.
        """
        job = self._locked(report.id)
        if job is None and report.row is not None and not self._is_deleted(report.id):
            job = self._adopt(box, report.row)
        if job is None or job.node != box.node:
            return ()
        if report.until is not None and report.after > report.until:
            job.box_cursor = report.until  # the box was restored from a backup, and goes on from there
        elif report.after > job.box_cursor:
            return ()  # the head was restored from a backup; its answer makes the box report the events between again
        is_late = report.until is not None and report.until < job.box_cursor
        for event in report.events:
            if event.ordinal > job.box_cursor:
                self._add_event(job, event)
                job.box_cursor = event.ordinal
        self._session.flush()
        gone: Sequence[str] = ()
        if report.checkpoints is not None and not is_late:
            gone = self._replace_checkpoints(job, report.checkpoints, path_of)
        is_behind = bool(self._boxes.instructions_about(job.id))  # those that were carried out are withdrawn
        is_over = report.fields.get("status") in TERMINAL_STATUSES
        # The end comes last: after it, the box is told to discard the job.
        is_whole = report.until is None or job.box_cursor >= report.until
        if report.fields and not is_behind and not is_late and (is_whole or not is_over):
            self._write_fields(job, report, here)
        self._session.flush()
        return gone

    def is_deleted_checkpoint(self, job: Job, checkpoint: MirroredCheckpoint) -> bool:
        """Returns whether a checkpoint was deleted on the head: it has no row, though the head has heard of it."""
        row = select(Checkpoint.id).where(Checkpoint.job_id == job.id, Checkpoint.id == checkpoint.id)
        later = select(JobEvent.ordinal).where(
            JobEvent.job_id == job.id, JobEvent.seq.is_not(None), JobEvent.created_at >= checkpoint.created_at
        )
        return self._session.scalar(row) is None and self._session.scalar(later.limit(1)) is not None

    def tell(self, box: Box, reasons: Mapping[str, str]) -> None:
        """Shows why jobs of a box wait, without events: how far their files are copied."""
        for job_id, reason in reasons.items():
            mine = (Job.id == job_id, Job.node == box.node, Job.status.in_(ACTIVE_STATUSES))
            execute_change(self._session, update(Job).where(*mine).values(waiting_reason=reason))

    def jobs_of(self, box: Box) -> Sequence[Job]:
        """Lists the unfinished jobs that belong to a box, in the order of the queue."""
        query = select(Job).where(Job.node == box.node, Job.status.in_(ACTIVE_STATUSES))
        return self._session.scalars(query.order_by(Job.priority, Job.created_at, Job.id)).all()

    def ids_on_boxes(self) -> set[str]:
        """Returns the jobs that belong to boxes that were not removed, ended ones too. Only of these come results."""
        query = select(Job.id).join(Box, Box.node == Job.node).where(Box.state != BoxState.REMOVED.value)
        return set(self._session.scalars(query))

    def _locked(self, job_id: str) -> Job | None:
        query = select(Job).where(Job.id == job_id).with_for_update().execution_options(populate_existing=True)
        return self._session.scalar(query)

    def _is_deleted(self, job_id: str) -> bool:
        return DeletionRepository(self._session).deleted_job(job_id) is not None

    def _claim(self, box: Box, job: Job, *, is_restored: bool) -> bool:
        """Gives a job back to the box that has it, after the head's database was restored from an older backup.

        Returns False if it has begun elsewhere, has ended, or is being given to a box.
        """
        before = {JobStatus.VALIDATING_FILES, JobStatus.QUEUED}
        if is_restored:
            before.add(JobStatus.PAUSED)  # it may have been resumed after the backup
        if job.status not in before or job.attempt != 0:
            return False
        if job.windlass.get("box") not in (None, box.name):
            return False
        if self._boxes.by_node(job.node) is not None and not (is_restored and self.take_back(job.id, box.head)):
            return False
        statement = update(Job).where(Job.id == job.id, Job.attempt == 0, Job.status == job.status)
        claimed = execute_change(self._session, statement.values(node=box.node, lease_holder=None, box_cursor=0)) == 1
        self._session.refresh(job)
        return claimed

    def _adopt(self, box: Box, row: Mapping[str, Any]) -> Job:
        """Adds a job that the head does not know, because its database is older than the job.

        A finished one is added as unfinished, so that its end is written as that of any other job. The caller has
        checked the row, because a box may send any.
        """
        values = _values_of(row)
        if values["status"] in TERMINAL_STATUSES:
            status = JobStatus.RUNNING if values["attempt"] else JobStatus.QUEUED
            values |= {"status": status, "finished_at": None, "error": None}
            values |= {"fine_tuned_model": None, "result_files": []}
        key = values.get("idempotency_key")
        if key is not None and JobRepository(self._session).by_idempotency_key(values.get("owner"), [key]) is not None:
            values["idempotency_key"] = None  # its owner has sent the request again since
        job = Job(**values, node=box.node, lease_holder=None, box_cursor=0)
        self._session.add(job)
        self._session.flush()
        return job

    def _add_event(self, job: Job, event: MirroredEvent) -> None:
        known = select(JobEvent.ordinal).where(
            JobEvent.job_id == job.id, JobEvent.attempt == event.attempt, JobEvent.seq == event.seq
        )
        if event.seq is not None and self._session.scalar(known.limit(1)) is not None:
            return
        row = JobEvent(
            job_id=job.id,
            attempt=event.attempt,
            seq=event.seq,
            created_at=event.created_at,
            level=event.level,
            message=event.message,
            type=event.type,
            data={key: value for key, value in event.data.items() if key not in (_GIVEN_NAME, _GIVEN_ID)},
        )
        self._session.add(row)
        if event.type == "metrics":
            put_metrics(self._session, job, event)

    def _replace_checkpoints(
        self, job: Job, checkpoints: Iterable[MirroredCheckpoint], path_of: Callable[[str], str]
    ) -> Sequence[str]:
        kept, gone = {each.id: each for each in checkpoints}, []
        for row in self._session.scalars(select(Checkpoint).where(Checkpoint.job_id == job.id)).all():
            if row.id not in kept:
                gone.append(row.model)
                self._session.delete(row)
        self._session.flush()
        for each in kept.values():
            row = self._session.get(Checkpoint, each.id) or Checkpoint(id=each.id, job_id=job.id)
            if row.job_id != job.id:
                continue  # a box may name any id
            row.attempt, row.step_number, row.created_at = each.attempt, each.step_number, each.created_at
            row.model, row.path, row.metrics = each.model, path_of(each.model), each.metrics
            row.reasons, row.nbytes = each.reasons, each.nbytes
            self._session.add(row)
        self._session.flush()
        return [model for model in gone if model not in {each.model for each in kept.values()}]

    def _write_fields(self, job: Job, report: JobReport, here: str) -> None:
        status = JobStatus(report.fields["status"])
        was_over = job.status in TERMINAL_STATUSES
        for name in _PROGRESS_COLUMNS if was_over else REPORTED_COLUMNS:
            if name in _WITH_GPUS:
                self._write_gpus(job, name, report.fields.get(name))
            elif name in report.fields:
                value = report.fields[name]
                setattr(job, name, status if name == "status" else value)
        if status not in TERMINAL_STATUSES:
            return
        for file in () if was_over else report.files:
            if self._session.get(File, file.id) is None:
                FileRepository(self._session).add(
                    file_id=file.id,
                    filename=file.filename,
                    purpose=file.purpose,
                    nbytes=file.nbytes,
                    owner=job.owner,
                    node=here,
                )
        job.node, job.lease_holder = here, None
        self._session.flush()
        if not was_over:
            WebhookRepository(self._session).enqueue_deliveries(job, status)

    def _write_gpus(self, job: Job, column: str, reported: Any) -> None:
        """Takes over the number of GPUs. All else in these columns is the head's."""
        gpus = reported.get("gpus") if isinstance(reported, dict) else None
        before = getattr(job, column)
        if before is not None and (gpus == "auto" or (type(gpus) is int and 1 <= gpus <= _MOST_GPUS)):
            setattr(job, column, {**before, "gpus": gpus})

    # --- the box's own rows ------------------------------------------------------------------------------------------

    def row_of(self, job: Job) -> dict[str, Any]:
        """Returns a job's whole row in JSON, without what counts in one database only."""
        return {key: _in_json(getattr(job, key)) for key in _columns() if key not in _OF_ONE_DATABASE}

    def insert(self, row: Mapping[str, Any], node: str) -> bool:
        """Adds a taken job to the box's database. Returns False if it is there already, or has begun elsewhere."""
        values = _values_of(row)
        if self._session.get(Job, values["id"]) is not None or values["attempt"] != 0:
            return False
        values |= {"status": JobStatus.QUEUED, "waiting_reason": None, "preparation": None}
        self._session.add(Job(**values, node=node, lease_holder=None))
        self._session.flush()
        return True

    def begin(self, job_id: str, node: str) -> None:
        """Gives a taken job to the box's dispatcher, because the head has read that the box has it."""
        execute_change(self._session, update(Job).where(Job.id == job_id, Job.lease_holder.is_(None)).values(node=node))

    def held(self) -> Sequence[Job]:
        """Lists all jobs of the box's database, finished ones too, in the order of their creation."""
        query = select(Job).order_by(Job.created_at, Job.id).execution_options(populate_existing=True)
        return self._session.scalars(query).all()

    def carry_out(self, kind: Instruction, job_id: str, body: Mapping[str, Any]) -> str | None:
        """Carries out a request of a user that the head has recorded. Returns why it cannot be, or None.

        Then the job has gone on meanwhile, and the next report tells the head.
        """
        jobs = JobRepository(self._session, writes_events=False)
        try:
            if kind is Instruction.CANCEL:
                jobs.request_cancel(job_id)
            elif kind is Instruction.PAUSE:
                jobs.request_pause(job_id)
            elif kind is Instruction.RESUME:
                jobs.request_resume(job_id, gpus=body.get("gpus"))
        except (IllegalTransition, StatusConflict, NotFound) as error:
            return str(error)
        return None

    def report(self, job: Job, *, after: int, limit: int = 500) -> JobReport:
        """Collects what the head is to know of a job: its columns, and its events after an ordinal."""
        rows = EventRepository(self._session).since(after, limit=limit, job_id=job.id)
        checkpoints = self._session.scalars(
            select(Checkpoint).where(Checkpoint.job_id == job.id).order_by(Checkpoint.step_number)
        )
        files = self._session.scalars(select(File).where(File.id.in_(job.result_files)))
        last = select(func.max(JobEvent.ordinal)).where(JobEvent.job_id == job.id)
        return JobReport(
            id=job.id,
            after=after,
            until=self._session.scalar(last) or 0,
            fields={name: _in_json(getattr(job, name)) for name in REPORTED_COLUMNS},
            events=[
                MirroredEvent(
                    ordinal=row.ordinal,
                    attempt=row.attempt,
                    seq=row.seq,
                    created_at=row.created_at,
                    level=row.level,
                    message=row.message,
                    type=row.type,
                    data=row.data,
                )
                for row in rows
            ],
            checkpoints=[
                MirroredCheckpoint(
                    id=row.id,
                    attempt=row.attempt,
                    step_number=row.step_number,
                    created_at=row.created_at,
                    model=row.model,
                    metrics=row.metrics,
                    reasons=row.reasons,
                    nbytes=row.nbytes,
                )
                for row in checkpoints
            ],
            files=[
                MirroredFile(id=row.id, filename=row.filename, purpose=row.purpose, nbytes=row.nbytes) for row in files
            ],
        )

    def forget(self, job_id: str) -> None:
        """Deletes the rows of a job that the box no longer has. Its files and states are removed before."""
        execute_change(self._session, delete(Job).where(Job.id == job_id))


def _names(given: Mapping[str, Any], box: Box) -> bool:
    """Returns whether the data of an event say that the head gave its job to this box."""
    if _GIVEN_ID in given:
        return bool(given[_GIVEN_ID] == box.id)  # its name may be another one now
    return bool(given.get(_GIVEN_NAME) == box.name)  # an event of an earlier release


def _columns() -> Sequence[str]:
    return [column.key for column in Job.__mapper__.column_attrs]


def _in_json(value: Any) -> Any:
    return value.value if isinstance(value, JobStatus) else value


def job_of_row(row: Mapping[str, Any], *, attempt: int) -> Job:
    """Returns a job that is in no database, from its row in JSON, at one of its attempts."""
    return Job(**(_values_of(row) | {"attempt": attempt}))


def _values_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the columns of a row in JSON. Columns that this version does not have are left out."""
    known = set(_columns()) - _OF_ONE_DATABASE
    values = {key: value for key, value in row.items() if key in known}
    return values | {"status": JobStatus(values["status"])}
