"""The plans of a job for other boxes than this one, beside its own plan, while it is not decided where it runs.

Boxes of one kind share plans. Plans for other kinds are in `prepare/kinds/KIND/` of the job's folder, with the requests
that they answer; `prepare/kinds.json` has their numbers. The plan of the box that gets the job takes the place of the
first plan in `prepare/`. So the job's folder is then as if the job had been prepared on that box.
"""

import functools
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from windlass.amounts import GIB
from windlass.engine.training_config import TrainingConfig
from windlass.planner.hardware import Hardware
from windlass.planner.question import JobPlan, PlanBounds, PlanRequest
from windlass.service.installation import Settings
from windlass.service.jobs.machine_resources import MachineResources
from windlass.service.jobs.plan_files import load_plan
from windlass.service.jobs.spec_builder import (
    dataset_dir,
    does_not_fit,
    first_plan_of,
    job_dir,
    resolve_settings,
    settings_of,
    training_config_of,
)
from windlass.service.preparation import (
    KINDS_FOLDER,
    PLAN_JOB,
    PREPARE_DATA,
    QUESTION_FILE,
    PreparationError,
    Results,
)
from windlass.service.validation import WindlassSettings, model_dir
from windlass.storage.files import sync_tree, write_durably
from windlass.storage.sql import Job

# Maximum seconds for the simulation of a plan for another kind of box. There may be several kinds.
_SIMULATION_S = 20.0
_NUMBERS_FILE = "kinds.json"
# The kind of this home's own box, and the folder of the job's own plan while that of another box is in its place.
HERE = "here"


