"""The steps of a preparation: the model's download and check, the data, the plan, and the check of the budgets.

Each step is a command for a process of its own, with the file of its result.
"""

import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from windlass.actors.job import JobSpec
from windlass.engine.model import MODELS_MODULE
from windlass.planner.question import LACKS_TIMES, PlanRequest, disturbed_path, progress_path
from windlass.planner.stages import StagesRequest
from windlass.service.preparation.check_cache import CheckCache
from windlass.service.preparation.sandbox import PASSED_ON, StepServer, WarmProcess
from windlass.storage.ids import Precision

DOWNLOAD_MODEL = "download_model"
CHECK_MODEL = "check_model"
PREPARE_DATA = "prepare_data"
PLAN_JOB = "plan_job"
MEASURE_BLOCKS = "measure_blocks"
PLAN_STAGES = "plan_stages"
CHECK_BUDGETS = "check_budgets"
QUESTION_FILE = "question.json"  # the request to the planner
KINDS_FOLDER = "kinds"  # plans for other kinds of boxes, each in a folder named by the kind

# Names of the steps in messages.
_TITLES = {
    DOWNLOAD_MODEL: "the download of the model",
    CHECK_MODEL: "the check of the model",
    PREPARE_DATA: "the preparation of the data",
    PLAN_JOB: "planning",
    MEASURE_BLOCKS: "the measurement of the model's blocks",
    PLAN_STAGES: "planning over several boxes",
    CHECK_BUDGETS: "the check of the budgets",
}
_TIMEOUTS_S = {
    DOWNLOAD_MODEL: 24 * 3600,
    CHECK_MODEL: 600,
    PREPARE_DATA: 3600,
    PLAN_JOB: 600,
    MEASURE_BLOCKS: 600,
    PLAN_STAGES: 1800,  # it makes plans of many divisions of the model
    CHECK_BUDGETS: 600,
}
# Modules of the steps.
_DOWNLOADER = "windlass.service.preparation.hub_download"
_CHECKER = "windlass.engine.checkpoint.check_model"
_PREPARER = "windlass.engine.data.tokenize"
_PLANNER = "windlass.planner.answers.job_process"
_MEASURER = "windlass.planner.answers.measure_process"
_STAGES_PLANNER = "windlass.planner.answers.stages_process"
_BUDGETS = "windlass.actors.job.check_budgets"
# Further environment variables of the download, the only step that talks to the hub. It runs only if the model's folder
# is missing, so it reads no user's file.
_HUB_PASSED_ON = ("HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE")


Results = dict[str, dict[str, Any]]  # of steps, by name


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparationOrder:
    """The inputs and outputs of a preparation."""

    model: str  # the requested id
    model_dir: Path
    training_file: Path
    training_name: str  # the file's name in messages
    validation_file: Path | None
    validation_name: str | None
    sequence_length: int
    precision: Precision
    random_weights: bool  # the folder needs no weights
    layout_file: Path  # the model's blocks
    dataset_dir: Path  # created anew
    work_dir: Path  # results and log
    day: date  # the date that chat templates print; fixed, so that a repeated preparation gives the same data
    kept_checks_dir: Path | None = None  # of models that were checked before; None: each is checked anew
    # Makes the request to the planner from the results of the earlier steps; None: no plan is made.
    plan_request: Callable[[Results], PlanRequest] | None = None
    # Make the requests for other kinds of boxes, by kind. The results are named "plan_job@KIND".
    other_plans: Mapping[str, Callable[[Results], PlanRequest]] = field(default_factory=dict)
    # Makes the job's spec, to check its budgets if no plan was made; None: it has no budgets.
    unplanned_spec: Callable[[Results], JobSpec] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparationStep:
    """A step of a preparation: the command of its process, and the file of its result."""

    name: str
    command: tuple[str, ...]
    result_path: Path
    timeout_s: int
    passed_on: tuple[str, ...] = PASSED_ON  # environment variables
    kept: CheckCache | None = None  # cache that may already hold its result
    maps: Path | None = None  # a model whose weights it maps, one file at a time
    sees_gpus: bool = False
    num_threads: int = 1  # threads that compute at once
    # The step to run if this one fails, as a step that measures may; None: the preparation fails.
    instead: "PreparationStep | None" = None
    instead_in_words: str = ""  # how `instead` differs
    is_optional: bool = False  # if it fails, its result is the error, and the preparation goes on

    @property
    def title(self) -> str:
        """The name of the step in messages."""
        return _TITLES.get(self.kind_of_work, self.kind_of_work)

    @property
    def kind_of_work(self) -> str:
        """Its name without the kind of box that it is for."""
        return self.name.partition("@")[0]

    @property
    def progress_path(self) -> Path:
        """The file in which the process may report its progress: a JSON object with `percent`, `line` and `file`."""
        return progress_path(self.result_path)

    @property
    def measuring_path(self) -> Path:
        """A file that is there while the process measures times."""
        return self.result_path.with_suffix(".measuring")

    @property
    def disturbed_path(self) -> Path:
        """A file that is there once another job has computed while the process measured times."""
        return disturbed_path(self.result_path)

    @property
    def cpu_s(self) -> int:
        """Limit of the CPU time of all its threads together, in seconds."""
        return self.timeout_s * self.num_threads


