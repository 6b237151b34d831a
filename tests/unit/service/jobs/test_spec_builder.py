"""A job's settings reach its runner and its planner alike."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.service.prepared_jobs import (
    NUM_VALIDATION_EXAMPLES,
    RESULTS,
    job_of,
    preparation_of_job,
    spec_of,
    training_of,
    windlass_settings,
)
from windlass.amounts import GIB
from windlass.engine.memory_plan.plan import Placement
from windlass.engine.memory_plan.update_order import UpdateOrder
from windlass.engine.training_config import config_json
from windlass.engine.training_config.training_config import FinalModel
from windlass.planner.question.job_plan import JobPlan
from windlass.planner.question.report import PlanReport
from windlass.service.installation.settings import Settings
from windlass.service.jobs.machine_resources import MachineResources, threads_of
from windlass.service.jobs.spec_builder import (
    first_plan_of,
    gpus_of,
    plan_bounds,
    resolve_job,
    resolve_settings,
    training_config_of,
)
from windlass.service.preparation.pipeline import PreparationError
from windlass.service.preparation.steps import PLAN_JOB, PREPARE_DATA
from windlass.service.validation.hyperparameters import WindlassSettings
from windlass.storage.ids import HeadSlices


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
    assert (spec.num_ranks, spec.training.lanes, spec.training.num_microbatches) == (2, 1, 2)
    cpu = MachineResources(num_cores=4, num_gpus=0, cpu_ranks=2)
    settings = Settings(home=tmp_path, num_cpu_optimizers=1)
    assert threads_of(settings, cpu, num_ranks=2) == threads_of(settings, cpu, num_ranks=1) == (2, 1)


def test_resumed_job_with_another_number_of_gpus_keeps_its_training_config(tmp_path: Path) -> None:
    """Its number of micro-batches, on which results depend, is in its row."""
    job = job_of(windlass_settings(gpus=2))
    resolved = resolve_job(job, RESULTS)
    job.hyperparameters, job.total_steps = json.loads(json.dumps(resolved.hyperparameters)), resolved.total_steps
    before, settings = training_config_of(job), Settings(home=tmp_path)
    job.windlass = {**job.windlass, "gpus": 1}
    assert training_config_of(job) == before
    assert (before.num_microbatches, plan_bounds(settings, job).num_ranks) == (2, 1)


def test_resumed_job_of_an_older_release_keeps_the_lanes_that_auto_was_then(tmp_path: Path) -> None:
    """They decide the last bits of its results. Older releases made a lane for each GPU."""
    job = job_of(windlass_settings(gpus=2, num_microbatches="auto"))
    assert job.windlass["lanes"] == "auto"
    resolved = resolve_job(job, RESULTS)
    job.hyperparameters = {**json.loads(json.dumps(resolved.hyperparameters)), "lanes": 2, "num_microbatches": 4}
    job.total_steps = resolved.total_steps
    before = training_config_of(job)
    assert (before.lanes, before.num_microbatches) == (2, 4)
    for gpus in (1, "auto"):
        job.windlass = {**job.windlass, "gpus": gpus}
        assert training_config_of(job) == before


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
        assert (spec.device_memory_nbytes, spec.num_validation_examples) == (GIB, NUM_VALIDATION_EXAMPLES)


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
