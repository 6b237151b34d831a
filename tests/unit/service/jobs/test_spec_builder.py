"""A job's settings reach its runner and its planner alike."""

import json
from dataclasses import fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest

from tests.support.actors import specs
from windlass.actors.job.context import grad_precision, make_context
from windlass.actors.job.spec import JobSpec
from windlass.engine.memory_plan.plan import Placement
from windlass.engine.memory_plan.update_order import UpdateOrder
from windlass.engine.training_config import config_json
from windlass.engine.training_config.training_config import FinalModel, TrainingConfig
from windlass.planner.cost.model_profile import ModelProfile
from windlass.planner.hardware.hardware import Gpus, Hardware, Host, Pcie, Ssds
from windlass.planner.hardware.model_shape import ModelShape
from windlass.planner.planning.job_planning import question_of
from windlass.planner.planning.planner import best_plan
from windlass.planner.profiling.model_profiler import Profiler, config_of_shape
from windlass.planner.question.job_plan import JobPlan
from windlass.planner.question.plan_request import PlanRequest
from windlass.planner.question.profiles import Profiles, planned_job
from windlass.planner.question.question import PlanQuestion
from windlass.planner.question.report import PlanReport
from windlass.planner.solver.step_cost import PlannedJob
from windlass.service.installation.settings import Settings
from windlass.service.jobs.machine_resources import MachineResources, threads_of
from windlass.service.jobs.spec_builder import (
    build_job_spec,
    first_plan_of,
    gpus_of,
    job_dir,
    plan_bounds,
    preparation_order,
    resolve_job,
    resolve_settings,
    training_config_of,
)
from windlass.service.preparation.pipeline import PreparationError
from windlass.service.preparation.steps import CHECK_MODEL, PLAN_JOB, PREPARE_DATA, PreparationOrder
from windlass.service.validation.hyperparameters import (
    JobSettings,
    SupervisedHyperparameters,
    WindlassSettings,
    resolve,
)
from windlass.storage.ids import HeadSlices, Precision
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.models import Job

MACHINE = Hardware(
    gpus=Gpus(count=1, memory_gib=2.0, tflops=20),
    host=Host(memory_gib=6.0, memory_gb_per_s=40, adam_params_per_s=1e9),
    pcie=Pcie(h2d_gb_per_s=12, d2h_gb_per_s=12),
    ssds=Ssds(count=2, read_gb_per_s=8, write_gb_per_s=8, capacity_gib=100),
)
CONFIG = config_of_shape(ModelShape(num_layers=6, hidden_size=256, num_heads=4, vocab_size=1000), num_tokens=64)
NUM_EXAMPLES, NUM_VALIDATION_EXAMPLES = 100, 7
RESULTS: dict[str, dict[str, Any]] = {
    PREPARE_DATA: {
        "num_examples": NUM_EXAMPLES,
        "num_validation_examples": NUM_VALIDATION_EXAMPLES,
        "num_targets": 1000,
    },
    CHECK_MODEL: {"num_params": 1000},
}
JOB = {"batch_size": 4, "num_microbatches": 2, "sequence_length": 64}

