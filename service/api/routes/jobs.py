"""`/v1/fine_tuning/jobs`: create, list, cancel, pause, resume and delete jobs.

Endpoints only store requests; the dispatcher acts on them.
"""

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import JSONResponse
from sqlalchemy.orm import Session

from windlass.actors.runtime.moving import blocks_text
from windlass.actors.timeline import FOLDER, KEPT_STEPS, held_steps, load_step, names_of_boxes, trace_of
from windlass.engine.training_config import Initialization
from windlass.planner.stages import StagesPlan
from windlass.service.api import (
    AuditDep,
    CallerDep,
    Context,
    ContextDep,
    Deleted,
    ListOf,
    PageOf,
    check_may_build_on,
    is_visible,
    model_hint,
)
from windlass.service.api.routes.files import TRAINING_PURPOSE
from windlass.service.api.schemas import (
    CheckpointObject,
    CreateJob,
    CurveColumns,
    EventObject,
    JobList,
    JobObject,
    MetricsObject,
    RestartJob,
    ResumeJob,
    ResumeSettings,
    StreamStart,
    TraceObject,
    event_ordinal,
)
from windlass.service.auth import Caller, check_one_more_job, check_priority, check_room_to_store
from windlass.service.data import deletion
from windlass.service.installation import Settings, check_is_here, is_local, node_of
from windlass.service.jobs import (
    division_of,
    end_for_restart,
    has_plan,
    is_over_boxes,
    job_dir,
    note_restart,
    plan_restart,
    stages_of,
    why_it_waits_for_room,
)
from windlass.service.machine import check_gpus
from windlass.service.machine.fleet import BoxFacts, resources_of_box
from windlass.service.preparation import check_model, fit_sequence_length
from windlass.service.validation import ApiError, JobSettings, is_fine_tuned_id, model_dir
from windlass.storage.ids import HEAD_NAME
from windlass.storage.sql import Box, Job, NotFound
from windlass.storage.sql.repositories import (
    BoxRepository,
    EventRepository,
    FileRepository,
    Instruction,
    JobRepository,
    MirrorRepository,
    NewJob,
    PartRepository,
    is_away,
)

_METADATA_FILTER = re.compile(r"metadata\[(.{1,64})\]")
_Limit = Annotated[int, Query(ge=1, le=1000)]

router = APIRouter(prefix="/v1/fine_tuning/jobs")


@router.post("")
def create_job(
    context: ContextDep,
    caller: CallerDep,
    audit: AuditDep,
    body: CreateJob,
    idempotency_key: Annotated[str | None, Header(max_length=255)] = None,
) -> JobObject:
    """Accepts a job. Repeated requests with the same Idempotency-Key and API key create one job."""
    digest = hashlib.sha256(body.model_dump_json().encode()).hexdigest()
    with context.database.read() as session:
        if (job := _made_before(session, caller, idempotency_key, digest)) is not None:
            return _with_metrics(context, session, [job])[0]
    new = _new_job(context, caller, body, idempotency_key, digest)
    with context.database.write() as session:
        if (job := _made_before(session, caller, idempotency_key, digest)) is not None:
            return _with_metrics(context, session, [job])[0]
        for param, file_id in (("training_file", new.training_file), ("validation_file", new.validation_file)):
            if file_id is not None:
                _check_file(context, session, caller, param, file_id)
        _check_model_stays(context, session, caller, new.model)
        check_one_more_job(session, context.settings, caller)
        check_room_to_store(session, context.settings, caller)
        job = JobRepository(session).create(new)
        audit(session, job.id)
        return JobObject.of(job, box=HEAD_NAME, boxes=_boxes_without_parts(context.settings, job))


