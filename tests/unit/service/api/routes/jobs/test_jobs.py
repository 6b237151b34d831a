"""Jobs over HTTP: accepted and refused requests, and the error messages."""

import time
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.support.service.api_client import context_of, make_model, serve, upload
from tests.support.service.job_requests import JOBS, create, refusal
from windlass.service.installation.home import node_of
from windlass.service.installation.settings import Settings
from windlass.service.jobs.machine_resources import MachineResources
from windlass.service.validation.hyperparameters import JobSettings, resolve
from windlass.storage.sql.repositories.jobs import JobRepository


def test_a_job_has_all_fields_of_the_contract(client: TestClient, file_id: str) -> None:
    job = create(client, file_id, suffix="run-1", seed=3, metadata={"team": "a"}, validation_file=file_id).json()
    assert job | {"id": "", "created_at": 0, "windlass": {}} == {
        "id": "",
        "object": "fine_tuning.job",
        "created_at": 0,
        "finished_at": None,
        "estimated_finish": None,
        "model": "tiny",
        "fine_tuned_model": None,
        "organization_id": "windlass",
        "status": "validating_files",
        "hyperparameters": {"n_epochs": "auto", "batch_size": "auto", "learning_rate_multiplier": "auto"},
        "training_file": file_id,
        "validation_file": file_id,
        "result_files": [],
        "trained_tokens": None,
        "seed": 3,
        "error": None,
        "method": {
            "type": "supervised",
            "supervised": {
                "hyperparameters": {"n_epochs": "auto", "batch_size": "auto", "learning_rate_multiplier": "auto"}
            },
        },
        "metadata": {"team": "a"},
        "integrations": [],
        "suffix": "run-1",
        "windlass": {},
    }
    assert job["windlass"]["settings"]["sequence_length"] == 512  # the model takes no more
    assert client.get(f"{JOBS}/{job['id']}").json() == job


def test_job_before_validation_shows_hyperparameters_of_both_objects(client: TestClient, file_id: str) -> None:
    windlass = {"epochs": 6, "learning_rate": 2e-3}
    job = create(client, file_id, windlass=windlass, hyperparameters={"batch_size": 8}).json()
    expected = {"n_epochs": 6, "batch_size": 8, "learning_rate_multiplier": 100.0}
    assert job["hyperparameters"] == job["method"]["supervised"]["hyperparameters"] == expected
    assert job["windlass"]["hyperparameters"] is None


