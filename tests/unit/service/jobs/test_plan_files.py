"""The planner's question is read again with the settings of the job's row, whichever release has written it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.service.jobs.test_spec_builder import CONFIG, RESULTS, job_of, order_of, spec_of, windlass_settings
from windlass.planner.planning.worker import PlanOrder, question_of
from windlass.service.installation.settings import Settings
from windlass.service.jobs.plan_files import has_plan, load_plan, load_question, plans_of
from windlass.service.jobs.spec_builder import dataset_dir, job_dir, resolve_job
from windlass.service.preparation.pipeline import PLAN_JOB, QUESTION_FILE
from windlass.service.validation.hyperparameters import WindlassSettings
from windlass.storage.sql.models import Job


def queued_job(asked: WindlassSettings) -> Job:
    job = job_of(asked)
    resolved = resolve_job(job, RESULTS)
    job.hyperparameters, job.total_steps, job.plan_number = resolved.hyperparameters, resolved.total_steps, 0
    return job


def stored_question(home: Path, asked: WindlassSettings, question: dict[str, Any]) -> dict[str, Any] | None:
    """Stores a question for such a job, and reads it again."""
    job, settings = queued_job(asked), Settings(home=home)
    path = job_dir(settings, job.id) / "prepare" / QUESTION_FILE
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(question))
    return load_question(settings, job)


def test_load_question_of_this_release_gives_the_order_of_the_preparation(tmp_path: Path) -> None:
    asked = windlass_settings(gradient_updates="after_backward", clip_norm=None, learning_rate=1e-3)
    order = order_of(tmp_path, asked)
    question = stored_question(tmp_path, asked, order.model_dump(mode="json"))
    assert question is not None
    model_dir = Settings(home=tmp_path).models_dir / "base"
    assert PlanOrder.model_validate(question) == order.model_copy(update={"model_dir": model_dir})
    assert order.training == spec_of(tmp_path, asked).training


def test_load_question_of_an_older_release_has_the_training_config_of_the_row(tmp_path: Path) -> None:
    asked = windlass_settings(gradient_updates="kept", clip_norm=None, accumulation_precision="bf16")
    order = order_of(tmp_path, asked)
    others = order.model_dump(mode="json", exclude={"training", "chooses_microbatches", "dataset_dir"})
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
    question = stored_question(tmp_path, asked, older)
    assert question is not None
    again = PlanOrder.model_validate(question)
    assert again.training == order.training
    assert again.dataset_dir == dataset_dir(job_dir(Settings(home=tmp_path), "ftjob-1"))


def test_load_question_without_data_is_planned_for_the_longest_examples(tmp_path: Path) -> None:
    asked = windlass_settings()
    older = order_of(tmp_path, asked).model_dump(mode="json", exclude={"dataset_dir"})
    question = stored_question(tmp_path, asked, older | {"dataset": None})
    assert question is not None
    again = PlanOrder.model_validate(question)
    assert again.dataset_dir is None
    assert question_of(again, CONFIG).lengths is None


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
