"""Plans over HTTP."""

from dataclasses import replace
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient
from transformers import LlamaConfig

from tests.support.service.api_client import context_of, serve, upload
from windlass.amounts import GIB
from windlass.planner.hardware.hardware import example_machines
from windlass.planner.hardware.named_machines import machine_of
from windlass.planner.planning import job_planning as plan_job
from windlass.planner.profiling.model_config import read_config
from windlass.planner.question.plan_request import PlanRequest
from windlass.planner.question.report import PlanReport
from windlass.service.api import plan_run
from windlass.service.api.routes import plans
from windlass.service.installation.settings import HARDWARE_FILE, Settings
from windlass.service.preparation.memory import PreparationMemory

MACHINE = yaml.safe_load(example_machines()["rtx4090-server"].read_text())


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


@pytest.mark.long
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


@pytest.mark.long
def test_units_that_are_probably_wrong_are_doubted(planning: TestClient) -> None:
    in_mib = MACHINE | {"gpus": MACHINE["gpus"] | {"memory_gib": 24576}}
    plan = ask(planning, hardware=in_mib).json()
    assert plan["feasible"]
    (warning,) = plan["warnings"]
    assert "gpus.memory_gib: 24576" in warning
    assert "were MiB meant?" in warning


def test_a_plan_for_this_machine_needs_its_profile(planning: TestClient) -> None:
    response = ask(planning)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("hardware", "not_measured")
    assert "windlass doctor" in error["message"]


def test_a_plan_gets_memory_beside_what_runs_and_else_none(
    planning: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PreparationMemory, "free_nbytes", lambda _self: GIB)
    monkeypatch.setattr(plan_run, "_WAIT_S", 0.1)
    response = ask(planning, hardware=MACHINE, windlass={"sequence_length": 64})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_memory")
    assert "1.00 GiB free beside what runs" in response.json()["error"]["message"]