@router.get("")
def list_jobs(
    request: Request, context: ContextDep, caller: CallerDep, after: str | None = None, limit: _Limit = 20
) -> JobList:
    """Returns a page of jobs, newest first, that have all the given `metadata[key]=value` pairs."""
    metadata: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if match := _METADATA_FILTER.fullmatch(name):
            metadata[match[1]] = value
    if unusable := [key for key in metadata if '"' in key or "\\" in key]:
        raise ApiError(f"metadata: keys have no quotes and no backslashes, got {unusable[0]!r}", param="metadata")
    with context.database.read() as session:
        # Reads the ordinal first, so that a stream from it on misses no change that the jobs do not show.
        last_event = EventRepository(session).last_ordinal()
        page = JobRepository(session, caller.only_of).page(limit=limit, after=after, metadata=metadata)
        data = _with_metrics(context, session, page.rows)
    return JobList(data=data, has_more=page.has_more, windlass=StreamStart(last_event_ordinal=last_event))


@router.get("/{job_id}")
def retrieve_job(context: ContextDep, caller: CallerDep, job_id: str) -> JobObject:
    """Returns a job."""
    with context.database.read() as session:
        return _with_metrics(context, session, [JobRepository(session, caller.only_of).get(job_id)])[0]


@router.post("/{job_id}/cancel")
def cancel_job(context: ContextDep, caller: CallerDep, audit: AuditDep, job_id: str) -> JobObject:
    """Cancels a job: at once, or, if it is training, as soon as its runner has stopped."""
    with context.database.write() as session:
        job = _request(context, session, caller, Instruction.CANCEL, job_id)
        audit(session, job_id)
        return _with_metrics(context, session, [job])[0]


@router.post("/{job_id}/pause")
def pause_job(context: ContextDep, caller: CallerDep, audit: AuditDep, job_id: str) -> JobObject:
    """Pauses a job: at once, or, if it is training, as soon as its runner has committed its step and stopped."""
    with context.database.write() as session:
        job = _request(context, session, caller, Instruction.PAUSE, job_id)
        audit(session, job_id)
        return _with_metrics(context, session, [job])[0]


@router.post("/{job_id}/resume")
def resume_job(
    context: ContextDep, caller: CallerDep, audit: AuditDep, job_id: str, body: ResumeJob | None = None
) -> JobObject:
    """Queues a paused job again, with another number of GPUs if the body names one, or "auto", or on other boxes."""
    settings = ResumeSettings() if body is None else body.windlass
    gpus, boxes = settings.gpus, settings.boxes
    with context.database.write() as session:
        if boxes is not None:
            job = JobRepository(session, caller.only_of).get(job_id)
            _check_boxes(context, session, boxes, least=1)
            _check_move(context, session, job, boxes)
        if gpus is not None:
            job = JobRepository(session, caller.only_of).get(job_id)
            if boxes is not None or is_over_boxes(job):
                raise ApiError(
                    "windlass.gpus: the number of GPUs of a job over several boxes does not change",
                    param="windlass.gpus",
                    code="invalid_value",
                )
            if isinstance(gpus, int):
                _check_gpus(context, session, gpus, node=job.node)
                _check_microbatches(job, gpus)
        job = _request(context, session, caller, Instruction.RESUME, job_id, gpus=gpus, boxes=boxes)
        audit(session, job_id)
        return _with_metrics(context, session, [job])[0]


@router.post("/{job_id}/restart")
def restart_job(
    context: ContextDep, caller: CallerDep, audit: AuditDep, job_id: str, body: RestartJob | None = None
) -> JobObject:
    """Begins a new job from the newest checkpoint of one that failed, was cancelled, or whose box is away.

    The optimizer's states and the position in the data are lost. Returns the new job.
    """
    with context.database.write() as session:
        old = JobRepository(session, caller.only_of).get(job_id)
        _check_box(context, session, None if body is None else body.windlass.box)
        end_for_restart(session, context.settings, old)
        check_one_more_job(session, context.settings, caller)
        check_room_to_store(session, context.settings, caller)
        restart = plan_restart(session, context.settings, old, box=None if body is None else body.windlass.box)
        for param, file_id in (("training_file", old.training_file), ("validation_file", old.validation_file)):
            if file_id is not None:
                _check_file(context, session, caller, param, file_id)
        _check_model_stays(context, session, caller, restart.new.model)
        job = JobRepository(session).create(restart.new)
        note_restart(session, job.id, restart)
        audit(session, job.id)
        return JobObject.of(job, box=HEAD_NAME, boxes=_boxes_without_parts(context.settings, job))


