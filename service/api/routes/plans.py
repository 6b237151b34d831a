"""Plans over HTTP: for a job that does not exist yet, and for an accepted job."""

import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import anyio
from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.sse import format_sse_event
from pydantic import ConfigDict, Field

from windlass.actors.timeline import SIMULATED_FOLDER, StepSpans, held_steps, load_step, names_of_boxes, trace_of
from windlass.planner.hardware import Hardware, unusual
from windlass.planner.question import JobPlan, PlanReport, PlanRequest
from windlass.service.api import POLL_S, CallerDep, Context, ContextDep, PlanRun, error_body, is_visible, model_hint
from windlass.service.api.middleware import BusyError
from windlass.service.api.schemas import JobPlanObject, PlanObject, TraceObject
from windlass.service.installation import Settings, check_is_here, node_of
from windlass.service.jobs import (
    MachineResources,
    hypothetical_request,
    is_over_boxes,
    job_dir,
    plans_of,
    settings_of_plan,
    view_of,
)
from windlass.service.machine import check_gpus, measured_hardware
from windlass.service.preparation import (
    check_model,
    fit_sequence_length,
)
from windlass.service.validation import (
    ApiError,
    JsonNumbers,
    TooFewMicrobatchesError,
    WindlassSettings,
    model_dir,
)
from windlass.storage.sql import JobStatus
from windlass.storage.sql.repositories import EventRepository, JobRepository

_LOG = logging.getLogger(__name__)

# How long a stream waits for the end of other plans, those of the same user among them. It holds no thread meanwhile.
_WAIT_FOR_TURN_S = 60.0

router = APIRouter(prefix="/v1/fine_tuning")