# Settings of a job, each with a value other than its default, that change its memory or the time of its steps.
PLANNED: dict[str, Any] = {
    "batch_size": 6,
    "num_microbatches": 4,
    "sequence_length": 32,
    "clip_norm": None,
    "precision": "fp32",
    "state_precision": "bf16",
    "accumulation_precision": "bf16",
    "gradient_updates": "after_backward",
    "cut_matrices": 2**20,
    "lanes": 2,
    "gpus": 2,
    "commit_minutes": 0.0,
    "checkpoint_minutes": 3.0,  # a checkpoint is made of a commit
    "budgets": {"host_memory_gib": 3.0},
    "epochs": 5,  # it selects the batches, and so their mean width
}
_MORE_STEPS = "how many steps there are does not change what one takes"
_A_NUMBER = "a number that an update computes with: as many bytes and operations with any value"
_EXPORT = "an export reads the committed states between two steps, in the buffers that the plan has"
_EVALUATION_TIME = "an evaluation lies between two steps, and what a step takes is planned; its memory is the same"
# The other settings, each with such a value and the reason why memory and step time do not depend on it.
NOT_PLANNED: dict[str, tuple[Any, str]] = {
    "learning_rate": (1e-3, _A_NUMBER),
    "optimizer": ("adam", "both optimizers take the same bytes and the same time"),
    "warmup_steps": (5, _A_NUMBER),
    "warmup": (0.5, _A_NUMBER),
    "schedule": ("cosine", _A_NUMBER),
    "weight_decay": (0.1, _A_NUMBER),
    "beta1": (0.5, _A_NUMBER),
    "beta2": (0.5, _A_NUMBER),
    "epsilon": (1e-6, _A_NUMBER),
    "max_bad_steps": (3, "it only says when the job ends"),
    "box": ("attic", "the plan for each box is made for the machine of that box"),
    "boxes": (2, "the plan over several boxes has a request of its own, with all of them"),
    "model_kernels": (
        "torch",
        "the planner counts torch's own kernels with any value; the other packages' save less for the backward pass, "
        "and how fast they are is not known before they have run",
    ),
    "seed": (3, "random numbers are drawn in any case"),
    "priority": (3, "it only says when the job runs"),
    "checkpoint_every": (3, _EXPORT),
    "keep_checkpoints": (3, "they lie in the models' folder, which is on no tier"),
    "keep_best": (True, _EXPORT),
    "early_stopping": ({"patience": 3}, _MORE_STEPS),
    "final_model": ("best", _EXPORT),
    "evaluate_every": (3, _EVALUATION_TIME),
    "initialization": ("random", "it happens before the first step, block by block in the plan's buffers"),
    "lora": (None, "there is no other value"),
}
_TOLD_OTHERWISE = {"keep_checkpoints": {"checkpoint_every": 3}}  # needs this setting too

# For each field of a training config, settings of a request that change it.
CHANGES: dict[str, dict[str, Any]] = {
    **{name: {name: PLANNED.get(name, NOT_PLANNED.get(name, (None, ""))[0])} for name in WindlassSettings.model_fields},
    "total_steps": {"epochs": 5},
    "update_order": {"gradient_updates": "after_backward"},
    "model_kernels": {"model_kernels": "torch"},
    "early_stopping": {"early_stopping": {"patience": 3, "min_delta": 0.5}},
}
NO_SETTING = {
    "kernel": "a resumed job's kernel is that of its commit",
    "head_slices": "a job keeps the slices of the release that it was submitted to",
    "numerics": "a job keeps the rules of the release that it was submitted to",
}
_NOT_THE_JOBS = "where files lie, or what the attempt is called"
JOB_SPEC = {
    "training": "training",
    "num_validation_examples": "num_validation_examples",
    "num_ranks": "num_ranks",
    "num_cpu_optimizers": "num_optimizers",
    "compute_threads": "compute_threads",
    "host_memory_nbytes": "host_memory_nbytes",
    "device_memory_nbytes": "device_memory_nbytes",
    "ssd_dirs": "hardware",
    "dataset_dir": "dataset_dir",
}
NOT_PLANNED_JOB_SPEC = {
    **dict.fromkeys(
        ["stages", "box", "box_names", "ranks_of_boxes", "layout_epoch"], "the service gives a job one box"
    ),
    **dict.fromkeys(
        (
            "job",
            "attempt",
            "model_dir",
            "layout_file",
            "job_dir",
            "output_dir",
            "arena_dir",
            "kernel_dir",
        ),
        _NOT_THE_JOBS,
    ),
    "optimizer_threads": "the machine's profile has what updates take with the threads of its settings",
    "planned_device_nbytes": "the plan's answer",
    "placement": "the plan's answer",
    "expected_pace": "the plan's answer",
    "deadline_s": "a limit of waits that no healthy job comes near",
    "ordering": "no setting of a job; the planner counts with its defaults",
}
# Fields of the request that concern the planner's work, not the job.
ABOUT_PLANNING = {
    "model_dir",
    "compute_threads",
    "may_measure",
    "kept_times_dir",
    "is_alone",
    "simulation_s",
    "what_if",
    "running",
}


