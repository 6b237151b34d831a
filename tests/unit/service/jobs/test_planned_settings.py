"""Settings of a job reach its planner, which plans what its runner makes."""

import re
from dataclasses import fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest

from tests.support.actors import specs
from tests.support.service.prepared_jobs import (
    CONFIG,
    MACHINE,
    request_of,
    spec_of,
    training_of,
    windlass_settings,
    without_data,
)
from windlass.actors.job.context import grad_precision, make_context
from windlass.actors.job.spec import JobSpec
from windlass.amounts import GIB
from windlass.engine.memory_plan.update_order import UpdateOrder
from windlass.engine.training_config.training_config import TrainingConfig
from windlass.planner.cost.model_profile import ModelProfile
from windlass.planner.planning.job_planning import question_of
from windlass.planner.planning.simulated_search import best_plan
from windlass.planner.profiling.model_profiler import Profiler
from windlass.planner.question.plan_request import PlanRequest
from windlass.planner.question.profiles import Profiles, planned_job
from windlass.planner.question.question import PlanQuestion
from windlass.planner.solver.planned_job import PlannedJob
from windlass.service.api.schemas.plans import CreatePlan
from windlass.service.installation.settings import Settings
from windlass.service.jobs.hypothetical_plans import hypothetical_request
from windlass.service.validation.hyperparameters import WindlassSettings
from windlass.service.validation.request_errors import ApiError
from windlass.storage.ids import Precision

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
    "tells_estimate",
    "what_if",
    "running",
}


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


@pytest.mark.parametrize("name", sorted(WindlassSettings.model_fields.keys() - {"lora"}))
def test_plan_over_http_uses_each_setting_or_refuses_it_or_docs_say_that_it_changes_nothing(
    tmp_path: Path, name: str
) -> None:
    def request(**settings: Any) -> PlanRequest:
        asked = windlass_settings(**settings)
        return hypothetical_request(
            Settings(home=tmp_path),
            MACHINE,
            None,
            model_dir=tmp_path,
            asked=asked,
            batch_size=CreatePlan(model="tiny", windlass=asked).checked_batch_size(),
            sequence_length=asked.sequence_length or 64,
        )

    plain = {"batch_size": 8}
    changed = plain | _TOLD_OTHERWISE.get(name, {}) | {name: PLANNED.get(name, NOT_PLANNED.get(name, (None,))[0])}
    if name in ("box", "boxes"):
        with pytest.raises(ApiError, match=rf"^windlass\.{name}: is .*, but a plan"):
            request(**changed)
    elif name in PLANNED and name != "epochs":
        assert request(**changed) != request(**plain)
    else:  # epochs give the number of steps; without data they select no batches
        text = (Path(__file__).parents[4] / "docs" / "planning.md").read_text()
        (told,) = re.findall(r"^These settings change no plan: (.*?)\.$", text, re.DOTALL | re.MULTILINE)
        assert f"`{name}`" in told


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
    assert shared == {*numbers, *chosen, "hardware", "training", "measures_apart", "leaves_unmeasured"}
    # Where the search for a number of micro-batches begins follows from the rest.
    least = replace(request.training, num_microbatches=question.least_microbatches)
    assert question.training == least != request.training
    assert all(getattr(question, name) == getattr(request, name) for name in shared - {"training"})


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


_LONG = pytest.mark.long
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
    assert solution.plan.arena_nbytes <= host_memory_gib * GIB
    assert job.update_order is spec.training.order_of_updates
    assert job.training.grad_precision is grad_precision(spec)