class CreatePlan(JsonNumbers):
    """The body of `POST /v1/fine_tuning/plans`. `hardware`: describes another machine than this one."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str
    batch_size: Annotated[int, Field(ge=1, le=65536)]
    hardware: Hardware | None = None
    num_validation_examples: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    windlass: WindlassSettings = WindlassSettings()
    what_if: bool = False  # also answer what one more SSD, more RAM and so on would give
    stream: bool = False  # answer with server-sent events: a first estimate by formulas, then the plan


@router.post("/plans", response_model=PlanObject)
def create_plan(context: ContextDep, caller: CallerDep, body: CreatePlan) -> Any:
    """Plans a job without creating it. Nothing is stored.

    With `stream`, the answer is a stream of server-sent events. Those named `fine_tuning.plan.estimate` have the best
    plan so far by formulas alone, with `estimated`; `fine_tuning.plan` has the plan, and `error` has an error object.
    """
    asked, settings = body.windlass, context.settings
    with context.database.read() as session:
        visible = is_visible(session, caller, body.model)
        is_alone = not JobRepository(session).with_status(
            JobStatus.RUNNING, JobStatus.PAUSING, node=node_of(settings.home)
        )
    checked = check_model(
        settings,
        body.model,
        random_weights=True,
        hub_files=context.hub_files,
        is_visible=visible,
        hint=lambda: model_hint(context, caller, body.model),
    )
    sequence_length = fit_sequence_length(asked.sequence_length, checked)
    if sequence_length is None:
        raise ApiError(
            "windlass.sequence_length: the model is not here yet, so its length is not known; give one",
            param="windlass.sequence_length",
            code="invalid_value",
        )
    check_gpus(settings, asked.least_gpus, other=body.hardware)
    hardware = body.hardware or measured_hardware(settings)
    if hardware is None:
        raise ApiError(
            "hardware: this machine was not measured yet; run `windlass doctor`, or describe a machine",
            param="hardware",
            code="not_measured",
        )
    request = _request(settings, body, hardware, sequence_length, is_alone=is_alone)
    request = replace(request, what_if=body.what_if)

    def shown(report: PlanReport, warnings: list[str]) -> dict[str, Any]:
        about = {
            "model": body.model,
            "hardware": hardware.model_dump(),
            "job_settings": settings_of_plan(asked, request.training, report),
            "warnings": [*unusual(hardware), *warnings],
        }
        return {"object": "fine_tuning.plan", **about, **asdict(report)}

    user = caller.user or ""
    if body.stream:
        request = replace(request, tells_estimate=True)
        return StreamingResponse(_streamed(context, user, request, shown), media_type="text/event-stream")
    try:
        with context.limits.plans.entered(user):
            return shown(*_run(context, request))
    except BusyError as error:
        raise _busy(error) from None


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


def _request(
    settings: Settings, body: CreatePlan, hardware: Hardware, sequence_length: int, *, is_alone: bool
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
            model_dir=_folder(settings, body.model),
            asked=body.windlass,
            batch_size=body.batch_size,
            sequence_length=sequence_length,
            num_validation_examples=body.num_validation_examples,
            is_alone=is_here and is_alone,
        )
    except TooFewMicrobatchesError as error:
        raise ApiError(str(error), param=error.param, code="invalid_value") from None
    except ValueError as error:
        raise ApiError(str(error), param="windlass", code="invalid_value") from None


def _folder(settings: Settings, model: str) -> Path:
    folder = model_dir(model, models_dir=settings.models_dir, fine_tuned_dir=settings.fine_tuned_dir)
    if not folder.is_dir():
        raise ApiError(f"model: {model} is not here yet; a job downloads it", param="model", code="model_not_found")
    return folder


def _run(context: Context, request: PlanRequest) -> tuple[PlanReport, list[str]]:
    """Makes the plan in a child process. Returns it with warnings about processes that died meanwhile."""
    run = PlanRun(context.settings, context.planner, request)
    try:
        while (report := run.poll()) is None:
            time.sleep(POLL_S)
        return report, run.warnings
    finally:
        run.close()


async def _streamed(
    context: Context, user: str, request: PlanRequest, shown: Callable[[PlanReport, list[str]], dict[str, Any]]
) -> AsyncIterator[bytes]:
    """Yields the events of a plan: estimates, and at last the plan or an error. `shown`: makes the plan's object."""
    held = ExitStack()
    try:
        try:
            await _enter(held, context, user)
            run = await run_in_threadpool(PlanRun, context.settings, context.planner, request)
            held.callback(run.close)
            while (report := await run_in_threadpool(run.poll)) is None:
                if (estimate := run.estimate()) is not None:
                    yield _event("fine_tuning.plan.estimate", {**shown(estimate, []), "estimated": True})
                await anyio.sleep(POLL_S)
            last = _event("fine_tuning.plan", shown(report, run.warnings))
        except BusyError as error:
            last = _event("error", error_body(_busy(error)))
        except ApiError as error:
            last = _event("error", error_body(error))
        except Exception:  # noqa: BLE001 - the status is sent already, so the stream itself tells
            _LOG.exception("a plan for a stream failed")
            failed = ApiError("the plan was not made; the service's log says why", status=500, code="internal_error")
            last = _event("error", error_body(failed))
        await run_in_threadpool(held.close)  # who has read the last event may ask again
        yield last
    finally:
        # If the client has gone, nothing can be awaited.
        threading.Thread(target=held.close, name="plan-end").start()


async def _enter(held: ExitStack, context: Context, user: str) -> None:
    """Waits for the user's turn to plan. A page asks again before the answer to its last question has come."""
    until_s = time.monotonic() + _WAIT_FOR_TURN_S
    while True:
        try:
            held.enter_context(context.limits.plans.entered(user, waits=False))
            return
        except BusyError:
            if time.monotonic() >= until_s:
                raise
        await anyio.sleep(POLL_S)


def _event(kind: str, data: dict[str, Any]) -> bytes:
    return format_sse_event(event=kind, data_str=json.dumps(data))


def _busy(error: BusyError) -> ApiError:
    return ApiError(f"plans are made one by one: {error}", status=429, code="plan_in_progress", kind="requests")