def windlass_settings(**asked: Any) -> WindlassSettings:
    return WindlassSettings.model_validate({**JOB, **asked})


def job_of(asked: WindlassSettings) -> Job:
    return Job(
        id="ftjob-1",
        status=JobStatus.QUEUED,
        attempt=0,
        model="base",
        training_file="file-1",
        validation_file=None,
        suffix=None,
        seed=1 if asked.seed is None else asked.seed,
        method={"type": "supervised", "supervised": {"hyperparameters": {}}},
        windlass=asked.model_dump(mode="json"),
        created_at=0,
    )


def preparation_of_job(home: Path, asked: WindlassSettings, hardware: Hardware | None) -> PreparationOrder:
    return preparation_order(
        Settings(home=home),
        MachineResources(num_cores=4, num_gpus=1),
        job_of(asked),
        hardware,
        filenames={"file-1": "a.jsonl"},
    )


def request_of(home: Path, asked: WindlassSettings) -> PlanRequest:
    """The request to the planner when a job with these settings is prepared."""
    order = preparation_of_job(home, asked, MACHINE)
    assert order.plan_request is not None
    return order.plan_request(RESULTS)


def training_of(asked: WindlassSettings) -> TrainingConfig:
    """The training config of such a job."""
    settings = JobSettings(supervised=SupervisedHyperparameters(), windlass=asked, seed=1)
    return resolve(settings, NUM_EXAMPLES)


def spec_of(home: Path, asked: WindlassSettings, plan: JobPlan | None = None) -> JobSpec:
    """The spec for the runner of such a job, built from its row and its folder."""
    job = job_of(asked)
    resolved = resolve_job(job, RESULTS)
    job.hyperparameters, job.total_steps = json.loads(json.dumps(resolved.hyperparameters)), resolved.total_steps
    settings = Settings(home=home)
    prepared = job_dir(settings, job.id) / "prepare" / f"{PREPARE_DATA}.json"
    prepared.parent.mkdir(parents=True, exist_ok=True)
    prepared.write_text(json.dumps(RESULTS[PREPARE_DATA]))
    return build_job_spec(settings, MachineResources(num_cores=4, num_gpus=1), job, plan)


@cache
def profile_of(num_examples: int, num_tokens: int, precision: Precision) -> ModelProfile:
    return Profiler(CONFIG, precision).profile(num_examples, num_tokens)


def plan_facts(request: PlanRequest) -> list[object]:
    """All that a plan depends on."""
    training, data = request.training, request.dataset_dir
    question = question_of(without_data(request), CONFIG)
    profile = profile_of(training.microbatch_size, training.sequence_length, training.precision)
    job = planned_job(question, profile, training.num_microbatches)
    # The others are the job again, and a cache.
    names = vars(PlannedJob).keys() - {"by_order", "known"}
    facts = sorted(name for name in names if isinstance(vars(PlannedJob)[name], property | cached_property))
    read = [getattr(job, name) for name in facts]
    batches = training.batch_size, training.num_microbatches, training.seed, training.total_steps
    return [profile, *read, question.limits, question.num_validation_examples, question.num_optimizers, data, batches]


