"""Plans that are made again, in a planner process: by the first measured steps, or for a changed machine.

The job keeps running or waiting meanwhile. All state is in the job's row and its plans, so a plan is made again also if
the dispatcher dies meanwhile.
"""

import math
import shutil
import statistics
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from windlass.actors.job import NUM_RECENT_STEPS
from windlass.actors.timeline import FOLDER
from windlass.engine.memory_plan import reserved_nbytes
from windlass.planner.predictions import MIN_STEPS
from windlass.planner.question import ChangedInputs, JobPlan, PlanRequest, ReplanRequest
from windlass.planner.stages import StagesRequest
from windlass.service.dispatcher.outcomes import pause_job
from windlass.service.installation import Settings
from windlass.service.jobs import (
    NoPlanForGpusError,
    chooses_gpus,
    gpus_of,
    job_dir,
    keep_plan,
    load_plan,
    load_plan_request,
    plan_bounds,
    with_gpus,
)
from windlass.service.machine import measured_hardware
from windlass.service.preparation import (
    PLAN_JOB,
    Preparation,
    PreparationError,
    PreparationStep,
    plan_step,
    stages_step,
    tell_warnings,
)
from windlass.service.preparation.sandbox import Start, start_limited
from windlass.service.validation import count_text
from windlass.storage.sql import Database, Job, JobMetrics
from windlass.storage.sql.repositories import EventRepository, JobFields, JobRepository

# First steps of an attempt that are not measured, because kernels are compiled and no transfers are in flight yet.
_NUM_FIRST_STEPS = 2
# Minimum remaining seconds of a job for a correction. Planning takes some ten seconds, and so does a restart.
_MIN_LEFT_S = 60.0
# Relative change of the time of a step, since it was last measured for the plan, from which its prediction is renewed.
_MIN_CHANGE = 0.15
# Minimum seconds of steps between two renewals of a prediction, because planning takes time from the job.
_MIN_BETWEEN_S = 600.0
_NUM_LAST_STEPS = 5  # that a renewed prediction is made by; the timelines of no more than eight are kept
# Cost of a restart, in times of the attempt's start: one for the new attempt's start and one for the old one's end.
_STARTS_A_RESTART = 2

Ask = Callable[[Path, PlanRequest], Preparation]
AskStages = Callable[[Path, StagesRequest], Preparation]


def ask_planner(work_dir: Path, request: PlanRequest, start: Start = start_limited) -> Preparation:
    """Starts a planner process. Its files go to `work_dir`, which is created anew."""
    return _asked(work_dir, lambda: plan_step(work_dir, request), start)


def ask_stages(work_dir: Path, request: StagesRequest, start: Start = start_limited) -> Preparation:
    """Starts a planner process for a job over several boxes, as `ask_planner` does. Its result is PLAN_STAGES."""
    return _asked(work_dir, lambda: stages_step(work_dir, request), start)


