"""Access rules and visible data for every endpoint that the app has, so that none is forgotten."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.service.api_client import context_of, make_model, serve, upload
from tests.support.service.keyed import ADMIN, BOX, NOTHING, Things, World, end_streams, keyed_world, new_job, routes_of
from windlass.service.api.authentication import LOGIN_COOKIE
from windlass.service.api.event_feed import MAX_STREAMS_PER_USER, News
from windlass.service.api.routes.events import _batch_of, _read_batch
from windlass.service.auth.caller import Caller
from windlass.service.auth.exposure import UnprotectedError
from windlass.service.installation.settings import Settings
from windlass.storage.sql.models import AuditEvent
from windlass.storage.sql.repositories.api_keys import KeyRepository, Role, digest_of
from windlass.storage.sql.repositories.audit import AuditRepository
from windlass.storage.sql.repositories.events import EventRepository
from windlass.storage.sql.repositories.jobs import JobRepository

JOBS = "/v1/fine_tuning/jobs"
HOOKS = "/v1/webhook_endpoints"
BOXES = "/v1/boxes"
MACHINE = "/v1/fine_tuning/machines/{machine}"
OPEN = {
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/login"),
    ("POST", "/login"),
    ("GET", "/static/{path}"),
    ("GET", "/static/vendor/plotly.min.js"),
}
# For admins only.
FOR_ADMINS = {
    ("GET", "/metrics"),
    ("GET", "/v1/audit"),
    ("POST", f"{BOXES}/{{name}}/drain"),
    ("POST", f"{BOXES}/{{name}}/resume"),
    ("POST", f"{BOXES}/{{name}}/remove"),
    ("POST", "/v1/join_codes"),
}
PAGES = {("GET", "/"), ("GET", "/docs"), ("POST", "/logout")}
# Status codes for an authorized request, if they are not 200: for data of planned or trained jobs, for data that does
# not exist yet, and for a file that a job needs.
OWN_CODES = {
    "timeline_not_held",
    "plan_not_found",
    "not_supported",
    "not_measured",
    "file_in_use",
    "webhook_not_delivered",
    "no_cluster_host",
}
ORIGIN = {"Origin": "http://127.0.0.1:8642"}
# So far ahead that no stream has all earlier events: it reads the events itself.
NOT_YET = News(after=2**62, newest=2**62, events=(), keys=(0, 0))


@pytest.fixture
def world(settings: Settings) -> Iterator[World]:
    with keyed_world(settings) as world:
        yield world


def arguments_of(method: str, path: str, things: Things) -> dict[str, Any]:
    """The arguments of a valid request to an endpoint, besides its path."""
    if method != "POST":
        return {}
    bodies: dict[str, dict[str, Any]] = {
        JOBS: {"json": {"model": "tiny", "training_file": things.file_id}},
        "/v1/files": {"files": {"file": ("a.jsonl", b'{"text": "a"}\n')}, "data": {"purpose": "fine-tune"}},
        "/v1/fine_tuning/plans": {"json": {"model": "tiny", "batch_size": 1}},
        "/login": {"data": {"key": "wk-none"}, "headers": ORIGIN},
        "/logout": {"headers": ORIGIN},
        f"{JOBS}/{{job_id}}/cancel": {},
        f"{JOBS}/{{job_id}}/pause": {},
        f"{JOBS}/{{job_id}}/resume": {},
        f"{JOBS}/{{job_id}}/restart": {},
        f"{BOXES}/{{name}}/drain": {},
        f"{BOXES}/{{name}}/resume": {},
        f"{BOXES}/{{name}}/remove": {},
        "/v1/join_codes": {},
        HOOKS: {"json": {"name": "b", "url": "https://hook.example", "event_types": ["fine_tuning.job.failed"]}},
        f"{HOOKS}/{{endpoint_id}}": {"json": {"name": "c"}},
        f"{HOOKS}/{{endpoint_id}}/rotate_secret": {},
        f"{HOOKS}/{{endpoint_id}}/test": {"json": {"event_type": "fine_tuning.job.failed"}},
    }
    return bodies[path]  # a new endpoint must be added here


def ask(world: World, who: str | None, method: str, path: str, things: Things, **more: Any) -> Any:
    filled = path.replace("{model:path}", "{model}").format(**things.ids, name=BOX, machine="rtx4090", path="style.css")
    return world.ask(who, method, filled, **(arguments_of(method, path, things) | more))


@pytest.mark.short("None", "revoked")
@pytest.mark.parametrize("who", [None, "wrong", "expired", "revoked"])
def test_request_without_valid_key_is_refused(world: World, who: str | None) -> None:
    got_in = {}
    for method, path in routes_of(world.client):
        response = ask(world, who, method, path, world.things["alice"])
        if (method, path) in OPEN:
            is_right = response.status_code == (401 if method == "POST" else 200)
        elif (method, path) in PAGES:
            is_right = (response.status_code, response.headers.get("location")) == (303, "/login")
        else:
            error = response.json().get("error", {})
            is_right = (response.status_code, error.get("code")) == (401, "invalid_api_key")
            is_right = is_right and response.headers["www-authenticate"].startswith("Bearer")
        if not is_right:
            got_in[method, path] = response.text
    assert got_in == {}
    assert world.ask(who, "GET", "/v1/none").status_code == 401
    assert jobs_there(world) == 8


def jobs_there(world: World) -> int:
    with context_of(world.client).database.read() as session:
        return len(JobRepository(session).page(limit=100, after=None, metadata={}).rows)


@pytest.fixture
def _short_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    end_streams(monkeypatch)


@pytest.mark.short("alice")
@pytest.mark.usefixtures("_short_streams")
@pytest.mark.parametrize("whose", [ADMIN, "alice", None])
def test_objects_of_other_users_are_not_found(world: World, whose: str | None) -> None:
    """Neither another user's objects, nor an admin's, nor those without an owner."""
    things = world.things[whose]
    seen = {}
    for method, path in routes_of(world.client):
        if (method, path) in OPEN | PAGES or path == "/openapi.json":
            continue
        response = ask(world, "bob", method, path, things)
        if (method, path) in FOR_ADMINS:
            if response.status_code != 403:
                seen[method, path] = response.text
        elif "{" in path and path not in (f"{BOXES}/{{name}}", MACHINE):  # boxes and machines are everybody's
            theirs, none = response, ask(world, "bob", method, path, NOTHING)
            told, expected = theirs.text, none.text
            for name, value in things.ids.items():
                told, expected = told.replace(value, name), expected.replace(NOTHING.ids[name], name)
            if none.status_code != 404 or (theirs.status_code, told) != (none.status_code, expected):
                seen[method, path] = (theirs.text, none.text)
        elif path == JOBS and method == "POST":
            if response.json()["error"]["code"] != "file_not_found":
                seen[method, path] = response.text
        elif any(value in response.text for value in things.ids.values()):
            seen[method, path] = response.text
    assert seen == {}
    assert all(world.ask(ADMIN, "GET", f"/v1/{path}").status_code == 200 for path in paths_of(things))


@pytest.mark.short("root-None", "alice-alice")
@pytest.mark.usefixtures("_short_streams")
@pytest.mark.parametrize(("who", "whose"), [("alice", "alice"), (ADMIN, "alice"), (ADMIN, ADMIN), (ADMIN, None)])
def test_users_access_own_objects_and_admins_all(world: World, who: str, whose: str | None) -> None:
    things = world.things[whose]
    refused = {}
    for method, path in routes_of(world.client):
        if (method, path) in OPEN | PAGES:
            continue
        response = ask(world, who, method, path, things)
        # A job that goes on by itself is not begun again.
        codes = OWN_CODES | {"invalid_state"} if path.endswith("/restart") else OWN_CODES
        if response.status_code != 200 and response.json()["error"]["code"] not in codes:
            refused[method, path] = response.text
        lists = {
            "/v1/files": things.file_id,
            JOBS: things.job_id,
            "/v1/models": things.model,
            HOOKS: things.endpoint_id,
            BOXES: things.job_id,
        }
        listed = lists.get(path, "")
        listed = things.job_id if path.endswith("/events/stream") else listed
        if method == "GET" and listed not in response.text:
            refused[method, path] = response.text
    expected = {
        ("alice", "alice"): FOR_ADMINS,
        (ADMIN, "alice"): {("POST", JOBS)},
    }  # for another's file
    assert refused.keys() == expected.get((who, whose), set()), refused


def paths_of(things: Things) -> list[str]:
    return [f"files/{things.file_id}", f"fine_tuning/jobs/{things.job_id}", f"models/{things.model}"]


def test_list_cursor_must_be_an_own_object(world: World) -> None:
    for path, after in (("/v1/files", world.things["alice"].file_id), (JOBS, world.things["alice"].job_id)):
        assert world.ask("bob", "GET", path, params={"after": after}).status_code == 404
        assert world.ask("alice", "GET", path, params={"after": after}).status_code == 200


def test_a_job_is_made_of_its_users_files_and_models_only(world: World) -> None:
    mine, others = world.things["bob"], world.things["alice"]
    codes = {}
    for who in ("bob", ADMIN):
        for field, body in {
            "file": {"model": "tiny", "training_file": others.file_id},
            "validation": {"model": "tiny", "training_file": mine.file_id, "validation_file": others.file_id},
            "model": {"model": others.model, "training_file": mine.file_id},
        }.items():
            body = {key: world.things[who].file_id if value == mine.file_id else value for key, value in body.items()}
            response = world.ask(who, "POST", JOBS, json=body)
            codes[who, field] = response.json()["error"]["code"]
    assert codes == {
        ("bob", "file"): "file_not_found",
        ("bob", "validation"): "file_not_found",
        ("bob", "model"): "model_not_found",
        (ADMIN, "file"): "not_yours",
        (ADMIN, "validation"): "not_yours",
        (ADMIN, "model"): "not_yours",
    }
    body = {"model": mine.model, "training_file": mine.file_id}
    job_id = world.ask("bob", "POST", JOBS, json=body).json()["id"]
    with context_of(world.client).database.read() as session:
        assert JobRepository(session).get(job_id).owner == "bob"


def test_a_model_of_no_known_job_is_for_admins(world: World, settings: Settings) -> None:
    make_model(settings.fine_tuned_dir / "ft:tiny:mine:abcdef")
    assert world.ask("bob", "GET", "/v1/models/ft:tiny:mine:abcdef").status_code == 404
    assert world.ask(ADMIN, "GET", "/v1/models/ft:tiny:mine:abcdef").status_code == 200


def test_idempotency_key_belongs_to_its_api_key(world: World) -> None:
    database = context_of(world.client).database
    with database.write() as session:
        _, another = KeyRepository(session).create(name="cluster", user="alice", role=Role.USER)
    world.secrets["alice elsewhere"] = another
    made = {}
    for who in ("alice", "bob", "alice elsewhere") * 2:
        body = {"model": "tiny", "training_file": world.things[who.split()[0]].file_id}
        job_id = world.ask(who, "POST", JOBS, json=body, headers={"Idempotency-Key": "1"}).json()["id"]
        assert made.setdefault(who, job_id) == job_id
    assert len(set(made.values())) == 3
    with database.write() as session:  # as older versions stored jobs
        JobRepository(session).get(made["bob"]).idempotency_key = "1"
    body = {"model": "tiny", "training_file": world.things["bob"].file_id}
    assert world.ask("bob", "POST", JOBS, json=body, headers={"Idempotency-Key": "1"}).json()["id"] == made["bob"]


def test_first_key_ends_access_without_key(settings: Settings) -> None:
    make_model(settings.models_dir / "tiny")
    with serve(settings) as client:
        file_id = upload(client)
        database = context_of(client).database
        with database.read() as session:
            anonymous = Caller(user=None, role=Role.ADMIN, key_id=None, peer="127.0.0.1")
            assert anonymous.is_still_in(session)
        with database.write() as session:
            key, secret = KeyRepository(session).create(name="a", user="a", role=Role.ADMIN)
        assert client.get(f"/v1/files/{file_id}").status_code == 401
        assert client.get(f"/v1/files/{file_id}", headers={"Authorization": f"Bearer {secret}"}).status_code == 200
        with database.read() as session:
            assert not anonymous.is_still_in(session)
        with database.write() as session:
            KeyRepository(session).get(key.id).expires_at = 1.0
        assert client.get(f"/v1/files/{file_id}").status_code == 401  # expired keys do not reopen the service
        with database.write() as session:
            KeyRepository(session).revoke(key.id)
        assert client.get(f"/v1/files/{file_id}").status_code == 200


@pytest.mark.parametrize("scheme", ["bearer {}", "Bearer  {} "])
def test_the_key_is_read_as_the_standard_says(world: World, scheme: str) -> None:
    headers = {"Authorization": scheme.format(world.secrets["bob"])}
    assert world.ask(None, "GET", JOBS, headers=headers).status_code == 200


@pytest.mark.parametrize("header", ["Basic {}", "{}", "Bearer", "Bearer {}x", "Bearer {} {}"])
def test_malformed_authorization_headers_are_refused(world: World, header: str) -> None:
    headers = {"Authorization": header.replace("{}", world.secrets["bob"])}
    assert world.ask(None, "GET", JOBS, headers=headers).status_code == 401


@pytest.mark.short("change0")
@pytest.mark.parametrize(
    "change",
    [{"host": "0.0.0.0"}, {"host": "::"}, {"host_names": ["box.example"]}, {"trusted_proxies": ["10.0.0.1"]}],
)
def test_public_service_without_keys_does_not_start(settings: Settings, change: dict[str, Any]) -> None:
    opened = Settings(home=settings.home, **change)
    with pytest.raises(UnprotectedError, match=r"windlass keys create"), serve(opened):
        pass
    with serve(settings) as client, context_of(client).database.write() as session:
        key, secret = KeyRepository(session).create(name="a", user="a", role=Role.ADMIN)
    with serve(opened) as client:
        assert client.get(JOBS, headers={"Authorization": f"Bearer {secret}"}).status_code == 200
        with context_of(client).database.write() as session:
            KeyRepository(session).revoke(key.id)
        assert client.get(JOBS).status_code == 401  # also from this machine: the client may be a proxy
    with pytest.raises(UnprotectedError), serve(opened):
        pass
    with serve(opened, starts_without_keys=True) as client:
        assert client.get(JOBS).status_code == 401
        assert client.get("/healthz").status_code == 200


def test_a_user_follows_their_own_events_and_others_cost_no_second_look(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, asked = context_of(world.client), []
    since = EventRepository.since

    def noting(events: EventRepository, ordinal: int, **arguments: Any) -> Any:
        asked.append(ordinal)
        return since(events, ordinal, **arguments)

    monkeypatch.setattr(EventRepository, "since", noting)
    caller = Caller(user="bob", role=Role.USER, key_id=world.key_ids["bob"])
    first = _read_batch(context, caller, 0, None, NOT_YET)
    assert {row.job_id for row in first.events} == {job.id for job in jobs_of(world, "bob")}
    with context.database.write() as session:
        JobRepository(session).create(new_job("file-x", "alice"))
        job_id = JobRepository(session).create(new_job("file-x", "bob")).id
        JobRepository(session).create(new_job("file-x", "alice"))
    second = _read_batch(context, caller, first.newest, None, NOT_YET)
    assert [row.job_id for row in second.events] == [job_id]
    third = _read_batch(context, caller, second.newest, None, NOT_YET)
    assert (list(third.events), third.newest) == ([], second.newest)
    assert asked == [0, first.newest, second.events[0].ordinal + 1]


@pytest.mark.parametrize("asks", [False, True], ids=["from memory", "after a look at the database"])
def test_live_events_are_of_ones_own_jobs_only(world: World, asks: bool) -> None:
    context = context_of(world.client)
    before = context.news._look(None)
    with context.database.write() as session:
        made = {who: JobRepository(session).create(new_job("file-x", who)).id for who in ("alice", "bob", ADMIN)}
    news = context.news._look(before)
    seen = {}
    for who in made:
        caller = Caller(user=who, role=Role.ADMIN if who == ADMIN else Role.USER, key_id=world.key_ids[who])
        if asks:
            batch = _read_batch(context, caller, before.newest, None, news)
        else:
            batch = _batch_of(news, caller, before.newest, None)
        seen[who] = [event.job_id for event in batch.events]
        assert batch.newest == news.newest, "others' events are passed over, not looked through again"
    assert seen == {"alice": [made["alice"]], "bob": [made["bob"]], ADMIN: [*made.values()]}


def jobs_of(world: World, who: str) -> Any:
    with context_of(world.client).database.read() as session:
        return JobRepository(session, who).page(limit=100, after=None, metadata={}).rows


@pytest.mark.short("revoke")
@pytest.mark.parametrize("end", ["revoke", "expire", "log_out"])
def test_a_stream_ends_with_what_it_was_opened_with(world: World, end: str) -> None:
    context = context_of(world.client)
    with context.database.write() as session:
        token = KeyRepository(session).log_in(world.key_ids["bob"], lasts_s=60)
    by_key = Caller(user="bob", role=Role.USER, key_id=world.key_ids["bob"])
    by_login = Caller(user="bob", role=Role.USER, key_id=world.key_ids["bob"], login=digest_of(token))
    assert not _read_batch(context, by_key, 0, None, NOT_YET).is_last
    assert not _read_batch(context, by_login, 0, None, NOT_YET).is_last
    with context.database.write() as session:
        keys = KeyRepository(session)
        if end == "revoke":
            keys.revoke(world.key_ids["bob"])
        elif end == "expire":
            keys.get(world.key_ids["bob"]).expires_at = 1.0
        else:
            keys.log_out(token)
    assert _read_batch(context, by_login, 0, None, NOT_YET).is_last
    assert _read_batch(context, by_key, 0, None, NOT_YET).is_last is (end != "log_out")


# --- logins ---


def log_in(world: World, who: str) -> Any:
    return world.client.post("/login", data={"key": world.secrets[who]}, headers=ORIGIN, follow_redirects=False)


def test_a_login_is_a_cookie_that_scripts_and_other_sites_do_not_get(world: World) -> None:
    response = log_in(world, "alice")
    assert (response.status_code, response.headers["location"]) == (303, "/")
    cookie = response.headers["set-cookie"]
    assert cookie.startswith(f"{LOGIN_COOKIE}=")
    assert {"HttpOnly", "SameSite=strict", "Path=/", "Max-Age=43200"} <= set(cookie.split("; "))
    assert "Secure" not in cookie
    page = world.client.get("/")
    assert page.headers["cache-control"] == "no-store"
    assert '<span id="user">alice</span>' in page.text
    assert [file["id"] for file in world.client.get("/v1/files").json()["data"]] == ["file-of-alice"]


@pytest.mark.short("log_out", "revoke")
@pytest.mark.parametrize("end", ["log_out", "revoke", "expire", "over"])
def test_a_login_ends_at_once(world: World, end: str) -> None:
    log_in(world, "alice")
    token = world.client.cookies[LOGIN_COOKIE]
    with context_of(world.client).database.write() as session:
        keys = KeyRepository(session)
        if end == "revoke":
            keys.revoke(world.key_ids["alice"])
        elif end == "expire":
            keys.get(world.key_ids["alice"]).expires_at = 1.0
        elif end == "over":
            keys.log_out(token)
            world.client.cookies.set(LOGIN_COOKIE, keys.log_in(world.key_ids["alice"], lasts_s=-1))
    if end == "log_out":
        assert world.client.get(JOBS).status_code == 200
        response = world.client.post("/logout", headers=ORIGIN, follow_redirects=False)
        assert (response.status_code, response.headers["location"]) == (303, "/login")
        assert LOGIN_COOKIE not in world.client.cookies
        world.client.cookies.set(LOGIN_COOKIE, token)
    assert world.client.get(JOBS).status_code == 401
    assert world.client.get("/", follow_redirects=False).status_code == 303


@pytest.mark.long
@pytest.mark.parametrize("who", ["wrong", "expired", "revoked"])
def test_a_key_that_opens_nothing_makes_no_login(world: World, who: str) -> None:
    response = log_in(world, who)
    assert (response.status_code, "set-cookie" in response.headers) == (401, False)
    assert "wrong, expired or revoked" in response.text
    assert world.secrets[who] not in response.text


@pytest.mark.short("https://evil.example")
@pytest.mark.parametrize("origin", [None, "null", "https://evil.example", "http://127.0.0.1:3000"])
def test_forms_of_other_sites_are_refused(world: World, origin: str | None) -> None:
    log_in(world, "alice")
    headers = {} if origin is None else {"Origin": origin}
    job_id = world.things["alice"].job_id
    for path, data in (("/login", {"key": world.secrets["bob"]}), ("/logout", {}), (f"{JOBS}/{job_id}/cancel", {})):
        response = world.client.post(path, data=data, headers=headers, follow_redirects=False)
        assert (response.status_code, response.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert world.client.get(f"{JOBS}/{job_id}").json()["status"] == "queued"
    assert world.client.post(f"{JOBS}/{job_id}/cancel", headers=ORIGIN).json()["status"] == "cancelled"


def test_a_wrong_key_is_not_made_good_by_a_login(world: World) -> None:
    log_in(world, "alice")
    assert world.ask("wrong", "GET", JOBS).status_code == 401


def test_login_page_without_keys_redirects_to_dashboard(settings: Settings) -> None:
    with serve(settings) as client:
        response = client.get("/login", follow_redirects=False)
        assert (response.status_code, response.headers["location"]) == (303, "/")
        page = client.get("/").text
        assert "Log out" not in page


# --- the audit ---


def audit_of(world: World) -> list[AuditEvent]:
    with context_of(world.client).database.read() as session:
        return list(AuditRepository(session).page(limit=1000).rows)


@pytest.mark.usefixtures("_short_streams")
def test_every_change_is_in_the_audit_and_nothing_else(world: World) -> None:
    things = world.things["alice"]
    for method, path in routes_of(world.client):
        if (method, path) in OPEN | PAGES:
            continue
        before = len(audit_of(world))
        response = ask(world, "alice", method, path, things)
        added = audit_of(world)[: len(audit_of(world)) - before]
        if method in ("GET", "HEAD") or path == "/v1/fine_tuning/plans":
            assert added == [], path
            continue
        assert len(added) == 1, (method, path, [(e.action, e.target, e.result) for e in added])
        (event,) = added
        assert event.result == ("done" if response.status_code == 200 else "refused"), path
        assert (event.key_id, event.user, event.peer) == (world.key_ids["alice"], "alice", "127.0.0.1")
        named = [value for name, value in (*things.ids.items(), ("{name}", BOX)) if name in path]
        assert event.target == (named[-1] if named else response.json().get("id")), path
        refused = audit_of(world)
        ask(world, "bob", method, path, things)
        newest = audit_of(world)[0]
        if named:
            assert (len(audit_of(world)), newest.user, newest.result) == (len(refused) + 1, "bob", "refused")
            assert (newest.action, newest.target) == (event.action, named[-1])


@pytest.mark.long
def test_logins_are_in_the_audit(world: World) -> None:
    log_in(world, "wrong")
    log_in(world, "alice")
    world.client.post("/logout", headers=ORIGIN)
    told = [(event.action, event.user, event.key_id, event.result) for event in reversed(audit_of(world))]
    key_id = world.key_ids["alice"]
    assert told == [
        ("log_in", None, None, "refused"),
        ("log_in", "alice", key_id, "done"),
        ("log_out", "alice", key_id, "done"),
    ]


def test_the_audit_comes_in_pages_newest_first(world: World) -> None:
    ids = [upload_as(world, "alice") for _ in range(5)]
    first = world.ask(ADMIN, "GET", "/v1/audit", params={"limit": 3}).json()
    assert ([event["target"] for event in first["data"]], first["has_more"]) == (ids[:1:-1], True)
    assert first["data"][0]["action"] == "upload_file"
    rest = world.ask(ADMIN, "GET", "/v1/audit", params={"after": first["data"][-1]["id"]}).json()
    assert ([event["target"] for event in rest["data"]], rest["has_more"]) == (ids[1::-1], False)
    assert world.ask(ADMIN, "GET", "/v1/audit", params={"after": "audit-99"}).status_code == 404
    assert world.ask(ADMIN, "GET", "/v1/audit", params={"after": "x"}).status_code == 400


def upload_as(world: World, who: str, content: bytes = b'{"text": "a"}\n') -> Any:
    files = {"file": ("a.jsonl", content)}
    response = world.ask(who, "POST", "/v1/files", files=files, data={"purpose": "fine-tune"})
    return response.json().get("id") or response.json()["error"]["code"]


def test_a_change_that_fails_is_not_in_the_audit_as_done(world: World, settings: Settings) -> None:
    """The event is part of the change's own transaction."""
    with context_of(world.client).database.write() as session:
        JobRepository(session).create(new_job(world.things["alice"].file_id, "alice", world.things["alice"].model))
    response = world.ask("alice", "DELETE", f"/v1/models/{world.things['alice'].model}")
    assert response.json()["error"]["code"] == "model_in_use"
    assert [event.result for event in audit_of(world)] == ["refused"]


