"""Deliveries of ended jobs to a local receiver: each once, retried, and fair to all owners."""

import json
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from tests.support.service.api_client import context_of, make_model, serve
from tests.support.service.keyed import new_job
from tests.support.service.webhook_receiver import Receiver, receiving
from tests.support.service.webhook_stage import (
    CANCELLED,
    DAY_S,
    SUCCEEDED,
    URL,
    Clock,
    add,
    cancel_one,
    deliveries,
    make_job,
    official,
)
from windlass.service.installation.settings import Settings
from windlass.service.webhooks import sender as webhook_sender
from windlass.service.webhooks.delivery import new_signing_secret
from windlass.service.webhooks.secret_box import SecretBox
from windlass.service.webhooks.sender import WebhookSender
from windlass.storage.sql.database import Database
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.repositories.jobs import JobRepository
from windlass.storage.sql.repositories.webhooks import WebhookRepository


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
    job_id = make_job(client)

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


def test_a_clock_that_is_set_back_holds_nothing_up(
    client: TestClient, receiver: Receiver, sender: WebhookSender, clock: Clock
) -> None:
    add(client, receiver)
    cancel_one(client)
    clock.now_s -= DAY_S
    assert sender.send_due() == 1
    assert len(receiver.received) == 1
    assert sender.send_due() == 0
