"""Foreign hosts, foreign pages, long bodies; and no secrets in errors."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from tests.unit.service.api_client import serve, upload
from windlass.service.loopback import is_loopback
from windlass.service.settings import Settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path, port=8642, max_file_mib=1)


@pytest.fixture
def client(settings: Settings) -> Iterator[TestClient]:
    with serve(settings) as client:
        yield client


@pytest.mark.parametrize("host", ["127.0.0.1:8642", "localhost:8642", "LOCALHOST", "[::1]:8642", "localhost:9999"])
def test_loopback_hosts_are_served(client: TestClient, host: str) -> None:
    assert client.get("/healthz", headers={"Host": host}).json() == {"status": "ok"}


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8642",
        "localhost.evil.example:8642",
        "127.0.0.1.evil.example",
        "user@localhost:8642",
        "localhost:8642@evil.example",
        "localhost:x",
        "0.0.0.0:8642",
        "192.168.1.5:8642",
        "",
    ],
)
def test_other_hosts_are_refused(client: TestClient, host: str) -> None:
    response = client.get("/healthz", headers={"Host": host})
    assert response.status_code == 403
    assert response.json()["error"]["code"] == "origin_not_allowed"


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://127.0.0.1:8642", 200),
        ("http://127.0.0.1:3000", 403),  # another web application of this machine
        ("http://localhost:8642", 403),
        ("https://evil.example", 403),
        ("null", 403),
    ],
)
def test_pages_of_other_origins_are_refused(client: TestClient, origin: str, status: int) -> None:
    assert client.get("/v1/models", headers={"Origin": origin}).status_code == status
    refused = client.post("/v1/fine_tuning/jobs/ftjob-1/cancel", headers={"Origin": origin})
    assert refused.status_code == (404 if status == 200 else 403)


def test_answers_carry_the_security_headers(client: TestClient) -> None:
    for path in ("/healthz", "/v1/none", "/static/vendor/plotly.min.js"):
        headers = client.get(path).headers
        assert "default-src 'self'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert (headers["x-content-type-options"], headers["x-frame-options"]) == ("nosniff", "DENY")


def test_the_charting_library_is_served_from_this_machine(client: TestClient) -> None:
    script = client.get("/static/vendor/plotly.min.js")
    assert script.headers["content-type"].startswith("text/javascript")
    assert b"plotly.js v" in script.content[:200]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_long_body_is_refused(client: TestClient, settings: Settings, chunked: bool) -> None:
    body = json.dumps({"model": "x" * 2 * 1024**2}).encode()
    content = iter([body[:1000], body[1000:]]) if chunked else body
    response = client.post("/v1/fine_tuning/jobs", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 413
    error = response.json()["error"]
    assert (error["code"], error["message"][:22]) == ("request_too_large", "the request is longer ")


def test_a_file_over_the_limit_is_refused_and_leaves_nothing(client: TestClient, settings: Settings) -> None:
    for excess in (1, 10 * 1024**2):
        content = b"x" * (settings.max_file_nbytes + excess)
        response = client.post("/v1/files", files={"file": ("a.jsonl", content)}, data={"purpose": "fine-tune"})
        assert (response.status_code, response.json()["error"]["type"]) == (413, "invalid_request_error")
    assert list(settings.files_dir.iterdir()) == []
    upload(client, b"x" * settings.max_file_nbytes)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/none", 404, "unknown_url"),
        ("PUT", "/v1/files", 405, "method_not_allowed"),
        ("GET", "/v1/files/file-none", 404, "not_found"),
        ("GET", "/v1/files?limit=0", 400, "invalid_value"),
        ("POST", "/v1/files", 400, "missing_parameter"),
    ],
)
def test_every_failure_has_the_envelope(client: TestClient, method: str, path: str, status: int, code: str) -> None:
    response = client.request(method, path)
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", code)


def test_a_failure_inside_tells_nothing_of_the_inside(settings: Settings) -> None:
    def broken(model: str) -> list[str]:
        raise ZeroDivisionError("secret detail")

    with serve(settings, hub_files=broken) as client:
        body = {"model": "org/model", "training_file": upload(client)}
        response = client.post("/v1/fine_tuning/jobs", json=body)
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
    assert "secret" not in response.text
    assert "Traceback" not in response.text


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.8.9.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("10.0.0.1", False), ("x", False)],
)
def test_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
