"""The route that boxes call every second: they tell what is new, and get their instructions."""

import logging
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from pydantic import ValidationError
from sqlalchemy.orm import Session

import windlass
from windlass.planner.stages import StagesPlan
from windlass.service.cluster.head.caller import BoxDep
from windlass.service.cluster.head.incoming import Incoming
from windlass.service.cluster.head.manifest import Manifests
from windlass.service.cluster.head.network import probe_of
from windlass.service.installation import Settings, about, node_of, was_restored
from windlass.service.jobs import keep_told_stages, stages_digest, stages_of, told_stages
from windlass.service.machine.fleet import (
    InstructionMessage,
    PartOrder,
    PartReport,
    ReportedRow,
    SyncReply,
    SyncRequest,
    error_text,
    is_job_id,
    is_model_of,
    model_name,
    readable_part,
    result_file_id,
)
from windlass.service.validation import ApiError, JobSettings, job_id_prefix
from windlass.storage.sql import ACTIVE_STATUSES, TERMINAL_STATUSES, Box, Database, Job, JobPart, JobStatus
from windlass.storage.sql.repositories import (
    BoxRepository,
    BoxState,
    DeletionRepository,
    EventRepository,
    Instruction,
    JobReport,
    JobRepository,
    MirrorRepository,
    PartRepository,
    PartState,
    is_reserved,
)

_LOG = logging.getLogger(__name__)
_WORKING = (PartState.READY, PartState.RUNNING)
_PREFIX_CHARS = len("ftjob-") + 12


@dataclass(slots=True)
class _After:
    """The work that follows the commit of a call."""

    unused_models: list[str] = field(default_factory=list)  # folders of checkpoints that their jobs have removed
    ended_jobs: list[str] = field(default_factory=list)


def sync_router(database: Database, settings: Settings, manifests: Manifests, incoming: Incoming) -> APIRouter:
    """Makes the route."""
    router = APIRouter(prefix="/v1/node")
    syncing = _Syncing(database, settings)

    @router.post("/sync")
    def sync(news: SyncRequest, box: BoxDep, request: Request) -> SyncReply:
        """Stores what a box tells, and answers with its instructions."""
        started_at = time.monotonic()
        reply, after = syncing.handle(box.id, news, address=request.client.host if request.client else "")
        for job_id in after.ended_jobs:
            incoming.forget(job_id)
            manifests.forget(job_id)
        for model in after.unused_models:
            incoming.remove_unused(model, since=started_at)
        return reply

    return router