@dataclass(frozen=True, kw_only=True)
class BoxKind:
    """The inputs of a plan for a box: its machine, and the settings of its home. Equal boxes share plans."""

    resources: MachineResources
    hardware: Hardware | None  # None: it was not measured, so jobs run there without a plan
    num_optimizers: int = 1
    host_memory_gib: float | None = None  # the budgets of its home
    gpu_memory_gib: float | None = None

    @classmethod
    def of_home(cls, settings: Settings, resources: MachineResources, hardware: Hardware | None) -> "BoxKind":
        """Returns the kind of a home's own box. `hardware`: its stored profile; None: it was not measured."""
        return cls(
            resources=resources,
            hardware=hardware,
            num_optimizers=settings.num_cpu_optimizers,
            host_memory_gib=settings.host_memory_gib,
            gpu_memory_gib=settings.gpu_memory_gib,
        )

    @functools.cached_property
    def key(self) -> str:
        """The name of its folder in a job's folder."""
        hardware = None if self.hardware is None else self.hardware.model_dump(mode="json")
        if hardware is not None and hardware["gpus"]["fp32_tflops"] is None:
            del hardware["gpus"]["fp32_tflops"]  # older versions had no such rate, and stored plans by the same key
        settings = [self.num_optimizers, self.host_memory_gib, self.gpu_memory_gib]
        text = json.dumps([asdict(self.resources), hardware, settings], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def bounds(self, asked: WindlassSettings) -> PlanBounds:
        """Returns the bounds of a job's plan for a box of this kind."""
        return PlanBounds(
            num_ranks=asked.least_gpus,
            num_optimizers=self.num_optimizers,
            host_memory_nbytes=_least_nbytes(self.host_memory_gib, asked.budgets.host_memory_gib),
            device_memory_nbytes=_least_nbytes(self.gpu_memory_gib, asked.budgets.gpu_memory_gib),
        )


class PlanNumbers(BaseModel):
    """The numbers of a plan for another kind of box, with which the queue decides."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    feasible: bool
    why_not: str = ""
    missing_nbytes: int = 0  # the least memory that the box lacks, of all kinds together
    peak_gib: dict[str, float] = {}
    arena_nbytes: int | None = None
    step_s: float | None = None

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> "PlanNumbers":
        """Reads the planner's answer, or the error of a planner that made no plan."""
        plan = JobPlan.from_json(answer)
        if plan is None:
            why_not = (answer.get("error") or {}).get("message") or "; ".join(answer.get("warnings", ()))
            return cls(feasible=False, why_not=why_not or "no plan could be made for it")
        return cls(
            feasible=plan.report.feasible and plan.placement is not None,
            why_not="" if plan.report.feasible else "; ".join(plan.report.reasons),
            missing_nbytes=int(plan.report.least_missing_nbytes),
            peak_gib=dict(plan.report.peak_gib or {}),
            arena_nbytes=plan.arena_nbytes,
            step_s=plan.report.step_s,
        )


def requests_for_kinds(
    settings: Settings, job: Job, kinds: Iterable[BoxKind], *, num_devices: int
) -> Mapping[str, Callable[[Results], PlanRequest]]:
    """Returns functions that make the requests to the planner from the results of a preparation, by kind.

    Unmeasured kinds are left out. `num_devices`: the most GPUs that a job with `gpus: auto` may get here. The first
    plan that fits chooses the number of micro-batches and the cut of matrices, if the job leaves them open. The plans
    after it have the same ones.
    """

    def request(kind: BoxKind, results: Results) -> PlanRequest:
        training = resolve_settings(job, results, num_devices=num_devices).training
        asked, is_open = settings_of(job).windlass, first_plan_of(results) is None
        request = _request(settings, job, kind, training, results[PREPARE_DATA]["num_validation_examples"])
        return replace(
            request,
            chooses_microbatches=is_open and asked.num_microbatches is None,
            chooses_cut=is_open and asked.cut_matrices == "auto",
        )

    return {kind.key: functools.partial(request, kind) for kind in kinds if kind.hardware is not None}


def later_request(settings: Settings, job: Job, kind: BoxKind) -> PlanRequest:
    """Makes the request for a job that is already prepared. Raises OSError or ValueError if its data is gone."""
    prepared = json.loads((_prepare_dir(settings, job.id) / f"{PREPARE_DATA}.json").read_text())
    return _request(settings, job, kind, training_config_of(job), prepared["num_validation_examples"])


def _request(
    settings: Settings, job: Job, kind: BoxKind, training: TrainingConfig, num_validation_examples: int
) -> PlanRequest:
    assert kind.hardware is not None, "nothing is planned for an unmeasured box"
    asked = settings_of(job).windlass
    bounds = kind.bounds(asked)
    return PlanRequest(
        model_dir=model_dir(job.model, models_dir=settings.models_dir, fine_tuned_dir=settings.fine_tuned_dir),
        hardware=kind.hardware,
        training=training,
        dataset_dir=dataset_dir(job_dir(settings, job.id)),
        num_validation_examples=num_validation_examples,
        chooses_order=asked.leaves_order_open,
        num_ranks=bounds.num_ranks,
        num_optimizers=bounds.num_optimizers,
        host_memory_nbytes=bounds.host_memory_nbytes,
        device_memory_nbytes=bounds.device_memory_nbytes,
        may_measure=False,  # nothing of that box can be measured here
        simulation_s=_SIMULATION_S,
    )


def check_fits_a_box(job: Job, results: Results, names: Mapping[str, str], *, may_run_unplanned: bool) -> None:
    """Checks that a prepared job fits one of the boxes. Raises PreparationError with what the closest one lacks.

    `names`: a box of each planned kind, by kind. `may_run_unplanned`: there is also a box without a plan.
    """
    answers = {**({HERE: results[PLAN_JOB]} if PLAN_JOB in results else {}), **answers_by_kind(results)}
    plans = {key: JobPlan.from_json(answer) for key, answer in answers.items()}
    reports = {key: plan.report for key, plan in plans.items() if plan is not None}
    if may_run_unplanned or not answers or any(report.feasible for report in reports.values()):
        return
    if reports:
        closest = min(reports, key=lambda key: reports[key].least_missing_nbytes)
        raise does_not_fit(job, reports[closest], closest=names[closest])
    key, answer = next(iter(answers.items()))
    why = PlanNumbers.of(answer).why_not
    raise PreparationError(f"{PLAN_JOB}_failed", f"no plan could be made for it, such as for box {names[key]}: {why}")


def kind_dir(settings: Settings, job_id: str, key: str) -> Path:
    """Returns the folder of a job's plan for a kind of box."""
    return _prepare_dir(settings, job_id) / KINDS_FOLDER / key


def answers_by_kind(results: Results) -> Mapping[str, dict[str, Any]]:
    """Returns the planner's answers for other kinds of boxes among the results of a preparation."""
    prefix = f"{PLAN_JOB}@"
    return {name.removeprefix(prefix): answer for name, answer in results.items() if name.startswith(prefix)}


def keep_numbers(settings: Settings, job_id: str, answers: Mapping[str, Mapping[str, Any]]) -> None:
    """Stores the numbers of plans for other kinds, which are in their folders, beside those stored earlier."""
    if answers:
        numbers = {**plan_numbers(settings, job_id), **{key: PlanNumbers.of(answer) for key, answer in answers.items()}}
        values = {key: each.model_dump(mode="json") for key, each in numbers.items()}
        write_durably(_prepare_dir(settings, job_id) / _NUMBERS_FILE, json.dumps(values))


def plan_numbers(settings: Settings, job_id: str) -> dict[str, PlanNumbers]:
    """Returns the numbers of a job's plans for other kinds of boxes, by kind. Unreadable ones count as missing."""
    try:
        stored = json.loads((_prepare_dir(settings, job_id) / _NUMBERS_FILE).read_text())
        return {key: PlanNumbers.model_validate(values) for key, values in stored.items()}
    except (OSError, ValueError, ValidationError, AttributeError):
        return {}


def plan_for_box(settings: Settings, job: Job, kind: BoxKind) -> None:
    """Makes the plan for a box of this kind the job's first plan, and keeps the job's own plan aside.

    The caller then sets `plan_number` to 0 as it gives the job away. If the job still runs here, `plan_for_here` puts
    its own plan back.
    """
    prepare_dir, aside = _prepare_dir(settings, job.id), kind_dir(settings, job.id, HERE)
    if not aside.exists():
        partial = aside.with_name(f"{HERE}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        if (plan := load_plan(settings, job)) is not None:
            (partial / f"{PLAN_JOB}.json").write_text(json.dumps(plan.to_json()))
        if (question := prepare_dir / QUESTION_FILE).exists():
            shutil.copyfile(question, partial / QUESTION_FILE)
        partial.rename(aside)
    _put(prepare_dir, kind_dir(settings, job.id, kind.key))
    sync_tree(prepare_dir)


def plan_for_here(settings: Settings, job: Job) -> None:
    """Puts the job's own plan back as its first one, because no other box takes the job. Idempotent.

    The caller then sets `plan_number` to 0.
    """
    aside = kind_dir(settings, job.id, HERE)
    if aside.exists():
        _put(_prepare_dir(settings, job.id), aside)
        sync_tree(_prepare_dir(settings, job.id))
        shutil.rmtree(aside)


def _put(prepare_dir: Path, source: Path) -> None:
    """Copies a plan and its request; without them, the job has none."""
    for name in (f"{PLAN_JOB}.json", QUESTION_FILE):
        if (source / name).exists():
            write_durably(prepare_dir / name, (source / name).read_text())
        else:
            (prepare_dir / name).unlink(missing_ok=True)


def _prepare_dir(settings: Settings, job_id: str) -> Path:
    return job_dir(settings, job_id) / "prepare"


def _least_nbytes(*budgets_gib: float | None) -> int | None:
    given = [budget for budget in budgets_gib if budget is not None]
    return int(min(given) * GIB) if given else None
