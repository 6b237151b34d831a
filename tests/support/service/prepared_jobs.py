"""Rows of jobs with given settings, and the plan requests and specs that are built from them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from windlass.actors.job.spec import JobSpec
from windlass.engine.training_config.training_config import TrainingConfig
from windlass.planner.hardware.hardware import Gpus, Hardware, Host, Pcie, Ssds
from windlass.planner.hardware.model_shape import ModelShape
from windlass.planner.profiling.model_profiler import config_of_shape
from windlass.planner.question.job_plan import JobPlan
from windlass.planner.question.plan_request import PlanRequest
from windlass.service.installation.settings import Settings
from windlass.service.jobs.machine_resources import MachineResources
from windlass.service.jobs.spec_builder import build_job_spec, job_dir, preparation_order, resolve_job
from windlass.service.preparation.steps import CHECK_MODEL, PREPARE_DATA, PreparationOrder
from windlass.service.validation.hyperparameters import (
    JobSettings,
    SupervisedHyperparameters,
    WindlassSettings,
    resolve,
)
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


def windlass_settings(**asked: Any) -> WindlassSettings:
    """The settings of a small job, and those that are `asked`."""
    return WindlassSettings.model_validate({**JOB, **asked})


def job_of(asked: WindlassSettings) -> Job:
    """The row of a queued job."""
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


def without_data(request: PlanRequest) -> PlanRequest:
    """The request without a dataset, which no test has written."""
    return replace(request, dataset_dir=None)
