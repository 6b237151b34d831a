"""Webhook endpoints managed with the official client, and samples that are sent on request."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient

from tests.support.service.webhook_receiver import Receiver, receiving
from tests.support.service.webhook_stage import (
    CANCELLED,
    SUCCEEDED,
    URL,
    add,
    official,
)
from windlass.service.api.routes import webhooks


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
    assert "another one is not done yet" in refused.json()["error"]["message"]
    assert client.post(url, json={"event_type": CANCELLED}).status_code == 200