@dataclass(frozen=True, slots=True)
class _Syncing:
    database: Database
    settings: Settings

    def handle(self, box_id: str, news: SyncRequest, *, address: str) -> tuple[SyncReply, _After]:
        """Stores a call in one transaction, so that a cut leaves either all of it or nothing."""
        after, missing = _After(), dict[str, tuple[str, ...]]()
        with self.database.write() as session:
            boxes, mirror = BoxRepository(session), MirrorRepository(session)
            boxes.set(box_id, seen_at=time.time(), address=address, **_told(news))
            box = boxes.get(box_id)
            if box.state == BoxState.REMOVED.value:  # since the caller was admitted
                raise ApiError(f"box {box.name} was removed from this service", status=403, code="box_removed")
            lease_s = 60 * self.settings.box_lease_minutes
            boxes.note_lease(box, lease_s)
            if news.probe is not None:
                boxes.answer_probe(box, news.probe.model_dump(mode="json"))
            done, held = set(news.done), set(news.held)
            for each in boxes.instructions(box.id, limit=len(done) + 1000) if done or held else ():
                # A box may have a job, and work on it, though a restored database still tells it to take it.
                if each.ordinal in done or (each.kind == Instruction.TAKE and each.job_id in held):
                    boxes.withdraw(each.ordinal)
            for told in news.jobs:
                report = readable_part(told, partial(_warn, box, told.id))
                if report is not None and (lacking := self._apply(session, box, report, after)):
                    missing[report.id] = lacking
            mirror.tell(box, news.copying)
            orders = self._parts(session, box, news, after)
            reply = SyncReply(
                state=BoxState(box.state),
                lease_s=lease_s,
                instructions=tuple(
                    InstructionMessage(
                        ordinal=each.ordinal, job_id=each.job_id, kind=Instruction(each.kind), body=each.body
                    )
                    for each in boxes.instructions(box.id)
                ),
                cursors=mirror.cursors(
                    box,
                    [job_id for job_id in news.held if is_job_id(job_id)],
                    is_restored=was_restored(self.settings.home),
                ),
                parts=orders,
                missing=missing,
                windlass=windlass.__version__,
                probe=probe_of(box),
            )
        return reply, after

    def _parts(self, session: Session, box: Box, news: SyncRequest, after: _After) -> dict[str, PartOrder]:
        """Writes what a box tells of its parts of jobs over several boxes. Returns those that it is to have.

        The rows of ended jobs go once the box has removed its part.
        """
        parts, orders = PartRepository(session), dict[str, PartOrder]()
        for job_id, told in news.parts.items():
            before, job = parts.find(job_id, box.node), JobRepository(session).find(job_id)
            if before is not None and before.state == PartState.LEAVING.value:
                continue
            is_its = job is not None and job.status in ACTIVE_STATUSES and job.windlass.get("boxes") is not None
            if before is None and is_its and told.served:  # this database was restored from an older backup
                parts.add(job_id, box.node, position=told.position, state=told.state)
            state, why = self._state_of(box, job_id, told) if is_its else (told.state, told.told)
            is_told = told.state in _WORKING and state is not PartState.COPYING
            if before is not None and is_its and why not in (None, before.told) and is_told:
                message = f"Box {box.name}: {why}"
                EventRepository(session).add(job_id, attempt=told.served, message=message, level="warn")
            parts.tell(job_id, box.node, state=state, served=told.served, told=why, port=told.port)
        for part in parts.on(box.node):
            job = JobRepository(session).find(part.job_id)
            is_active = job is not None and job.status in ACTIVE_STATUSES
            if job is not None and is_active and part.state != PartState.LEAVING.value:
                runs = job.status in (JobStatus.RUNNING, JobStatus.PAUSING) and job.attempt == part.attempt
                attempt, link = (part.attempt, part.link) if runs else (0, None)
                if is_reserved(job, part):
                    attempt = max(part.attempt, job.attempt + 1)
                ended = job.attempt - 1 if runs else job.attempt
                orders[part.job_id] = PartOrder.model_validate(
                    {
                        "position": part.position,
                        "attempt": attempt,
                        "ended": max(0, ended),
                        "ends_at_once": not runs and _never_began(job, part),
                        "link": link,
                        "plan": stages_digest(self.settings, part.job_id),
                        "division": self._newer_division(part.job_id, news.parts.get(part.job_id)),
                        "gets_blocks": part.state == PartState.COPYING.value and self._gets_blocks(box, part.job_id),
                    }
                )
            elif part.job_id not in news.parts:
                parts.remove(part.job_id, box.node)
                if not is_active:
                    after.ended_jobs.append(part.job_id)
        return orders | self._unknown_parts(session, news)

    @staticmethod
    def _unknown_parts(session: Session, news: SyncRequest) -> dict[str, PartOrder]:
        """Returns orders to keep the parts of jobs that this database has never had.

        It was restored from a backup that is older than these jobs, and a newer one may follow.
        """
        jobs, deletions = JobRepository(session), DeletionRepository(session)
        unknown = [each for each in news.parts if jobs.find(each) is None and deletions.deleted_job(each) is None]
        return {each: PartOrder(position=news.parts[each].position, ended=news.parts[each].served) for each in unknown}

    def _newer_division(self, job_id: str, told: PartReport | None) -> dict[str, Any] | None:
        """Returns the division of a job, if a box has told of an earlier one."""
        if told is None or told.division is None or (here := stages_of(self.settings, job_id)) is None:
            return None
        before = _division_of(told)
        is_older = before is not None and before.layout_epoch < here.layout_epoch
        return told_stages(self.settings, job_id) if is_older else None

    def _gets_blocks(self, box: Box, job_id: str) -> bool:
        """Returns whether a box has no blocks of a job yet."""
        here = stages_of(self.settings, job_id)
        return here is not None and box.name not in {stage.box for stage in here.stages}

    def _state_of(self, box: Box, job_id: str, told: PartReport) -> tuple[PartState, str | None]:
        """Returns the state of a box's part, and the words about it. A part of another division cannot be used."""
        here = stages_digest(self.settings, job_id)
        if here is None and told.division is not None:  # this home was restored from an older backup
            try:
                keep_told_stages(self.settings, job_id, told.division)
            except (OSError, ValueError) as error:
                _warn(box, job_id, str(error))
            here = stages_digest(self.settings, job_id)
        if here is None or told.plan == here or told.state not in _WORKING:
            return told.state, told.told
        if "plan" not in told.model_fields_set:  # a box of the version before; no attempt begins before it is upgraded
            return told.state, told.told
        if told.served:
            before, now = _division_of(told), stages_of(self.settings, job_id)
            if told.division is None:
                return PartState.COPYING, told.told  # it tells its division with the next call
            if before is not None and now is not None and before.layout_epoch < now.layout_epoch:
                return PartState.COPYING, told.told or "its new division is sent"  # it has moved since
            return PartState.LOST, f"box {box.name} has a part of another division of the job"
        return PartState.COPYING, told.told  # it was planned anew since

    def _apply(self, session: Session, box: Box, report: JobReport, after: _After) -> tuple[str, ...]:
        """Writes a report. Returns the results that it names and that have not arrived; its fields then wait."""
        job, mirror = JobRepository(session).find(report.id), MirrorRepository(session)
        lacking: tuple[str, ...] = ()
        if job is not None and report.checkpoints is not None:
            report, lacking = self._only_kept(session, job, report)
        if job is None:
            report = replace(report, fields={}, events=(), checkpoints=None)  # its row comes first
            if report.row is not None and (why := _why_not_adopted(session, report)) is not None:
                _LOG.warning("box %s has a job that is unknown here, and is not taken over: %s", box.name, why)
                report = replace(report, row=None)
        elif report.fields:
            is_over = JobStatus(report.fields["status"]) in TERMINAL_STATUSES
            lacking += self._missing_results(job, report) if is_over else ()
            if (is_over and lacking) or not _is_its_own(job, report):
                report = replace(report, fields={})
        was_its = job is not None and job.node == box.node
        after.unused_models += mirror.apply(
            box,
            report,
            here=node_of(self.settings.home),
            path_of=lambda model: str(self.settings.fine_tuned_dir / model),
        )
        now = JobRepository(session).find(report.id)
        if was_its and now is not None and now.node != box.node:
            after.ended_jobs.append(now.id)
            _LOG.info("ended on box %s: %s", box.name, now.status, extra=about(now.id, now.attempt))
        return lacking

    def _only_kept(self, session: Session, job: Job, report: JobReport) -> tuple[JobReport, tuple[str, ...]]:
        """Leaves out checkpoints that a user has deleted here, and models of other jobs.

        Returns the report, and the models of the rest that are not here. Their rows stay until they were sent again, so
        that a lost answer does not make them look deleted.
        """
        deletions, mirror, kept, lacking = DeletionRepository(session), MirrorRepository(session), [], []
        for each in report.checkpoints or ():
            if not is_model_of(job, each.model) or deletions.is_doomed(each.model, job.id):
                continue
            if not self._has_model(each.model):
                if mirror.is_deleted_checkpoint(job, each):
                    continue
                lacking.append(each.model)
            kept.append(each)
        return replace(report, checkpoints=kept), tuple(lacking)

    def _missing_results(self, job: Job, report: JobReport) -> tuple[str, ...]:
        """Returns the model and the result files that the report of a job's end names and that are not here."""
        fields = report.fields
        model, files = fields.get("fine_tuned_model"), fields.get("result_files") or ()
        lacking = [name for name in (model,) if name is not None and not self._has_model(model_name(job))]
        lacking += [file_id for file_id in files if not (self.settings.files_dir / result_file_id(job.id)).is_file()]
        return tuple(lacking)

    def _has_model(self, name: str) -> bool:
        return (self.settings.fine_tuned_dir / name / "config.json").is_file()


