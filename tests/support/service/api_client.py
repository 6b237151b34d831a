"""A client of an app in this process, and a home folder to serve."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from windlass.service.api.app import create_app
from windlass.service.api.context import Context
from windlass.service.installation.settings import Settings

CONFIG = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 512}


def make_model(folder: Path, *, config: Any = CONFIG, weights: str | None = "model.safetensors") -> None:
    """Makes a folder that looks like a model from outside."""
    folder.mkdir(parents=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if weights is not None:
        (folder / weights).write_bytes(b"weights")


def no_hub(model: str) -> list[str]:
    """Fails as an unreachable hub does."""
    raise LookupError("the hub could not be reached (test)")


@contextmanager
def serve(settings: Settings, *, peer: str = "127.0.0.1", **kwargs: Any) -> Iterator[TestClient]:
    """A client of the app that uses its base URL and has the address `peer`."""
    app = create_app(settings, **({"hub_files": no_hub} | kwargs))
    address = (peer, 50000)
    with TestClient(app, base_url=settings.base_url, raise_server_exceptions=False, client=address) as client:
        yield client


def context_of(client: TestClient) -> Context:
    """The app's context."""
    context: Context = client.app.state.context
    return context


def upload(client: TestClient, content: bytes = b'{"text": "a"}\n', name: str = "a.jsonl") -> str:
    """Uploads a file and returns its id."""
    response = client.post("/v1/files", files={"file": (name, content)}, data={"purpose": "fine-tune"})
    assert response.status_code == 200, response.text
    file_id: str = response.json()["id"]
    return file_id
