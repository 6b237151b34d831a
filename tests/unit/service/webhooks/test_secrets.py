"""The secrets that sign webhooks: rotated, kept from sight, and mended if they do not open."""

from pathlib import Path

import pytest
from cryptography.fernet import Fernet
from fastapi.testclient import TestClient
from sqlalchemy import select

from tests.support.service.keyed import new_job
from tests.support.service.webhook_receiver import Receiver
from tests.support.service.webhook_stage import (
    CANCELLED,
    DAY_S,
    URL,
    Clock,
    add,
    cancel_one,
    deliveries,
    official,
)
from windlass.service.installation.settings import Settings
from windlass.service.webhooks import sender as webhook_sender
from windlass.service.webhooks.delivery import new_signing_secret, signature
from windlass.service.webhooks.secret_box import SecretBox
from windlass.service.webhooks.sender import WebhookSender
from windlass.storage.sql.database import Database
from windlass.storage.sql.models import WebhookDelivery
from windlass.storage.sql.repositories.jobs import JobRepository
from windlass.storage.sql.repositories.webhooks import EVENT_TYPES, WebhookRepository


def test_an_old_secret_signs_as_well_for_a_day_if_asked(
    client: TestClient, receiver: Receiver, sender: WebhookSender, clock: Clock
) -> None:
    old = add(client, receiver)
    keep = {"keep_old_secret_active_for_24_hours": True}
    new = client.post(f"{URL}/{old['id']}/rotate_secret", json=keep).json()
    for later_s, num_signatures in ((0.0, 2), (DAY_S, 1)):
        clock.now_s += later_s
        cancel_one(client)
        clock.now_s += 30
        sender.send_due()
        headers, body = receiver.received[-1]
        assert len(headers["webhook-signature"].split()) == num_signatures
        official(client).webhooks.unwrap(body, headers, secret=new["signing_secret"])
        if num_signatures == 2:
            official(client).webhooks.unwrap(body, headers, secret=old["signing_secret"])


def test_secrets_lie_nowhere_in_the_open(client: TestClient, receiver: Receiver, settings: Settings) -> None:
    secret = add(client, receiver)["signing_secret"].encode()
    key = settings.home / "secrets.key"
    assert key.stat().st_mode & 0o777 == 0o600
    for path in settings.home.rglob("*"):
        assert not path.is_file() or secret.removeprefix(b"whsec_") not in path.read_bytes(), path


# --- secrets that do not open -------------------------------------------------------------------------------------

KEYS = pytest.mark.parametrize("key", [None, b"", Fernet.generate_key()], ids=["none", "broken", "another"])


def put_key(settings: Settings, key: bytes | None) -> bytes:
    """Replaces the home's key, and returns the home's own one."""
    path = settings.home / "secrets.key"
    own = path.read_bytes()
    if key is None:
        path.unlink()
    else:
        path.write_bytes(key)
    return own


@KEYS
def test_an_endpoint_whose_secret_does_not_open_is_shown_and_can_be_mended(
    client: TestClient, receiver: Receiver, settings: Settings, key: bytes | None
) -> None:
    ids = [add(client, receiver)["id"] for _ in range(3)]
    own = put_key(settings, key)
    shown = client.get(URL).json()["data"]
    shown.append(client.get(f"{URL}/{ids[0]}").json())
    shown.append(client.post(f"{URL}/{ids[0]}", json={"name": "renamed"}).json())
    assert [each["id"] for each in shown] == [*reversed(ids), ids[0], ids[0]]
    for each in shown:
        assert "signing_secret_hint" not in each
        assert "put the right file into the home, or rotate the secret" in each["windlass"]["signing_secret_error"]
    sample = client.post(f"{URL}/{ids[0]}/test", json={"event_type": CANCELLED})
    error = sample.json()["error"]
    assert (sample.status_code, error["code"]) == (400, "secrets_key_unusable")
    assert repr(ids[0]) in error["message"]
    assert str(settings.home) not in error["message"]
    assert receiver.received == []

    assert client.delete(f"{URL}/{ids[2]}").json()["deleted"]
    rotated = client.post(f"{URL}/{ids[0]}/rotate_secret", json={"keep_old_secret_active_for_24_hours": True})
    if key == b"":  # it cannot seal either
        assert (rotated.status_code, rotated.json()["error"]["code"]) == (400, "secrets_key_unusable")
    else:
        secret = rotated.json()["signing_secret"]
        found = {each["id"]: each.get("signing_secret_hint") for each in client.get(URL).json()["data"]}
        assert found == {ids[0]: f"…{secret[-4:]}", ids[1]: None}
        assert client.post(f"{URL}/{ids[0]}/test", json={"event_type": CANCELLED}).status_code == 200
    put_key(settings, own)
    assert client.get(f"{URL}/{ids[1]}").json()["signing_secret_hint"].startswith("…")


