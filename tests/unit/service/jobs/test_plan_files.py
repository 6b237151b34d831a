"""The request to the planner is read again with the settings of the job's row, whichever release has written it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.service.prepared_jobs import CONFIG, RESULTS, job_of, request_of, spec_of, windlass_settings
from windlass.planner.planning.job_planning import question_of
from windlass.planner.question.job_plan import ChangedInputs, JobPlan, PlanBounds
from windlass.planner.question.plan_request import PlanRequest
from windlass.planner.question.report import PlanReport
from windlass.service.installation.settings import Settings
from windlass.service.jobs.plan_files import has_plan, keep_plan, load_plan, load_plan_request, plans_of
from windlass.service.jobs.spec_builder import dataset_dir, job_dir, resolve_job
from windlass.service.preparation.steps import PLAN_JOB, QUESTION_FILE
from windlass.service.validation.hyperparameters import WindlassSettings
from windlass.storage.sql.models import Job


def queued_job(asked: WindlassSettings) -> Job:
    job = job_of(asked)
    resolved = resolve_job(job, RESULTS)
    job.hyperparameters, job.total_steps, job.plan_number = resolved.hyperparameters, resolved.total_steps, 0
    return job


def stored_request(home: Path, asked: WindlassSettings, values: object) -> PlanRequest | None:
    """Stores a request for such a job, and reads it again."""
    job, settings = queued_job(asked), Settings(home=home)
    path = job_dir(settings, job.id) / "prepare" / QUESTION_FILE
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(values))
    return load_plan_request(settings, job)


def test_load_plan_request_of_this_release_gives_that_of_the_preparation(tmp_path: Path) -> None:
    asked = windlass_settings(gradient_updates="after_backward", clip_norm=None, learning_rate=1e-3)
    request = request_of(tmp_path, asked)
    model_dir = Settings(home=tmp_path).models_dir / "base"
    kept = replace(request, model_dir=model_dir, chooses_cut=False)  # the row has the cut of the first plan
    assert stored_request(tmp_path, asked, request.to_json()) == kept
    assert request.training == spec_of(tmp_path, asked).training


def test_load_plan_request_of_an_older_release_has_the_training_config_of_the_row(tmp_path: Path) -> None:
    asked = windlass_settings(gradient_updates="kept", clip_norm=None, accumulation_precision="bf16")
    request = request_of(tmp_path, asked)
    others = request.to_json()
    for name in ("training", "chooses_microbatches", "dataset_dir"):
        del others[name]
    # Its settings were single fields, and the data had an order of its own.
    older = others | {
        "batch_size": 4,
        "num_microbatches": 2,
        "sequence_length": 64,
        "dataset": {"dataset_dir": "/old/home/dataset", "seed": 1, "total_steps": 75},
        "precision": "bf16",
        "state_precision": "fp32",
        "optimizer": "adamw",
        "clips": False,
    }
    again = stored_request(tmp_path, asked, older)
    assert again is not None
    assert again.training == request.training
    assert again.dataset_dir == dataset_dir(job_dir(Settings(home=tmp_path), "ftjob-1"))


def test_load_plan_request_of_a_job_has_the_number_of_microbatches_that_its_first_plan_chose(tmp_path: Path) -> None:
    left_open = windlass_settings(num_microbatches="auto")
    request = request_of(tmp_path, left_open)
    assert request.chooses_microbatches
    again = stored_request(tmp_path, left_open, request.to_json())
    assert again is not None
    assert (again.chooses_microbatches, again.training) == (False, request.training)


def test_load_plan_request_without_data_is_planned_for_the_longest_examples(tmp_path: Path) -> None:
    asked = windlass_settings()
    older = request_of(tmp_path, asked).to_json()
    del older["dataset_dir"]
    again = stored_request(tmp_path, asked, older | {"dataset": None})
    assert again is not None
    assert again.dataset_dir is None
    assert question_of(again, CONFIG).lengths is None


def test_load_plan_request_of_the_first_release_with_plans_is_read(tmp_path: Path) -> None:
    """It had no fields for measurements, simulations, the data and the validation examples."""
    asked = windlass_settings()
    request = request_of(tmp_path, asked)
    names = ("model_dir", "hardware", "num_optimizers", "host_memory_nbytes", "device_memory_nbytes")
    oldest = {name: value for name, value in request.to_json().items() if name in names}
    oldest |= {"batch_size": 4, "num_microbatches": None, "sequence_length": 64, "precision": "bf16", "clips": True}
    again = stored_request(tmp_path, asked, oldest | {"state_precision": "fp32"})
    assert again is not None
    assert (again.training, again.hardware, again.running) == (request.training, request.hardware, None)


@pytest.mark.parametrize("values", [3, None, [], {}, {"hardware": "fast"}])
def test_load_plan_request_of_a_file_without_a_request_is_none_and_warned_of_once(
    tmp_path: Path, values: object, caplog: pytest.LogCaptureFixture
) -> None:
    asked = windlass_settings()
    assert stored_request(tmp_path, asked, values) is None
    assert load_plan_request(Settings(home=tmp_path), queued_job(asked)) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"{QUESTION_FILE} cannot be read, so the job's plan is not renewed: " in record.getMessage()


def test_load_plan_request_of_a_job_that_was_not_planned_is_none_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load_plan_request(Settings(home=tmp_path), queued_job(windlass_settings())) is None
    assert caplog.records == []


def test_load_plan_request_with_a_renewed_plan_has_its_machine_and_budgets(tmp_path: Path) -> None:
    asked, settings = windlass_settings(), Settings(home=tmp_path)
    request = request_of(tmp_path, asked)
    assert stored_request(tmp_path, asked, request.to_json()) is not None
    job = queued_job(asked)
    other = request.hardware.model_copy(update={"network_gb_per_s": 1.0})
    bounds = PlanBounds(num_optimizers=2, host_memory_nbytes=3 << 30, device_memory_nbytes=None)
    plan = JobPlan(report=PlanReport(feasible=True, reasons=()))
    job.plan_number = keep_plan(settings, job, plan.made_for(ChangedInputs(hardware=other, bounds=bounds)))
    again = load_plan_request(settings, job)
    assert again is not None
    assert again.hardware == other
    assert (again.num_optimizers, again.host_memory_nbytes, again.device_memory_nbytes) == (2, 3 << 30, None)


@pytest.mark.parametrize("text", ["3", "null", "[]", "{", '{"error": "no model"}'])
def test_a_file_without_a_plan_is_no_plan(tmp_path: Path, text: str) -> None:
    job, settings = stored_plan(tmp_path, text)
    assert load_plan(settings, job) is None
    assert plans_of(settings, job) == []
    assert not has_plan(settings, job)


def test_a_plan_with_a_wrong_value_fails_only_where_it_is_read(tmp_path: Path) -> None:
    job, settings = stored_plan(tmp_path, '{"plan": "fast"}')
    with pytest.raises(ValueError, match="plan"):
        load_plan(settings, job)
    assert has_plan(settings, job)  # so that lists of jobs can be shown
    assert plans_of(settings, job) == []


def stored_plan(home: Path, text: str) -> tuple[Job, Settings]:
    job, settings = queued_job(windlass_settings()), Settings(home=home)
    path = job_dir(settings, job.id) / "prepare" / f"{PLAN_JOB}.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return job, settings
