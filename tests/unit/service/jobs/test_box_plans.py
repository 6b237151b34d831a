"""Plans for other kinds of boxes, in a job's folder."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.service.prepared_jobs import MACHINE, RESULTS, job_of, windlass_settings
from windlass.planner.question.job_plan import JobPlan
from windlass.planner.question.report import PlanReport
from windlass.service.installation.settings import Settings
from windlass.service.jobs.box_plans import (
    HERE,
    BoxKind,
    PlanNumbers,
    check_fits_a_box,
    keep_numbers,
    kind_dir,
    plan_for_box,
    plan_for_here,
    plan_numbers,
    requests_for_kinds,
)
from windlass.service.jobs.machine_resources import MachineResources
from windlass.service.jobs.plan_files import keep_plan, load_plan
from windlass.service.jobs.spec_builder import job_dir, resolve_job
from windlass.service.preparation.pipeline import PreparationError
from windlass.service.preparation.steps import PLAN_JOB, QUESTION_FILE
from windlass.storage.sql.models import Job

KIND = BoxKind(resources=MachineResources(num_cores=8, num_gpus=1), hardware=MACHINE)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path)


@pytest.fixture
def job() -> Job:
    job = job_of(windlass_settings())
    job.plan_number = 0
    return job


def answer(step_s: float, *, missing_nbytes: int = 0) -> dict[str, object]:
    reasons = (f"{missing_nbytes} bytes are missing",) if missing_nbytes else ()
    report = PlanReport(
        feasible=not missing_nbytes, reasons=reasons, step_s=step_s, missing_bytes={"host": missing_nbytes}
    )
    return {"ok": True, **JobPlan(report=report).to_json()}


def store(folder: Path, step_s: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{PLAN_JOB}.json").write_text(json.dumps(answer(step_s)))
    (folder / QUESTION_FILE).write_text(json.dumps({"about": step_s}))


def in_place(settings: Settings, job: Job) -> tuple[float | None, object]:
    plan, question = load_plan(settings, job), job_dir(settings, job.id) / "prepare" / QUESTION_FILE
    return plan and plan.report.step_s, json.loads(question.read_text())["about"] if question.exists() else None


def test_equal_boxes_are_of_one_kind() -> None:
    assert KIND.key == BoxKind(resources=MachineResources(num_cores=8, num_gpus=1), hardware=MACHINE).key
    others = [
        replace(KIND, resources=MachineResources(num_cores=9, num_gpus=1)),
        replace(KIND, hardware=None),
        replace(KIND, num_optimizers=2),
        replace(KIND, host_memory_gib=4.0),
        replace(KIND, gpu_memory_gib=4.0),
    ]
    assert len({KIND.key, *(other.key for other in others)}) == 1 + len(others)


def test_kinds_have_the_keys_by_which_the_version_before_stored_their_plans() -> None:
    assert KIND.key == "fe204c9869d7f352"


def test_request_for_another_kind_is_about_its_machine_and_measures_nothing(settings: Settings, job: Job) -> None:
    kinds = [KIND, replace(KIND, hardware=None)]
    [(key, request_of)] = requests_for_kinds(settings, job, kinds, num_devices=1).items()
    request = request_of(RESULTS)
    assert (key, request.hardware, request.may_measure, request.is_alone) == (KIND.key, MACHINE, False, False)
    assert request.compute_threads is None


def test_request_for_another_kind_has_the_training_config_that_the_job_has_here(settings: Settings) -> None:
    job = job_of(windlass_settings(gpus="auto", batch_size=12, num_microbatches=None, lanes=3))
    [request_of] = requests_for_kinds(settings, job, [KIND], num_devices=3).values()
    training = resolve_job(job, RESULTS, num_devices=3).training
    assert (training.lanes, training.num_microbatches) == (3, 3)
    assert request_of(RESULTS).training == training


def test_number_of_microbatches_is_chosen_for_one_kind_and_holds_for_all(settings: Settings) -> None:
    job = job_of(windlass_settings(num_microbatches=None))
    [request_of] = requests_for_kinds(settings, job, [KIND], num_devices=1).values()
    assert request_of(RESULTS).chooses_microbatches
    report = PlanReport(feasible=True, reasons=(), choices={"num_microbatches": 4})
    later = request_of({**RESULTS, PLAN_JOB: {"ok": True, **JobPlan(report=report).to_json()}})
    assert (later.chooses_microbatches, later.training.num_microbatches) == (False, 4)
    fixed = job_of(windlass_settings(num_microbatches=2))
    [request_of] = requests_for_kinds(settings, fixed, [KIND], num_devices=1).values()
    assert (request_of(RESULTS).chooses_microbatches, request_of(RESULTS).training.num_microbatches) == (False, 2)


def test_plan_of_the_chosen_box_takes_the_place_of_the_first_plan_until_the_job_stays_here(
    settings: Settings, job: Job
) -> None:
    store(job_dir(settings, job.id) / "prepare", 1.0)
    store(kind_dir(settings, job.id, KIND.key), 2.0)
    assert in_place(settings, job) == (1.0, 1.0)
    for _ in range(2):  # repeated after a crash
        plan_for_box(settings, job, KIND)
        assert in_place(settings, job) == (2.0, 2.0)
    for _ in range(2):
        plan_for_here(settings, job)
        assert in_place(settings, job) == (1.0, 1.0)


def test_renewed_plan_is_put_aside_and_back_as_the_first_one(settings: Settings, job: Job) -> None:
    store(job_dir(settings, job.id) / "prepare", 1.0)
    renewed = JobPlan.model_validate(answer(3.0))
    job.plan_number = keep_plan(settings, job, renewed)
    plan_for_box(settings, job, replace(KIND, hardware=None))
    job.plan_number = 0
    assert in_place(settings, job) == (None, None), "an unmeasured box has no plan"
    plan_for_here(settings, job)
    assert in_place(settings, job) == (3.0, 1.0)


def test_numbers_of_plans_are_kept_beside_earlier_ones(settings: Settings, job: Job) -> None:
    prepare_dir = job_dir(settings, job.id) / "prepare"
    prepare_dir.mkdir(parents=True)
    assert plan_numbers(settings, job.id) == {}
    keep_numbers(settings, job.id, {"a": answer(1.0)})
    keep_numbers(settings, job.id, {"b": {"error": {"message": "it was killed"}}})
    found = plan_numbers(settings, job.id)
    assert found["b"] == PlanNumbers(feasible=False, why_not="it was killed")
    assert (found["a"].step_s, found["a"].feasible) == (1.0, False), "a plan without a placement cannot be used"
    (prepare_dir / "kinds.json").write_text("[")
    assert plan_numbers(settings, job.id) == {}


def test_job_must_fit_one_of_the_boxes(job: Job) -> None:
    names = {HERE: "head", "a": "attic"}
    unfit = {PLAN_JOB: answer(1.0, missing_nbytes=9), f"{PLAN_JOB}@a": answer(1.0, missing_nbytes=5)}
    check_fits_a_box(job, {}, names, may_run_unplanned=False)
    check_fits_a_box(job, unfit, names, may_run_unplanned=True)
    check_fits_a_box(job, {**unfit, f"{PLAN_JOB}@a": answer(1.0)}, names, may_run_unplanned=False)
    with pytest.raises(PreparationError, match="fits no box; the closest one is attic: 5 bytes") as raised:
        check_fits_a_box(job, unfit, names, may_run_unplanned=False)
    assert raised.value.code == "does_not_fit"
    failed = {f"{PLAN_JOB}@a": {"error": {"message": "it was killed"}}}
    with pytest.raises(PreparationError, match="such as for box attic: it was killed"):
        check_fits_a_box(job, failed, names, may_run_unplanned=False)
