"""Builds the order of a job's preparation and the specification for its runner from the job's row."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.actors.job import JOURNAL_FILE, JobSpec, Pace
from windlass.engine.memory_plan import Placement
from windlass.engine.training_config import Initialization, TrainingConfig, config_json
from windlass.planner.hardware import Hardware
from windlass.planner.question import JobPlan, PlanBounds, PlanReport, PlanRequest
from windlass.service.installation import Settings
from windlass.service.jobs.machine_resources import MachineResources, most_gpus_of, threads_of
from windlass.service.preparation import (
    CHECK_MODEL,
    PLAN_JOB,
    PREPARE_DATA,
    PreparationError,
    PreparationOrder,
    Results,
)
from windlass.service.validation import (
    JobSettings,
    TooFewMicrobatchesError,
    WindlassSettings,
    count_text,
    fine_tuned_model_id,
    known_before_data,
    model_dir,
    resolve,
    with_derived,
)
from windlass.storage.ids import FIRST_EPOCH, Attempt, HeadSlices, JobId, LayoutEpoch

if TYPE_CHECKING:  # it loads the database's library, which a plan does not need
    from windlass.storage.sql import Job

ARENA_DIR = Path("/dev/shm")

# Maximum seconds for the simulation of a job's plan, before the job is queued.
_SIMULATION_S = 60.0
_DEADLINE_S = 120.0
_KEPT_CHECKS, _KEPT_TIMES = "checked-models", "measured-models"  # folders in the home
# Fields of a training config that the job's row has in its columns `windlass` and `total_steps`. The column
# `hyperparameters` has all others.
_IN_OTHER_COLUMNS = frozenset(
    (
        "total_steps",
        "initialization",
        "evaluate_every",
        "commit_minutes",
        "checkpoint_every",
        "checkpoint_minutes",
        "keep_best",
        "keep_checkpoints",
        "early_stopping",
        "final_model",
    )
)


# The number of GPUs in a row's `hyperparameters`, if the request says "auto". It is that of the current attempt, or of
# the job's plan before the first one.
_GPUS = "gpus"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedJob:
    """The facts of a job that are known once its model and data were checked."""

    training: TrainingConfig
    summary: str
    warnings: tuple[str, ...]
    gpus: int | None = None  # that the plan chose; None: the request has a number

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The JSON object that the job's row stores; see `training_config_of` and `gpus_of`."""
        values = config_json.to_json(self.training)
        chosen = {} if self.gpus is None else {_GPUS: self.gpus}
        return {name: value for name, value in values.items() if name not in _IN_OTHER_COLUMNS} | chosen

    @property
    def total_steps(self) -> int:
        """The number of steps, which the job's row stores too."""
        return self.training.total_steps


def job_dir(settings: Settings, job_id: str) -> Path:
    """Returns a job's folder."""
    return settings.jobs_dir / job_id


def dataset_dir(folder: Path) -> Path:
    """Returns the folder of prepared data inside a job's folder."""
    return folder / "dataset"


def kept_times_dir(settings: Settings) -> Path:
    """Returns the folder of the times of models' blocks that were measured on this machine."""
    return settings.home / _KEPT_TIMES


def journal_path(settings: Settings, job_id: str) -> Path:
    """Returns the path of the journal of a job's runners."""
    return job_dir(settings, job_id) / JOURNAL_FILE


def preparation_order(
    settings: Settings,
    resources: MachineResources,
    job: "Job",
    hardware: Hardware | None = None,
    *,
    filenames: Mapping[str, str],
    is_alone: Callable[[], bool] = lambda: False,
    may_run_here: bool = True,
    other_plans: Mapping[str, Callable[[Results], PlanRequest]] | None = None,
) -> PreparationOrder:
    """Makes the order for a job's preparation: checks, data, and a plan if the machine's profile is known.

    `filenames`: the users' names of the job's files, by id. `is_alone`: returns whether no job trains here. It is
    called when the planner starts, and if true, the planner's measurements are cached. `may_run_here`: else no plan is
    made for this machine. `other_plans`: make the requests for other kinds of boxes, by kind.
    """
    folder, asked = job_dir(settings, job.id), settings_of(job)

    def request(results: Results) -> PlanRequest:
        assert hardware is not None, "nothing is requested without it"
        alone = is_alone()
        return plan_request(
            settings,
            hardware,
            resources,
            model_dir=_model_dir(settings, job.model),
            asked=asked.windlass,
            training=resolve_job(job, results, num_devices=resources.most_gpus).training,
            num_validation_examples=results[PREPARE_DATA]["num_validation_examples"],
            has_gpus=alone,
            is_alone=alone,
            dataset_dir=dataset_dir(folder),
            simulation_s=_SIMULATION_S,
        )

    def unplanned_spec(results: Results) -> JobSpec:
        num_validation_examples = results[PREPARE_DATA]["num_validation_examples"]
        training = resolve_job(job, results, num_devices=resources.most_gpus).training
        return _job_spec(settings, resources, job, training, num_validation_examples, None, gpus_of(job))

    validation_file = settings.files_dir / job.validation_file if job.validation_file is not None else None

    def told(file_id: str) -> str:
        return f"{filenames[file_id]} ({file_id})" if file_id in filenames else file_id

    return PreparationOrder(
        model=job.model,
        model_dir=_model_dir(settings, job.model),
        training_file=settings.files_dir / job.training_file,
        training_name=told(job.training_file),
        validation_file=validation_file,
        validation_name=None if job.validation_file is None else told(job.validation_file),
        sequence_length=asked.sequence_length,
        precision=asked.windlass.precision,
        random_weights=asked.initialization is Initialization.RANDOM,
        layout_file=layout_file(folder),
        kept_checks_dir=settings.home / _KEPT_CHECKS,
        dataset_dir=dataset_dir(folder),
        work_dir=folder / "prepare",
        day=datetime.fromtimestamp(job.created_at, UTC).date(),
        plan_request=None if hardware is None or not may_run_here else request,
        other_plans=other_plans or {},
        unplanned_spec=unplanned_spec if may_run_here and _has_budget(_bounds(settings, asked.windlass)) else None,
    )