def _division_of(told: PartReport) -> StagesPlan | None:
    try:
        return None if told.division is None else StagesPlan.from_json(told.division)
    except ValueError:
        return None


def _never_began(job: Job, part: JobPart) -> bool:
    """Returns whether a box still has processes of an attempt that has ended before all boxes were connected."""
    return part.state == PartState.RUNNING.value and job.journal_attempt < part.served == job.attempt


def _warn(box: Box, job_id: str, why: str) -> None:
    _LOG.warning("a part of a report of box %s cannot be read, and is left out: %s", box.name, why, extra=about(job_id))


def _why_not_adopted(session: Session, report: JobReport) -> str | None:
    """Returns why a job that only its box knows is not taken over, or None.

    A database that was restored from a backup lacks newer jobs. But a box may send any row.
    """
    row = report.row or {}
    try:
        job = ReportedRow.model_validate(row)
    except ValidationError as error:
        return f"its row cannot be read ({error_text(error)})"
    if job.id != report.id:
        return f"its row is that of {job.id}"
    jobs, prefix = JobRepository(session), job.id[:_PREFIX_CHARS]  # names of models have this part of it
    if jobs.owners_by_prefix(prefix):
        return f"another job's id begins with {prefix}"
    made_by = job_id_prefix(job.model)
    if made_by is not None and any(owner != job.owner for owner in jobs.owners_by_prefix(made_by)):
        return f"its model {job.model} belongs to another user"
    try:
        JobSettings.from_row(job.method, job.windlass, job.seed)
    except (KeyError, TypeError, ValueError, ApiError) as error:
        return f"its settings cannot be read ({error})"
    return None


def _is_its_own(job: Job, report: JobReport) -> bool:
    """Returns whether a report names no model and no file of another job."""
    named = {*(report.fields.get("result_files") or ()), *(file.id for file in report.files)}
    is_own = named <= {result_file_id(job.id)} and report.fields.get("fine_tuned_model") in (None, model_name(job))
    if not is_own:
        _LOG.warning("a box reported results of another job; its report is left out", extra=about(job.id, job.attempt))
    return is_own


def _told(news: SyncRequest) -> dict[str, Any]:
    """Returns the columns of a box's row that a call renews."""
    told: dict[str, Any] = {}
    if news.capacity is not None:
        told["capacity"] = news.capacity.model_dump(mode="json")
    if news.facts is not None:
        told["facts"] = news.facts.model_dump(mode="json")
    return told
