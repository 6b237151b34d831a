"""Two users: for every endpoint that the app has, one user sees no data of the other.

`WHOSE` says whose data each endpoint returns; a new endpoint must be added there, or a test fails. All data of a user
is marked, so that a leak is noticed in any answer.
"""

from collections.abc import Iterator
from enum import Enum
from typing import Any

import pytest

from tests.support.service.api_client import context_of
from tests.support.service.keyed import BOX, NOTHING, World, end_streams, keyed_world, leave_traces, routes_of
from tests.unit.service.api.test_authentication import BOXES, HOOKS, JOBS, arguments_of
from windlass.service.installation.settings import Settings
from windlass.storage.sql.models import AuditEvent, Checkpoint
from windlass.storage.sql.repositories.events import EventRepository
from windlass.storage.sql.repositories.files import FileRepository
from windlass.storage.sql.repositories.jobs import JobRepository
from windlass.storage.sql.repositories.webhooks import WebhookRepository


class Whose(Enum):
    """The data that an endpoint answers with."""

    NOBODYS = "the same for all, or the asker's name"
    ADMINS = "everybody's, and for admins only"
    LISTED = "all of the asker's"
    NAMED = "of what its path names, where that is the asker's"
    MADE = "what the asker made just now, of nothing that was there"
    MADE_OF = "what the asker made just now of what the body names, where that is the asker's"


FILE, JOB, MODEL, HOOK = (
    "/v1/files/{file_id}",
    f"{JOBS}/{{job_id}}",
    "/v1/models/{model:path}",
    f"{HOOKS}/{{endpoint_id}}",
)
WHOSE = {
    ("GET", "/"): Whose.NOBODYS,
    ("GET", "/docs"): Whose.NOBODYS,
    ("GET", "/healthz"): Whose.NOBODYS,
    ("GET", "/readyz"): Whose.NOBODYS,
    ("GET", "/login"): Whose.NOBODYS,
    ("POST", "/login"): Whose.NOBODYS,
    ("POST", "/logout"): Whose.NOBODYS,
    ("GET", "/openapi.json"): Whose.NOBODYS,
    ("GET", "/static/vendor/plotly.min.js"): Whose.NOBODYS,
    ("GET", "/static/{path}"): Whose.NOBODYS,
    ("GET", "/v1/webhook_event_types"): Whose.NOBODYS,
    ("GET", "/metrics"): Whose.ADMINS,
    ("GET", "/v1/audit"): Whose.ADMINS,
    ("POST", f"{BOXES}/{{name}}/drain"): Whose.ADMINS,
    ("POST", f"{BOXES}/{{name}}/resume"): Whose.ADMINS,
    ("POST", f"{BOXES}/{{name}}/remove"): Whose.ADMINS,
    ("POST", "/v1/join_codes"): Whose.ADMINS,
    ("GET", f"{BOXES}/{{name}}"): Whose.NOBODYS,
    ("GET", "/v1/fine_tuning/machines"): Whose.NOBODYS,
    ("GET", "/v1/fine_tuning/machines/{machine}"): Whose.NOBODYS,
    ("GET", "/v1/fine_tuning/shapes"): Whose.NOBODYS,
    ("GET", BOXES): Whose.LISTED,
    ("GET", "/v1/events/stream"): Whose.LISTED,
    ("GET", "/v1/files"): Whose.LISTED,
    ("GET", JOBS): Whose.LISTED,
    ("GET", "/v1/models"): Whose.LISTED,
    ("GET", "/v1/storage"): Whose.LISTED,
    ("GET", HOOKS): Whose.LISTED,
    ("GET", FILE): Whose.NAMED,
    ("GET", f"{FILE}/content"): Whose.NAMED,
    ("DELETE", FILE): Whose.NAMED,
    ("GET", JOB): Whose.NAMED,
    ("DELETE", JOB): Whose.NAMED,
    ("GET", f"{JOB}/checkpoints"): Whose.NAMED,
    ("DELETE", f"{JOB}/checkpoints/{{checkpoint_id}}"): Whose.NAMED,
    ("GET", f"{JOB}/events"): Whose.NAMED,
    ("GET", f"{JOB}/events/stream"): Whose.NAMED,
    ("GET", f"{JOB}/metrics"): Whose.NAMED,
    ("GET", f"{JOB}/plan"): Whose.NAMED,
    ("GET", f"{JOB}/plan/timeline"): Whose.NAMED,
    ("GET", f"{JOB}/storage"): Whose.NAMED,
    ("GET", f"{JOB}/timeline"): Whose.NAMED,
    ("POST", f"{JOB}/cancel"): Whose.NAMED,
    ("POST", f"{JOB}/pause"): Whose.NAMED,
    ("POST", f"{JOB}/resume"): Whose.NAMED,
    ("POST", f"{JOB}/restart"): Whose.NAMED,
    ("GET", MODEL): Whose.NAMED,
    ("DELETE", MODEL): Whose.NAMED,
    ("GET", HOOK): Whose.NAMED,
    ("POST", HOOK): Whose.NAMED,
    ("DELETE", HOOK): Whose.NAMED,
    ("POST", f"{HOOK}/rotate_secret"): Whose.NAMED,
    ("POST", f"{HOOK}/test"): Whose.NAMED,
    ("POST", "/v1/files"): Whose.MADE,
    ("POST", HOOKS): Whose.MADE,
    ("POST", JOBS): Whose.MADE_OF,
    ("POST", "/v1/fine_tuning/plans"): Whose.MADE_OF,
}
THEIRS, OTHER = "alice", "bob"