@pytest.mark.parametrize("name", WindlassSettings.model_fields)
def test_plan_reads_each_setting_or_it_is_named_as_one_that_changes_no_step(tmp_path: Path, name: str) -> None:
    assert (name in PLANNED) != (name in NOT_PLANNED), (
        f"{name}: a new setting: have the planner read it and name it in PLANNED, or say in NOT_PLANNED why neither "
        "memory nor time of a step depends on it"
    )
    value = PLANNED[name] if name in PLANNED else NOT_PLANNED[name][0]
    changed = request_of(tmp_path, windlass_settings(**_TOLD_OTHERWISE.get(name, {}), **{name: value}))
    facts, others = plan_facts(changed), plan_facts(request_of(tmp_path, windlass_settings()))
    if name == "seed":  # it selects the batches, whose widths the plan reads from the data
        facts[-1] = others[-1]
    assert (facts != others) == (name in PLANNED)


@pytest.mark.parametrize("name", [field.name for field in fields(TrainingConfig)])
def test_each_field_of_a_training_config_reaches_the_runner_and_the_planner(tmp_path: Path, name: str) -> None:
    assert (name in CHANGES) != (name in NO_SETTING), f"{name}: a new field: name the setting that changes it"
    if name in NO_SETTING:
        return
    plain, changed = windlass_settings(), windlass_settings(**_TOLD_OTHERWISE.get(name, {}) | CHANGES[name])
    spec, request = spec_of(tmp_path, changed), request_of(tmp_path, changed)
    assert getattr(spec.training, name) != getattr(spec_of(tmp_path, plain).training, name)
    assert spec.training == request.training == question_of(without_data(request), CONFIG).training


@pytest.mark.parametrize("gradient_updates", ["auto", *UpdateOrder])
@pytest.mark.parametrize("accumulation_precision", ["fp32", "bf16"])
def test_planner_and_runner_see_the_same_gradient_settings(
    tmp_path: Path, gradient_updates: str, accumulation_precision: str
) -> None:
    asked = windlass_settings(
        gradient_updates=gradient_updates, accumulation_precision=accumulation_precision, clip_norm=None
    )
    spec, question = spec_of(tmp_path, asked), question_of(without_data(request_of(tmp_path, asked)), CONFIG)
    job = planned_job(question, profile_of(2, 64, Precision.BF16), 2)
    assert {each.update_order for each in job.by_order} >= {spec.training.order_of_updates}
    assert (len(job.by_order) > 1) == (gradient_updates == "auto")
    assert job.update_order == ("active" if gradient_updates == "auto" else gradient_updates)
    assert job.grad_itemsize == spec.training.grad_itemsize == (4 if accumulation_precision == "fp32" else 2)


def without_data(request: PlanRequest) -> PlanRequest:
    return replace(request, dataset_dir=None)


def test_spec_of_an_older_row_has_the_numbers_of_the_row(tmp_path: Path) -> None:
    job = job_of(windlass_settings(checkpoint_every=3, final_model="best"))
    # What a release without a training config has stored for a job that left all to it.
    job.hyperparameters = {
        "epochs": 10,
        "batch_size": 4,
        "num_microbatches": 1,
        "sequence_length": 32,
        "learning_rate": 2e-05,
        "warmup_steps": 6,
        "schedule": "linear",
        "weight_decay": 0.0,
        "beta1": 0.9,
        "beta2": 0.999,
        "epsilon": 1e-08,
        "clip_norm": 1.0,
        "precision": "bf16",
        "seed": 366091781,
        "optimizer": "adamw",
        "state_precision": "fp32",
        "accumulation_precision": "fp32",
        "update_order": "kept",
        "kernel": None,
        "model_kernels": None,
        "max_bad_steps": 10,
    }
    job.total_steps = 200
    config = training_config_of(job)
    stored = config_json.to_json(config)
    assert {name: stored[name] for name in job.hyperparameters} == job.hyperparameters
    assert (config.total_steps, config.evaluate_every) == (200, 20)
    assert (config.checkpoint_every, config.final_model) == (3, FinalModel.BEST)
    assert config.head_slices is HeadSlices.SMALL  # the row has none, so the job began with these
    assert (config.lanes, config.numerics) == (1, 1)


