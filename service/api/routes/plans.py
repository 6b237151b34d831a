"""Plans over HTTP: for a job that does not exist yet, and for an accepted job."""

import json
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import anyio
from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from fastapi.sse import format_sse_event

from windlass.actors.timeline import SIMULATED_FOLDER, StepSpans, held_steps, load_step, names_of_boxes, trace_of
from windlass.planner.hardware import Hardware, ModelShape, load, published_model, similar_models, unusual
from windlass.planner.question import JobPlan, PlanReport, PlanRequest
from windlass.service.api import (
    CallerDep,
    Context,
    ContextDep,
    PlanRun,
    described_stream,
    error_body,
    event_stream,
    is_visible,
    model_hint,
    no_job_runs,
)
from windlass.service.api.schemas import CreatePlan, JobPlanObject, PlanObject, TraceObject
from windlass.service.auth import Caller
from windlass.service.installation import Settings, check_is_here
from windlass.service.jobs import (
    MachineResources,
    hypothetical_request,
    is_over_boxes,
    job_dir,
    least_rated_tb,
    plans_of,
    settings_of_plan,
    totals_of_job,
    view_of,
)
from windlass.service.machine import check_gpus, measured_hardware
from windlass.service.preparation import CheckedModel, check_model, fit_sequence_length
from windlass.service.validation import (
    DEFAULT_SEQUENCE_LENGTH,
    ApiError,
    SettingError,
    model_dir,
)
from windlass.storage.sql.repositories import EventRepository, JobRepository

_LOG = logging.getLogger(__name__)

router = APIRouter(prefix="/v1/fine_tuning")


# The stream's events, beside the answer without `stream`.
_STREAMED = described_stream({"event": {"type": "string"}, "data": {"type": "string"}}, required=("event", "data"))

# Makes the plan's object of a report and warnings.
Shown = Callable[[PlanReport, Sequence[str]], dict[str, Any]]


@router.post("/plans", response_model=PlanObject, responses=_STREAMED)
async def create_plan(context: ContextDep, caller: CallerDep, body: CreatePlan, http: Request) -> Any:
    """Plans a job without creating it. Nothing is stored but measured times of the model's blocks.

    Blocks whose times are not known on this machine are measured first, which takes all its cores for a minute or so.
    With `measure` false they are not: their times then follow from the machine's rates (`times_from` is `rates`), and
    `measuring_s` tells about how long it would take to measure them. Times that are known are used in either case.

    With `stream`, the answer is a stream of server-sent events. Those named `fine_tuning.plan.estimate` have the best
    plan so far by formulas alone, with `estimated`. With `to_be_measured`, its times follow from the machine's rates,
    because the model's blocks are not measured yet. Then events named `fine_tuning.plan.progress` have `message`,
    `done` and `total` of the measurement. `fine_tuning.plan.without_advice` has the plan as soon as it is known. It has
    no answers to `what_if` yet, does not say what would be faster, and has no least GPU memory. With `what_if`, those
    named `fine_tuning.plan.changes` have the plan with the rows of `what_if` so far, and `num_changes_left`.
    `fine_tuning.plan` has the plan with all of these, and `error` has an error object.
    """
    request, shown = await run_in_threadpool(_asked, context, caller, body)
    if body.stream:
        request = replace(request, tells_estimate=True)
        return event_stream(_streamed(context, caller.user, request, shown))
    return shown(*await _run(context, caller.user, request, http.is_disconnected))


def _asked(context: Context, caller: Caller, body: CreatePlan) -> tuple[PlanRequest, Shown]:
    """Checks a request for a plan. Raises its ApiError."""
    asked, settings, batch_size = body.windlass, context.settings, body.checked_batch_size()
    is_alone = no_job_runs(context)
    model_path, sequence_length = _model(context, caller, body)
    check_gpus(settings, asked.least_gpus, other=body.hardware)
    hardware = body.hardware or measured_hardware(settings)
    if hardware is None:
        raise ApiError(
            "hardware: this machine was not measured yet; run `windlass doctor`, or describe a machine",
            param="hardware",
            code="not_measured",
        )
    request = _request(
        settings,
        body,
        hardware,
        model_dir=model_path,
        batch_size=batch_size,
        sequence_length=sequence_length,
        is_alone=is_alone,
    )
    leaves_unmeasured = request.measures and not body.measure
    request = replace(request, what_if=body.what_if, leaves_unmeasured=leaves_unmeasured)

    def shown(report: PlanReport, warnings: Sequence[str]) -> dict[str, Any]:
        about = {
            "model": body.model,
            "shape": model_path.stem if model_path.is_file() else None,
            "hardware": hardware.model_dump(),
            "job_settings": settings_of_plan(asked, request.training, report),
            **totals_of_job(
                asked,
                report,
                batch_size=batch_size,
                num_examples=body.num_examples,
                num_ssds=hardware.ssds.count,
                rated_tb=least_rated_tb(settings, hardware.ssds, is_here=body.hardware is None),
            ),
            "warnings": [*unusual(hardware), *warnings],
        }
        return {"object": "fine_tuning.plan", **about, **asdict(report)}

    return request, shown


