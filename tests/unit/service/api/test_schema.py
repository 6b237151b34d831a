"""Schemathesis makes valid and invalid requests from our own API description.

No request fails, no answer is missing in the description, and no request without a valid key is served.

Each request is made to a service without keys, and to one with keys: without a key, with a wrong one, with a user's and
with an admin's. Every second request names objects that its sender has.

The long form makes thousands on both databases, and prints how many; `make test` makes a few for each operation.
`python -m benchmarks.schema` makes a hundred thousand different ones, each by one sender.
"""

import itertools
import json
import os
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import hypothesis
import pytest
import schemathesis
import yaml
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.python.asgi import shutdown_lifespans
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.service.api_client import make_model, no_hub
from tests.support.service.boxes import add_box
from tests.support.service.keyed import (
    ADMIN,
    BOX,
    USERS,
    Things,
    end_streams,
    leave_traces,
    make_keys,
    make_things,
    routes_in,
)
from windlass.planner.hardware.hardware import Hardware, example_machines
from windlass.planner.question.report import PlanReport
from windlass.service.api.app import create_app
from windlass.service.installation.settings import Settings
from windlass.storage.sql.database import Database, migrate
from windlass.storage.sql.repositories.jobs import JobRepository
from windlass.storage.sql.repositories.webhooks import EVENT_TYPES, WebhookRepository

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
HOST = "127.0.0.1:8642"
NUM_CASES, NUM_CASES_LONG = 2, 100
# Requests for each operation, and the file for the numbers of answers; `python -m benchmarks.schema` sets them.
NUM_CASES_ONCE = int(os.environ.get("SCHEMA_CASES", "0"))
TOLD_FILE = os.environ.get("SCHEMA_TOLD")
STRANGERS, USER = (None, "wrong", "expired", "revoked"), USERS[0]
NUMBERS = itertools.count()
ALL_CHECKS = list(hypothesis.HealthCheck)
# Paths that the description does not contain: pages, their assets, and Prometheus metrics.
PAGES = {
    "/",
    "/docs",
    "/login",
    "/logout",
    "/openapi.json",
    "/metrics",
    "/static/vendor/plotly.min.js",
    "/static/{path}",
}


def describe() -> dict[str, Any]:
    """The API description. Nothing is opened for it."""
    with tempfile.TemporaryDirectory() as home:
        return create_app(Settings(home=Path(home))).openapi()


def described(*, goes_through_all: bool) -> Any:
    """The schema to make requests from.

    `goes_through_all`: also cover every part of every schema, which makes hundreds of cases for each operation.
    """
    phases = {"coverage": {"enabled": goes_through_all}, "stateful": {"enabled": False}}
    config = schemathesis.Config.from_dict({"generation": {"with-security-parameters": False}, "phases": phases})
    schema = schemathesis.openapi.from_dict(describe(), config=config)
    schema.app = lambda *_: None  # each request names its own app
    return schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A service that gets local requests."""

    app: Any
    settings: Settings
    database: Database
    secrets: dict[str, str]  # empty if the service has no keys
    kept: dict[str | None, Things] = field(default_factory=dict)  # only read by requests
    told: Counter[tuple[str, int]] = field(default_factory=Counter)  # operations and the status of their answers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            scope["client"] = ("127.0.0.1", 50000)
        await self.app(scope, receive, send)

    def ask(self, case: Case, who: str | None, **more: Any) -> int:
        """Makes a request, checks its answer, and returns the status."""
        headers = {} if who is None or not self.secrets else {"Authorization": f"Bearer {self.secrets[who]}"}
        response = case.call_and_validate(
            base_url=f"http://{HOST}", app=self, headers=headers, checks=CHECKS, timeout=60, **more
        )
        self.told[case.operation.label, response.status_code] += 1
        return response.status_code

    def things_for(self, case: Case, who: str | None) -> Things:
        """Unchanged objects of the sender."""
        if case.method == "GET" and who in self.kept:
            return self.kept[who]
        number = next(NUMBERS)
        things = make_things(self.database, self.settings, who, number=number)
        if number % 2:  # as stored by another home, which has another key
            with self.database.write() as session:
                WebhookRepository(session).get(things.endpoint_id).secret = "gAAAAA"
        if case.method == "GET":
            self.kept[who] = things
            leave_traces(self.database, self.settings, things.done_id)
        return things


def _scope(fixture_name: str, config: pytest.Config) -> Literal["function", "module"]:
    """One service for all operations; or one for each, if so many cases would make its lists too long."""
    return "function" if NUM_CASES_ONCE else "module"


@pytest.fixture(scope=_scope, params=["sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
def urls(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The URLs of two databases."""
    if request.param == "sqlite":
        folder = tmp_path_factory.mktemp("databases")
        yield [f"sqlite:///{folder / name}.db" for name in ("open", "keyed")]
    else:
        server = request.getfixturevalue("postgresql")
        with server.new_database(migrated=True) as first, server.new_database(migrated=True) as second:
            yield [first, second]