def test_spec_of_a_row_without_gpus_has_one_gpu_worker(tmp_path: Path) -> None:
    job = job_of(windlass_settings())
    del job.windlass["gpus"]
    resolved = resolve_job(job, RESULTS)
    assert gpus_of(job) == 1
    assert resolved.training.lanes == 1


def test_spec_of_several_gpus_has_their_number_and_shares_the_cores(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, windlass_settings(gpus=2))
    assert (spec.num_ranks, spec.training.lanes, spec.training.num_microbatches) == (2, 2, 2)
    cpu = MachineResources(num_cores=4, num_gpus=0, cpu_ranks=2)
    settings = Settings(home=tmp_path, num_cpu_optimizers=1)
    assert threads_of(settings, cpu, num_ranks=2) == threads_of(settings, cpu, num_ranks=1) == (2, 1)


def test_resumed_job_with_another_number_of_gpus_keeps_its_training_config(tmp_path: Path) -> None:
    """Its lanes, on which results depend, are in its row."""
    job = job_of(windlass_settings(gpus=2))
    resolved = resolve_job(job, RESULTS)
    job.hyperparameters, job.total_steps = json.loads(json.dumps(resolved.hyperparameters)), resolved.total_steps
    before, settings = training_config_of(job), Settings(home=tmp_path)
    job.windlass = {**job.windlass, "gpus": 1}
    assert training_config_of(job) == before
    assert (before.lanes, plan_bounds(settings, job).num_ranks) == (2, 1)


@pytest.mark.parametrize(
    ("num_gpus", "cpu_ranks", "setting", "gpus", "expected"),
    [
        (0, 1, 1, 1, None),
        (4, 1, 1, 4, None),
        (0, 3, 3, 3, None),
        (1, 1, 1, 2, "windlass.gpus is 2, and the machine has 1 GPU"),
        (4, 9, 9, 5, "windlass.gpus is 5, and the machine has 4 GPUs"),
        (0, 2, 2, 4, "windlass.gpus is 4, and the machine has no GPU: its CPU counts as 2 devices (setting cpu_ranks)"),
        (0, 1, None, 4, "windlass.gpus is 4, and the machine has no GPU: its CPU counts as 1 device"),
        (
            *(0, 1, 2, 2),
            "windlass.gpus is 2, and Ray was started with 1 device, but cpu_ranks is 2 now; run `windlass down` and "
            "`windlass up` once no job runs, and submit the job again",
        ),
    ],
)
def test_resources_say_why_a_job_cannot_have_so_many_gpus(
    num_gpus: int, cpu_ranks: int, setting: int | None, gpus: int, expected: str | None
) -> None:
    resources = MachineResources(num_cores=4, num_gpus=num_gpus, cpu_ranks=cpu_ranks)
    assert resources.why_too_many(gpus, cpu_ranks=setting) == expected


def test_gpus_of_different_models_compute_no_job_together() -> None:
    alike = MachineResources(num_cores=4, num_gpus=3, gpu_models=("RTX 4090",))
    mixed = MachineResources(num_cores=4, num_gpus=3, gpu_models=("RTX 3090", "RTX 4090"))
    assert alike.why_too_many(3) is mixed.why_too_many(1) is None
    assert "of several models (RTX 3090, RTX 4090)" in (mixed.why_too_many(2) or "")
    assert mixed.why_too_many(4) == "windlass.gpus is 4, and the machine has 3 GPUs"


def test_row_keeps_the_fields_that_the_api_shows(tmp_path: Path) -> None:
    resolved = resolve_job(job_of(windlass_settings()), RESULTS)
    names = "epochs batch_size num_microbatches lanes numerics sequence_length learning_rate warmup_steps schedule "
    names += "weight_decay beta1 beta2 epsilon clip_norm precision seed optimizer state_precision "
    names += "accumulation_precision update_order kernel model_kernels head_slices cut_matrices max_bad_steps"
    assert list(resolved.hyperparameters) == names.split()


