"""Webhook endpoints managed with the official client, and deliveries to a local receiver."""

import importlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest
from cryptography.fernet import Fernet
from fastapi.testclient import TestClient
from sqlalchemy import select

from tests.support.service.api_client import context_of, make_model, serve, upload
from tests.support.service.keyed import new_job
from tests.support.service.webhook_receiver import Receiver, receiving
from tests.unit.service.api.routes.test_job_metrics import make_job
from windlass.service.api.routes import webhooks
from windlass.service.installation.settings import Settings
from windlass.service.webhooks import sender as webhook_sender
from windlass.service.webhooks.delivery import new_signing_secret, signature
from windlass.service.webhooks.secret_box import SealError, SecretBox
from windlass.service.webhooks.sender import WebhookSender
from windlass.storage.sql.database import Database
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.models import WebhookDelivery
from windlass.storage.sql.repositories.jobs import JobRepository
from windlass.storage.sql.repositories.webhooks import EVENT_TYPES, WebhookRepository

CANCELLED, SUCCEEDED = "fine_tuning.job.cancelled", "fine_tuning.job.succeeded"
URL = "/v1/webhook_endpoints"
DAY_S = 86400.0


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


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = time.time()

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sender(client: TestClient, settings: Settings, clock: Clock) -> WebhookSender:
    return WebhookSender(context_of(client).database, settings, clock=clock)


def add(client: TestClient, receiver: Receiver, *types: str) -> dict[str, Any]:
    body = {"name": "mine", "url": receiver.url, "event_types": list(types or (CANCELLED,))}
    response = client.post(URL, json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def cancel_one(client: TestClient) -> str:
    job_id = make_job(client, upload(client))
    assert client.post(f"/v1/fine_tuning/jobs/{job_id}/cancel").json()["status"] == "cancelled"
    return job_id


def deliveries(client: TestClient) -> list[WebhookDelivery]:
    with context_of(client).database.read() as session:
        return list(session.scalars(select(WebhookDelivery).order_by(WebhookDelivery.ordinal)))


# --- endpoints ----------------------------------------------------------------------------------------------------


def official(client: TestClient) -> openai.OpenAI:
    """A client whose requests are answered by the app in this process."""
    http = importlib.import_module(openai.DefaultHttpxClient.__mro__[1].__module__.split(".")[0])

    def answer(request: Any) -> Any:
        path = str(request.url.raw_path, "ascii")
        found = client.request(request.method, path, content=request.read(), headers=dict(request.headers))
        return http.Response(found.status_code, headers=dict(found.headers), content=found.content)

    return openai.OpenAI(
        base_url="http://127.0.0.1:8642/v1",
        api_key="none",
        http_client=openai.DefaultHttpxClient(transport=http.MockTransport(answer)),
        max_retries=0,
    )


def test_the_official_client_manages_endpoints(client: TestClient, receiver: Receiver) -> None:
    webhooks = official(client).webhooks
    assert CANCELLED in webhooks.event_types.list().data
    made = webhooks.create(name="mine", url=receiver.url, event_types=["fine_tuning.job.cancelled"])
    assert made.signing_secret.startswith("whsec_")
    other = webhooks.create(name="other", url=receiver.url, event_types=["fine_tuning.job.failed"])
    assert [each.id for each in webhooks.list(limit=1)] == [other.id, made.id]
    changed = webhooks.update(made.id, name="renamed", event_types=["fine_tuning.job.succeeded"])
    assert (changed.name, changed.event_types, changed.url) == ("renamed", [SUCCEEDED], receiver.url)
    again = webhooks.retrieve(made.id)
    assert (again.name, again.signing_secret_hint) == ("renamed", f"…{made.signing_secret[-4:]}")
    assert "signing_secret" not in again.model_dump(exclude_none=True)
    result = webhooks.test(made.id, event_type="fine_tuning.job.succeeded")
    assert (result.status_code, result.success) == (200, True)
    headers, body = receiver.received[0]
    event = official(client).webhooks.unwrap(body, headers, secret=made.signing_secret)
    assert event.type == SUCCEEDED
    with pytest.raises(openai.InvalidWebhookSignatureError):
        webhooks.unwrap(body, headers, secret=other.signing_secret)
    rotated = webhooks.rotate_secret(made.id)
    assert rotated.signing_secret != made.signing_secret
    assert webhooks.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        webhooks.retrieve(made.id)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"url": "http://0.0.0.0/"}, "url"),
        ({"url": "nonsense"}, "url"),
        ({"event_types": []}, "event_types"),
        ({"event_types": ["batch.completed"]}, "event_types"),
        ({"name": ""}, "name"),
        ({"more": 1}, "more"),
    ],
)
def test_invalid_endpoint_is_refused_with_reason(
    client: TestClient, receiver: Receiver, change: dict[str, Any], param: str
) -> None:
    body = {"name": "mine", "url": receiver.url, "event_types": [CANCELLED]} | change
    response = client.post(URL, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith(param)


def test_a_sample_that_does_not_arrive_is_told(client: TestClient) -> None:
    with receiving() as receiver:
        made = add(client, receiver)
    response = client.post(f"{URL}/{made['id']}/test", json={"event_type": CANCELLED})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "webhook_not_delivered")