def plan_request(
    settings: Settings,
    hardware: Hardware,
    resources: MachineResources | None,
    *,
    model_dir: Path,
    asked: WindlassSettings,
    training: TrainingConfig,
    num_validation_examples: int = 0,
    has_gpus: bool = False,
    is_alone: bool = False,
    dataset_dir: Path | None = None,
    simulation_s: float = 0.0,
) -> PlanRequest:
    """Makes the request to the planner. The same settings give the same request, whether the job exists or not.

    `resources`: of this machine, which `hardware` then describes. If it is None, `hardware` is another machine. Nothing
    can be measured there, and this installation's settings do not apply. `asked`: the settings of the request. If they
    leave the number of micro-batches or the cut of matrices open, the planner chooses it, whatever `training` has.
    `has_gpus`: the planner has this machine's GPUs, if any, for itself. The other arguments are fields of the request.
    """
    chooses_microbatches = asked.num_microbatches is None
    most_microbatches = training.batch_size if chooses_microbatches else training.num_microbatches
    gpus = asked.with_most_gpus(most_gpus_of(hardware, resources), most_microbatches)
    bounds = _bounds_elsewhere(gpus) if resources is None else _bounds(settings, gpus)
    return PlanRequest(
        model_dir=model_dir,
        hardware=hardware,
        training=training,
        chooses_microbatches=chooses_microbatches,
        chooses_cut=asked.cut_matrices == "auto",
        chooses_order=asked.leaves_order_open,
        num_validation_examples=num_validation_examples,
        num_ranks=bounds.num_ranks,
        chooses_ranks=asked.gpus == "auto",
        num_optimizers=bounds.num_optimizers,
        host_memory_nbytes=bounds.host_memory_nbytes,
        device_memory_nbytes=bounds.device_memory_nbytes,
        compute_threads=None if resources is None else threads_of(settings, resources, num_ranks=bounds.num_ranks)[0],
        may_measure=has_gpus or hardware.gpus.count == 0,
        kept_times_dir=kept_times_dir(settings),
        dataset_dir=dataset_dir,
        is_alone=is_alone,
        simulation_s=simulation_s,
    )


def plan_bounds(settings: Settings, job: "Job", *, num_devices: int = 1) -> PlanBounds:
    """Returns the parts of the planner's request that follow from the installation's settings and the job's.

    `num_devices`: the most that a job with `gpus: auto` may get.
    """
    asked = settings_of(job).windlass
    most_microbatches = (job.hyperparameters or {}).get("num_microbatches", num_devices)
    bounds = _bounds(settings, asked.with_most_gpus(num_devices, most_microbatches))
    return replace(bounds, chooses_ranks=asked.gpus == "auto")


def resolve_job(job: "Job", results: Results, *, num_devices: int = 1) -> ResolvedJob:
    """Computes the settings that the request left open, from the results of the preparation.

    `num_devices`: the most GPUs that a job with `gpus: auto` may get. Without a plan it gets one.

    Raises:
        PreparationError: no plan fits the machine, or the batch is too small for the GPUs or the lanes.
    """
    plan = JobPlan.from_json(results.get(PLAN_JOB, {}))
    if plan is not None and not plan.report.feasible:
        raise does_not_fit(job, plan.report)
    return resolve_settings(job, results, num_devices=num_devices)


