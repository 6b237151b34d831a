"""The plans of a job, in files of its folder: the first one, and those made while it waited or ran.

The job's row names the current one. An attempt runs by the plan that is current at its launch.
"""

import functools
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from windlass.actors.job import Pace, pace_of_metrics
from windlass.engine.training_config import TrainingConfig
from windlass.planner.question import JobPlan, PlanRequest, fewest_of_fastest
from windlass.planner.stages import StagesPlan
from windlass.service.installation import Settings
from windlass.service.jobs.spec_builder import (
    chooses_gpus,
    dataset_dir,
    is_over_boxes,
    job_dir,
    kept_times_dir,
    training_config_of,
    with_gpus,
)
from windlass.service.preparation import PLAN_JOB, QUESTION_FILE
from windlass.service.validation import count_text, model_dir
from windlass.storage.files import sync_path, write_durably
from windlass.storage.sql import Job, JobMetrics
from windlass.storage.sql.repositories import JobFields

_LOG = logging.getLogger(__name__)

# Fields of the request to the planner in older releases, which the training config has now.
_OLDER_SETTINGS = frozenset(
    (
        "batch_size",
        "num_microbatches",
        "sequence_length",
        "precision",
        "state_precision",
        "optimizer",
        "clips",
        "accumulation_precision",
        "update_order",
    )
)


class NoPlanForGpusError(Exception):
    """A job has no plan for its number of GPUs. The text tells its owner so, and that the job is paused."""

    def __init__(self, plan: JobPlan, why: str) -> None:
        *others, last = plan.gpu_numbers
        numbers = f"{', '.join(map(str, others))}{' or ' if others else ''}{count_text(last, 'GPU')}"
        super().__init__(
            f"{why}. The job is paused, and nothing of it is lost: resume it with {numbers}, for which it has a plan, "
            "or with another number"
        )


def load_plan(settings: Settings, job: Job) -> JobPlan | None:
    """Returns the current plan of a job on one box, or None if none was made, or if the job is over several boxes.

    Raises ValueError if a field has a wrong value.
    """
    return None if is_over_boxes(job) else load_plan_on_one_box(settings, job)


def load_plan_on_one_box(settings: Settings, job: Job) -> JobPlan | None:
    """Returns the plan by which a job has last run on one box, None without one. Raises as `load_plan`."""
    return _load(_path(settings, job, job.plan_number))


def has_plan(settings: Settings, job: Job) -> bool:
    """Returns whether the job has a plan. Lists ask it of many jobs, so the file is read only if it has changed."""
    if is_over_boxes(job):
        return False
    path = _path(settings, job, job.plan_number)
    try:
        changed_ns = path.stat().st_mtime_ns
    except OSError:
        return False
    return _holds_plan(path, changed_ns)


@functools.lru_cache(maxsize=1024)
def _holds_plan(path: Path, _changed_ns: int) -> bool:
    try:
        return _load(path) is not None
    except ValueError:
        return True  # `load_plan` raises the error where the plan is needed


def plans_of(settings: Settings, job: Job) -> Sequence[JobPlan]:
    """Returns all plans of a job on one box, the current one last; none if one has a wrong value."""
    if is_over_boxes(job):
        return []
    try:
        plans = [_load(_path(settings, job, number)) for number in range(job.plan_number + 1)]
    except ValueError:
        return []
    return [plan for plan in plans if plan is not None]


def keep_plan(settings: Settings, job: Job, plan: JobPlan) -> int:
    """Stores a plan as the job's next one and returns its number. It becomes current once the row has that number.

    An existing file with that number is overwritten, because the row does not name it.
    """
    number = job.plan_number + 1
    path = _path(settings, job, number)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    write_durably(path, json.dumps(plan.to_json()))
    sync_path(path.parent.parent)
    return number


def plan_for_gpus(settings: Settings, job: Job, plan: JobPlan, gpus: int) -> tuple[JobPlan, JobFields, str]:
    """Makes the plan for a number of GPUs the one of the next attempt.

    Returns the plan, the fields of the row that must be written with the attempt, and a text for the user. Another plan
    than the current one is stored first; a crash before the row names it only makes it once more.

    Raises NoPlanForGpusError.
    """
    fields, message = JobFields(), ""
    if gpus != plan.num_gpus:
        message = f"Goes on with {count_text(gpus, 'GPU')}"
    if chooses_gpus(job):
        fields["hyperparameters"] = with_gpus(job, gpus)
        if (step_s := plan.step_s_by_gpus) and gpus != (preferred := fewest_of_fastest(step_s)):
            message = f"Begins with {gpus} of {preferred} GPUs: it ends sooner so than if it waited for {preferred}"
    if gpus == plan.num_gpus:
        return plan, fields, message
    if gpus not in plan.gpu_numbers:
        raise NoPlanForGpusError(plan, f"There is no plan for {count_text(gpus, 'GPU')}")
    chosen = plan.for_gpus(gpus).model_copy(update={"message": message, "from_attempt": job.attempt + 1})
    fields["plan_number"] = keep_plan(settings, job, chosen)
    return chosen, fields, message