def _request(
    context: Context,
    session: Session,
    caller: Caller,
    kind: Instruction,
    job_id: str,
    *,
    gpus: int | str | None = None,
    boxes: int | list[str] | None = None,
) -> Job:
    """Requests something of a job, also if another box works on it."""
    here = node_of(context.settings.home)
    return MirrorRepository(session).request(kind, job_id, here=here, only_of=caller.only_of, gpus=gpus, boxes=boxes)


def _check_gpus(context: Context, session: Session, gpus: int, *, node: str | None = None) -> None:
    """Raises ApiError if no machine has so many GPUs for a job. `node`: only the machine with this home counts."""
    for box in BoxRepository(session).all(node_of(context.settings.home)):
        if node in (None, box.node):
            why = resources_of_box(BoxFacts.model_validate(box.facts)).why_too_many(gpus)
            if why is None:
                return
            if node is not None:
                raise ApiError(f"box {box.name}: {why}", param="windlass.gpus", code="invalid_value")
    check_gpus(context.settings, gpus)


def _check_box(context: Context, session: Session, name: str | None) -> str | None:
    """Returns the home of the box that a job asks for, None for any. Raises ApiError if it has not joined."""
    here = node_of(context.settings.home)
    nodes = {HEAD_NAME: here} | {box.name: box.node for box in BoxRepository(session).all(here)}
    if name is not None and name not in nodes:
        raise ApiError(
            f"windlass.box: there is no box {name!r}; there are {', '.join(nodes)}",
            param="windlass.box",
            code="invalid_value",
        )
    return None if name is None else nodes[name]


def _check_boxes(context: Context, session: Session, asked: int | list[str] | None, *, least: int = 2) -> None:
    """Raises ApiError unless there are the boxes over which a job is to be spread. The head's own is the first."""
    here = node_of(context.settings.home)
    names = [HEAD_NAME, *(box.name for box in BoxRepository(session).all(here))]
    why: str | None = None
    if asked is not None and _number_of(asked) < least:
        why = f"a new job over several boxes has {least} at least; one on one box names it in windlass.box"
    elif isinstance(asked, int):
        if asked > len(names):
            why = f"it asks for {asked} boxes, and this service has {len(names)}: {', '.join(names)}"
    elif asked is not None:
        if unknown := [name for name in asked if name not in names]:
            why = f"there is no box {unknown[0]!r}; there are {', '.join(names)}"
        elif HEAD_NAME not in asked:
            why = f"the head's own box must be among them: add {HEAD_NAME!r}"
    if why is not None:
        raise ApiError(f"windlass.boxes: {why}", param="windlass.boxes", code="invalid_value")


def _check_move(context: Context, session: Session, job: Job, asked: int | list[str]) -> None:
    """Raises ApiError if a job cannot go on on these boxes."""
    why: str | None = None
    rows: dict[str | None, Box] = {row.node: row for row in BoxRepository(session).all(node_of(context.settings.home))}
    box = rows.get(job.node) if MirrorRepository(session).is_taken(job.id) else None
    if box is not None and not is_over_boxes(job) and _number_of(asked) > 1:
        why = f"the job is on box {box.name}, and stays there: only a job on the head's own box can go on over others"
    elif (plan := _division_of(context.settings, job)) is not None:
        why = _why_not_over(job, plan, asked, {row.name: row for row in rows.values()})
    if why is not None:
        raise ApiError(f"windlass.boxes: {why}", param="windlass.boxes", code="invalid_value")


def _division_of(settings: Settings, job: Job) -> StagesPlan | None:
    try:
        return division_of(settings, job)
    except (OSError, ValueError) as error:
        raise ApiError(f"windlass.boxes: the job's blocks cannot be read: {error}", param="windlass.boxes") from None


