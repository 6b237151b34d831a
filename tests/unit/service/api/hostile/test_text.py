"""Text that databases treat differently, or not at all: it is returned unchanged, or refused."""

import json
from urllib.parse import quote

import pytest
from fastapi.testclient import TestClient

from tests.support.service.api_client import upload
from tests.support.service.keyed import NOTHING
from tests.unit.service.api.hostile.asking import (
    HOOKS,
    JOBS,
    JSON,
    PLANS,
    check_refused,
    raw,
)

EVENTS = ["fine_tuning.job.failed"]


UNSTORABLE = ["\0", "a\0b", "\ud800", "a\udfffb"]
ODD = [
    "",
    " ",
    "' OR 1=1 --",
    '"; DROP TABLE jobs; --',
    "%s %d {0} ${x}",
    "\u202e\u2066",
    "e\u0301",
    "👾" * 100,
    "\x7f\x1b[2J",
]


@pytest.mark.parametrize("text", UNSTORABLE + ODD)
def test_text_comes_back_as_it_was_or_is_refused(client: TestClient, text: str) -> None:
    file_id = upload(client)
    plain = {"model": "tiny", "training_file": file_id}
    hook = {"name": "a", "url": "https://hook.example/", "event_types": EVENTS}
    for path, body in (
        (JOBS, plain | {"metadata": {"a": text}}),
        (JOBS, plain | {"metadata": {text: "a"}}),
        (JOBS, plain | {"suffix": text}),
        (JOBS, plain | {"model": text}),
        (JOBS, plain | {"training_file": text}),
        (JOBS, plain | {"validation_file": text}),
        (JOBS, plain | {"integrations": [text]}),
        (JOBS, plain | {"method": {"type": text}}),
        (JOBS, plain | {text: 1}),
        (JOBS, plain | {"windlass": {"schedule": text}}),
        (PLANS, {"model": text, "batch_size": 1}),
        (HOOKS, hook | {"name": text}),
        (HOOKS, hook | {"url": text}),
        (HOOKS, hook | {"event_types": [text]}),
    ):
        # As escapes, which any JSON may have.
        response = client.post(path, content=json.dumps(body), headers=JSON)
        if response.status_code != 200 or text in UNSTORABLE:
            check_refused(response)
            continue
        made = response.json()
        told = made["name"] if path == HOOKS else made["metadata"]
        assert told == body.get("name", body.get("metadata"))
        if path == JOBS:
            (key, value) = next(iter(made["metadata"].items()))
            found = client.get(JOBS, params={f"metadata[{key}]": value}).json()["data"]
            assert [job["id"] for job in found] == [made["id"]]


@pytest.mark.parametrize("text", UNSTORABLE[:2] + ODD)
def test_no_text_of_a_url_fails_inside(client: TestClient, text: str) -> None:
    for path in ("/v1/files", JOBS, HOOKS, "/v1/audit", f"{JOBS}/{NOTHING.job_id}/events"):
        check_refused(client.get(path, params={"after": text}))
    for name in ("purpose", "metadata[a]", f"metadata[{text}]", text):
        for path in ("/v1/files", JOBS):
            assert client.get(path, params={name: text}).status_code in (200, 400)
    for path in ("/v1/files/{}", "/v1/files/{}/content", f"{JOBS}/{{}}", f"{JOBS}/{{}}/events", "/v1/models/{}"):
        assert raw(client, "GET", path.format(quote(text or "x", safe=""))).partition(" ")[0] in ("400", "404")
    assert raw(client, "DELETE", f"/v1/files/{quote(text or 'x', safe='')}").partition(" ")[0] in ("400", "404")


@pytest.mark.parametrize("value", ["\xff\xfe", "' OR 1=1 --", "a" * 255, "a" * 256, "a" * 10_000, "\x7f", " "])
def test_no_header_fails_inside(client: TestClient, value: str) -> None:
    file_id = upload(client)
    body = json.dumps({"model": "tiny", "training_file": file_id}).encode()
    for name in ("Idempotency-Key", "Last-Event-ID", "Authorization", "Cookie", "X-Forwarded-For", "Content-Type"):
        headers = {"Content-Type": "application/json", name: value}
        found = raw(client, "POST", JOBS, headers, body)
        assert found.partition(" ")[0] in ("200", "400", "401"), (name, found)
    check_refused(client.get("/v1/events/stream", headers={"Last-Event-ID": "9" * 40}), 400)
    once = raw(client, "POST", JOBS, {"Content-Type": "application/json", "Idempotency-Key": value}, body)
    again = raw(client, "POST", JOBS, {"Content-Type": "application/json", "Idempotency-Key": value}, body)
    assert once == again
