"""One service for the tests of a file, with a check of its state after each test."""

from collections.abc import Callable, Iterator

import pytest
from fastapi.testclient import TestClient

from tests.unit.service.api.hostile.asking import check_unharmed, homes, served
from windlass.service.installation.settings import Settings


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def new_settings(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], Settings]]:
    with homes(request, tmp_path_factory) as new:
        yield new


@pytest.fixture(scope="module")
def settings(new_settings: Callable[[], Settings]) -> Settings:
    return new_settings()


@pytest.fixture(scope="module")
def shared(settings: Settings) -> Iterator[TestClient]:
    with served(settings) as client:
        yield client


@pytest.fixture
def client(shared: TestClient, settings: Settings) -> Iterator[TestClient]:
    yield shared
    check_unharmed(shared, settings)
