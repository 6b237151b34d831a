"""Plans over HTTP, and what becomes of a job by its plan."""

import json
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient
from transformers import LlamaConfig

from tests.unit.service.api_client import context_of, serve
from tests.unit.service.dispatcher_stage import PREPARED, Stage
from windlass.planner.activations import BlockActivations
from windlass.planner.hardware import example_machines
from windlass.planner.placement_json import from_json, to_json
from windlass.planner.plan import Placement
from windlass.service.doctor import HARDWARE_FILE
from windlass.service.job_specs import job_dir
from windlass.service.preparation import Results
from windlass.service.settings import Settings
from windlass.storage.sql.statuses import JobStatus

MACHINE = yaml.safe_load(example_machines()["rtx4090-server"].read_text())
PLAN: dict[str, Any] = {"feasible": True, "reasons": ["a step is bound by the SSDs"], "step_s": 3.0}
PLACEMENT = Placement(
    host_blocks=(0, 2),
    num_cached_params=3,
    group_size=2,
    activations=(BlockActivations(swap_input=True, kept=frozenset({"aten.mm.default#0"})),),
    host_activation_nbytes=1 << 20,
)


@pytest.fixture
def planning(settings: Settings) -> Any:
    """A client, and a model whose shapes are known."""
    folder = settings.models_dir / "llama"
    LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"weights")
    with serve(settings) as client:
        yield client


def ask(client: TestClient, **body: Any) -> Any:
    return client.post("/v1/fine_tuning/plans", json={"model": "llama", "batch_size": 4, **body})


def test_a_plan_for_another_machine(planning: TestClient) -> None:
    response = ask(planning, hardware=MACHINE, windlass={"clip_norm": None, "sequence_length": 64})
    assert response.status_code == 200, response.text
    plan = response.json()
    assert plan["object"] == "fine_tuning.plan"
    assert plan["feasible"]
    assert plan["tokens_per_s"] == pytest.approx(4 * 64 / plan["step_s"])
    assert set(plan["peak_gib"]) == {"gpu", "host", "ssd"}
    assert plan["hardware"]["gpus"]["count"] == 1
    assert not list(context_of(planning).settings.home.glob("plan-*"))


def test_a_plan_for_this_machine_needs_its_profile(planning: TestClient) -> None:
    response = ask(planning)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("hardware", "not_measured")
    assert "windlass doctor" in error["message"]


def test_what_does_not_fit_is_an_answer_as_well(planning: TestClient) -> None:
    home = context_of(planning).settings.home
    tiny = MACHINE | {"host": MACHINE["host"] | {"memory_gib": 1.501}}
    (home / HARDWARE_FILE).write_text(yaml.safe_dump(tiny))
    plan = ask(planning).json()
    assert not plan["feasible"]
    assert plan["step_s"] is None
    assert any("it fits with" in reason for reason in plan["reasons"])


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"model": "nobody"}, 404, "model"),
        ({"batch_size": 0}, 400, "batch_size"),
        ({"hardware": MACHINE | {"host": {"memory_gib": -1}}}, 400, "hardware"),
        ({"windlass": {"sequence_length": 4096}}, 400, "windlass.sequence_length"),
        ({"windlass": {"precision": "int4"}}, 400, "windlass.precision"),
    ],
)
def test_bad_input_gets_the_error_form(planning: TestClient, body: dict[str, Any], status: int, param: str) -> None:
    response = ask(planning, **body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"].startswith(param)


def test_a_job_without_a_plan_says_so(client: TestClient, file_id: str) -> None:
    job = client.post("/v1/fine_tuning/jobs", json={"model": "tiny", "training_file": file_id}).json()
    path = f"/v1/fine_tuning/jobs/{job['id']}/plan"
    response = client.get(path)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "plan_not_found"
    keep_plan(context_of(client).settings, job["id"])
    plan = client.get(path).json()
    assert plan == {"object": "fine_tuning.job.plan", "job_id": job["id"], **PLAN}
    assert client.get("/v1/fine_tuning/jobs/ftjob-none/plan").status_code == 404


def keep_plan(settings: Settings, job_id: str) -> None:
    folder = job_dir(settings, job_id) / "prepare"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan_job.json").write_text(
        json.dumps({"ok": True, "plan": PLAN, "placement": to_json(PLACEMENT), "arena_nbytes": 1 << 20})
    )