def _asked(work_dir: Path, make_step: Callable[[], PreparationStep], start: Start) -> Preparation:
    shutil.rmtree(work_dir, ignore_errors=True)
    work_dir.mkdir(parents=True)
    return Preparation([make_step()], work_dir=work_dir, start=start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replan:
    """A plan to make again: the request to the planner, and the plan that follows from its answer."""

    work_dir: Path
    request: PlanRequest
    accept: Callable[[JobPlan], JobPlan]  # makes the job's next plan from the planner's plan
    # Makes it from the previous plan; gets the reason why there is no other. Raises NoPlanForGpusError.
    reject: Callable[[str], JobPlan]
    reports_step_time: bool  # in the event


# Returns the plan to make again for a job, or None if there is no reason.
Trigger = Callable[[Job], Replan | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    job: Job  # as it was when the planner was asked
    replan: Replan
    preparation: Preparation


class Replanner:
    """Makes plans again whenever a trigger says so, one job at a time, because the planner takes all cores."""

    def __init__(self, database: Database, settings: Settings, trigger: Trigger, *, ask: Ask = ask_planner) -> None:
        self._database = database
        self._settings = settings
        self._trigger = trigger
        self._ask = ask
        self._running: _Running | None = None

    @property
    def job_id(self) -> str | None:
        """The job whose plan is being made again."""
        return None if self._running is None else self._running.job.id

    def poll(self, job: Job) -> bool:
        """Starts the planner for a job or checks on it. Returns False if the job needs no other plan than its own.

        Returns True also in the pass that stores the plan.
        """
        running = self._running
        if running is not None and running.job.id == job.id:
            self._poll(running, job)
            return True
        replan = self._trigger(job)
        if replan is not None and running is None:
            preparation = self._ask(replan.work_dir, replan.request)
            self._running = _Running(job=job, replan=replan, preparation=preparation)
        return replan is not None

    def drop(self, *, keep: Collection[str]) -> None:
        """Ends the planner process of a job that is not in `keep`."""
        if self._running is not None and self._running.job.id not in keep:
            self._running.preparation.stop()
            self._running = None

    # --- private methods --------------------------------------------------------------------------------------------

    def _poll(self, running: _Running, job: Job) -> None:
        before = running.job
        # Another attempt has other steps and another start time. A resumed job may have another number of GPUs.
        if (before.attempt, before.windlass) != (job.attempt, job.windlass):
            self.drop(keep=())
            return
        plan, why_not = None, ""
        try:
            results = running.preparation.poll()
        except PreparationError as error:
            why_not = str(error)
        else:
            if results is not None:
                plan, why_not = _feasible_plan(results[PLAN_JOB])
        tell_warnings(self._database, job, running.preparation)
        if plan is not None:
            self._store(job, running.replan.accept(plan), running.replan, level="info")
        elif why_not:
            self._keep(job, running.replan, why_not)

    def _keep(self, job: Job, replan: Replan, why_not: str) -> None:
        """Stores the previous plan as the next one. If it is not for the job's number of GPUs, the job is paused."""
        try:
            plan = replan.reject(why_not)
        except NoPlanForGpusError as error:
            self.drop(keep=())
            with self._database.write() as session:
                pause_job(session, job, str(error))
        else:
            self._store(job, plan, replan, level="warn")

    def _store(self, job: Job, plan: JobPlan, replan: Replan, *, level: str) -> None:
        """Stores the plan and names it in the job's row. A crash between the two only repeats the planning."""
        self.drop(keep=())
        number = keep_plan(self._settings, job, plan)
        data: dict[str, Any] = {"plan_number": number}
        fields: JobFields = {"plan_number": number}
        if chooses_gpus(job):
            fields["hyperparameters"] = with_gpus(job, plan.num_gpus)
        if replan.reports_step_time:
            data["step_s"] = plan.report.step_s
        with self._database.write() as session:
            JobRepository(session).set_fields(job.id, seen=job, **fields)
            EventRepository(session).add(
                job.id, attempt=job.attempt, message=plan.message or "", level=level, data=data
            )


def _feasible_plan(answer: dict[str, Any]) -> tuple[JobPlan | None, str]:
    """Returns the planner's plan, or the reason why there is none."""
    plan = JobPlan.from_json(answer)
    if plan is not None and plan.report.feasible:
        return plan, ""
    reasons = answer.get("warnings", ()) if plan is None else plan.report.reasons
    return None, "; ".join(reasons) or "the planner gave no reason"


# --- trigger: measured steps ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSteps:
    """Corrects the plan of a running job once, by the measured times of its first steps.

    If the new plan is worth a restart, the running attempt ends at its next commit and the next one runs with it. If
    later steps take another time for long, only the prediction is made again, by the last steps.
    """

    database: Database
    settings: Settings
    has_gpus: bool = True  # else jobs compute on the CPU

    def __call__(self, job: Job) -> Replan | None:
        """Returns the correction of a job's plan, or None while there is nothing to correct."""
        num_needed = _NUM_FIRST_STEPS + MIN_STEPS
        if job.total_steps is None or not num_needed <= job.step < job.total_steps:
            return None
        # GPU workers that compute on the CPU share its cores, so their spans do not tell how fast each one is.
        if gpus_of(job) > 1 and not self.has_gpus:
            return None
        plan = load_plan(self.settings, job)
        if plan is None or plan.placement is None:
            return None
        if plan.measured or plan.corrected:
            return self._renewed_prediction(job, plan)
        with self.database.read() as session:
            events = EventRepository(session)
            # One more row, because a resumed attempt may report the last step again.
            rows = events.first_metrics(job.id, job.attempt, limit=num_needed + 1)
            began = events.first(job.id, job.attempt)
        steps = [row for row in rows if "step_s" in row.data]
        if began is None or len(steps) < num_needed:
            return None
        num_left = job.total_steps - job.step
        measured_s = statistics.median(_step_s(row) for row in steps[_NUM_FIRST_STEPS:])
        if num_left * measured_s < _MIN_LEFT_S:
            return None
        if (request := load_plan_request(self.settings, job)) is None:
            return None
        start_s = steps[0].created_at - _step_s(steps[0]) - began.created_at
        folder = job_dir(self.settings, job.id)
        about: dict[str, Any] = {"expected_step_s": measured_s, "expected_from_step": steps[-1].step}
        running = ReplanRequest(
            timeline_dir=folder / FOLDER,
            first_step=steps[_NUM_FIRST_STEPS].step,
            plan=plan,
            num_steps_left=num_left,
            restart_s=_STARTS_A_RESTART * max(0.0, start_s),
        )
        return Replan(
            work_dir=folder / "correction",
            # The planner must not measure blocks while the job computes. It uses the job's own steps.
            request=replace(request, may_measure=False, simulation_s=0.0, running=running),
            accept=lambda answer: _corrected(plan, answer, job.attempt).model_copy(
                # With another plan, steps take what it says.
                update=about | ({"expected_step_s": answer.report.step_s} if answer.changes else {})
            ),
            reject=lambda why: _uncorrected(plan, why).model_copy(update=about),
            reports_step_time=True,
        )

    def _renewed_prediction(self, job: Job, plan: JobPlan) -> Replan | None:
        """Returns the renewal of a prediction that the last steps contradict, or None."""
        before_s, from_step = plan.expected_step_s, plan.expected_from_step
        # Plans of older releases lack both. A plan that waits for its first attempt has no steps yet.
        if before_s is None or from_step is None or (plan.from_attempt or 0) > job.attempt:
            return None
        assert job.total_steps is not None, "it runs"
        num_left = job.total_steps - job.step
        if (job.step - from_step) * before_s < _MIN_BETWEEN_S or num_left * before_s < _MIN_LEFT_S:
            return None
        with self.database.read() as session:
            events = EventRepository(session)
            first = events.first_metrics(job.id, job.attempt, limit=1)
            recent = (events.last_measured(job.id) or {}).get("recent")
        if recent is None or recent["num_steps"] < NUM_RECENT_STEPS:
            return None
        # The last steps must be those of this attempt, because an earlier one may have had another plan.
        if not first or job.step - first[0].step < _NUM_FIRST_STEPS + NUM_RECENT_STEPS:
            return None
        now_s: float = recent["step_s"]
        if abs(math.log(now_s / before_s)) < math.log1p(_MIN_CHANGE):
            return None
        if (request := load_plan_request(self.settings, job)) is None:
            return None
        folder = job_dir(self.settings, job.id)
        running = ReplanRequest(
            timeline_dir=folder / FOLDER,
            first_step=job.step - _NUM_LAST_STEPS + 1,
            plan=plan,
            num_steps_left=num_left,
            restart_s=0.0,
            may_change=False,
        )
        about = {"measured": True, "expected_step_s": now_s, "expected_from_step": job.step}
        changed = (
            f"The last {recent['num_steps']} steps took {now_s:.3g} s each; since step {from_step}, {before_s:.3g} s "
            "were expected"
        )
        return Replan(
            work_dir=folder / "correction",
            request=replace(request, may_measure=False, simulation_s=0.0, running=running),
            accept=lambda answer: _with_renewed_prediction(plan, answer, changed).model_copy(update=about),
            reject=lambda why: plan.model_copy(
                update=about | {"message": f"{changed}. The prediction could not be made again: {why}"}
            ),
            reports_step_time=True,
        )


def must_end_for_plan(settings: Settings, job: Job) -> bool:
    """Returns whether a running attempt must end at its next commit, so that the next one runs with a new plan."""
    plan = load_plan(settings, job) if job.plan_number else None
    return plan is not None and (plan.from_attempt or 0) > job.attempt


def _corrected(before: JobPlan, answer: JobPlan, attempt: int) -> JobPlan:
    plan = JobPlan(
        report=answer.report,
        placement=answer.placement,
        arena_nbytes=answer.arena_nbytes,
        message=answer.message,
        corrected=True,
        measured=True,
        others=answer.others or before.others,
        from_attempt=attempt + 1 if answer.changes else None,
    )
    return plan.made_for(before.changed_inputs)


def _with_renewed_prediction(before: JobPlan, answer: JobPlan, changed: str) -> JobPlan:
    """Makes the plan that the job runs with, with the times of the planner's answer."""
    return before.model_copy(update={"report": answer.report, "message": f"{changed}. {answer.message}"})


def _uncorrected(before: JobPlan, why: str) -> JobPlan:
    message = f"The plan could not be made again by what the first steps measured, and stays: {why}"
    about = {"corrected": False, "measured": True, "from_attempt": None, "message": message}
    return before.model_copy(update=about)


def _step_s(row: JobMetrics) -> float:
    return float(row.data["step_s"])


# --- trigger: a changed machine ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedMachine:
    """Renews the plan of a queued job if its inputs or the planner have changed since the plan was made.

    The inputs are the machine, the settings and the job's number of GPUs.

    A job may wait or be paused for long. Meanwhile SSDs or GPUs may change and be measured again, or the settings give
    jobs other budgets. A job's states can move to the places that a new plan requires. The new plan therefore holds
    from the next attempt on.
    """

    settings: Settings
    num_devices: int = 1  # the most that a job may get whose plan chooses the number of GPUs

    def __call__(self, job: Job) -> Replan | None:
        """Returns the renewal of a job's plan, or None if nothing has changed or the job has no plan."""
        plan, before = load_plan(self.settings, job), load_plan_request(self.settings, job)
        if plan is None or before is None:
            return None
        bounds = plan_bounds(self.settings, job, num_devices=self.num_devices)
        now = ChangedInputs(hardware=measured_hardware(self.settings), bounds=bounds)
        request = before.with_inputs(now)
        if request.chooses_ranks and (request.num_ranks, True) != (before.num_ranks, before.chooses_ranks):
            why = f"The plan may choose up to {count_text(request.num_ranks, 'GPU')} now"
        elif request.chooses_ranks != before.chooses_ranks:
            why = f"The job has {count_text(request.num_ranks, 'GPU')} now, and its plan does not choose them"
        elif request.num_ranks != before.num_ranks:
            why = f"The job has {count_text(request.num_ranks, 'GPU')} now, not {before.num_ranks}"
        elif request.hardware != before.hardware:
            why = "The machine was measured again"
        elif request != before:
            why = "The settings' budgets have changed"
        elif plan.from_attempt != job.attempt + 1 and _lacks_reserve(plan, request):  # not renewed just now
            why = "The plan leaves too little of the GPU's memory to PyTorch's allocator"
        else:
            return None
        return Replan(
            work_dir=job_dir(self.settings, job.id) / "renewal",
            request=request,
            accept=lambda answer: _renewed(plan, answer, now, job.attempt, why),
            reject=lambda why_not: _not_renewed(plan, now, job.attempt, why, why_not),
            reports_step_time=False,
        )


def _lacks_reserve(plan: JobPlan, request: PlanRequest) -> bool:
    """Checks whether a GPU has room for the plan's tensors, but not for what PyTorch's allocator reserves beside them.

    The job's budget may leave less room. Such plans are those of older releases. The job's GPU worker would refuse to
    start.
    """
    planned_nbytes = plan.planned_device_nbytes
    if not request.hardware.gpus.count or planned_nbytes is None:
        return False
    return reserved_nbytes(planned_nbytes) > request.budgets.device_nbytes


def _renewed(before: JobPlan, answer: JobPlan, now: ChangedInputs, attempt: int, why: str) -> JobPlan:
    plan = JobPlan(
        report=answer.report,
        placement=answer.placement,
        arena_nbytes=answer.arena_nbytes,
        others=answer.others,
        message=f"{why}: the job goes on by a new plan",
        corrected=False,
        measured=before.measured or before.corrected,
        from_attempt=attempt + 1,
    )
    return plan.made_for(now)


def _not_renewed(before: JobPlan, now: ChangedInputs, attempt: int, why: str, why_not: str) -> JobPlan:
    """Makes a plan with the new facts, so that it is not renewed again. It is for the job's number of GPUs.

    Raises NoPlanForGpusError if the previous plan has none for this number.
    """
    kept = before
    if (bounds := now.bounds) is not None and not bounds.chooses_ranks and bounds.num_ranks != before.num_gpus:
        if bounds.num_ranks not in before.gpu_numbers:
            gpus = count_text(bounds.num_ranks, "GPU")
            raise NoPlanForGpusError(before, f"{why}, but there is no plan for {gpus}: {why_not}")
        kept = before.for_gpus(bounds.num_ranks)
    message = f"{why}, but there is no new plan, and the previous plan is kept: {why_not}"
    measured = before.measured or before.corrected
    about = {"corrected": False, "measured": measured, "from_attempt": attempt + 1, "message": message}
    return kept.model_copy(update=about).made_for(now)