# --- limits ---


def test_a_key_may_ask_so_often_in_a_minute(settings: Settings) -> None:
    with keyed_world(settings.model_copy(update={"requests_per_minute": 5})) as world:
        statuses = [world.ask("alice", "GET", JOBS).status_code for _ in range(7)]
        assert statuses == [200] * 5 + [429] * 2
        response = world.ask("alice", "GET", JOBS)
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
        assert 1 <= int(response.headers["retry-after"]) <= 120
        assert world.ask("bob", "GET", JOBS).status_code == 200


def test_client_with_many_wrong_keys_must_wait_and_others_are_served(world: World) -> None:
    statuses = [world.ask("wrong", "GET", JOBS).status_code for _ in range(61)]
    assert statuses == [401] * 60 + [429]
    assert log_in(world, "wrong").status_code == 429
    assert world.ask("alice", "GET", JOBS).status_code == 200
    assert log_in(world, "alice").status_code == 303


def _of(nbytes: int) -> bytes:
    """A training file of `nbytes` bytes."""
    return b'{"text": "%s"}' % (b"x" * (nbytes - 12))


def test_a_user_has_so_many_files_and_so_many_bytes(settings: Settings) -> None:
    few = settings.model_copy(update={"max_files_per_user": 3, "max_file_gib_per_user": 1000 / 1024**3})
    with keyed_world(few) as world:
        assert upload_as(world, "alice", _of(987)) == "file_quota_exceeded"  # 14 bytes are stored already
        assert upload_as(world, "alice", _of(900)).startswith("file-")
        last = upload_as(world, "alice", _of(66))
        assert upload_as(world, "alice", _of(20)) == "file_quota_exceeded"
        assert upload_as(world, "bob", _of(986)).startswith("file-")
        assert world.ask("alice", "DELETE", f"/v1/files/{last}").status_code == 200
        assert upload_as(world, "alice", _of(20)).startswith("file-")
        assert len(list(settings.files_dir.iterdir())) == 4 + 3  # refused uploads have left nothing


def test_a_misspelt_model_is_told_with_no_model_of_another_user(world: World) -> None:
    name = f"{world.things['alice'].model}x"
    told = {
        who: world.ask(who, "POST", JOBS, json={"model": name, "training_file": "file-1"}).json()["error"]["message"]
        for who in ("alice", "bob", ADMIN)
    }
    assert [f"did you mean '{world.things['alice'].model}" in told[who] for who in ("alice", "bob", ADMIN)] == [
        True,
        False,
        True,
    ]


def test_one_users_streams_are_bounded_and_leave_those_of_others_alone(world: World) -> None:
    feed = context_of(world.client).news
    done = f"{JOBS}/{{}}/events/stream"
    with contextlib.ExitStack() as streams:
        for _ in range(MAX_STREAMS_PER_USER):
            streams.enter_context(feed.place("bob"))
        refused = world.ask("bob", "GET", done.format(world.things["bob"].done_id))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_streams")
        assert world.ask("alice", "GET", done.format(world.things["alice"].done_id)).status_code == 200
        assert world.ask(ADMIN, "GET", done.format(world.things["bob"].done_id)).status_code == 200
    assert world.ask("bob", "GET", done.format(world.things["bob"].done_id)).status_code == 200
    assert feed.has_place("bob")