REQUEST_FIELDS = {field.name for field in fields(PlanRequest)}


def test_plan_request_of_a_job_spec_leaves_no_field_out() -> None:
    names = {field.name for field in fields(JobSpec)}
    assert JOB_SPEC.keys() | NOT_PLANNED_JOB_SPEC.keys() == names
    assert set(JOB_SPEC.values()) <= REQUEST_FIELDS


def test_plan_request_with_a_field_that_the_planner_does_not_know_is_a_defect() -> None:
    known = {field.name for field in fields(PlanQuestion)}
    assert "lengths" in known  # from the request's dataset
    assert REQUEST_FIELDS - known == ABOUT_PLANNING | {"dataset_dir"}


def test_plan_question_has_the_request_s_values(tmp_path: Path) -> None:
    numbers = {"num_validation_examples": 3, "num_optimizers": 4, "host_memory_nbytes": 5, "device_memory_nbytes": 6}
    numbers["num_ranks"] = 3
    request = replace(without_data(request_of(tmp_path, windlass_settings())), chooses_microbatches=True, **numbers)
    question = question_of(request, CONFIG)
    shared = {field.name for field in fields(PlanQuestion)} & REQUEST_FIELDS
    chosen = {f"chooses_{name}" for name in ("microbatches", "cut", "order", "ranks")}
    assert shared == {*numbers, *chosen, "hardware", "training"}
    # Where the search for a number of micro-batches begins follows from the rest.
    least = replace(request.training, num_microbatches=question.least_microbatches)
    assert question.training == least != request.training
    assert all(getattr(question, name) == getattr(request, name) for name in shared - {"training"})


@pytest.mark.parametrize(("budgets", "is_checked"), [({}, False), ({"gpu_memory_gib": 1.0}, True)])
def test_preparation_order_with_a_budget_has_the_job_s_spec_to_check_it(
    tmp_path: Path, budgets: dict[str, float], is_checked: bool
) -> None:
    asked = windlass_settings(budgets=budgets)
    make = preparation_of_job(tmp_path, asked, None).unplanned_spec
    assert (make is not None) == is_checked
    if make is not None:
        spec = make(RESULTS)
        assert spec.training == training_of(asked)
        assert (spec.device_memory_nbytes, spec.num_validation_examples) == (_GIB, NUM_VALIDATION_EXAMPLES)


def planned(num_microbatches: int | None, cut_matrices: int | None = None) -> dict[str, Any]:
    """The planner's answer; no number of micro-batches: the job does not fit."""
    choices = {"num_microbatches": num_microbatches, "cut_matrices": cut_matrices}
    choices = None if num_microbatches is None else choices
    report = PlanReport(feasible=choices is not None, reasons=(), choices=choices)
    return {"ok": True, **JobPlan(report=report).to_json()}


def test_number_of_microbatches_is_that_of_the_plan_unless_the_request_has_one() -> None:
    left_open, fixed = (job_of(windlass_settings(num_microbatches=number)) for number in ("auto", 2))
    with_plan = {**RESULTS, PLAN_JOB: planned(4)}
    assert left_open.windlass["num_microbatches"] is None, "as in rows of older versions"
    assert resolve_job(left_open, RESULTS).training.num_microbatches == 1
    assert resolve_job(left_open, with_plan).training.num_microbatches == 4
    assert resolve_job(left_open, with_plan).hyperparameters["num_microbatches"] == 4
    assert resolve_job(fixed, with_plan).training.num_microbatches == 2
    unplanned = {**RESULTS, PLAN_JOB: {"ok": True, "warnings": ["no plan was made"]}}
    assert resolve_job(left_open, unplanned).training.num_microbatches == 1