def test_sample_while_another_of_the_same_user_is_in_flight_is_refused(
    client: TestClient, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each test request holds a thread of the API until the endpoint has answered, so many could block all requests."""
    url = f"{URL}/{add(client, receiver)['id']}/test"
    begun, may_end = threading.Event(), threading.Event()

    def hang(*_: object, **__: object) -> int:
        begun.set()
        assert may_end.wait(60)
        return 200

    monkeypatch.setattr(webhooks, "send", hang)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.post, url, json={"event_type": CANCELLED})
        assert begun.wait(60)
        refused = client.post(url, json={"event_type": CANCELLED})
        may_end.set()
        assert first.result().status_code == 200
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "webhook_test_in_progress")
    assert "wait for its answer" in refused.json()["error"]["message"]
    assert client.post(url, json={"event_type": CANCELLED}).status_code == 200


# --- deliveries ---------------------------------------------------------------------------------------------------


def test_ended_job_is_delivered_once_to_each_subscriber(
    client: TestClient, receiver: Receiver, sender: WebhookSender, clock: Clock
) -> None:
    made = add(client, receiver)
    add(client, receiver, SUCCEEDED)
    job_id = cancel_one(client)
    clock.now_s += 30
    assert sender.send_due() == 1
    assert sender.send_due() == 0
    ((headers, body),) = receiver.received
    event = official(client).webhooks.unwrap(body, headers, secret=made["signing_secret"])
    assert (event.type, event.data.id) == (CANCELLED, job_id)
    assert json.loads(body)["object"] == "event"
    assert headers["webhook-id"] == json.loads(body)["id"]
    (told,) = client.get(f"{URL}/{made['id']}").json()["windlass"]["deliveries"]
    assert (told["event_id"], told["num_tries"]) == (headers["webhook-id"], 1)
    assert told["delivered_at"] is not None


def test_rolled_back_change_is_not_delivered(client: TestClient, receiver: Receiver, sender: WebhookSender) -> None:
    """The delivery is part of the change's transaction."""
    add(client, receiver)
    job_id = make_job(client, upload(client))

    def cancel_and_fail() -> None:
        with context_of(client).database.write() as session:
            JobRepository(session).transition(job_id, JobStatus.VALIDATING_FILES, JobStatus.CANCELLED, message="")
            raise RuntimeError("undo")

    with pytest.raises(RuntimeError, match="undo"):
        cancel_and_fail()
    assert sender.send_due() == 0
    assert deliveries(client) == []


def test_failed_delivery_is_retried_with_growing_delays(
    client: TestClient, receiver: Receiver, sender: WebhookSender, clock: Clock
) -> None:
    made = add(client, receiver)
    receiver.statuses += [500, 302, 404]
    cancel_one(client)
    clock.now_s += 30
    waits = []
    for _ in range(3):
        assert sender.send_due() == 1
        (row,) = deliveries(client)
        assert row.next_try_at is not None
        waits.append(row.next_try_at - clock.now_s)
        assert sender.send_due() == 0
        clock.now_s = row.next_try_at
    assert waits == sorted(waits)
    assert [5 <= waits[0] <= 6, 30 <= waits[1] <= 36, 120 <= waits[2] <= 144] == [True] * 3
    assert row.last_error == "it was answered with 404"
    assert sender.send_due() == 1
    assert len({headers["webhook-id"] for headers, _ in receiver.received}) == 1
    for headers, body in receiver.received:  # each try has a new signature
        official(client).webhooks.unwrap(body, headers, secret=made["signing_secret"])
    (row,) = deliveries(client)
    assert (row.num_tries, row.next_try_at, row.last_error) == (4, None, None)


def test_delivery_is_given_up_after_three_days(client: TestClient, sender: WebhookSender, clock: Clock) -> None:
    with receiving() as receiver:
        add(client, receiver)
    cancel_one(client)
    clock.now_s += 30
    assert sender.send_due() == 1
    began_s, jump_s = clock.now_s, 10 * DAY_S
    clock.now_s += jump_s  # the clock was set ahead: that is no try
    while (next_try_at := deliveries(client)[0].next_try_at) is not None:
        clock.now_s = max(clock.now_s, next_try_at)
        assert sender.send_due() == 1
    assert clock.now_s - began_s - jump_s == pytest.approx(3 * DAY_S, rel=0.1)
    (row,) = deliveries(client)
    assert row.delivered_at is None
    assert row.last_error is not None
    assert "ConnectError" in row.last_error


def test_delivery_of_killed_sender_is_sent_by_another(
    client: TestClient, receiver: Receiver, settings: Settings, clock: Clock
) -> None:
    add(client, receiver)
    cancel_one(client)
    clock.now_s += 30
    database = context_of(client).database

    def killed(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    assert WebhookSender(database, settings, send=killed, clock=clock).send_due() == 1
    other = WebhookSender(database, settings, clock=clock)
    assert other.send_due() == 0  # it may still be in flight
    clock.now_s += webhook_sender._CLAIM_S
    assert other.send_due() == 1
    assert len(receiver.received) == 1


def test_owner_whose_endpoints_hang_delays_no_other_owner(client: TestClient, settings: Settings) -> None:
    database = context_of(client).database
    sealed = SecretBox(settings.home).close(new_signing_secret())
    num_slow = webhook_sender._MOST_OF_OWNER + 3
    with database.write() as session:
        for owner, number in (("ann", num_slow), ("bob", 1)):
            for each in range(number):
                WebhookRepository(session).add(
                    name="a",
                    url=f"http://{owner}-{each}.example/",
                    event_types=(CANCELLED,),
                    secret=sealed,
                    owner=owner,
                )
        jobs = JobRepository(session)
        for owner in ("ann", "ann", "bob"):
            jobs.request_cancel(jobs.create(new_job("file-x", owner)).id)
    under_way, delivered, may_end, told = Counter[str](), list[str](), threading.Event(), threading.Event()
    most = Counter[str]()
    lock = threading.Lock()

    def hang_for_ann(url: str, **_: object) -> int:
        with lock:
            under_way[url] += 1
            most[url] = max(most[url], under_way[url])
            most["ann"] = max(most["ann"], sum(number for each, number in under_way.items() if "ann" in each))
        if "ann" in url:
            assert may_end.wait(60)
        with lock:
            under_way[url] -= 1
            delivered.append(url)
        if "bob" in url:
            told.set()
        return 200

    sender = WebhookSender(database, settings, send=hang_for_ann)
    sender.start()
    assert told.wait(60), "bob is told while all of ann's hang"
    assert delivered == ["http://bob-0.example/"]
    may_end.set()
    until_s = time.monotonic() + 60
    while len(delivered) < 2 * num_slow + 1:
        assert time.monotonic() < until_s, "ann's are not delivered"
        time.sleep(0.01)
    sender.close()
    assert most.pop("ann") <= webhook_sender._MOST_OF_OWNER
    assert set(most.values()) == {1}, "of one endpoint one after the other"


def test_sender_with_all_places_taken_gives_the_next_one_to_the_owner_with_the_fewest(
    client: TestClient, settings: Settings
) -> None:
    """Owners whose endpoints hang have more overdue deliveries, and older ones."""
    database = context_of(client).database
    sealed = SecretBox(settings.home).close(new_signing_secret())
    num_owners = webhook_sender._NUM_AT_ONCE // webhook_sender._MOST_OF_OWNER
    hanging = [f"ann-{number}" for number in range(num_owners)]
    with database.write() as session:
        for owner in (*hanging, "bob"):
            for number in range(webhook_sender._MOST_OF_OWNER + 1):
                url = f"http://{owner}.example/{number}"
                WebhookRepository(session).add(name="a", url=url, event_types=(CANCELLED,), secret=sealed, owner=owner)

    def end_job(owner: str) -> None:
        with database.write() as session:
            jobs = JobRepository(session)
            jobs.request_cancel(jobs.create(new_job("file-x", owner)).id)

    for owner in hanging:
        end_job(owner)
    may_end = threading.Semaphore(0)
    begun, changed = list[str](), threading.Condition()

    def hang(url: str, **_: object) -> int:
        with changed:
            begun.append(url)
            changed.notify_all()
        if "bob" not in url:
            may_end.acquire()
        return 200

    sender = WebhookSender(database, settings, send=hang)
    sender.start()
    try:
        with changed:
            assert changed.wait_for(lambda: len(begun) == webhook_sender._NUM_AT_ONCE, timeout=60)
        end_job("bob")
        may_end.release()
        with changed:
            assert changed.wait_for(lambda: len(begun) > webhook_sender._NUM_AT_ONCE, timeout=60)
        next_begun = begun[webhook_sender._NUM_AT_ONCE]
    finally:
        may_end.release(100)
        sender.close()
    assert next_begun.startswith("http://bob.example/")


def test_two_senders_do_not_send_the_same(tmp_path: Path, database_url: str, receiver: Receiver) -> None:
    """Each has its own connections, as in two services."""
    settings = Settings(home=tmp_path, port=8642, webhook_private_addresses=True, database_url=database_url)
    make_model(settings.models_dir / "tiny")
    with (
        serve(settings) as client,
        closing(Database(database_url)) as first,
        closing(Database(database_url)) as second,
    ):
        add(client, receiver)
        for _ in range(3):
            cancel_one(client)
        senders = [WebhookSender(each, settings) for each in (first, second)]
        for each in senders:
            each.start()
        until_s = time.monotonic() + 60
        while len(receiver.received) < 3 and time.monotonic() < until_s:
            time.sleep(0.05)
        for each in senders:
            each.close()
    assert len({headers["webhook-id"] for headers, _ in receiver.received}) == len(receiver.received) == 3


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


def test_another_key_does_not_open_what_was_sealed(tmp_path: Path) -> None:
    key = tmp_path / "secrets.key"
    sealed = SecretBox(tmp_path).close("hush")
    assert SecretBox(tmp_path).open(sealed) == "hush"
    right = key.read_bytes()
    key.unlink()
    with pytest.raises(SealError, match="cannot be read: No such file"):
        SecretBox(tmp_path).open(sealed)
    SecretBox(tmp_path).close("another")
    with pytest.raises(SealError, match="not the one with which"):
        SecretBox(tmp_path).open(sealed)
    key.write_bytes(b"")
    for use in (SecretBox(tmp_path).open, SecretBox(tmp_path).close):
        with pytest.raises(SealError, match="holds no key"):
            use(sealed)
    key.write_bytes(right)
    assert SecretBox(tmp_path).open(sealed) == "hush"


def test_a_clock_that_is_set_back_holds_nothing_up(
    client: TestClient, receiver: Receiver, sender: WebhookSender, clock: Clock
) -> None:
    add(client, receiver)
    cancel_one(client)
    clock.now_s -= DAY_S
    assert sender.send_due() == 1
    assert len(receiver.received) == 1
    assert sender.send_due() == 0


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
