"""Foreign hosts, foreign pages, long bodies; and no secrets in errors."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from tests.support.service.api_client import context_of, serve, upload
from windlass.service.installation.addresses import is_loopback
from windlass.service.installation.settings import Settings
from windlass.storage.sql.repositories.api_keys import KeyRepository, Role
from windlass.storage.sql.repositories.audit import AuditRepository


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


@pytest.mark.short("0.0.0.0-*")
@pytest.mark.parametrize(
    ("bound", "host", "is_served"),
    [
        ("0.0.0.0", "192.168.1.5:8642", True),
        ("0.0.0.0", "192.168.1.5", True),
        ("::", "[fd00::5]:8642", True),
        ("0.0.0.0", "localhost:8642", True),
        ("0.0.0.0", "Box.Example:8642", True),
        ("0.0.0.0", "box.example", True),
        ("0.0.0.0", "other.example:8642", False),  # a DNS-rebinding name
        ("0.0.0.0", "box.example.other.example", False),
        ("0.0.0.0", "192.168.1.5.other.example", False),
        ("0.0.0.0", "192.168.1.5@other.example", False),
        ("192.168.1.5", "192.168.1.5:8642", True),
        ("192.168.1.5", "192.168.1.6:8642", False),
        ("fd00::5", "[fd00:0:0::5]:8642", True),
        ("fd00::5", "[fd00::6]:8642", False),
        ("127.0.0.1", "192.168.1.5:8642", False),
        ("127.0.0.1", "box.example", True),  # a proxy passes the name on
    ],
)
def test_a_service_for_others_has_names_and_addresses(tmp_path: Path, bound: str, host: str, is_served: bool) -> None:
    opened = Settings(home=tmp_path, host=bound, host_names="box.example")
    with serve(Settings(home=tmp_path)) as client, context_of(client).database.write() as session:
        KeyRepository(session).create(name="a", user="a", role=Role.ADMIN)
    with serve(opened) as client:
        assert client.get("/healthz", headers={"Host": host}).status_code == (200 if is_served else 403)
        origin = {"Host": host, "Origin": f"http://{host}"}
        assert client.get("/healthz", headers=origin).status_code == (200 if is_served else 403)


@pytest.mark.parametrize(
    ("peer", "expected"),
    [("10.0.0.7", ("8.8.8.8", True)), ("10.0.0.8", ("10.0.0.8", False)), ("127.0.0.1", ("127.0.0.1", False))],
)
def test_forwarded_headers_count_only_from_trusted_proxies(
    tmp_path: Path, peer: str, expected: tuple[str, bool]
) -> None:
    behind = Settings(home=tmp_path, host_names="box.example", trusted_proxies="10.0.0.7, 10.1.0.0/16")
    with serve(Settings(home=tmp_path)) as client, context_of(client).database.write() as session:
        _, secret = KeyRepository(session).create(name="a", user="a", role=Role.ADMIN)
    headers = {
        "Host": "box.example",
        "Origin": "https://box.example",
        "X-Forwarded-For": "127.0.0.1, 8.8.8.8, 10.1.2.3",  # the first one is made up by the client
        "X-Forwarded-Proto": "https",
    }
    with serve(behind, peer=peer) as client:
        response = client.post("/login", data={"key": secret}, headers=headers, follow_redirects=False)
        assert response.status_code == 303
        with context_of(client).database.read() as session:
            (event,) = AuditRepository(session).page(limit=10).rows
        assert (event.peer, "Secure" in response.headers["set-cookie"]) == expected


def test_client_headers_cannot_claim_loopback(tmp_path: Path) -> None:
    with serve(Settings(home=tmp_path), peer="192.168.1.9") as client:
        assert client.get("/v1/files", headers={"X-Forwarded-For": "127.0.0.1"}).status_code == 401


def test_under_tls_a_page_without_it_is_of_another_origin(tmp_path: Path) -> None:
    with serve(Settings(home=tmp_path)) as client:
        client.base_url = "https://127.0.0.1:8642"
        assert client.get("/healthz", headers={"Origin": "https://127.0.0.1:8642"}).status_code == 200
        assert client.get("/healthz", headers={"Origin": "http://127.0.0.1:8642"}).status_code == 403


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://127.0.0.1:8642", 200),
        ("http://127.0.0.1:3000", 403),  # another web application on this machine
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
    upload(client, b'{"text": "%s"}' % (b"x" * (settings.max_file_nbytes - 12)))


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


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/files", {"GET", "POST"}),
        ("PATCH", "/v1/files/file-1", {"GET", "DELETE"}),
        ("DELETE", "/v1/fine_tuning/jobs/ftjob-1/cancel", {"POST"}),
        ("PUT", "/login", {"GET", "POST"}),
        ("PUT", "/static/style.css", {"GET"}),
    ],
)
def test_allow_names_all_methods_of_the_path(client: TestClient, method: str, path: str, allowed: set[str]) -> None:
    response = client.request(method, path, headers={"Origin": str(client.base_url)})
    assert response.status_code == 405
    assert set(response.headers["allow"].split(", ")) - {"HEAD"} == allowed


def test_browsers_are_told_to_stay_with_tls_where_there_is_tls(settings: Settings) -> None:
    with serve(settings) as client:
        assert "strict-transport-security" not in client.get("/healthz").headers
        client.base_url = client.base_url.copy_with(scheme="https")
        assert client.get("/healthz").headers["strict-transport-security"] == "max-age=31536000"


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