def does_not_fit(job: "Job", report: PlanReport, *, closest: str | None = None) -> PreparationError:
    """Makes the error of a job that fits no box. `closest`: the box of the report; None: there is only one."""
    param = _budget_that_lacks(settings_of(job).windlass, report.missing_bytes or {})
    reasons = "; ".join(report.reasons)
    message = reasons if closest is None else f"it fits no box; the closest one is {closest}: {reasons}"
    return PreparationError("does_not_fit", message, param)


def resolve_settings(job: "Job", results: Results, *, num_devices: int = 1) -> ResolvedJob:
    """Computes the settings as `resolve_job`, also if no plan fits.

    Raises PreparationError if the batch is too small for the GPUs or the lanes.
    """
    data, model = results[PREPARE_DATA], results[CHECK_MODEL]
    num_examples: int = data["num_examples"]
    first = first_plan_of(results)
    try:
        training = resolve(
            settings_of(job),
            num_examples,
            num_devices=num_devices,
            planned_microbatches=None if first is None else first.num_microbatches,
            planned_cut=None if first is None else first.cut_matrices,
        )
    except TooFewMicrobatchesError as error:
        raise PreparationError("invalid_value", str(error), error.param) from None
    plan = JobPlan.from_json(results.get(PLAN_JOB, {}))
    chosen = None if not chooses_gpus(job) else 1 if plan is None else plan.num_gpus
    return ResolvedJob(
        training=training,
        gpus=chosen,
        summary=(
            f"{count_text(num_examples, 'training example')} with {count_text(data['num_targets'], 'token')} to learn, "
            f"{count_text(data['num_validation_examples'], 'validation example')}, "
            f"{model['num_params']:,} parameters, {count_text(training.total_steps, 'step')}"
        ),
        warnings=tuple(warning for result in results.values() for warning in result.get("warnings", ())),
    )


def first_plan_of(results: Results) -> JobPlan | None:
    """Returns the first plan that fits, among those in the results of a preparation.

    Its number of micro-batches and its cut of matrices decide the last bits of the job's results. So if the request
    leaves them open, the job has them on every kind of box, and for good.
    """
    answers = (answer for name, answer in results.items() if name.partition("@")[0] == PLAN_JOB)
    plans = (plan for answer in answers if (plan := JobPlan.from_json(answer)) is not None)
    return next((plan for plan in plans if plan.num_microbatches is not None), None)


def training_config_of(job: "Job") -> TrainingConfig:
    """Returns the training config of a job whose data was counted.

    The numbers in its row hold, whatever this version would resolve "auto" to. Rows of older versions have fewer. Their
    jobs go on under the rules that they began with, because others change the last bits of gradients.
    """
    assert job.hyperparameters is not None, f"job {job.id} is {job.status} without hyperparameters"
    assert job.total_steps is not None, f"job {job.id} is {job.status} without a number of steps"
    values = known_before_data(settings_of(job)) | {"head_slices": HeadSlices.SMALL, "numerics": 1}
    values |= {name: value for name, value in job.hyperparameters.items() if name != _GPUS}
    values["total_steps"] = job.total_steps
    return with_derived(config_json.from_json(values))


def build_job_spec(
    settings: Settings,
    resources: MachineResources,
    job: "Job",
    plan: JobPlan | None = None,
    expected_pace: Pace | None = None,
    layout_epoch: LayoutEpoch = FIRST_EPOCH,
    *,
    num_ranks: int | None = None,
) -> JobSpec:
    """Builds the specification for the runner of the attempt in the job's row.

    `plan`: the job's current plan. `num_ranks`: the GPUs of the box; None: as many as the row says.
    """
    prepared = json.loads((job_dir(settings, job.id) / "prepare" / f"{PREPARE_DATA}.json").read_text())
    training, num_validation_examples = training_config_of(job), prepared["num_validation_examples"]
    number = gpus_of(job) if num_ranks is None else num_ranks
    spec = _job_spec(settings, resources, job, training, num_validation_examples, plan, number)
    return replace(spec, expected_pace=expected_pace, layout_epoch=layout_epoch)


