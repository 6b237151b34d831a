"""An app over a home with one model and one file; a dispatcher over a database."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from tests.support.service.api_client import make_model, serve, upload
from tests.support.service.dispatcher_stage import Stage
from windlass.service.installation.settings import Settings
from windlass.storage.sql.database import Database


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


@pytest.fixture
def stage(tmp_path: Path, database: Database) -> Stage:
    return Stage(tmp_path / "home", database)