@router.get("/jobs/{job_id}/plan", response_model=JobPlanObject)
def get_plan(context: ContextDep, caller: CallerDep, job_id: str) -> dict[str, Any]:
    """Returns the job's current plan, the measured values, and its earlier plans.

    A job over several boxes has a simulated step and measured values only.
    """
    with context.database.read() as session:
        job = JobRepository(session, caller.only_of).get(job_id)
        measured = EventRepository(session).last_measured(job_id)
    check_is_here(context.settings, job)
    plans = plans_of(context.settings, job)
    plan = plans[-1] if plans else None
    simulated = _simulated_step(context.settings, job_id) if is_over_boxes(job) else None
    if plan is None and measured is None and simulated is None:
        why = "it is not validated yet, or this machine was not measured (`windlass doctor`) when it was"
        if is_over_boxes(job):
            why += "; a job over several boxes may also wait for its boxes to be chosen, or have no simulated step"
        raise ApiError(
            f"job {job_id} has no plan: {why}",
            status=404,
            code="plan_not_found",
        )
    earlier = [{**asdict(each.report), **_correction_of(each)} for each in plans[:-1]]
    shown = {**view_of(plan, measured), **_correction_of(plan), "before": earlier}
    if simulated is not None:
        shown["simulated"] = {"step_s": simulated.summary["period_s"], "summary": simulated.summary}
    return {"object": "fine_tuning.job.plan", "job_id": job_id, **shown}


@router.get("/jobs/{job_id}/plan/timeline", responses={200: {"model": TraceObject}})
def get_planned_timeline(context: ContextDep, caller: CallerDep, job_id: str) -> JSONResponse:
    """Returns the simulated timeline of a planned step, as a trace like that of a measured step."""
    with context.database.read() as session:
        job = JobRepository(session, caller.only_of).get(job_id)
    check_is_here(context.settings, job)
    found = _simulated_step(context.settings, job_id)
    if found is None:
        raise ApiError(
            f"job {job_id} has no simulated timeline: it has no plan, or the simulation would have taken too long",
            status=404,
            code="timeline_not_held",
        )
    about = {"job_id": job_id, "simulated": True, "summary": found.summary}
    boxes = names_of_boxes(found.summary)
    return JSONResponse(trace_of(found.spans, begins_s=found.start_s, about=about, levels=found.levels, boxes=boxes))


def _simulated_step(settings: Settings, job_id: str) -> StepSpans | None:
    """Returns the step that was simulated for a job's plan, None if there is none."""
    folder = job_dir(settings, job_id) / "prepare" / SIMULATED_FOLDER
    held = held_steps(folder)
    return load_step(folder, held[-1]) if held else None


def _correction_of(plan: JobPlan | None) -> dict[str, Any]:
    """Returns the fields about a plan's correction."""
    if plan is None:
        return {"corrected": False, "told": None, "from_attempt": None}
    return {"corrected": plan.corrected, "told": plan.message, "from_attempt": plan.from_attempt}


def _model(context: Context, caller: Caller, body: CreatePlan) -> tuple[Path, int]:
    """Returns the path of the model's folder, or of a published shape, and the tokens of an example.

    A model that is here goes before a published one of the same name. Raises ApiError.
    """
    settings, model = context.settings, body.model
    with context.database.read() as session:
        visible = is_visible(session, caller, model)
    folder = model_dir(model, models_dir=settings.models_dir, fine_tuned_dir=settings.fine_tuned_dir)
    is_here = visible and folder.is_dir()
    shape_path = None if is_here else published_model(model)
    if shape_path is None:
        checked = check_model(
            settings,
            model,
            random_weights=True,
            hub_files=context.hub_files,
            is_visible=visible,
            hint=lambda: model_hint(context, caller, model) or _shape_hint(model),
        )
        if not is_here:
            raise ApiError(
                f"model: {model} is not here yet; a job downloads it{_shape_hint(model)}",
                param="model",
                code="model_not_found",
                status=404,
            )
        default = None
    else:
        longest = load(ModelShape, shape_path).max_tokens
        checked, default = CheckedModel(max_sequence_length=longest), DEFAULT_SEQUENCE_LENGTH
    asked = body.checked_sequence_length()
    sequence_length = fit_sequence_length(asked, checked, param=body.param_of("sequence_length")) or default
    if sequence_length is None:
        raise ApiError(
            "windlass.sequence_length: the model's config does not tell its longest sequence; give a length",
            param="windlass.sequence_length",
            code="invalid_value",
        )
    return shape_path or folder, sequence_length