LaterStep = Callable[[Results], PreparationStep | None]  # None: the step is not needed


def step_server(log_path: Path) -> StepServer:
    """Makes a server for the steps that share their imports.

    The download is excluded, because its process has secrets.
    """
    return StepServer(
        (_CHECKER, _PREPARER, _PLANNER, _STAGES_PLANNER, _BUDGETS), log_path, also=(MODELS_MODULE,)
    )  # the checker and the planner build models


def warm_planner(log_path: Path) -> WarmProcess:
    """Makes a process that plans one question after the other, and keeps the profiles of models between them."""
    return WarmProcess(_PLANNER, log_path)


def steps_of(order: PreparationOrder) -> list[PreparationStep | LaterStep]:
    """Returns the steps of a preparation, without the download if the model is here."""
    steps: list[PreparationStep | LaterStep] = [_check_step(order), _data_step(order)]
    if not order.model_dir.exists():
        steps.insert(0, _download_step(order))
    if (request := order.plan_request) is not None:
        steps.append(lambda results: plan_step(order.work_dir, request(results)))
    for kind, other_request in order.other_plans.items():
        steps.append(functools.partial(_other_plan_step, order, kind, other_request))
    if (spec := order.unplanned_spec) is not None:
        steps.append(
            lambda results: (
                None if "plan" in results.get(PLAN_JOB, {}) else _budgets_step(order.work_dir, spec(results))
            )
        )
    return steps


def plan_step(work_dir: Path, request: PlanRequest) -> PreparationStep:
    """Makes the step that runs the planner. Its files go to `work_dir`, which must exist.

    Measurements may fail in unforeseen ways or take long. The step is then repeated without them. On a GPU, nothing is
    measured while a job runs.
    """
    step = _step(work_dir, PLAN_JOB, (_PLANNER, "--question", _asked(work_dir, request)))
    return _measuring(step, work_dir, request) if _measures(request) and not request.measures_apart else step


def plan_steps_apart(work_dir: Path, request: PlanRequest) -> list[PreparationStep | LaterStep]:
    """Makes the steps of a plan whose measurements, if it needs any, are made by another process than the planner.

    The first step has the plan, or finds that times lack. Then a second one measures, and a third one plans. A request
    that leaves blocks unmeasured has one step.
    """
    if not _measures(request):
        return [plan_step(work_dir, request)]
    first = plan_step(work_dir, replace(request, measures_apart=True))

    def measure(results: Results) -> PreparationStep | None:
        if not results[PLAN_JOB].get(LACKS_TIMES):
            return None
        question = _asked(work_dir, request, name="measured")
        return _measuring(_step(work_dir, MEASURE_BLOCKS, (_MEASURER, "--question", question)), work_dir, request)

    def plan(results: Results) -> PreparationStep | None:
        if (measured := results.get(MEASURE_BLOCKS)) is None:
            return None
        # Times that were measured beside a job are for plans beside one.
        return plan_step(work_dir, replace(request, may_measure=False, is_alone=measured["alone"]))

    return [first, measure, plan]


def _measures(request: PlanRequest) -> bool:
    """Returns whether blocks are measured whose times are not known. On a GPU, nothing is while a job runs."""
    if not request.measures or request.leaves_unmeasured:
        return False
    return request.is_alone or request.hardware.gpus.count == 0


