"""Models over HTTP."""

import pytest
from fastapi.testclient import TestClient

from tests.support.service.api_client import make_model
from windlass.service.installation.settings import Settings

MADE = "ft:tiny:run:0123456789ab"


@pytest.fixture(autouse=True)
def _more_models(client: TestClient, settings: Settings) -> None:
    make_model(settings.models_dir / "org" / "big")
    make_model(settings.models_dir / "no-config", config=None)
    make_model(settings.models_dir / "bad name")
    make_model(settings.models_dir / "a" / "b" / "too-deep")
    make_model(settings.fine_tuned_dir / MADE)
    make_model(settings.fine_tuned_dir / f"{MADE}-step-5")
    (settings.fine_tuned_dir / ".half-written").mkdir()


def test_lists_base_and_fine_tuned(client: TestClient) -> None:
    models = client.get("/v1/models").json()["data"]
    assert {model["id"]: model["owned_by"] for model in models} == {
        "tiny": "local",
        "org/big": "local",
        MADE: "user",
        f"{MADE}-step-5": "user",
    }


@pytest.mark.parametrize("path", ["tiny", "org/big", "org%2Fbig", MADE])
def test_retrieves(client: TestClient, path: str) -> None:
    model = client.get(f"/v1/models/{path}").json()
    assert (model["id"], model["object"]) == (path.replace("%2F", "/"), "model")
    assert model["created"] > 0


@pytest.mark.parametrize(
    ("path", "status"),
    [("none", 404), ("no-config", 404), ("..%2F..%2Fetc", 400), ("%2Fetc", 400), ("a/b/too-deep", 400)],
)
def test_folder_that_is_no_model_is_not_deleted(client: TestClient, path: str, status: int) -> None:
    for response in (client.get(f"/v1/models/{path}"), client.delete(f"/v1/models/{path}")):
        assert response.status_code == status
        assert response.json()["error"]["param"] == "model"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Tiny", " (did you mean 'tiny'?)"),
        ("tinny", " (did you mean 'tiny'?)"),
        ("big", " (did you mean 'org/big'?)"),
        ("orgs/big", " (did you mean 'org/big'?)"),
        ("ft:tiny:rum:0123456789ab", f" (did you mean '{MADE}'?)"),
    ],
)
def test_a_model_that_is_not_here_is_told_with_the_one_that_is_near(
    client: TestClient, file_id: str, name: str, hint: str
) -> None:
    requests = [client.get(f"/v1/models/{name}"), client.delete(f"/v1/models/{name}")]
    requests.append(client.post("/v1/fine_tuning/jobs", json={"model": name, "training_file": file_id}))
    requests.append(client.post("/v1/fine_tuning/plans", json={"model": name, "batch_size": 1}))
    for response in requests:
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (404, "model", "model_not_found")
        assert f"there is no model {name!r} here{hint}" in error["message"]


def test_only_fine_tuned_models_are_deleted(client: TestClient, settings: Settings) -> None:
    refused = client.delete("/v1/models/tiny")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "not_deletable")
    assert (settings.models_dir / "tiny" / "config.json").exists()
    assert client.delete(f"/v1/models/{MADE}").json() == {"id": MADE, "object": "model", "deleted": True}
    assert client.get(f"/v1/models/{MADE}").status_code == 404
    assert sorted(path.name for path in settings.fine_tuned_dir.iterdir()) == [".half-written", f"{MADE}-step-5"]


def test_a_model_that_a_job_starts_from_stays(client: TestClient, file_id: str) -> None:
    created = client.post("/v1/fine_tuning/jobs", json={"model": MADE, "training_file": file_id})
    assert created.status_code == 200
    refused = client.delete(f"/v1/models/{MADE}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "model_in_use")
    assert client.get(f"/v1/models/{MADE}").status_code == 200