@pytest.fixture(scope=_scope)
def services(
    urls: list[str], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[list[Service]]:
    """A service without keys, and one with keys."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        # Clients with 1000 wrong requests in a minute would otherwise get another error.
        patch.setattr("windlass.service.api.middleware.rate_limit._FAILURES_PER_MINUTE", 10**9)
        # Requests to other servers, and started processes, are tested elsewhere.
        patch.setattr("windlass.service.api.routes.webhooks.send", lambda *_, **__: 204)
        plan = PlanReport(feasible=False, reasons=("it has no weights",))
        patch.setattr("windlass.service.api.plan_run.PlanRun.poll", lambda _: plan)
        machine = Hardware.model_validate(yaml.safe_load(example_machines()["rtx4090-server"].read_text()))
        patch.setattr("windlass.service.api.routes.plans.measured_hardware", lambda _: machine)
        end_streams(patch)
        for is_keyed, url in enumerate(urls):
            home = tmp_path_factory.mktemp("home")
            settings = Settings(
                home=home,
                port=8642,
                max_file_mib=1,
                database_url=url,
                requests_per_minute=10**9,
                cluster_host="10.77.0.1",
            )
            settings.make_dirs()
            make_model(settings.models_dir / "tiny")
            migrate(url)
            database = Database(url)
            secrets = make_keys(database)[0] if is_keyed else {}
            app = create_app(settings, hub_files=no_hub)
            found.append(Service(app=app, settings=settings, database=database, secrets=secrets))
            add_box(found[-1], BOX)
        yield found
        shutdown_lifespans()
        for service in found:
            service.database.close()
    _print_numbers(request.config, found)


def _print_numbers(config: pytest.Config, services: list[Service]) -> None:
    """Prints how many requests there were, if this file runs alone."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    told = services[0].told + services[1].told
    if TOLD_FILE is not None:
        with Path(TOLD_FILE).open("a") as file:
            file.write(json.dumps([[*key, number] for key, number in told.items()]) + "\n")
    if terminal is None or not told:
        return
    statuses: Counter[int] = Counter()
    for (_, status), number in told.items():
        statuses[status] += number
    operations = {operation for operation, _ in told}
    never = sorted(operations - {operation for operation, status in told if status == 200})
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        terminal.write_line("")
        terminal.write_line(f"{told.total()} requests of {len(operations)} operations; by status: {dict(statuses)}")
        terminal.write_line(f"never answered with 200: {', '.join(never) or 'none'}")


def name_what_is_there(service: Service, case: Case, who: str | None, luck: int) -> dict[str, Any]:
    """Changes a request to name existing objects, and returns further arguments for it."""
    things = service.things_for(case, who)
    ids = dict(things.ids)
    if luck & 2 and "checkpoint_id" not in case.path_parameters:
        ids["job_id"] = things.done_id
    ids["name"] = BOX
    case.path_parameters = {name: ids.get(name, value) for name, value in case.path_parameters.items()}
    if isinstance(case.body, dict):
        case.body = {**case.body, **_right(case, things, with_options=bool(luck & 4))}
    change = {"DELETE": JobRepository.request_cancel}.get(case.method)
    change = JobRepository.request_pause if case.path.endswith("/resume") else change
    if luck & 8 and change is not None:
        with service.database.write() as session:
            change(JobRepository(session), things.job_id)
    if case.operation.label == "POST /v1/files":
        return {"files": {"file": ("a.jsonl", b'{"text": "a"}\n')}, "data": {"purpose": "fine-tune"}}
    return {}


def _right(case: Case, things: Things, *, with_options: bool) -> dict[str, Any]:
    """The fields that the API requires beyond its description. Without options the request succeeds."""
    event_type = EVENT_TYPES[0]
    job = {"model": "tiny", "training_file": things.file_id}
    plain = {"validation_file": None, "suffix": "a", "integrations": [], "method": None, "hyperparameters": None}
    hook = {"name": "b", "url": "https://hook.example/", "event_types": [event_type]}
    fields: dict[str, dict[str, Any]] = {
        "/v1/fine_tuning/jobs": job if with_options else job | plain | {"windlass": {}, "metadata": {"a": "b"}},
        "/v1/fine_tuning/plans": {"model": "tiny"} if with_options else {"model": "tiny", "windlass": {}},
        "/v1/webhook_endpoints": hook,
        "/v1/webhook_endpoints/{endpoint_id}": {} if with_options else hook,
        "/v1/webhook_endpoints/{endpoint_id}/test": {"event_type": event_type},
    }
    return fields.get(case.path, {})


def check(case: Case, services: list[Service]) -> None:
    """Makes the request with every kind of key.

    With very many cases, each is made with one kind; one in eight without a valid key.
    """
    keyless, keyed = services
    is_open = case.operation.definition.raw.get("security") == []
    luck = zlib.crc32(repr((case.path_parameters, case.query, case.body)).encode())
    ways = [(keyless, None), *((keyed, who) for who in (*STRANGERS, USER, ADMIN))]
    if NUM_CASES_ONCE and (case.path_parameters or case.query or isinstance(case.body, dict)):
        place = (luck >> 4) % 8
        ways = [ways[1 + (luck >> 8) % len(STRANGERS)] if place == 0 else ways[(0, -2, -1)[place % 3]]]
    for service, who in ways:
        more = name_what_is_there(service, case, who, luck) if luck & 1 and who not in STRANGERS[1:] else {}
        status = service.ask(case, who, **more)
        if service is keyed and who in STRANGERS and not is_open:
            assert status == 401
        else:
            assert status != 401


few, many = described(goes_through_all=False), described(goes_through_all=True)


@few.parametrize()
@hypothesis.settings(max_examples=NUM_CASES, deadline=None, derandomize=True, suppress_health_check=ALL_CHECKS)
def test_no_request_is_answered_with_what_is_not_described(case: Case, services: list[Service]) -> None:
    check(case, services)


@pytest.mark.long
@pytest.mark.timeout(1800)
@many.parametrize()
@hypothesis.settings(max_examples=NUM_CASES_ONCE or NUM_CASES_LONG, deadline=None, suppress_health_check=ALL_CHECKS)
def test_no_request_of_thousands_is_answered_with_what_is_not_described(case: Case, services: list[Service]) -> None:
    check(case, services)


def test_the_description_has_every_call_that_is_answered_and_types_each_answer(tmp_path: Path) -> None:
    described = describe()
    untyped = {
        (method, path)
        for path, operations in described["paths"].items()
        for method, operation in operations.items()
        for answer in operation["responses"]["200"]["content"].values()
        if not ({"$ref", "format"} & answer["schema"].keys() if "schema" in answer else answer.get("itemSchema"))
    }
    assert untyped == set()
    answered = {
        (method, path.replace(":path", ""))
        for method, path in routes_in(create_app(Settings(home=tmp_path)))
        if path not in PAGES
    }
    assert answered == {(method.upper(), path) for path, each in described["paths"].items() for method in each}
    open_to_all = {path for path, each in described["paths"].items() if all("security" in e for e in each.values())}
    assert open_to_all == {"/healthz", "/readyz"}