def _shape_hint(model: str) -> str:
    """Names the published shapes whose names are near to a model's that is not here, or says how to list all shapes."""
    if near := similar_models(model):
        return f" (the shape of {' or '.join(near)} can be planned without its files)"
    return " (GET /v1/fine_tuning/shapes lists the models that can be planned without their files)"


def _request(
    settings: Settings,
    body: CreatePlan,
    hardware: Hardware,
    *,
    model_dir: Path,
    batch_size: int,
    sequence_length: int,
    is_alone: bool,
) -> PlanRequest:
    """Makes the request to the planner. Raises the ApiError that a request for the job would get.

    `is_alone`: no job trains on this machine.
    """
    is_here = body.hardware is None
    try:
        return hypothetical_request(
            settings,
            hardware,
            MachineResources.here(settings) if is_here else None,
            model_dir=model_dir,
            asked=body.windlass,
            batch_size=batch_size,
            sequence_length=sequence_length,
            num_validation_examples=body.num_validation_examples,
            is_alone=is_here and is_alone,
        )
    except SettingError as error:
        raise ApiError(str(error), param=error.param, code="invalid_value") from None
    except ValueError as error:
        raise ApiError(str(error), param="windlass", code="invalid_value") from None


@asynccontextmanager
async def _running(context: Context, user: str | None, request: PlanRequest) -> AsyncIterator[PlanRun]:
    """Holds a plan's making, which is ended at the end of the `with` block."""
    run = await run_in_threadpool(PlanRun, context, user, request)
    try:
        yield run
    finally:
        # If the client has gone, nothing can be awaited.
        threading.Thread(target=run.close, name="plan-end").start()


async def _run(
    context: Context, user: str | None, request: PlanRequest, is_gone: Callable[[], Awaitable[bool]]
) -> tuple[PlanReport, list[str]]:
    """Makes the plan. Returns it with warnings about processes that died meanwhile. Waiting holds no thread.

    `is_gone`: returns whether the client has ended the connection. Its plan is then abandoned, with an ApiError.
    """
    async with _running(context, user, request) as run:
        while (report := await run_in_threadpool(run.poll)) is None:
            if await is_gone():
                raise ApiError("the client has gone, so its plan was abandoned", code="cut_off")
            await anyio.sleep(run.pause_s)
        await run_in_threadpool(run.close)  # who has the answer may ask again
        return report, run.warnings


async def _streamed(context: Context, user: str | None, request: PlanRequest, shown: Shown) -> AsyncIterator[bytes]:
    """Yields the events of a plan: estimates, progress, the changes so far, and at last the plan or an error."""
    try:
        async with _running(context, user, request) as run:
            while (report := await run_in_threadpool(run.poll)) is None:
                for kind, data in _news_of(run, shown):
                    yield _event(kind, data)
                await anyio.sleep(run.pause_s)
            last = _event("fine_tuning.plan", shown(report, run.warnings))
            await run_in_threadpool(run.close)  # who has read the last event may ask again
    except ApiError as error:
        last = _event("error", error_body(error))
    except Exception:  # noqa: BLE001 - the status is sent already, so the stream itself tells
        _LOG.exception("a plan for a stream failed")
        failed = ApiError("the plan was not made; the service's log says why", status=500, code="internal_error")
        last = _event("error", error_body(failed))
    yield last


def _news_of(run: PlanRun, shown: Shown) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the names and the data of the events that are due before the plan."""
    if (told := run.estimate()) is not None:
        plan = shown(told.report, run.warnings)
        if told.lacks_advice:
            yield "fine_tuning.plan.without_advice", plan
        elif told.num_changes_left is not None:
            yield "fine_tuning.plan.changes", {**plan, "num_changes_left": told.num_changes_left}
        else:
            yield "fine_tuning.plan.estimate", {**plan, "estimated": True, "to_be_measured": told.to_be_measured}
    if (progress := run.progress()) is not None:
        yield "fine_tuning.plan.progress", {"object": "fine_tuning.plan.progress", **progress}


def _event(kind: str, data: dict[str, Any]) -> bytes:
    return format_sse_event(event=kind, data_str=json.dumps(data))