def test_no_endpoint_is_made_with_a_broken_key(client: TestClient, receiver: Receiver, settings: Settings) -> None:
    (settings.home / "secrets.key").write_bytes(b"nonsense")
    body = {"name": "mine", "url": receiver.url, "event_types": [CANCELLED]}
    response = client.post(URL, json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "secrets_key_unusable")
    assert client.get(URL).json()["data"] == []


@KEYS
def test_delivery_that_cannot_be_signed_waits_and_delays_no_other(
    client: TestClient,
    receiver: Receiver,
    sender: WebhookSender,
    settings: Settings,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    key: bytes | None,
) -> None:
    made = add(client, receiver)
    for _ in range(webhook_sender._NUM_AT_ONCE + 1):
        cancel_one(client)
    clock.now_s += 30
    own = put_key(settings, key)
    for _ in range(3):
        assert sender.send_due() == 0
        clock.now_s += 2 * DAY_S
    (warning,) = [each for each in caplog.records if each.name == webhook_sender.__name__]
    assert made["id"] in warning.getMessage()
    assert {(row.num_tries, row.last_error) for row in deliveries(client)} == {(0, None)}
    assert receiver.received == []
    (settings.home / "secrets.key").write_bytes(own)  # while the sender runs
    assert sender.send_due() == webhook_sender._NUM_AT_ONCE + 1
    assert {row.next_try_at for row in deliveries(client)} == {None}


def test_homes_that_share_a_database_each_deliver_what_they_can_sign(
    database: Database, receiver: Receiver, clock: Clock, tmp_path: Path
) -> None:
    homes = [Settings(home=tmp_path / name, webhook_private_addresses=True) for name in ("first", "second")]
    secrets = [new_signing_secret() for _ in homes]
    for settings, secret in zip(homes, secrets, strict=True):
        settings.home.mkdir()
        with database.write() as session:
            WebhookRepository(session).add(
                name="mine", url=receiver.url, event_types=EVENT_TYPES, secret=SecretBox(settings.home).close(secret)
            )
    with database.write() as session:
        jobs = JobRepository(session)
        for _ in range(6):
            jobs.request_cancel(jobs.create(new_job("file-1", None)).id)
    senders = [WebhookSender(database, settings, clock=clock) for settings in homes]
    clock.now_s += 30
    for sender, secret in zip(senders, secrets, strict=True):
        receiver.received.clear()
        assert sender.send_due() == 6
        assert sender.send_due() == 0
        for headers, body in receiver.received:
            timestamp = int(headers["webhook-timestamp"])
            signed = signature(secret, event_id=headers["webhook-id"], timestamp=timestamp, body=body)
            assert headers["webhook-signature"] == signed
    with database.read() as session:
        rows = session.scalars(select(WebhookDelivery)).all()
    assert [(row.num_tries, row.last_error, row.delivered_at is None) for row in rows] == [(1, None, False)] * 12


def test_an_old_secret_that_does_not_open_is_done_without(
    client: TestClient,
    receiver: Receiver,
    sender: WebhookSender,
    settings: Settings,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = add(client, receiver)
    put_key(settings, None)
    keep = {"keep_old_secret_active_for_24_hours": True}
    new = client.post(f"{URL}/{made['id']}/rotate_secret", json=keep).json()
    for _ in range(2):
        cancel_one(client)
        clock.now_s += 30
        assert sender.send_due() == 1
        headers, body = receiver.received[-1]
        assert len(headers["webhook-signature"].split()) == 1
        official(client).webhooks.unwrap(body, headers, secret=new["signing_secret"])
    (warning,) = [each for each in caplog.records if each.name == webhook_sender.__name__]
    assert made["id"] in warning.getMessage()