def test_an_estimated_finish_that_has_passed_is_not_shown(client: TestClient, file_id: str) -> None:
    job_id = create(client, file_id).json()["id"]
    for seconds_left in (100.0, -1.0):
        with context_of(client).database.write() as session:
            finish = time.time() + seconds_left
            JobRepository(session).set_fields(job_id, estimated_finish=finish, finish_is_measured=True)
        job = client.get(f"{JOBS}/{job_id}").json()
        found = (job["estimated_finish"], job["windlass"]["finish_is_estimate"])
        assert found == ((int(finish), False) if seconds_left > 0 else (None, None))


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"windlass": {"learning_rate": -1}}, "windlass.learning_rate", "greater than 0, got -1"),
        ({"windlass": {"learning_rate": "x"}}, "windlass.learning_rate", "must be a number, got 'x'"),
        ({"windlass": {"epochs": 0}}, "windlass.epochs", "greater than or equal to 1, got 0"),
        ({"windlass": {"batch_size": 2.5}}, "windlass.batch_size", "must be a whole number, got 2.5"),
        ({"windlass": {"clip_norm": 0}}, "windlass.clip_norm", "greater than 0, got 0"),
        ({"windlass": {"learning_rate": 1.5}}, "windlass.learning_rate", "less than or equal to 1, got 1.5"),
        ({"windlass": {"weight_decay": -0.1}}, "windlass.weight_decay", "greater than or equal to 0, got -0.1"),
        ({"windlass": {"beta1": 1}}, "windlass.beta1", "less than 1, got 1"),
        ({"windlass": {"beta2": -0.5}}, "windlass.beta2", "greater than or equal to 0, got -0.5"),
        ({"windlass": {"epsilon": 0}}, "windlass.epsilon", "greater than 0, got 0"),
        ({"windlass": {"epsilon": 1e-50}}, "windlass.epsilon", "at least 1e-37: fp32 takes less for 0"),
        ({"windlass": {"max_bad_steps": -1}}, "windlass.max_bad_steps", "greater than or equal to 0, got -1"),
        ({"windlass": {"max_bad_steps": 1001}}, "windlass.max_bad_steps", "less than or equal to 1000, got 1001"),
        ({"windlass": {"max_bad_steps": True}}, "windlass.max_bad_steps", "must be a whole number, got True"),
        ({"windlass": {"max_bad_steps": None}}, "windlass.max_bad_steps", "must be a whole number, got None"),
        ({"windlass": {"precision": "fp8"}}, "windlass.precision", "'bf16', 'fp16' or 'fp32', got 'fp8'"),
        ({"windlass": {"precision": None}}, "windlass.precision", "got None"),
        ({"windlass": {"optimizer": "sgd"}}, "windlass.optimizer", "'adamw' or 'adam', got 'sgd'"),
        ({"windlass": {"schedule": ["linear"]}}, "windlass.schedule", "'cosine' or 'constant', got ['linear']"),
        ({"windlass": {"state_precision": "fp16"}}, "windlass.state_precision", "'split' or 'bf16', got 'fp16'"),
        (
            {"windlass": {"state_precision": "split", "precision": "fp16"}},
            "windlass.state_precision",
            "split states go with bf16 training; in fp16 states are fp32, got 'split'",
        ),
        (
            {"windlass": {"precision": "fp32", "state_precision": "bf16"}},
            "windlass.state_precision",
            "bf16 states go with bf16 training; in fp32 states are fp32, got 'bf16'",
        ),
        (
            {"windlass": {"accumulation_precision": "bf16", "precision": "fp16"}},
            "windlass.accumulation_precision",
            "must be fp32 or the model's own precision: bf16 sums do not go with precision fp16, got 'bf16'",
        ),
        (
            {"windlass": {"accumulation_precision": "fp16"}},
            "windlass.accumulation_precision",
            "fp16 sums do not go with precision bf16",
        ),
        (
            {"windlass": {"accumulation_precision": "bf16", "precision": "fp32"}},
            "windlass.accumulation_precision",
            "bf16 sums do not go with precision fp32",
        ),
        (
            {"windlass": {"gradient_updates": "late"}},
            "windlass.gradient_updates",
            "must be one of auto, active, kept, naive, after_backward, got 'late'",
        ),
        ({"windlass": {"gradient_updates": None}}, "windlass.gradient_updates", "must be one of auto, active"),
        ({"windlass": {"gradient_updates": ["active"]}}, "windlass.gradient_updates", "must be one of auto, active"),
        (
            {"windlass": {"gradient_updates": "active"}},
            "windlass.gradient_updates",
            "with clip_norm 1.0 every gradient must be known before the first update, as the norm is that of all; set "
            "clip_norm to null, or choose auto or kept, got 'active'",
        ),
        (
            {"windlass": {"gradient_updates": "naive"}},
            "windlass.gradient_updates",
            "with clip_norm 1.0 every gradient must be known before the first update, as the norm is that of all; set "
            "clip_norm to null, or choose auto or kept, got 'naive'",
        ),
        (
            {"windlass": {"gradient_updates": "active", "clip_norm": None, "precision": "fp16"}},
            "windlass.gradient_updates",
            "with precision fp16 every gradient must be known before the first update, as one overflow skips the step; "
            "choose auto or kept, or precision bf16, got 'active'",
        ),
        (
            {"windlass": {"cut_matrices": 2**20 - 1}},
            "windlass.cut_matrices",
            'must be "auto", "off" or a whole number of elements from 1048576 to 1099511627776, got 1048575',
        ),
        ({"windlass": {"cut_matrices": None}}, "windlass.cut_matrices", 'must be "auto", "off" or a whole number'),
        ({"windlass": {"cut_matrices": True}}, "windlass.cut_matrices", 'must be "auto", "off" or a whole number'),
        ({"windlass": {"lanes": 0}}, "windlass.lanes", 'must be "auto" or a whole number from 1 to 4096, got 0'),
        (
            {"windlass": {"num_microbatches": 2, "batch_size": 4, "lanes": 3}},
            "windlass.lanes",
            "lanes is 3, and a step has 2 micro-batches: it must be at least 1, and each lane needs a micro-batch, "
            "got 3",
        ),
        (
            {"windlass": {"lanes": 2, "accumulation_precision": "bf16"}},
            "windlass.lanes",
            "lanes are summed in fp32, and accumulation_precision is bf16, got 2",
        ),
        (
            {"windlass": {"batch_size": 2, "lanes": 3}},
            "windlass.lanes",
            "windlass.lanes is 3, but a batch has only 2 examples",
        ),
        # An invalid value is reported before a conflict.
        ({"windlass": {"precision": "fp8", "state_precision": "split"}}, "windlass.precision", "got 'fp8'"),
        ({"windlass": {"precision": "fp8", "accumulation_precision": "bf16"}}, "windlass.precision", "got 'fp8'"),
        ({"windlass": {"clip_norm": -1, "gradient_updates": "active"}}, "windlass.clip_norm", "got -1"),
        ({"windlass": {"gpus": 0}}, "windlass.gpus", "got 0"),
        ({"windlass": {"gpus": 2}}, "windlass.gpus", "windlass.gpus is 2, and the machine has no GPU"),
        ({"windlass": {"budgets": {"host_memory_gib": 0}}}, "windlass.budgets.host_memory_gib", "got 0"),
        ({"windlass": {"budgets": {"ssd": 1}}}, "windlass.budgets.ssd", "there are host_memory_gib, gpu_memory_gib"),
        (
            {"windlass": {"learn_rate": 1}},
            "windlass.learn_rate",
            "unrecognized parameter: windlass.learn_rate; did you mean windlass.learning_rate?",
        ),
        ({"windlass": {"lr": 1e-4}}, "windlass.lr", "did you mean windlass.learning_rate?"),
        ({"windlass": {"batchsize": 4}}, "windlass.batchsize", "did you mean windlass.batch_size?"),
        ({"windlass": {"host_memory_gib": 1}}, "windlass.host_memory_gib", "mean windlass.budgets.host_memory_gib?"),
        (
            {"windlass": {"budgets": {"gpu": 1}}},
            "windlass.budgets.gpu",
            "mean windlass.budgets.gpu_memory_gib?",
        ),
        ({"precision": "bf16"}, "precision", "unrecognized parameter: precision; did you mean windlass.precision?"),
        ({"windlass": {"lora": {"r": 8}}}, "windlass.lora", "LoRA is not supported yet"),
        ({"windlass": {"warmup": 0.1, "warmup_steps": 3}}, "windlass", "warmup (0.1) or warmup_steps (3), not both"),
        ({"windlass": {"sequence_length": 513}}, "windlass.sequence_length", "at most 512 tokens, got 513"),
        ({"windlass": {"epochs": 2}, "hyperparameters": {"n_epochs": 3}}, "windlass.epochs", "windlass.epochs is 2"),
        ({"hyperparameters": {"n_epochs": 0}}, "hyperparameters.n_epochs", '"auto" or a whole number from 1 to 1000'),
        ({"hyperparameters": {"n_epochs": True}}, "hyperparameters.n_epochs", "got True"),
        ({"hyperparameters": {"learning_rate_multiplier": "big"}}, "hyperparameters.learning_rate_multiplier", "big"),
        ({"method": {"type": "dpo", "dpo": {}}}, "method.type", "only \"supervised\" is supported yet, got 'dpo'"),
        ({"method": {"type": "reinforcement"}}, "method.type", "is supported yet"),
        ({"method": {"type": "lora"}}, "method.type", "is supported yet"),
        ({"suffix": ""}, "suffix", "1 to 64"),
        ({"suffix": "a/b"}, "suffix", "got 'a/b'"),
        ({"suffix": "s" * 65}, "suffix", "1 to 64"),
        ({"seed": -1}, "seed", "got -1"),
        ({"seed": 1, "windlass": {"seed": 2}}, "seed", "it is 1 but windlass.seed is 2"),
        ({"metadata": {str(key): "" for key in range(17)}}, "metadata", "at most 16 pairs, got 17"),
        ({"metadata": {"k" * 65: ""}}, "metadata", "1 to 64"),
        ({"metadata": {"k": "v" * 513}}, "metadata", "at most 512 characters, 'k' has 513"),
        ({"metadata": {'"': "v"}}, "metadata", "without quotes"),
        ({"metadata": {"k": 1}}, "metadata.k", "must be text"),
        ({"integrations": [{"type": "wandb"}]}, "integrations", "not supported"),
        ({"colour": "red"}, "colour", "unrecognized parameter: colour; there are model, training_file"),
        ({"training_file": "file-none"}, "training_file", "there is no file 'file-none'"),
        ({"validation_file": "file-none"}, "validation_file", "there is no file 'file-none'"),
        ({"model": "../tiny"}, "model", "never by a path; got '../tiny'"),
        ({"model": "/etc/passwd"}, "model", "never by a path"),
        ({"model": "none"}, "model", "there is no model 'none' here; `windlass models`"),
        ({"model": "tinny"}, "model", "there is no model 'tinny' here (did you mean 'tiny'?)"),
        ({"model": "org/Tiny"}, "model", "there is no model 'org/Tiny' here (did you mean 'tiny'?)"),
        ({"model": "org/none"}, "model", "and the hub could not be reached"),
    ],
)
def test_bad_requests_name_the_parameter_and_the_value(
    shared_client: TestClient, shared_file_id: str, body: dict[str, Any], param: str, message: str
) -> None:
    error = refusal(shared_client, shared_file_id, **body)
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400])
@pytest.mark.parametrize(
    "name", ["learning_rate", "weight_decay", "clip_norm", "beta1", "beta2", "epsilon", "budgets.host_memory_gib"]
)
def test_json_nan_and_infinity_are_refused(
    shared_client: TestClient, shared_file_id: str, name: str, literal: str
) -> None:
    client, file_id = shared_client, shared_file_id
    setting = f'"{name}": {literal}' if "." not in name else f'"budgets": {{"host_memory_gib": {literal}}}'
    body = f'{{"model": "tiny", "training_file": "{file_id}", "windlass": {{{setting}}}}}'
    response = client.post(JOBS, content=body, headers={"Content-Type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, f"windlass.{name}", "invalid_value")
    assert error["type"] == "invalid_request_error"
    assert "number, got " in error["message"]
    assert client.get(JOBS).json()["data"] == []


def test_a_job_tells_all_its_settings(client: TestClient, file_id: str) -> None:
    asked = {
        "precision": "bf16",
        "optimizer": "adam",
        "state_precision": "split",
        "accumulation_precision": "bf16",
        "gradient_updates": "active",
        "max_bad_steps": 3,
        "clip_norm": None,
    }
    told = create(client, file_id, windlass=asked).json()["windlass"]["settings"]
    assert {name: told[name] for name in asked} == asked
    defaults = create(client, file_id).json()["windlass"]["settings"]
    assert {name: defaults[name] for name in asked} == {
        "precision": "bf16",
        "optimizer": "adamw",
        "state_precision": "fp32",
        "accumulation_precision": "fp32",
        "gradient_updates": "auto",
        "max_bad_steps": 10,
        "clip_norm": 1.0,
    }


def test_no_json_and_no_model_are_said_so(client: TestClient) -> None:
    broken = client.post(JOBS, content=b"{", headers={"Content-Type": "application/json"})
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_json")
    for content in (b'{"suffix": "\xff"}', b"[" * 200_000, b'{"seed": ' + b"9" * 5000 + b"}"):
        unreadable = client.post(JOBS, content=content, headers={"Content-Type": "application/json"})
        assert unreadable.status_code == 400
        assert unreadable.json()["error"]["message"].startswith("the body cannot be read: it is not UTF-8, is nested")
    missing = client.post(JOBS, json={"training_file": "file-1"})
    assert missing.json()["error"] == {
        "message": "missing parameter: model",
        "type": "invalid_request_error",
        "param": "model",
        "code": "missing_parameter",
    }


@pytest.mark.parametrize(
    ("config", "weights", "message"),
    [
        (None, "model.safetensors", "no config.json"),
        ({}, None, "no *.safetensors; windlass.initialization"),
        ({}, "pytorch_model.bin", "pytorch_model.bin may run code"),
        ({"auto_map": {"AutoModel": "m.M"}}, "model.safetensors", "code of its own (auto_map)"),
        ([], "model.safetensors", "holds no object"),
    ],
)
def test_folders_that_are_no_usable_model(
    client: TestClient, settings: Settings, file_id: str, config: Any, weights: str | None, message: str
) -> None:
    make_model(settings.models_dir / "org" / "odd", config=config, weights=weights)
    error = refusal(client, file_id, model="org/odd")
    assert (error["param"], error["code"]) == ("model", "model_not_supported")
    assert message in error["message"]


def test_random_weights_need_no_safetensors(client: TestClient, settings: Settings, file_id: str) -> None:
    make_model(settings.models_dir / "bare", weights=None)
    assert create(client, file_id, model="bare", windlass={"initialization": "random"}).status_code == 200


def test_hub_models_are_judged_by_their_file_list(settings: Settings) -> None:
    listings = {"org/good": ["config.json", "model.safetensors"], "org/pickle": ["config.json", "pytorch_model.bin"]}

    def hub_files(model: str) -> list[str]:
        if model not in listings:
            raise LookupError("the hub has no such public model")
        return listings[model]

    with serve(settings, hub_files=hub_files) as client:
        file_id = upload(client)
        assert "may run code" in refusal(client, file_id, model="org/pickle")["message"]
        assert refusal(client, file_id, model="org/none")["code"] == "model_not_found"
        assert create(client, file_id, model="org/good").status_code == 200


def test_without_a_hub_the_answer_says_so(
    settings: Settings, client: TestClient, file_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from windlass.service.preparation.model_files import list_hub_files

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(LookupError, match="HF_HUB_OFFLINE is set"):
        list_hub_files("org/model")


def test_the_same_key_makes_one_job(client: TestClient, file_id: str) -> None:
    body = {"model": "tiny", "training_file": file_id}
    first, again = (client.post(JOBS, json=body, headers={"Idempotency-Key": "k1"}).json() for _ in range(2))
    assert first == again
    other = client.post(JOBS, json=body | {"seed": 5}, headers={"Idempotency-Key": "k1"})
    assert (other.status_code, other.json()["error"]["code"]) == (400, "idempotency_key_reused")
    assert client.post(JOBS, json=body, headers={"Idempotency-Key": "k2"}).json()["id"] != first["id"]
    assert len(client.get(JOBS).json()["data"]) == 2


def test_a_row_resolves_to_what_was_asked(client: TestClient, file_id: str) -> None:
    windlass = {"epochs": 2, "learning_rate": 1e-3, "priority": -5, "clip_norm": None}
    job = create(client, file_id, windlass=windlass, seed=9).json()
    with context_of(client).database.read() as session:
        row = JobRepository(session).get(job["id"])
    resolved = resolve(JobSettings.from_row(row.method, row.windlass, row.seed), num_examples=16)
    assert (resolved.epochs, resolved.learning_rate, resolved.clip_norm, resolved.seed) == (2, 1e-3, None, 9)
    assert (resolved.sequence_length, row.priority) == (512, -5)


def test_pages_and_metadata_filters(client: TestClient, file_id: str) -> None:
    ids = [
        create(client, file_id, metadata={"team": f"t{index % 2}", "x.y[0]": "1"}).json()["id"] for index in range(5)
    ]
    listed = client.get(JOBS, params={"limit": 2}).json()
    assert ([job["id"] for job in listed["data"]], listed["has_more"]) == (ids[:2:-1], True)
    rest = client.get(JOBS, params={"after": ids[3]}).json()
    assert ([job["id"] for job in rest["data"]], rest["has_more"]) == (ids[2::-1], False)
    odd = client.get(JOBS, params={"metadata[team]": "t1", "metadata[x.y[0]]": "1"}).json()["data"]
    assert [job["id"] for job in odd] == [ids[3], ids[1]]
    assert client.get(JOBS, params={"metadata[team]": "t9"}).json()["data"] == []
    assert client.get(JOBS, params={'metadata["]': "1"}).status_code == 400
    assert client.get(JOBS, params={"after": "ftjob-none"}).status_code == 404


def test_a_file_whose_content_lies_elsewhere_is_refused(client: TestClient, settings: Settings, file_id: str) -> None:
    """Services that share a database have separate homes."""
    (settings.files_dir / file_id).unlink()
    error = refusal(client, file_id)
    assert (error["code"], error["param"]) == ("file_elsewhere", "training_file")


def test_a_job_belongs_to_the_home_that_has_its_files(client: TestClient, settings: Settings, file_id: str) -> None:
    job_id = create(client, file_id).json()["id"]
    with context_of(client).database.read() as session:
        assert JobRepository(session).get(job_id).node == node_of(settings.home)


@pytest.mark.parametrize("path", ["", "/events", "/checkpoints", "/events/stream"])
def test_unknown_jobs_are_404(client: TestClient, path: str) -> None:
    response = client.get(f"{JOBS}/ftjob-none{path}")
    assert response.status_code == 404
    assert "no fine-tuning job 'ftjob-none'" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("name", "value"), [("keep_best", True), ("early_stopping", {"patience": 2}), ("final_model", "best")]
)
def test_settings_based_on_validation_loss_need_a_validation_file(
    client: TestClient, file_id: str, name: str, value: object
) -> None:
    body = {"model": "tiny", "training_file": file_id, "windlass": {name: value}}
    refused = client.post("/v1/fine_tuning/jobs", json=body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == (f"windlass.{name}", "invalid_value")
    assert "give validation_file" in error["message"]
    accepted = client.post("/v1/fine_tuning/jobs", json=body | {"validation_file": file_id})
    assert accepted.json()["windlass"]["settings"][name] is not None


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        (MachineResources(num_cores=4, num_gpus=2), "windlass.gpus is 3, and the machine has 2 GPUs"),
        (MachineResources(num_cores=4, num_gpus=0), "its CPU counts as 1 device (setting cpu_ranks)"),
    ],
)
def test_job_with_more_gpus_than_the_machine_has_is_refused(
    client: TestClient, file_id: str, monkeypatch: pytest.MonkeyPatch, resources: MachineResources, expected: str
) -> None:
    monkeypatch.setattr(MachineResources, "here", lambda _: resources)
    error = refusal(client, file_id, windlass={"gpus": 3})
    assert (error["param"], error["code"], error["type"]) == ("windlass.gpus", "invalid_value", "invalid_request_error")
    assert expected in error["message"]


def test_job_with_several_gpus_is_accepted_and_shows_them(
    client: TestClient, file_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MachineResources, "here", lambda _: MachineResources(num_cores=4, num_gpus=4))
    job = create(client, file_id, windlass={"gpus": 4}).json()
    assert job["windlass"]["settings"]["gpus"] == 4
