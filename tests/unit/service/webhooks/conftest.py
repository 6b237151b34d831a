"""An app that may send webhooks to this machine, a receiver of them, and a sender with a clock that the test moves."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from tests.support.service.api_client import context_of, make_model, serve
from tests.support.service.webhook_receiver import Receiver, receiving
from tests.support.service.webhook_stage import Clock
from windlass.service.installation.settings import Settings
from windlass.service.webhooks.sender import WebhookSender


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path, port=8642, webhook_private_addresses=True)


@pytest.fixture
def client(settings: Settings) -> Iterator[TestClient]:
    make_model(settings.models_dir / "tiny")
    with serve(settings) as client:
        yield client


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sender(client: TestClient, settings: Settings, clock: Clock) -> WebhookSender:
    return WebhookSender(context_of(client).database, settings, clock=clock)
