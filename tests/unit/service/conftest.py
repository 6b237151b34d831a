"""An app over a home with one model and one file; a dispatcher over a database."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from tests.support.service.api_client import make_model, serve, upload
from tests.support.service.dispatcher_stage import Stage
from windlass.service.installation.settings import Settings
from windlass.storage.sql.database import Database

_FOLDER = Path(__file__).parent
# Tests that `make test` runs on PostgreSQL too, besides those of the database's own room. `make test-long` runs all.
_ON_BOTH_DATABASES = ("test_lease.py", "test_troubled_database.py")


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        is_of_service = item.path.is_relative_to(_FOLDER) and item.path.name not in _ON_BOTH_DATABASES
        if is_of_service and parameters.get("database_url") == "postgresql":
            item.add_marker(pytest.mark.long)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path, port=8642, max_file_mib=1)


@pytest.fixture
def client(settings: Settings, migrated_file: Path) -> Iterator[TestClient]:
    make_model(settings.models_dir / "tiny")
    shutil.copyfile(migrated_file, settings.home / "windlass.db")
    with serve(settings) as client:
        yield client


@pytest.fixture
def file_id(client: TestClient) -> str:
    return upload(client)


@pytest.fixture(scope="module")
def shared_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A client of an app for many requests that change nothing, because making an app takes longer than they do."""
    settings = Settings(home=tmp_path_factory.mktemp("shared"), port=8642, max_file_mib=1)
    make_model(settings.models_dir / "tiny")
    with serve(settings) as client:
        yield client


@pytest.fixture(scope="module")
def shared_file_id(shared_client: TestClient) -> str:
    return upload(shared_client)


@pytest.fixture
def stage(tmp_path: Path, database: Database) -> Stage:
    return Stage(tmp_path / "home", database)
