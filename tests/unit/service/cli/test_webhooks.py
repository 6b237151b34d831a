"""Webhooks on the command line: created, listed with their deliveries, tested, deleted."""

import contextlib
import time
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from tests.support.service.api_client import context_of
from windlass.service.cli import webhooks as cli_webhooks
from windlass.service.installation.client import RequestRefusedError, ServiceClient
from windlass.storage.sql.models import WebhookDelivery

URL = "https://hook.example/a"


@pytest.fixture
def home(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home whose service answers the commands."""
    service = ServiceClient(str(client.base_url))
    service._http = client
    monkeypatch.setattr(cli_webhooks, "open_client", lambda _: contextlib.nullcontext(service))
    return context_of(client).settings.home


def listed(home: Path, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    capsys.readouterr()
    cli_webhooks.list_(home)
    return [line.split("  ") for line in capsys.readouterr().out.splitlines()]


def make(home: Path, capsys: pytest.CaptureFixture[str], **options: list[str] | str) -> str:
    """Creates an endpoint and returns its id."""
    cli_webhooks.create(URL, home=home, **options)  # type: ignore[arg-type]
    printed = capsys.readouterr()
    assert printed.out.startswith("whsec_")
    assert len(printed.out.splitlines()) == 1
    webhook, _, told = printed.err.partition(" ")
    assert told.endswith("Keep the secret: it is not shown again.\n")
    return webhook


def test_webhook_gets_all_or_the_selected_events(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(home, capsys) == [["no webhooks yet; make one with `windlass webhooks create`"]]
    first = make(home, capsys)
    second = make(home, capsys, event=["failed", "cancelled"], name="pager")
    rows = [[cell.strip() for cell in row if cell] for row in listed(home, capsys)]
    assert rows == [
        ["webhook", "name", "url", "events", "last delivery"],
        [second, "pager", URL, "cancelled, failed", "none yet"],
        [first, URL, URL, "cancelled, failed, succeeded", "none yet"],
    ]
    with pytest.raises(RequestRefusedError, match=r"there is no event type 'fine_tuning.job.started'"):
        make(home, capsys, event=["started"])


def test_webhooks_list_shows_the_last_delivery(
    client: TestClient, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    webhook, now_s = make(home, capsys), time.time()
    about = {"endpoint_id": webhook, "body": "{}", "num_tries": 1}
    for told, fields in (
        ("next try ", {"next_try_at": now_s}),
        (": it was answered with 500", {"next_try_at": now_s, "last_error": "it was answered with 500"}),
        ("given up: it was answered with 500", {"last_error": "it was answered with 500"}),
        ("arrived ", {"delivered_at": now_s}),
    ):
        now_s += 1
        with context_of(client).database.write() as session:
            session.add(WebhookDelivery(event_id=f"evt_{now_s}", created_at=now_s, **about, **fields))
        assert told in "  ".join(listed(home, capsys)[1])


def test_a_secret_that_cannot_be_read_is_told_of(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    webhook = make(home, capsys)
    (home / "secrets.key").unlink()
    _, row, remark = listed(home, capsys)
    assert row[0] == webhook
    assert remark[0].startswith(f"! the signing secret of webhook endpoint '{webhook}' cannot be read")
    with pytest.raises(RequestRefusedError, match="put the right file into the home"):
        cli_webhooks.send_sample(webhook, home)


def test_a_sample_is_sent_and_then_it_is_deleted(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []

    def send(url: str, **_: object) -> int:
        sent.append(url)
        return 204

    monkeypatch.setattr("windlass.service.api.routes.webhooks.send", send)
    webhook = make(home, capsys)
    cli_webhooks.send_sample(webhook, home)
    cli_webhooks.delete(webhook, home)
    assert capsys.readouterr().out.splitlines() == ["the sample was answered with 204", f"{webhook} is deleted"]
    assert sent == [URL]
    with pytest.raises(RequestRefusedError, match="there is no webhook endpoint"):
        cli_webhooks.delete(webhook, home)
