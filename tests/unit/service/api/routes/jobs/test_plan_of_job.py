"""One answer everywhere: the command line, the API and a job's preparation give the same plan for the same settings."""

import dataclasses
import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient
from transformers import LlamaConfig

from tests.support.engine.folders import VOCABULARY, make_tokenizer
from tests.support.service.api_client import context_of, serve, upload
from tests.support.service.plan_command import run
from windlass.planner.hardware.hardware import example_machines
from windlass.planner.question.job_plan import JobPlan
from windlass.planner.question.plan_request import PlanRequest
from windlass.service.api.routes import plans
from windlass.service.installation.settings import HARDWARE_FILE, Settings
from windlass.service.jobs.hypothetical_plans import settings_of_plan
from windlass.service.jobs.machine_resources import MachineResources
from windlass.service.jobs.spec_builder import preparation_order, resolve_job
from windlass.service.machine.devices import measured_hardware
from windlass.service.preparation.pipeline import preparation_of
from windlass.service.preparation.steps import PLAN_JOB, Results
from windlass.service.validation.hyperparameters import WindlassSettings
from windlass.storage.sql.models import Job
from windlass.storage.sql.repositories.jobs import JobRepository

MACHINE = yaml.safe_load(example_machines()["rtx4090-server"].read_text())
NUM_TOKENS = 32
ASKED = {"sequence_length": NUM_TOKENS, "initialization": "random", "clip_norm": None}
# Longer than `NUM_TOKENS`, so that each is cut to that length.
EXAMPLES = (json.dumps({"text": "the user asks and the assistant answers " * 9}) + "\n") * 8


@pytest.fixture
def planning(settings: Settings, migrated_file: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of a measured machine with a model that a job can train."""
    monkeypatch.setenv("WINDLASS_HOME", str(settings.home))
    folder = settings.models_dir / "llama"
    make_tokenizer().save_pretrained(folder)
    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    (settings.home / HARDWARE_FILE).write_text(yaml.safe_dump(MACHINE))
    shutil.copyfile(migrated_file, settings.home / "windlass.db")
    with serve(settings) as client:
        yield client


def create(client: TestClient, windlass: Mapping[str, Any]) -> Job:
    """Creates a job and returns its row."""
    body = {"model": "llama", "training_file": upload(client, EXAMPLES.encode()), "windlass": windlass, "seed": 1}
    response = client.post("/v1/fine_tuning/jobs", json=body)
    assert response.status_code == 200, response.text
    with context_of(client).database.read() as session:
        return JobRepository(session).get(response.json()["id"])


def prepare(client: TestClient, job: Job) -> Results:
    """Runs all steps of a job's preparation."""
    settings = context_of(client).settings
    order = preparation_order(
        settings, MachineResources.here(settings), job, measured_hardware(settings), filenames={job.training_file: "a"}
    )
    preparation = preparation_of(order)
    until_s = time.monotonic() + 600
    try:
        while (results := preparation.poll()) is None:
            assert time.monotonic() < until_s, "the preparation did not end"
            time.sleep(0.02)
    finally:
        preparation.stop()
    return results


def report_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a plan. The data of a job is known, also if all its examples are as long as they may be."""
    plan = JobPlan.from_json({"plan": values})
    assert plan is not None
    assert plan.report.feasible, plan.report.reasons
    report = dataclasses.asdict(plan.report)
    assert report.pop("example_tokens")["mean"] == NUM_TOKENS
    return json.loads(json.dumps(report))  # type: ignore[no-any-return]


@pytest.mark.long
def test_command_line_api_and_job_get_the_same_plan_and_it_can_be_submitted(planning: TestClient) -> None:
    shown = run("--model", "llama", "--batch-size", "8", "--seq-len", str(NUM_TOKENS), "--no-clip", "--json")
    assert shown.exit_code == 0, shown.output
    of_command = json.loads(shown.output)
    response = planning.post("/v1/fine_tuning/plans", json={"model": "llama", "batch_size": 8, "windlass": ASKED})
    assert response.status_code == 200, response.text
    of_api = response.json()
    assert report_of(of_api) == report_of(of_command)
    left_open = create(planning, {**ASKED, "batch_size": 8, "epochs": 1})
    submitted = create(planning, of_api["job_settings"])
    # What would need least memory is told of the number of micro-batches that a job has, or else of the best one.
    advice = {"least_gpu_gib": None, "least_gpu_reason": None}
    for job, unlike in ((left_open, {}), (submitted, advice)):
        results = prepare(planning, job)
        assert report_of(results[PLAN_JOB]["plan"]) | unlike == report_of(of_api) | unlike
        training = resolve_job(job, results).training
        assert training.num_microbatches == of_api["choices"]["num_microbatches"]
    assert of_api["choices"]["num_microbatches"] == 1, "without a plan it would be 2"


def requested(client: TestClient, monkeypatch: pytest.MonkeyPatch, **body: Any) -> PlanRequest:
    """The request to the planner that a body of the API makes."""
    requests: list[PlanRequest] = []

    async def note(_context: object, _user: object, request: PlanRequest, _is_gone: object) -> Any:
        requests.append(request)
        raise plans.ApiError("that is all")

    with monkeypatch.context() as patched:
        patched.setattr(plans, "_run", note)
        assert client.post("/v1/fine_tuning/plans", json={"model": "llama", **body}).json()["error"]
    return requests[0]


@pytest.mark.parametrize("asked", [{}, {"num_microbatches": "auto"}, {"num_microbatches": 4}, {"lanes": 2}])
def test_api_asks_the_planner_what_a_job_asks(
    planning: TestClient, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    of_api = requested(planning, monkeypatch, batch_size=8, windlass=ASKED | asked)
    job = create(planning, {**ASKED, "batch_size": 8, **asked})
    settings = context_of(planning).settings
    order = preparation_order(
        settings,
        MachineResources.here(settings),
        job,
        measured_hardware(settings),
        filenames={},
        is_alone=lambda: True,
    )
    assert order.plan_request is not None
    counted = {"prepare_data": {"num_examples": 8, "num_validation_examples": 0, "num_targets": 1}}
    of_job = order.plan_request({"check_model": {"num_params": 1}, **counted})
    assert of_job.chooses_microbatches == of_api.chooses_microbatches == (asked.get("num_microbatches") != 4)
    # The preparation has the GPU for itself, and simulates the plan for the timeline.
    about_run = {"dataset_dir": None, "simulation_s": 0.0, "may_measure": of_api.may_measure}
    training = dataclasses.replace(of_job.training, num_microbatches=of_api.training.num_microbatches, seed=0)
    assert dataclasses.replace(of_job, **about_run, training=training) == of_api


def test_plan_of_a_job_that_no_request_can_ask_for_has_no_settings(
    planning: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = requested(planning, monkeypatch, batch_size=8192, windlass=ASKED)
    plan = JobPlan.from_json({"plan": {"feasible": True, "reasons": (), "choices": {"num_microbatches": 8}}})
    assert plan is not None
    asked = WindlassSettings.model_validate(ASKED)
    assert settings_of_plan(asked, request.training, plan.report) is None
    training = dataclasses.replace(request.training, batch_size=64)
    settings = settings_of_plan(asked, training, plan.report)
    assert settings == {**ASKED, "batch_size": 64, "num_microbatches": 8, "lanes": 1}
