"""A service for hostile requests, and a check of its state after them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import unquote

import pytest
from fastapi.testclient import TestClient

from tests.support.service.api_client import make_model, serve
from windlass.service.installation.settings import Settings

JOBS, HOOKS, PLANS = "/v1/fine_tuning/jobs", "/v1/webhook_endpoints", "/v1/fine_tuning/plans"
JSON = {"Content-Type": "application/json"}
SECRET = "outside of the home"


@contextmanager
def homes(request: pytest.FixtureRequest, factory: pytest.TempPathFactory) -> Iterator[Callable[[], Settings]]:
    """Makes homes beside files that no request may touch, each with its own database of the fixture's kind."""
    with ExitStack() as stack:

        def new() -> Settings:
            folder = factory.mktemp("folder")
            (folder / "secret").mkdir()
            for name in ("config.json", "secret.jsonl"):
                (folder / "secret" / name).write_text(f'"{SECRET}"')
            url = f"sqlite:///{folder / 'test.db'}"
            if request.param == "postgresql":
                server = request.getfixturevalue("postgresql")
                url = stack.enter_context(server.new_database(migrated=True))
            return Settings(home=folder / "home", port=8642, max_file_mib=1, database_url=url)

        yield new


@contextmanager
def served(settings: Settings) -> Iterator[TestClient]:
    """A client of a service with a model to train."""
    make_model(settings.models_dir / "tiny")
    with serve(settings) as client:
        yield client


def check_unharmed(client: TestClient, settings: Settings) -> None:
    """Checks that the next request is served, and that nothing outside of the home was changed."""
    for path in ("/v1/files", JOBS, "/v1/models", HOOKS, "/v1/audit", f"{JOBS}?metadata[a]=b&limit=1000"):
        assert client.get(path).status_code == 200, path
    secret = settings.home.parent / "secret"
    assert sorted(path.name for path in secret.iterdir()) == ["config.json", "secret.jsonl"]


def check_refused(response: Any, *statuses: int) -> None:
    """Checks that an answer has the error envelope, and reveals no internal text."""
    assert response.status_code in (statuses or (400, 404)), response.text
    assert response.json()["error"].keys() == {"message", "type", "param", "code"}
    assert SECRET not in response.text
    assert "Traceback" not in response.text


def raw(client: TestClient, method: str, path: str, headers: dict[str, str] | None = None, body: bytes = b"") -> str:
    """The status and the body of the answer to a raw request, which no client library normalizes."""
    target, _, query = path.partition("?")
    lines = {"host": "127.0.0.1:8642", **(headers or {})}
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "path": unquote(target),
        "raw_path": target.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": query.encode(),
        "headers": [(key.lower().encode("latin-1"), value.encode("latin-1")) for key, value in lines.items()],
        "client": ("127.0.0.1", 50000),
        "server": ("127.0.0.1", 8642),
    }
    found: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        found.append(message.get("status") or message.get("body", b"").decode(errors="replace"))

    async def ask() -> None:
        await client.app(scope, receive, send)

    assert client.portal is not None
    client.portal.call(ask)
    return f"{found[0]} {''.join(map(str, found[1:]))}"