def load_plan_request(settings: Settings, job: Job) -> PlanRequest | None:
    """Returns the request to the planner for the current plan, or None if it is no longer known.

    A request that cannot be read counts as unknown, with a warning in the log. Raises ValueError as `load_plan` does.
    """
    plan, path = load_plan(settings, job), job_dir(settings, job.id) / "prepare" / QUESTION_FILE
    try:
        stored = json.loads(path.read_text())
        request = _read_request(stored, training_config_of(job), dataset_dir(job_dir(settings, job.id)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _warn_once(path, str(error))
        return None
    # The home may have been moved since, and other jobs may run now.
    folder = model_dir(job.model, models_dir=settings.models_dir, fine_tuned_dir=settings.fine_tuned_dir)
    # The job's number of micro-batches and its cut of matrices stay, also if its first plan chose them.
    request = replace(
        request,
        model_dir=folder,
        kept_times_dir=kept_times_dir(settings),
        is_alone=False,
        chooses_microbatches=False,
        chooses_cut=False,
    )
    return request if plan is None else request.with_inputs(plan.changed_inputs)


def keep_plan_request(settings: Settings, job: Job, request: PlanRequest) -> None:
    """Stores the request for plans of a job that comes to one box, unless it has one. Raises OSError."""
    path = job_dir(settings, job.id) / "prepare" / QUESTION_FILE
    if not path.exists():
        write_durably(path, json.dumps(request.to_json()))


@functools.lru_cache(maxsize=1024)
def _warn_once(path: Path, why: str) -> None:
    """Logs that a request cannot be read, only once because a waiting job's request is read again and again."""
    _LOG.warning("the request to the planner in %s cannot be read, so the job's plan is not renewed: %s", path, why)


def _read_request(stored: object, training: TrainingConfig, data_dir: Path) -> PlanRequest:
    """Reads a request of this release or an older one. Raises ValueError.

    `training`: of the job's row. `data_dir`: where the job's data is now.
    """
    if not isinstance(stored, dict):
        raise ValueError("a request to the planner is a JSON object")
    # A request of an older release has single settings in place of the training config.
    values = {name: value for name, value in stored.items() if name not in _OLDER_SETTINGS}
    # `dataset` is the field of an older release. A request of a still older one has no data.
    if values.pop("dataset", None) is not None or values.get("dataset_dir") is not None:
        values["dataset_dir"] = data_dir
    return PlanRequest.from_json({**values, "training": training})


def expected_pace(plan: JobPlan | None, division: StagesPlan | None, last_step: JobMetrics | None) -> Pace | None:
    """Returns the expected time of a step in a job's next attempt.

    It is the time that the last step reported (`EventRepository.last_paced_step`), else the plan's. Returns None if
    neither is known, or if the steps contradict the plan. Steps that were measured under an earlier plan, or before the
    states were moved to other boxes, do not count.

    `plan`: that of a job on one box. `division`: the stored one, also that of a job that has come to one box.
    """
    from_attempt = max(0 if each is None else each.from_attempt or 0 for each in (plan, division))
    if last_step is not None and last_step.attempt >= from_attempt:
        return pace_of_metrics(last_step.data)
    step_s = plan.report.step_s if plan is not None else None if division is None else division.step_s
    return None if step_s is None else Pace(step_s=step_s, is_measured=False)


def seconds_left(pace: Pace | None, job: Job) -> float | None:
    """Returns the seconds that the rest of a job takes at this pace, or None if unknown."""
    if pace is None or job.total_steps is None:
        return None
    mean_s = pace.step_s if pace.mean_s is None else pace.mean_s
    return mean_s * (job.total_steps - (job.step or 0))


def _path(settings: Settings, job: Job, number: int) -> Path:
    folder = job_dir(settings, job.id)
    return folder / "plans" / f"{number}.json" if number else folder / "prepare" / f"{PLAN_JOB}.json"


def _load(path: Path) -> JobPlan | None:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return JobPlan.from_json(values) if isinstance(values, dict) else None