def _why_not_over(job: Job, plan: StagesPlan, asked: int | list[str], boxes: Mapping[str, Box]) -> str | None:
    """Returns why a job with this division cannot go on on the boxes that are asked for, or None."""
    num_layers, number = plan.num_blocks - 2, _number_of(asked)
    if number > num_layers:
        return f"the model has {num_layers} layers, and each box needs one: give at most {num_layers} boxes"
    same = number == len(plan.boxes) if isinstance(asked, int) else set(asked) == set(plan.boxes)
    for stage in () if same or not job.attempt else plan.stages[1:]:
        box = boxes.get(stage.box)
        if box is None or is_away(box):
            blocks = blocks_text(stage.stage, plan.num_blocks)
            is_what = "not here any more: join it" if box is None else "away: start it"
            return (
                f"box {stage.box} has the states of {blocks}, which no other box has, and is {is_what} again, or "
                "begin again from the newest exported model with `windlass restart`"
            )
    return None


def _number_of(boxes: int | list[str]) -> int:
    return boxes if isinstance(boxes, int) else len(boxes)


def _check_microbatches(job: Job, gpus: int) -> None:
    """Raises ApiError if a prepared job has fewer micro-batches a step than GPUs."""
    num_microbatches = (job.hyperparameters or {}).get("num_microbatches", gpus)
    if gpus > num_microbatches:
        raise ApiError(
            f"windlass.gpus is {gpus}, but the job has {num_microbatches} micro-batches a step: each GPU needs one",
            param="windlass.gpus",
            code="invalid_value",
        )


@router.get("/{job_id}/events")
def list_events(
    context: ContextDep,
    caller: CallerDep,
    job_id: str,
    after: str | None = None,
    limit: _Limit = 20,
    type: Literal["message", "metrics"] | None = None,
) -> ListOf[EventObject]:
    """Returns a page of a job's events, newest first, of one type or of both."""
    ordinal = None if after is None else event_ordinal(after)
    with context.database.read() as session:
        JobRepository(session, caller.only_of).get(job_id)
        page = EventRepository(session).page(job_id, limit=limit, after=ordinal, type=type)
    return ListOf(data=[EventObject.of(row) for row in page.rows], has_more=page.has_more)


@router.get("/{job_id}/metrics")
def get_metrics(context: ContextDep, caller: CallerDep, job_id: str) -> MetricsObject:
    """Returns a job's curves, in columns with one entry for each step.

    A resumed attempt's values replace those of repeated steps.
    """
    with context.database.read() as session:
        JobRepository(session, caller.only_of).get(job_id)
        last_event = EventRepository(session).last_ordinal()
        rows = EventRepository(session).metrics(job_id)
    columns = CurveColumns(
        step=[row.step for row in rows],
        attempt=[row.attempt for row in rows],
        train_loss=[row.data.get("train_loss") for row in rows],
        valid_loss=[row.data.get("valid_loss") for row in rows],
    )
    return MetricsObject(job_id=job_id, last_event_ordinal=last_event, data=columns)


@router.get("/{job_id}/timeline", responses={200: {"model": TraceObject}})
def get_timeline(
    context: ContextDep,
    caller: CallerDep,
    job_id: str,
    step: Annotated[int | None, Query(ge=1, le=2**63 - 1)] = None,
) -> JSONResponse:
    """Returns the timeline of a step, by default the last one held, as a trace for Perfetto and Chrome."""
    with context.database.read() as session:
        job = JobRepository(session, caller.only_of).get(job_id)
    check_is_here(context.settings, job)
    folder = job_dir(context.settings, job_id) / FOLDER
    held = held_steps(folder)
    if step is None and held:
        step = held[-1]
    found = None if step is None else load_step(folder, step)
    if found is None:
        which = f"; held are steps {', '.join(map(str, held))}" if held else ": no step is held yet"
        raise ApiError(
            f"job {job_id} has no timeline of {'any step' if step is None else f'step {step}'}{which}. A step is held "
            f"from its end until {KEPT_STEPS} more are over",
            status=404,
            param="step",
            code="timeline_not_held",
        )
    about = {"job_id": job_id, "step": found.step, "held_steps": held, "summary": found.summary}
    # Not validated by a model, because a trace has thousands of events.
    return JSONResponse(trace_of(found.spans, begins_s=found.start_s, about=about, boxes=names_of_boxes(found.summary)))