@pytest.mark.long
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
        ({"batch_size": 10**6}, 400, "batch_size"),
        ({"hardware": MACHINE | {"host": {"memory_gib": -1}}}, 400, "hardware"),
        ({"hardware": MACHINE | {"host": MACHINE["host"] | {"memory_gib": 1e-300}}}, 400, "hardware.host.memory_gib"),
        ({"hardware": MACHINE | {"gpus": MACHINE["gpus"] | {"tflops": 1e300}}}, 400, "hardware.gpus.tflops"),
        ({"hardware": MACHINE | {"gpus": 3}}, 400, "hardware.gpus"),
        ({"hardware": MACHINE | {"ssd": {}}}, 400, "hardware.ssd"),
        ({"windlass": {"sequence_length": 4096}}, 400, "windlass.sequence_length"),
        ({"windlass": {"precision": "int4"}}, 400, "windlass.precision"),
        ({"windlass": {"box": "attic"}}, 400, "windlass.box"),
        ({"windlass": {"boxes": 2}}, 400, "windlass.boxes"),
        ({"windlass": {"batch_size": 8}}, 400, "windlass.batch_size"),
        ({"sequence_length": 4096}, 400, "sequence_length"),
        ({"sequence_length": 64, "windlass": {"sequence_length": 32}}, 400, "windlass.sequence_length"),
        ({"batch_size": None}, 400, "batch_size"),
        ({"num_examples": 0}, 400, "num_examples"),
    ],
)
def test_bad_input_gets_the_error_form(planning: TestClient, body: dict[str, Any], status: int, param: str) -> None:
    response = ask(planning, **body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"].startswith(param)


def test_name_of_a_machine_as_hardware_is_refused_with_the_request_that_gives_the_object(planning: TestClient) -> None:
    error = ask(planning, hardware="rtx4090:ram=64,ssds=2").json()["error"]
    where = "such as hardware in the answer of GET /v1/fine_tuning/machines/{name}"
    assert error["message"] == f"hardware: must be an object, {where}, got 'rtx4090:ram=64,ssds=2'"
    assert (error["param"], error["code"]) == ("hardware", "invalid_value")


def test_plan_with_more_microbatches_than_examples_is_refused_as_the_job_is(
    planning: TestClient,
) -> None:
    settings = {"batch_size": 4, "num_microbatches": 5, "sequence_length": 64}
    job = {"model": "llama", "training_file": upload(planning), "windlass": settings}
    of_job = planning.post("/v1/fine_tuning/jobs", json=job)
    of_plan = ask(planning, hardware=MACHINE, windlass={"num_microbatches": 5, "sequence_length": 64})
    assert (of_plan.status_code, of_plan.json()) == (of_job.status_code, of_job.json())
    error = of_plan.json()["error"]
    assert (of_plan.status_code, error["param"], error["code"]) == (400, "windlass.num_microbatches", "invalid_value")
    assert error["message"] == "windlass.num_microbatches is 5, but a batch has only 4 examples"


def answer_with(monkeypatch: pytest.MonkeyPatch, **report: Any) -> list[PlanRequest]:
    """Has plans of the API answered with a report. Returns the list of requests that the planner gets."""
    requests: list[PlanRequest] = []

    async def run(_: object, user: str | None, request: PlanRequest, is_gone: object) -> tuple[PlanReport, list[str]]:
        requests.append(request)
        return PlanReport(feasible=True, reasons=(), **report), []

    monkeypatch.setattr(plans, "_run", run)
    return requests


def test_plan_takes_the_batch_size_among_the_settings_of_a_job(
    planning: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = answer_with(monkeypatch)
    body = {"model": "llama", "hardware": MACHINE, "windlass": {"batch_size": 6}}
    assert planning.post("/v1/fine_tuning/plans", json=body).status_code == 200
    assert ask(planning, hardware=MACHINE, windlass={"batch_size": 4}).status_code == 200
    assert [request.training.batch_size for request in requests] == [6, 4]


@pytest.mark.parametrize("beside", [{}, {"sequence_length": 48}])
@pytest.mark.parametrize("among", [{}, {"sequence_length": 48}])
def test_plan_takes_the_sequence_length_beside_the_settings_and_among_them(
    planning: TestClient, monkeypatch: pytest.MonkeyPatch, beside: dict[str, int], among: dict[str, int]
) -> None:
    requests = answer_with(monkeypatch)
    assert ask(planning, hardware=MACHINE, **beside, windlass=among).status_code == 200
    assert [request.training.sequence_length for request in requests] == [48 if beside or among else 128]


def test_misplaced_setting_of_the_job_is_not_taken_for_a_part_of_the_machine(planning: TestClient) -> None:
    response = ask(planning, hardware=MACHINE, gpus=2)
    assert response.status_code == 400
    assert "unrecognized parameter: gpus; did you mean windlass.gpus?" in response.json()["error"]["message"]


def test_plan_tells_the_time_of_a_job_with_a_number_of_examples(
    planning: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(monkeypatch, step_s=30.0, ssd_write_gb_per_step=250.0)
    plan = ask(planning, hardware=MACHINE, num_examples=10, windlass={"epochs": 2}).json()
    assert (plan["num_steps"], plan["job_s"], plan["ssd_write_tb"]) == (6, 180.0, 1.5)
    plan = ask(planning, hardware=MACHINE).json()
    assert (plan["num_steps"], plan["job_s"], plan["ssd_write_tb"]) == (None, None, None)


def test_plan_tells_the_wear_of_ssds_whose_endurance_is_known(
    planning: TestClient, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(monkeypatch, step_s=30.0, ssd_write_gb_per_step=240.0)
    (settings.home / HARDWARE_FILE).write_text(yaml.safe_dump(MACHINE))
    desktop = machine_of("rtx4090:ssds=2").model_dump()
    found = [ask(planning, hardware=each, num_examples=40_000) for each in (desktop, MACHINE, None)]
    assert [plan.json()["ssd_endurance_percent"] for plan in found] == [300.0, None, None]
    # The rating of this installation is of this machine only.
    rated = settings.model_copy(update={"ssd_endurance_tbw": (1200.0, 600.0)})
    monkeypatch.setattr(planning.app.state, "context", replace(context_of(planning), settings=rated))
    found = [ask(planning, hardware=each, num_examples=40_000) for each in (desktop, MACHINE, None)]
    assert [plan.json()["ssd_endurance_percent"] for plan in found] == [300.0, None, 100.0]


@pytest.mark.parametrize(("num_gpus", "leaves"), [(0, True), (1, False)])
def test_plan_leaves_blocks_unmeasured_if_it_is_asked_to_and_could_measure(
    planning: TestClient, monkeypatch: pytest.MonkeyPatch, *, num_gpus: int, leaves: bool
) -> None:
    machine = MACHINE | {"gpus": MACHINE["gpus"] | {"count": num_gpus}}
    (context_of(planning).settings.home / HARDWARE_FILE).write_text(yaml.safe_dump(machine))
    monkeypatch.setattr(plans, "check_gpus", lambda *_, **__: None)
    requests = answer_with(monkeypatch, measuring_s=12.0)
    assert ask(planning, measure=False).json()["measuring_s"] == 12.0
    assert ask(planning).status_code == ask(planning, measure=False, hardware=MACHINE).status_code == 200
    assert [request.leaves_unmeasured for request in requests] == [leaves, False, False]


def test_plan_of_a_published_shape_needs_no_files(planning: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = answer_with(monkeypatch)
    assert ask(planning, hardware=MACHINE, model="qwen2.5-0.5b").status_code == 200
    question = plan_job.question_of(requests[0], read_config(requests[0].model_dir, 2048))
    assert (question.config.shape.num_layers, requests[0].training.sequence_length) == (24, 2048)
    response = ask(planning, hardware=MACHINE, model="gpt2", windlass={"sequence_length": 2048})
    assert "takes at most 1024 tokens" in response.json()["error"]["message"]
    # A model that is here goes before.
    folder = context_of(planning).settings.models_dir / "gpt2"
    folder.mkdir()
    (folder / "config.json").write_text('{"n_positions": 64}')
    assert ask(planning, hardware=MACHINE, model="gpt2").status_code == 200
    assert requests[-1].training.sequence_length == 64


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-0.5B-Instruct", "QWEN2.5-0.5b"])
def test_plan_of_a_name_on_the_hub_is_of_its_shape(
    planning: TestClient, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    requests = answer_with(monkeypatch)
    plan = ask(planning, hardware=MACHINE, model=model).json()
    assert (plan["model"], plan["shape"], requests[-1].model_dir.stem) == (model, "qwen2.5-0.5b", "qwen2.5-0.5b")
    # A model that is here goes before.
    folder = context_of(planning).settings.models_dir / model
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"n_positions": 64}')
    assert ask(planning, hardware=MACHINE, model=model).json()["shape"] is None
    assert requests[-1].model_dir == folder


@pytest.mark.parametrize("model", ["llama-3.1-71b", "meta-llama/Llama-3.1-71B-Instruct"])
def test_plan_of_an_unknown_model_names_near_shapes(
    planning: TestClient, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    context = replace(context_of(planning), hub_files=lambda _: ["config.json"])
    monkeypatch.setattr(planning.app.state, "context", context)
    response = ask(planning, hardware=MACHINE, model=model)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (404, "model", "model_not_found")
    assert "the shape of llama-3.1-70b" in error["message"]


@pytest.mark.long
def test_a_published_shape_is_planned_by_the_service(planning: TestClient) -> None:
    plan = ask(planning, hardware=MACHINE, model="qwen2.5-0.5b", windlass={"sequence_length": 64}).json()
    assert plan["feasible"], plan
    assert plan["choices"]["activations"][0]["layers"] == "0-23"


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("meta-lama/Llama-3.1-8B", "the shape of meta-llama/Llama-3.1-8B can be planned without its files"),
        ("google/gemma-2-9b", "GET /v1/fine_tuning/shapes lists the models"),
    ],
)
def test_plan_of_a_model_of_no_known_family_or_organization_says_what_is_known(
    planning: TestClient, model: str, told: str
) -> None:
    response = ask(planning, hardware=MACHINE, model=model)
    assert response.status_code == 404
    assert told in response.json()["error"]["message"]