def routes(*whose: Whose) -> pytest.MarkDecorator:
    found = [route for route, each in WHOSE.items() if each in whose]
    return pytest.mark.parametrize(("method", "path"), found, ids=map(" ".join, found))


def mark_of(who: str | None) -> str:
    return f"mark-{who}"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A service that no test of this file changes."""
    settings = Settings(home=tmp_path_factory.mktemp("home"), port=8642, max_file_mib=1, cluster_host="10.77.0.1")
    with pytest.MonkeyPatch.context() as patch, keyed_world(settings) as world:
        end_streams(patch)
        for who, things in world.things.items():
            _mark(world, settings, who)
            leave_traces(context_of(world.client).database, settings, things.job_id, message=mark_of(who))
        yield world


def _mark(world: World, settings: Settings, who: str | None) -> None:
    """Writes the user's mark into all of the user's data."""
    things, mark = world.things[who], mark_of(who)
    (settings.files_dir / things.file_id).write_text(f'{{"text": "{mark}"}}\n')
    with context_of(world.client).database.write() as session:
        FileRepository(session).get(things.file_id).filename = f"{mark}.jsonl"
        job = JobRepository(session).get(things.job_id)
        job.suffix, job.job_metadata, job.attempt = mark, {"a": mark}, 1
        EventRepository(session).add(things.job_id, attempt=1, message=mark)
        checkpoint = session.get(Checkpoint, things.checkpoint_id)
        assert checkpoint is not None
        checkpoint.model = f"{mark}-step-1"
        endpoint = WebhookRepository(session).get(things.endpoint_id)
        endpoint.name, endpoint.url = mark, f"https://{mark}.example/hook"
        session.add(AuditEvent(created_at=1.0, action="x", target=mark, result="done"))


def ask(world: World, who: str, method: str, path: str, **more: Any) -> Any:
    """Makes a valid request of user `who` for objects of alice."""
    things = world.things[THEIRS]
    filled = path.replace("{model:path}", "{model}").format(**things.ids, name=BOX, machine="rtx4090", path="style.css")
    return world.ask(who, method, filled, **(arguments_of(method, path, world.things[who]) | more))


def told_of_others(world: World, who: str, text: str) -> list[str]:
    """The ids and marks of other users that an answer contains."""
    others = {each: things for each, things in world.things.items() if each != who}
    found = [value for things in others.values() for value in (*things.ids.values(), things.done_id) if value in text]
    return found + [mark_of(each) for each in others if mark_of(each) in text]


def state_of(world: World, who: str) -> list[Any]:
    paths = [path for (method, path), whose in WHOSE.items() if method == "GET" and whose is Whose.NAMED]
    return [ask(world, who, "GET", path).text for path in paths]


def test_every_endpoint_is_in_whose(world: World) -> None:
    assert set(WHOSE) == set(routes_of(world.client)), "one that is new has to be put into WHOSE"


@routes(*Whose)
def test_endpoint_with_id_in_path_is_marked_named(method: str, path: str) -> None:
    assert ("_id}" in path or "{model" in path) == (WHOSE[method, path] is Whose.NAMED)


@routes(Whose.LISTED)
def test_a_list_has_ones_own_and_nothing_of_others(world: World, method: str, path: str) -> None:
    for who in (THEIRS, OTHER):
        response = ask(world, who, method, path)
        assert response.status_code == 200
        things = world.things[who]
        assert any(value in response.text for value in (*things.ids.values(), mark_of(who))), "so it would be seen"
        assert told_of_others(world, who, response.text) == []


@routes(Whose.NAMED)
def test_object_of_another_user_is_not_found(world: World, method: str, path: str) -> None:
    before = state_of(world, THEIRS)
    response = ask(world, OTHER, method, path)
    assert response.status_code == 404
    assert mark_of(THEIRS) not in response.text
    text, none = response.text, world.ask(OTHER, method, _filled(path), **arguments_of(method, path, NOTHING)).text
    for name, value in world.things[THEIRS].ids.items():
        text, none = text.replace(value, name), none.replace(NOTHING.ids[name], name)
    assert text == none, "not to be told from what nobody has"
    assert state_of(world, THEIRS) == before
    if method == "GET":
        assert ask(world, THEIRS, method, path).status_code == 200, "so it was there"


def _filled(path: str) -> str:
    return path.replace("{model:path}", "{model}").format(**NOTHING.ids)


@routes(Whose.ADMINS)
def test_data_of_all_users_is_for_admins(world: World, method: str, path: str) -> None:
    response = ask(world, OTHER, method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (403, "permission_denied")
    assert told_of_others(world, OTHER, response.text) == []
    assert ask(world, "root", method, path).status_code == 200


@routes(Whose.NOBODYS, Whose.MADE)
def test_shared_or_new_data_has_nothing_of_other_users(world: World, method: str, path: str) -> None:
    response = ask(world, OTHER, method, path)
    assert response.status_code < 500
    assert told_of_others(world, OTHER, response.text) == []


@pytest.mark.parametrize(
    ("method", "path", "field"),
    [
        ("POST", JOBS, "training_file"),
        ("POST", JOBS, "validation_file"),
        ("POST", JOBS, "model"),
        ("POST", "/v1/fine_tuning/plans", "model"),
    ],
)
def test_create_from_object_of_another_user_is_refused(world: World, method: str, path: str, field: str) -> None:
    own, others = world.things[OTHER], world.things[THEIRS]
    body: dict[str, Any] = {"model": own.model}
    body |= {"training_file": own.file_id} if path == JOBS else {"batch_size": 1}
    answers = []
    for value in (others, NOTHING):
        body[field] = value.model if field == "model" else value.file_id
        response = ask(world, OTHER, method, path, json=body)
        answers.append((response.status_code, response.text.replace(body[field], field)))
    assert answers[0] == answers[1], "not to be told from what nobody has"
    assert answers[0][0] in (400, 404)
    assert mark_of(THEIRS) not in answers[0][1]


@routes(Whose.MADE_OF)
def test_misspelt_model_suggests_no_model_of_another_user(world: World, method: str, path: str) -> None:
    body = arguments_of(method, path, world.things[OTHER])["json"]
    misspelt = f"{world.things[THEIRS].model[:-1]}"
    told = {who: ask(world, who, method, path, json=body | {"model": misspelt}).text for who in (THEIRS, OTHER)}
    assert world.things[THEIRS].model in told[THEIRS]
    assert told_of_others(world, OTHER, told[OTHER]) == []


def test_page_after_object_of_another_user_is_refused(world: World) -> None:
    """A page after another user's object would reveal that it exists, and when it was made."""
    things = world.things[THEIRS]
    for path, after in (("/v1/files", things.file_id), (JOBS, things.job_id), (HOOKS, things.endpoint_id)):
        assert world.ask(OTHER, "GET", path, params={"after": after}).status_code == 404
        assert world.ask(THEIRS, "GET", path, params={"after": after}).status_code == 200


def test_live_events_of_another_are_passed_over_wherever_a_stream_begins(world: World) -> None:
    with context_of(world.client).database.read() as session:
        newest = EventRepository(session).last_ordinal()
    for after in range(newest + 1):
        text = ask(world, OTHER, "GET", "/v1/events/stream", headers={"Last-Event-ID": str(after)}).text
        assert told_of_others(world, OTHER, text) == []