@router.get("/{job_id}/checkpoints")
def list_checkpoints(
    context: ContextDep, caller: CallerDep, job_id: str, after: str | None = None, limit: _Limit = 10
) -> PageOf[CheckpointObject]:
    """Returns a page of a job's checkpoints, latest first."""
    with context.database.read() as session:
        JobRepository(session, caller.only_of).get(job_id)
        page = EventRepository(session).checkpoints(job_id, limit=limit, after=after)
    return PageOf.of([CheckpointObject.of(row) for row in page.rows], has_more=page.has_more)


@router.delete("/{job_id}/checkpoints/{checkpoint_id}")
def delete_checkpoint(
    context: ContextDep, caller: CallerDep, audit: AuditDep, job_id: str, checkpoint_id: str
) -> Deleted:
    """Deletes a checkpoint and its files."""
    with context.database.write() as session:
        JobRepository(session, caller.only_of).get(job_id)
        model = EventRepository(session).checkpoint(job_id, checkpoint_id).model
        removal = deletion.delete_model(session, context.settings, model, only_of=caller.only_of)
        audit(session, checkpoint_id)
    deletion.carry_out(context.database, context.settings, removal)
    return Deleted(id=checkpoint_id, object="fine_tuning.job.checkpoint")


@router.delete("/{job_id}")
def delete_job(
    context: ContextDep, caller: CallerDep, audit: AuditDep, job_id: str, delete_model: bool = False
) -> Deleted:
    """Deletes a finished job with its events, checkpoints and result files.

    Its model is deleted only with `delete_model`.
    """
    with context.database.write() as session:
        job = JobRepository(session, caller.only_of).get(job_id)
        deletion.delete_job(session, context.settings, job, with_model=delete_model, only_of=caller.only_of)
        audit(session, job_id)
    return Deleted(id=job_id, object="fine_tuning.job")


def _with_metrics(context: Context, session: Session, jobs: Iterable[Job]) -> list[JobObject]:
    rows = list(jobs)
    last_metrics = EventRepository(session).last_metrics([job.id for job in rows])
    rated_nbytes = context.settings.ssd_endurance_nbytes  # of the SSDs of this home
    boxes = _boxes(context, session)
    parts = _names_of_parts(session, boxes, [job.id for job in rows])
    return [
        JobObject.of(
            job,
            last_metrics.get(job.id),
            rated_nbytes if rated_nbytes and is_local(context.settings, job) else (),
            has_plan=has_plan(context.settings, job),
            room_reason=why_it_waits_for_room(context.settings, job),
            box=boxes.get(job.node),
            boxes=parts.get(job.id) or _boxes_without_parts(context.settings, job),
            is_here=is_local(context.settings, job),
        )
        for job in rows
    ]


def _names_of_parts(
    session: Session, boxes: Mapping[str | None, str], job_ids: Collection[str]
) -> dict[str, list[str]]:
    """Returns the boxes of each of these jobs that was divided over several, in the order of its blocks."""
    return {
        job_id: [HEAD_NAME, *(boxes.get(part.node, "a removed box") for part in parts)]
        for job_id, parts in PartRepository(session).by_job(job_ids).items()
    }


def _boxes_without_parts(settings: Settings, job: Job) -> list[str] | None:
    """Returns the boxes of a job over several that has no parts: those it had or, before it is divided, asks for."""
    asked = job.windlass.get("boxes")
    if asked is None:
        return None
    if (plan := stages_of(settings, job.id)) is not None:
        return list(plan.boxes)
    return None if isinstance(asked, int) else [HEAD_NAME, *(name for name in asked if name != HEAD_NAME)]


def _boxes(context: Context, session: Session) -> dict[str | None, str]:
    """Returns the names of boxes by their homes. A job without a home will be this home's."""
    here: dict[str | None, str] = dict.fromkeys((node_of(context.settings.home), None), HEAD_NAME)
    return here | BoxRepository(session).names()