def _job_spec(
    settings: Settings,
    resources: MachineResources,
    job: "Job",
    training: TrainingConfig,
    num_validation_examples: int,
    plan: JobPlan | None,
    num_ranks: int,
) -> JobSpec:
    asked = settings_of(job)
    folder = job_dir(settings, job.id)
    bounds = _bounds(settings, asked.windlass)
    compute_threads, optimizer_threads = threads_of(settings, resources, num_ranks=num_ranks)
    if plan is not None and plan.placement is None:
        raise ValueError("the job's plan has no placement")
    if plan is not None and plan.update_order is not None:
        training = replace(training, update_order=plan.update_order)
    return JobSpec(
        job=JobId(job.id),
        attempt=Attempt(job.attempt),
        model_dir=str(_model_dir(settings, job.model)),
        layout_file=str(layout_file(folder)),
        dataset_dir=str(dataset_dir(folder)),
        num_validation_examples=num_validation_examples,
        job_dir=str(folder),
        output_dir=str(_model_dir(settings, fine_tuned_model_id(job.model, job.suffix, job.id))),
        ssd_dirs=tuple(str(path) for path in settings.ssd_dirs),
        arena_dir=str(ARENA_DIR),
        training=training,
        num_ranks=num_ranks,
        num_cpu_optimizers=settings.num_cpu_optimizers,
        compute_threads=compute_threads,
        optimizer_threads=optimizer_threads,
        kernel_dir=str(settings.home / "kernels"),
        # A planned job gets exactly the planned memory.
        host_memory_nbytes=bounds.host_memory_nbytes if plan is None else plan.arena_nbytes,
        device_memory_nbytes=bounds.device_memory_nbytes,
        planned_device_nbytes=None if plan is None else plan.planned_device_nbytes,
        deadline_s=_DEADLINE_S,
        placement=(plan.placement if plan is not None else None) or Placement(),
    )


def _has_budget(bounds: PlanBounds) -> bool:
    return bounds.host_memory_nbytes is not None or bounds.device_memory_nbytes is not None


def _budget_that_lacks(asked: WindlassSettings, missing_nbytes: Mapping[str, int]) -> str | None:
    """Returns the request's budget field that is too small, or None if the request set no such budget."""
    budgets = {"gpu": "gpu_memory_gib", "host": "host_memory_gib"}
    lacking = (budgets[tier] for tier, nbytes in missing_nbytes.items() if nbytes and tier in budgets)
    return next((f"windlass.budgets.{name}" for name in lacking if getattr(asked.budgets, name) is not None), None)


def settings_of(job: "Job") -> JobSettings:
    """Returns the settings of a job's request."""
    return JobSettings.from_row(job.method, job.windlass, job.seed)


def layout_file(folder: Path) -> Path:
    return folder / "layout.json"


def _model_dir(settings: Settings, model: str) -> Path:
    return model_dir(model, models_dir=settings.models_dir, fine_tuned_dir=settings.fine_tuned_dir)


def gpus_of(job: "Job") -> int:
    """Returns the number of GPUs of a job: as asked for, or of its current attempt or plan if the plan chooses."""
    asked = settings_of(job).windlass.gpus
    return (job.hyperparameters or {}).get(_GPUS, 1) if asked == "auto" else asked


def shown_gpus_of(job: "Job") -> int:
    """Returns the same as `gpus_of`, without a check of the row's other settings."""
    asked = job.windlass.get("gpus", 1)
    number: int = (job.hyperparameters or {}).get(_GPUS, 1) if asked == "auto" else asked
    return number


def chooses_gpus(job: "Job") -> bool:
    """Returns whether a job's plan chooses its number of GPUs, without a check of the row's other settings."""
    return bool(job.windlass.get("gpus") == "auto")


def is_over_boxes(job: "Job") -> bool:
    """Returns whether a job is over several boxes, or its states are yet to be moved to or from others."""
    return job.windlass.get("boxes") is not None  # its other settings may be unreadable


def is_for_several(job: "Job") -> bool:
    """Returns whether a job asks for several boxes."""
    asked = job.windlass.get("boxes")
    return asked is not None and (asked if isinstance(asked, int) else len(asked)) > 1


def with_gpus(job: "Job", gpus: int) -> dict[str, Any]:
    """Returns the `hyperparameters` of the job's row with another number of GPUs, which its plan chose."""
    return {**(job.hyperparameters or {}), _GPUS: gpus}


def _bounds(settings: Settings, asked: WindlassSettings) -> PlanBounds:
    return PlanBounds(
        num_ranks=asked.least_gpus,
        num_optimizers=settings.num_cpu_optimizers,
        host_memory_nbytes=_budget_nbytes(settings.host_memory_gib, asked.budgets.host_memory_gib),
        device_memory_nbytes=_budget_nbytes(settings.gpu_memory_gib, asked.budgets.gpu_memory_gib),
    )


def _bounds_elsewhere(asked: WindlassSettings) -> PlanBounds:
    """Returns the bounds of a job on another machine, of which only the profile is known."""
    return PlanBounds(
        num_ranks=asked.least_gpus,
        num_optimizers=1,
        host_memory_nbytes=_budget_nbytes(asked.budgets.host_memory_gib),
        device_memory_nbytes=_budget_nbytes(asked.budgets.gpu_memory_gib),
    )


def _budget_nbytes(*budgets_gib: float | None) -> int | None:
    """Returns the smallest of the installation's and the job's budgets in bytes, or None without any."""
    given = [budget for budget in budgets_gib if budget is not None]
    return int(min(given) * 1024**3) if given else None
