"""Hostile requests: no internal error, no access outside of the home, and no effect on the next request.

`test_authentication.py` tests other users' objects and invalid keys for every endpoint. `test_text.py` tests strange
text, which databases treat differently.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.support.service.api_client import context_of, upload
from tests.support.service.keyed import BOX, NOTHING, World, keyed_world, routes_of
from tests.unit.service.api.hostile.asking import (
    HOOKS,
    JOBS,
    JSON,
    PLANS,
    SECRET,
    check_refused,
    homes,
    raw,
)
from windlass.service.installation.settings import Settings
from windlass.storage.sql.repositories.audit import AuditRepository
from windlass.storage.sql.repositories.jobs import JobRepository


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
def new_settings(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], Settings]]:
    with homes(request, tmp_path_factory) as new:
        yield new


# --- paths ---

TRAVERSALS = [
    "../secret",
    "../../secret",
    "..%2Fsecret",
    "..%2F..%2Fsecret%2Fsecret.jsonl",
    "%2e%2e%2fsecret",
    "..%5C..%5Csecret",
    "....//secret",
    "..%00/secret",
    "%2Fetc%2Fpasswd",
    "//etc/passwd",
    "file:%2F%2F%2Fetc%2Fpasswd",
    "~%2F.ssh",
    ".",
    "..",
    "%252e%252e%252fsecret",
    "..%c0%af..%c0%afsecret",
    "..%EF%BC%8Fsecret",
    "a" * 5000,
    "ft:tiny:..:..%2F..%2Fsecret",
    "ft:..:x:0123456789ab",
]


@pytest.mark.parametrize("name", TRAVERSALS)
def test_no_path_leaves_the_home(client: TestClient, name: str) -> None:
    read = ("/v1/files/{}/content", f"{JOBS}/{{}}/timeline", f"{JOBS}/{{}}/plan", "/static/{}")
    removed = ("/v1/files/{}", "/v1/models/{}", f"{HOOKS}/{{}}")
    for method, path in (
        *(("GET", path) for path in (*read, *removed)),
        *(("DELETE", path) for path in removed),
        ("POST", f"{JOBS}/{{}}/cancel"),
    ):
        # The raw path: a normal client would resolve the dots.
        response = raw(client, method, path.format(name))
        assert SECRET not in response
        assert response.partition(" ")[0] in ("400", "404", "405", "307"), (method, path, response)


@pytest.mark.parametrize(
    "model", ["../secret", "/etc", "..", "a/../../secret", "C:\\secret", "ft:..:x:0123", "a\0b", ""]
)
def test_no_model_of_a_job_is_a_path(client: TestClient, model: str) -> None:
    file_id = upload(client)
    check_refused(client.post(JOBS, json={"model": model, "training_file": file_id}))
    check_refused(client.post(PLANS, json={"model": model, "batch_size": 1}))
    for given in ("../secret/secret.jsonl", "/etc/passwd", f"../files/{file_id}", f"{file_id}/../{file_id}"):
        check_refused(client.post(JOBS, json={"model": "tiny", "training_file": given}))


@pytest.mark.parametrize(
    "filename",
    [
        *("../../x.jsonl", "/etc/x.jsonl", "..\\x.jsonl", "x.jsonl\0.jsonl", "\ud800x.jsonl", '";x=".jsonl'),
        *("\r\nSet-Cookie: a=b\r\n.jsonl", "a" * 5000 + ".jsonl", "\u202elnosj.jsonl", "👾.jsonl"),
    ],
)
def test_a_filename_is_a_name_and_nothing_else(client: TestClient, settings: Settings, filename: str) -> None:
    before = set(settings.files_dir.iterdir())
    head = f'--x\r\nContent-Disposition: form-data; name="file"; filename="{filename}"\r\n\r\na\r\n'
    body = f'{head}--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n--x--\r\n'
    response = client.post(
        "/v1/files",
        content=body.encode(errors="surrogatepass"),
        headers={"Content-Type": "multipart/form-data; boundary=x"},
    )
    if response.status_code != 200:
        check_refused(response, 400)
        return
    file = response.json()
    assert "/" not in file["filename"]
    assert file["filename"].isprintable()
    assert set(settings.files_dir.iterdir()) - before == {settings.files_dir / file["id"]}
    content = client.get(f"/v1/files/{file['id']}/content")
    assert content.content == b"a"
    assert "set-cookie" not in content.headers


# --- bodies ---


def nested(depth: int, kind: str = "[]") -> str:
    opening = "[" if kind == "[]" else '{"a":'
    return opening * depth + "1" + ("]" if kind == "[]" else "}") * depth


@pytest.mark.parametrize("kind", ["[]", "{}"])
def test_no_depth_of_nesting_fails_inside(client: TestClient, kind: str) -> None:
    file_id = upload(client)
    # Around Python's limit of nesting, and far beyond it.
    for depth in (10, 300, 600, 800, 900, 950, 1000, 5_000, 100_000):
        bomb = nested(depth, kind)
        for body in (
            bomb,
            f'{{"model": "tiny", "training_file": "{file_id}", "integrations": {bomb}}}',
            f'{{"model": "tiny", "training_file": "{file_id}", "metadata": {{"a": {bomb}}}}}',
            f'{{"model": "tiny", "training_file": "{file_id}", "windlass": {bomb}}}',
            f'{{"model": "tiny", "training_file": "{file_id}", "windlass": {{"lora": {bomb}}}}}',
            f'{{"model": "tiny", "training_file": "{file_id}", "unknown": {bomb}}}',
        ):
            check_refused(client.post(JOBS, content=body, headers=JSON), 400, 413)
        check_refused(client.post(PLANS, content=f'{{"model": "tiny", "hardware": {bomb}}}', headers=JSON), 400, 413)
        ignored = (
            f'{{"model": "tiny", "training_file": "{file_id}", "method": {{"type": "supervised", "dpo": {bomb}}}}}'
        )
        response = client.post(JOBS, content=ignored, headers=JSON)
        assert response.status_code in (200, 400, 413), response.text


@pytest.mark.short("sqlite-?")
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"' + b"x" * 500_000 + b'"',
        b"[" + b"0," * 400_000 + b"0]",
        b"{" + b",".join(b'"k%d":1' % number for number in range(50_000)) + b"}",
        b'{"metadata": {' + b",".join(b'"k%d":"v"' % number for number in range(50_000)) + b"}}",
        b'{"model": "tiny", "model": "tiny", "training_file": []}',
        b"\xff\xfe\x00",
        b"\x00",
        b'{"model": "\xff"}',
        "\ufeff{}".encode(),
        b"{" + b" " * 900_000,
        b'{"model": ' + b"9" * 500_000 + b"}",
        b'{"seed": NaN}',
        b'{"__proto__": {}, "constructor": {}}',
    ],
    ids=range(16),
)
def test_no_body_fails_inside(client: TestClient, body: bytes) -> None:
    for path in (JOBS, PLANS, HOOKS):
        check_refused(client.post(path, content=body, headers=JSON), 400, 413)
        check_refused(client.post(path, content=body), 400, 413)  # without any content type


HUGE = [
    "1e400",
    "-1e400",
    "1e-400",
    "NaN",
    "Infinity",
    "-1",
    "-0.0",
    "9" * 30,
    "9" * 4_299,
    "9" * 5_000,
    "1" + "0" * 5_000,
]
NUMBERS = {
    "seed": "{}",
    "hyperparameters": '{{"n_epochs": {}}}',
    "method": '{{"type": "supervised", "supervised": {{"hyperparameters": {{"batch_size": {}}}}}}}',
    **{
        f"windlass {name}": f'{{{{"{name}": {{}}}}}}'
        for name in (
            *("epochs", "batch_size", "num_microbatches", "sequence_length", "learning_rate", "warmup_steps", "warmup"),
            *("weight_decay", "clip_norm", "beta1", "epsilon", "max_bad_steps", "seed", "priority", "checkpoint_every"),
            *("checkpoint_minutes", "keep_checkpoints", "evaluate_every"),
        )
    },
    "windlass budgets": '{{"budgets": {{"host_memory_gib": {}}}}}',
}


@pytest.mark.parametrize("field", NUMBERS)
def test_no_number_fails_inside(client: TestClient, field: str) -> None:
    file_id = upload(client)
    for number in HUGE:
        key, value = field.split(" ")[0], NUMBERS[field].format(number)
        body = f'{{"model": "tiny", "training_file": "{file_id}", "{key}": {value}}}'
        response = client.post(JOBS, content=body, headers=JSON)
        if response.status_code != 200 or len(number) > 1000:
            check_refused(response, 400)


def test_no_number_of_a_machine_fails_inside(client: TestClient) -> None:
    machine = {
        "gpus": {"count": 1, "memory_gib": 24, "tflops": 100},
        "host": {"memory_gib": 64, "memory_gb_per_s": 20, "adam_params_per_s": 1e9},
        "pcie": {"h2d_gb_per_s": 12, "d2h_gb_per_s": 12},
        "ssds": {"count": 1, "read_gb_per_s": 3, "write_gb_per_s": 2, "capacity_gib": 1000},
    }
    for part, values in machine.items():
        for name in values:
            for number in (*HUGE, "0", '"1"', "null", "[]", "true"):
                changed = {**machine, part: {**values, name: "here"}}
                hardware = json.dumps(changed).replace('"here"', number)
                body = f'{{"model": "none", "batch_size": 1, "hardware": {hardware}}}'
                check_refused(client.post(PLANS, content=body, headers=JSON))


@pytest.mark.parametrize(
    "number", ["-1", "0", "1e3", "9" * 18, "9" * 30, "9" * 5000, "NaN", "٣", "1_0", " 1", "0x10", "true"]
)
def test_no_number_of_a_query_fails_inside(client: TestClient, number: str) -> None:
    for path in ("/v1/files", JOBS, HOOKS, "/v1/audit"):
        assert client.get(path, params={"limit": number}).status_code in (200, 400)
    for path in (f"{JOBS}/{{}}/events?after=ftevent-{{}}", "/v1/audit?after=audit-{}"):
        check_refused(client.get(path.format(*([NOTHING.job_id, number] if "{}/" in path else [number]))))
    check_refused(client.get("/v1/events/stream", params={"after": f"{number}x"}))
    check_refused(client.get(f"{JOBS}/{NOTHING.job_id}/timeline", params={"step": number}))


# --- other sites ---

FOREIGN = [
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1:9999"},
    {"Host": "evil.example"},
    {"Host": "evil.example", "Origin": "http://evil.example"},  # a DNS-rebinding name
    {"Host": "127.0.0.1.evil.example:8642"},
]


@pytest.fixture(scope="module")
def world(new_settings: Callable[[], Settings]) -> Iterator[World]:
    with keyed_world(new_settings()) as world:
        yield world


@pytest.mark.short("sqlite-cookie-*")
@pytest.mark.parametrize("headers", FOREIGN, ids=str)
@pytest.mark.parametrize("login", ["key", "cookie", "none"])
def test_no_other_site_reaches_anything(world: World, headers: dict[str, str], login: str) -> None:
    """Neither with a key that a browser has, nor with its login, and with no kind of form."""
    things, own = world.things["alice"], {"Origin": "http://127.0.0.1:8642"}
    world.client.cookies.clear()
    if login == "cookie":
        world.client.post("/login", data={"key": world.secrets["alice"]}, headers=own, follow_redirects=False)
    before = state_of(world)
    for method, path in routes_of(world.client):
        filled = path.replace("{model:path}", "{model}").format(
            **things.ids, name=BOX, machine="a100-40g-server", path="style.css"
        )
        forms: list[dict[str, Any]] = [{}]
        if method == "POST":
            forms += [
                {"data": {"a": "b"}},
                {"files": {"file": ("a.jsonl", b"{}")}, "data": {"purpose": "fine-tune"}},
                {"content": '{"model": "tiny"}', "headers": {"Content-Type": "text/plain"}},
            ]
        for form in forms:
            more = dict(form)
            more["headers"] = {**headers, **more.get("headers", {})}
            response = world.ask("alice" if login == "key" else None, method, filled, **more)
            assert (response.status_code, response.json()["error"]["code"]) == (403, "origin_not_allowed"), path
    assert state_of(world) == before


def state_of(world: World) -> Any:
    with context_of(world.client).database.read() as session:
        jobs = JobRepository(session).page(limit=100, after=None, metadata={}).rows
        return [(job.id, job.status) for job in jobs], len(AuditRepository(session).page(limit=1000).rows)


def test_what_a_form_can_send_is_no_json(client: TestClient) -> None:
    """For these types a form of another site needs no permission from the browser; JSON it cannot send."""
    body = json.dumps({"model": "tiny", "training_file": upload(client)})
    before = client.get(JOBS).json()["data"][:1]
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        for path in (JOBS, PLANS, HOOKS):
            check_refused(client.post(path, content=body, headers={"Content-Type": kind}), 400)
    assert client.get(JOBS).json()["data"][:1] == before