def _made_before(session: Session, caller: Caller, key: str | None, digest: str) -> Job | None:
    if key is None:
        return None
    # A key is stored for its API key. Older releases stored the bare key.
    job = JobRepository(session).by_idempotency_key(caller.user, (_own_key(caller, key), key))
    if job is not None and job.request_digest != digest:
        raise ApiError(
            f"Idempotency-Key {key!r} was used for job {job.id} with another body; use a new key",
            param="Idempotency-Key",
            code="idempotency_key_reused",
        )
    return job


def _own_key(caller: Caller, key: str) -> str:
    """Returns the stored form of an Idempotency-Key.

    It contains the API key's id, because a user's API keys may send equal ones.
    """
    return key if caller.key_id is None else f"{caller.key_id}:{hashlib.sha256(key.encode()).hexdigest()}"


def _new_job(context: Context, caller: Caller, body: CreateJob, idempotency_key: str | None, digest: str) -> NewJob:
    settings = body.job_settings()
    with context.database.read() as session:
        check_priority(session, context.settings, caller, settings.windlass.priority)
        node = _check_box(context, session, settings.windlass.box)
        _check_boxes(context, session, settings.windlass.boxes)
        _check_gpus(context, session, settings.windlass.least_gpus, node=node)
        visible = is_visible(session, caller, body.model)
        if visible:
            check_may_build_on(session, caller, body.model)
    checked = check_model(
        context.settings,
        body.model,
        random_weights=settings.initialization is Initialization.RANDOM,
        hub_files=context.hub_files,
        is_visible=visible,
        hint=lambda: model_hint(context, caller, body.model),
    )
    sequence_length = fit_sequence_length(settings.windlass.sequence_length, checked)
    return NewJob(
        model=body.model,
        training_file=body.training_file,
        validation_file=body.validation_file,
        suffix=body.suffix,
        seed=settings.seed,
        method=_method(settings),
        windlass=settings.windlass.model_dump(mode="json") | {"sequence_length": sequence_length},
        metadata=body.metadata or {},
        priority=settings.windlass.priority,
        idempotency_key=None if idempotency_key is None else _own_key(caller, idempotency_key),
        request_digest=digest,
        node=node_of(context.settings.home),
        owner=caller.user,
    )


def _method(settings: JobSettings) -> dict[str, Any]:
    return {"type": "supervised", "supervised": {"hyperparameters": settings.supervised.model_dump(mode="json")}}


def _check_model_stays(context: Context, session: Session, caller: Caller, model: str) -> None:
    """Raises ApiError if a fine-tuned model was deleted since its check. The caller holds the write lock."""
    if not is_fine_tuned_id(model):
        return
    folder = model_dir(model, models_dir=context.settings.models_dir, fine_tuned_dir=context.settings.fine_tuned_dir)
    if not (is_visible(session, caller, model) and folder.is_dir()):
        raise ApiError(f"model: there is no model {model!r} here", status=404, param="model", code="model_not_found")
    deletion.refuse_if_it_may_go(session, model)


def _check_file(context: Context, session: Session, caller: Caller, param: str, file_id: str) -> None:
    try:
        file = FileRepository(session, caller.only_of).get(file_id)
    except NotFound as error:
        raise ApiError(f"{param}: {error}; upload it first", param=param, code="file_not_found") from None
    if not caller.may_build_on(file.owner):
        raise ApiError(
            f"{param}: {file_id} belongs to user {file.owner!r}; a job uses its own user's files",
            param=param,
            code="not_yours",
        )
    if file.purpose != TRAINING_PURPOSE:
        raise ApiError(
            f'{param}: {file_id} has the purpose "{file.purpose}", not "{TRAINING_PURPOSE}"',
            param=param,
            code="invalid_file",
        )
    if not (context.settings.files_dir / file_id).is_file():
        raise ApiError(
            f"{param}: the content of {file_id} is not here: send the job to the service that it was uploaded to",
            param=param,
            code="file_elsewhere",
        )