# --- the dispatcher -------------------------------------------------------------------------------------------------


def measured(stage: Stage) -> None:
    (stage.settings.home / HARDWARE_FILE).write_text(yaml.safe_dump(MACHINE))


def test_the_planner_is_asked_with_resolved_numbers(stage: Stage) -> None:
    measured(stage)
    stage.submit(clip_norm=None, budgets={"host_memory_gib": 4, "gpu_memory_gib": 2})
    stage.tick()
    ask_planner = stage.preparations[-1].order.plan_question
    assert ask_planner is not None
    question = ask_planner(dict(PREPARED))
    assert (question["batch_size"], question["num_microbatches"], question["sequence_length"]) == (5, 2, 64)
    assert question["clips"] is False
    assert question["host_memory_nbytes"] == 4 * 2**30
    assert question["device_memory_nbytes"] == 2 * 2**30
    assert question["hardware"]["host"]["memory_gib"] == 768
    json.dumps(question)


def test_without_a_profile_nothing_is_planned(stage: Stage) -> None:
    stage.submit()
    stage.tick()
    assert stage.preparations[-1].order.plan_question is None


def test_a_job_that_cannot_fit_is_refused(stage: Stage) -> None:
    job_id = stage.submit()
    stage.tick()
    reasons = ["no plan fits; it lacks 2.00 GiB of host memory", "it fits with 8 GiB of host memory"]
    refused: Results = {**PREPARED, "plan_job": {"ok": True, "plan": {"feasible": False, "reasons": reasons}}}
    stage.preparations[-1].ending = refused
    stage.tick()
    job = stage.job(job_id)
    assert job.status is JobStatus.FAILED
    assert job.error is not None
    assert job.error["code"] == "does_not_fit"
    assert job.error["message"] == "; ".join(reasons)


def test_the_plan_tells_when_a_job_will_finish(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.service.dispatcher.time.time", lambda: 1e9)
    job_id = stage.submit()
    stage.tick()
    keep_plan(stage.settings, job_id)
    stage.preparations[-1].ending = PREPARED
    stage.tick(2)
    job = stage.job(job_id)
    assert job.status is JobStatus.RUNNING
    assert job.total_steps == 4
    assert job.estimated_finish == 1e9 + 4 * 3.0


def test_a_job_runs_as_it_was_planned(stage: Stage) -> None:
    job_id = stage.submit(budgets={"host_memory_gib": 4})
    stage.tick()
    keep_plan(stage.settings, job_id)
    stage.preparations[-1].ending = PREPARED
    stage.tick(2)
    (spec,) = stage.runners.started
    assert spec.placement == PLACEMENT
    assert spec.host_memory_nbytes == 1 << 20


def test_placements_survive_json() -> None:
    assert from_json(json.loads(json.dumps(to_json(PLACEMENT)))) == PLACEMENT
    with pytest.raises(ValueError, match="host_blocks"):
        from_json({"host_blocks": "all"})


def test_a_job_without_a_plan_is_queued_with_a_warning(stage: Stage) -> None:
    job_id = stage.submit()
    stage.tick()
    why = "no plan was made: DeviceNeedUnknownError: experts"
    stage.preparations[-1].ending = {**PREPARED, "plan_job": {"ok": True, "warnings": [why]}}
    stage.tick(2)
    assert stage.job(job_id).status is JobStatus.RUNNING
    assert why in stage.messages(job_id)