def test_first_plan_that_fits_gives_the_job_its_number_of_microbatches() -> None:
    results = {**RESULTS, PLAN_JOB: planned(None), f"{PLAN_JOB}@a": {"ok": False, "error": {}}}
    assert first_plan_of(results) is None
    results |= {f"{PLAN_JOB}@b": planned(4, 2**26), f"{PLAN_JOB}@c": planned(2)}
    first = first_plan_of(results)
    assert first is not None
    assert (first.num_microbatches, first.cut_matrices) == (4, 2**26)


def test_cut_of_matrices_is_that_of_the_first_plan_unless_the_request_has_one_and_stays() -> None:
    left_open, off, fixed = (job_of(windlass_settings(cut_matrices=cut)) for cut in ("auto", "off", 2**22))
    with_plan = {**RESULTS, PLAN_JOB: planned(4, 2**26)}
    for job, cut in ((left_open, 2**26), (off, None), (fixed, 2**22)):
        resolved = resolve_job(job, with_plan)
        assert resolved.training.cut_matrices == resolved.hyperparameters["cut_matrices"] == cut
        job.hyperparameters, job.total_steps = resolved.hyperparameters, resolved.total_steps
        assert training_config_of(job).cut_matrices == cut
        del job.hyperparameters["cut_matrices"]  # as in rows of older releases, whatever is asked for now
        assert training_config_of(job).cut_matrices is None
    assert resolve_job(left_open, RESULTS).training.cut_matrices is None, "without a plan nothing is cut"
    uncut = {**RESULTS, PLAN_JOB: planned(None), f"{PLAN_JOB}@b": planned(4), f"{PLAN_JOB}@c": planned(4, 2**26)}
    assert resolve_settings(left_open, uncut).training.cut_matrices is None


def test_attempt_updates_blocks_in_the_order_of_its_plan(tmp_path: Path) -> None:
    left_open = windlass_settings(clip_norm=None)
    plain = spec_of(tmp_path, left_open)
    assert plain.training.update_order is UpdateOrder.ACTIVE
    report = PlanReport(feasible=True, reasons=(), choices={"gradient_updates": "kept"})
    plan = JobPlan(report=report, placement=Placement(), arena_nbytes=1)
    spec = spec_of(tmp_path, left_open, plan)
    assert spec.training == replace(plain.training, update_order=UpdateOrder.KEPT)
    of_older_release = plan.model_copy(update={"report": replace(report, choices={})})
    assert spec_of(tmp_path, left_open, of_older_release).training == plain.training


@pytest.mark.parametrize(
    ("asked", "is_open"),
    [({"clip_norm": None}, True), ({}, False), ({"clip_norm": None, "precision": "fp16"}, False)],
)
def test_plan_chooses_the_order_of_updates_only_where_every_order_is_exact(
    tmp_path: Path, asked: dict[str, Any], is_open: bool
) -> None:
    assert request_of(tmp_path, windlass_settings(**asked)).chooses_order is is_open
    fixed = windlass_settings(gradient_updates="kept", **asked)
    assert not request_of(tmp_path, fixed).chooses_order


def test_resolve_job_with_fewer_examples_than_lanes_names_the_lanes() -> None:
    results = {**RESULTS, PREPARE_DATA: {**RESULTS[PREPARE_DATA], "num_examples": 5}}
    job = job_of(WindlassSettings(lanes=6))
    with pytest.raises(PreparationError, match="5 training examples give batches of 5 in 5 micro-batches") as caught:
        resolve_job(job, results)
    assert (caught.value.code, caught.value.param) == ("invalid_value", "windlass.lanes")


def test_resolve_job_whose_plan_does_not_fit_its_budget_names_the_budget(tmp_path: Path) -> None:
    job = job_of(windlass_settings(budgets={"gpu_memory_gib": 1.0}))
    plan = {"feasible": False, "reasons": ["too little"], "missing_bytes": {"gpu": 1, "host": 0, "ssd": 0}}
    with pytest.raises(PreparationError) as caught:
        resolve_job(job, {**RESULTS, PLAN_JOB: {"plan": plan}})
    assert (caught.value.code, caught.value.param) == ("does_not_fit", "windlass.budgets.gpu_memory_gib")


