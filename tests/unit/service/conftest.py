"""An app over a home with one model and one file."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from tests.unit.service.api_client import make_model, serve, upload
from windlass.service.settings import Settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path, port=8642, max_file_mib=1)


@pytest.fixture
def client(settings: Settings) -> Iterator[TestClient]:
    make_model(settings.models_dir / "tiny")
    with serve(settings) as client:
        yield client


@pytest.fixture
def file_id(client: TestClient) -> str:
    return upload(client)