def _measuring(step: PreparationStep, work_dir: Path, request: PlanRequest) -> PreparationStep:
    """Returns a step that measures on this machine, with the step to run if it fails: a plan without measuring."""
    assert request.compute_threads is not None, "nothing is measured for another machine"
    unmeasured = _asked(work_dir, replace(request, may_measure=False), name="unmeasured")
    return replace(
        step,
        command=(*step.command, "--measuring", str(step.measuring_path)),
        sees_gpus=request.hardware.gpus.count > 0,
        num_threads=request.compute_threads,
        instead=_step(work_dir, PLAN_JOB, (_PLANNER, "--question", unmeasured)),
        instead_in_words="It begins anew without measuring the model's blocks, so the plan's times may be less exact",
    )


def _asked(work_dir: Path, request: PlanRequest, *, name: str | None = None) -> Path:
    """Writes a request to the planner to a file. `name`: of the request, if it is not the only one."""
    path = work_dir / (QUESTION_FILE if name is None else f"{name}-{QUESTION_FILE}")
    path.write_text(json.dumps(request.to_json()))
    return path


def stages_step(work_dir: Path, request: StagesRequest) -> PreparationStep:
    """Makes the step that plans a job over several boxes. Its files go to `work_dir`, which must exist."""
    path = work_dir / QUESTION_FILE
    path.write_text(json.dumps(request.to_json()))
    return _step(work_dir, PLAN_STAGES, (_STAGES_PLANNER, "--question", path))


def _other_plan_step(
    order: PreparationOrder, kind: str, request: Callable[[Results], PlanRequest], results: Results
) -> PreparationStep:
    folder = order.work_dir / KINDS_FOLDER / kind
    folder.mkdir(parents=True, exist_ok=True)
    return replace(plan_step(folder, request(results)), name=f"{PLAN_JOB}@{kind}", is_optional=True)


def _download_step(order: PreparationOrder) -> PreparationStep:
    command = (_DOWNLOADER, "--model", order.model, "--model-dir", order.model_dir)
    return _step(order.work_dir, DOWNLOAD_MODEL, command, passed_on=(*PASSED_ON, *_HUB_PASSED_ON))


def _check_step(order: PreparationOrder) -> PreparationStep:
    command: list[object] = [_CHECKER, "--model-dir", order.model_dir, "--precision", order.precision]
    command += ["--layout-file", order.layout_file]
    if order.random_weights:
        command.append("--random-weights")
    kept = None
    if order.kept_checks_dir is not None:
        asked = (order.precision.value, "random" if order.random_weights else "weights")
        kept = CheckCache(
            folder=order.kept_checks_dir, model_dir=order.model_dir, layout_file=order.layout_file, asked=asked
        )
    return _step(order.work_dir, CHECK_MODEL, command, kept=kept, maps=order.model_dir)


def _data_step(order: PreparationOrder) -> PreparationStep:
    # A name may begin with a dash, so it is one argument with its option.
    command: list[object] = [_PREPARER, "--model-dir", order.model_dir, "--training-file", order.training_file]
    command.append(f"--training-name={order.training_name}")
    if order.validation_file is not None:
        command += ["--validation-file", order.validation_file]
    if order.validation_name is not None:
        command.append(f"--validation-name={order.validation_name}")
    command += ["--sequence-length", order.sequence_length, "--output-dir", order.dataset_dir, "--day", order.day]
    command += ["--progress", order.work_dir / f"{PREPARE_DATA}.progress"]
    return _step(order.work_dir, PREPARE_DATA, command)


def _budgets_step(work_dir: Path, spec: JobSpec) -> PreparationStep:
    path = work_dir / "spec.json"
    path.write_bytes(TypeAdapter(JobSpec).dump_json(spec))
    return _step(work_dir, CHECK_BUDGETS, (_BUDGETS, "--spec", path))


def _step(
    work_dir: Path,
    name: str,
    module_and_arguments: Sequence[object],
    *,
    passed_on: tuple[str, ...] = PASSED_ON,
    kept: CheckCache | None = None,
    maps: Path | None = None,
) -> PreparationStep:
    result_path = work_dir / f"{name}.json"
    return PreparationStep(
        name=name,
        command=(sys.executable, "-m", *map(str, module_and_arguments), "--result", str(result_path)),
        result_path=result_path,
        timeout_s=_TIMEOUTS_S[name],
        passed_on=passed_on,
        kept=kept,
        maps=maps,
    )
