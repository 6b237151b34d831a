"""Requests that the API's description allows are accepted.

Rules between fields are the exception, because no description can express them. Bodies of jobs and plans are drawn from
the description, with an existing model and files.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
import yaml
from fastapi.testclient import TestClient
from hypothesis import strategies as st

from tests.support.service.api_client import make_model, serve, upload
from tests.unit.service.api.test_schema import describe
from windlass.planner.hardware.hardware import Hardware, example_machines
from windlass.planner.question.report import PlanReport
from windlass.service.api.plan_run import PlanRun
from windlass.service.installation.settings import Settings

# Rules between two fields, or between a field and the model: the error names the rule.
_BETWEEN_FIELDS = re.compile(
    r"differ from method\.supervised|^seed: it is|goes by the loss on a validation file|say \d|"
    r"not both|a batch has only|do not go with precision|state.*precision|every gradient must be known|"
    r"windlass.gpus is \d+, and the machine|there are none to keep|the model takes at most|first update|fp16|"
    r"not measured|length is not known|windlass.box: there is no box|"
    r"windlass.boxes: (it asks for|there is no box|must name each)|lanes are summed in fp32|"
    r"each lane needs a micro-batch"
)
_NUM_CASES, _NUM_CASES_LONG = 60, 5000
_SETTINGS = {
    "deadline": None,
    "suppress_health_check": list(hypothesis.HealthCheck),
}


def _bodies_of(path: str) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies that the description allows for a POST."""
    operation = schemathesis.openapi.from_dict(describe())[path]["POST"]
    cases = operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE)
    return cases.map(lambda case: case.body)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    settings = Settings(home=tmp_path_factory.mktemp("home"), port=8642, requests_per_minute=10**9)
    make_model(settings.models_dir / "tiny")
    with serve(settings) as client:
        yield client


@pytest.fixture(scope="module")
def file_id(client: TestClient) -> str:
    return upload(client)


def _check(client: TestClient, path: str, body: dict[str, Any], told: Counter[str]) -> None:
    response = client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    message = "" if response.status_code == 200 else response.json()["error"]["message"]
    told[str(response.status_code)] += 1
    assert response.status_code == 200 or _BETWEEN_FIELDS.search(message), f"{message}: {body}"


def _jobs(client: TestClient, file_id: str, *, num_cases: int, derandomize: bool) -> Counter[str]:
    told: Counter[str] = Counter()

    @hypothesis.settings(max_examples=num_cases, derandomize=derandomize, database=None, **_SETTINGS)  # type: ignore[arg-type]
    @hypothesis.given(_bodies_of("/v1/fine_tuning/jobs"), st.booleans())
    def ask(body: dict[str, Any], validates: bool) -> None:
        # The library compares with the largest seed in floats, which cannot tell it from the next number.
        hypothesis.assume((body.get("seed") or 0) < 2**63)
        there = {"model": "tiny", "training_file": file_id, "validation_file": file_id if validates else None}
        _check(client, "/v1/fine_tuning/jobs", {**body, **there}, told)

    ask()
    return told


def test_a_job_that_the_description_allows_is_accepted(client: TestClient, file_id: str) -> None:
    told = _jobs(client, file_id, num_cases=_NUM_CASES, derandomize=True)
    assert told["200"] > _NUM_CASES / 4, f"most are refused, so this shows little: {told}"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_thousands_of_jobs_that_the_description_allows_are_accepted(client: TestClient, file_id: str) -> None:
    told = _jobs(client, file_id, num_cases=_NUM_CASES_LONG, derandomize=False)
    assert told["200"] > _NUM_CASES_LONG / 4


def test_a_plan_that_the_description_allows_is_accepted(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner itself is replaced: only the request counts."""
    plan = PlanReport(feasible=False, reasons=("it has no weights",))
    monkeypatch.setattr(PlanRun, "poll", lambda _: plan)
    machine = Hardware.model_validate(yaml.safe_load(example_machines()["rtx4090-server"].read_text()))
    told: Counter[str] = Counter()
    hardware = machine.model_dump(mode="json")

    @hypothesis.settings(max_examples=30, derandomize=True, database=None, **_SETTINGS)  # type: ignore[arg-type]
    @hypothesis.given(_bodies_of("/v1/fine_tuning/plans"))
    def ask(body: dict[str, Any]) -> None:
        hypothesis.assume(((body.get("windlass") or {}).get("seed") or 0) < 2**63)  # as above
        replaced = {"model": "tiny", "hardware": hardware, "stream": False}  # a stream has a planner of its own
        # A plan is for one machine, and has one batch size.
        replaced["batch_size"] = body.get("batch_size") or 4
        replaced["windlass"] = (body.get("windlass") or {}) | {"batch_size": None, "box": None, "boxes": None}
        _check(client, "/v1/fine_tuning/plans", {**body, **replaced}, told)

    ask()
    assert told["200"] > 8, told