_LONG = pytest.mark.long
_GIB = 2**30
# With the smaller budget, kept gradients spill to the SSDs in fp32, but not in bf16.
PLENTY_GIB, TIGHT_GIB = 1.0, 0.04


@pytest.mark.long
def test_best_plan_of_several_gpus_has_the_arena_that_the_runner_makes(tmp_path: Path) -> None:
    asked = windlass_settings(gpus=2, num_microbatches=4, budgets={"host_memory_gib": PLENTY_GIB})
    request = without_data(request_of(tmp_path, asked))
    question = replace(question_of(request, CONFIG), measures=False, kept_times=None)
    profiles = Profiles(question)
    _, solution = best_plan(question, profiles)
    spec = replace(
        specs.SPEC,
        training=training_of(asked),
        num_ranks=question.num_ranks,
        num_cpu_optimizers=question.num_optimizers,
        placement=solution.placement,
        host_memory_nbytes=solution.plan.arena_nbytes,
    )
    context = make_context(spec, profiles.layout, "")
    assert context.plan == solution.plan
    assert context.plan.num_ranks == 2


@pytest.mark.short("kept-None-bf16-4-0.04_0", "after_backward-1.0-fp32-4-0.04_0")
@pytest.mark.parametrize(
    ("gradient_updates", "clip_norm", "accumulation_precision", "num_microbatches", "host_memory_gib"),
    [
        # Each order with another layout of the arena once; all of them with `long`.
        ("auto", None, "bf16", 4, PLENTY_GIB),
        ("kept", None, "bf16", 4, TIGHT_GIB),
        ("naive", None, "fp32", 1, PLENTY_GIB),
        ("after_backward", 1.0, "fp32", 4, TIGHT_GIB),
        *(
            pytest.param(order, clip_norm, precision, number, gib, marks=_LONG)
            for order, clip_norm in (
                *((each, None) for each in ("auto", "active", "kept", "naive", "after_backward")),
                *((each, 1.0) for each in ("auto", "kept", "after_backward")),
            )
            for precision in ("fp32", "bf16")
            for number in (1, 4)
            for gib in (PLENTY_GIB, TIGHT_GIB)
        ),
    ],
)
def test_best_plan_with_any_gradient_settings_has_the_arena_that_the_runner_makes(
    tmp_path: Path,
    gradient_updates: str,
    clip_norm: float | None,
    accumulation_precision: str,
    num_microbatches: int,
    host_memory_gib: float,
) -> None:
    asked = windlass_settings(
        gradient_updates=gradient_updates,
        clip_norm=clip_norm,
        accumulation_precision=accumulation_precision,
        num_microbatches=num_microbatches,
        budgets={"host_memory_gib": host_memory_gib},
    )
    request = without_data(request_of(tmp_path, asked))
    question = replace(question_of(request, CONFIG), measures=False, kept_times=None)
    profiles = Profiles(question)
    job, solution = best_plan(question, profiles)
    spec = replace(
        specs.SPEC,
        # `auto` is the planner's choice of an order, which the job's spec gets.
        training=job.training if gradient_updates == "auto" else training_of(asked),
        num_cpu_optimizers=question.num_optimizers,
        placement=solution.placement,
        host_memory_nbytes=solution.plan.arena_nbytes,
    )
    context = make_context(spec, profiles.layout, "")
    assert context.plan == solution.plan
    is_tight = host_memory_gib == TIGHT_GIB and num_microbatches > 1 and accumulation_precision == "fp32"
    must_spill = is_tight and job.update_order is UpdateOrder.KEPT
    assert must_spill <= bool(context.plan.spilled_blocks) <= (is_tight and job.keeps_grads)
    assert solution.plan.arena_nbytes <= host_memory_gib * _GIB
    assert job.update_order is spec.training.order_of_updates
    assert job.training.grad_precision is grad_precision(spec)
