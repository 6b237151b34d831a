"""Schemathesis makes requests from our own description, right ones and wrong ones: nothing fails, nothing answers with
what the description does not have, and nobody gets in without a key.

Each request is made of a service that asks for no key, and of one that does: without one, with a wrong one, and with
those of a user and of an admin. Every second one names things that its sender has.
"""

import itertools
import os
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.python.asgi import shutdown_lifespans
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.unit.service.api_client import make_model, no_hub
from tests.unit.service.keyed import ADMIN, USERS, Things, make_keys, make_things
from windlass.planner.report import PlanReport
from windlass.service.app import create_app
from windlass.service.settings import Settings
from windlass.storage.sql.database import Database, migrate

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
# Streams have no end.
ENDLESS = r"/stream$"
HOST = "127.0.0.1:8642"
NUM_CASES_SHORT, WITH_COVERAGE = 3, 100
NUM_CASES = int(os.environ.get("WINDLASS_TEST_SCHEMA_CASES", NUM_CASES_SHORT))
IS_LONG = NUM_CASES > NUM_CASES_SHORT
STRANGERS, USER = (None, "wrong", "expired", "revoked"), USERS[0]
NUMBERS = itertools.count()
ALL_CHECKS = list(hypothesis.HealthCheck)
# The phase that goes through every part of every schema makes hundreds of cases of each operation: for the long form.
CONFIG = {
    "generation": {"with-security-parameters": False},
    "phases": {"coverage": {"enabled": NUM_CASES >= WITH_COVERAGE}, "stateful": {"enabled": False}},
}


def describe() -> dict[str, Any]:
    """The description; nothing is opened for it."""
    with tempfile.TemporaryDirectory() as home:
        return create_app(Settings(home=Path(home))).openapi()


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One that is asked from its own machine."""

    app: Any
    settings: Settings
    database: Database
    secrets: dict[str, str]  # none: it asks for no key

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            scope["client"] = ("127.0.0.1", 50000)
        await self.app(scope, receive, send)

    def ask(self, case: Case, who: str | None) -> int:
        """Make a request and check its answer; the status."""
        headers = {} if who is None or not self.secrets else {"Authorization": f"Bearer {self.secrets[who]}"}
        response = case.call_and_validate(
            base_url=f"http://{HOST}", app=self, headers=headers, checks=CHECKS, timeout=60
        )
        return response.status_code

    def new_things(self, who: str | None) -> Things:
        """Things that nothing was done to."""
        return make_things(self.database, self.settings, who, number=next(NUMBERS))


schema = schemathesis.openapi.from_dict(describe(), config=schemathesis.Config.from_dict(CONFIG))
schema = schema.exclude(path_regex=ENDLESS)
schema.app = lambda *_: None  # each request names its own


@pytest.fixture(
    scope="module", params=["sqlite", pytest.param("postgresql", marks=() if IS_LONG else pytest.mark.long)]
)
def urls(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Two databases."""
    if request.param == "sqlite":
        folder = tmp_path_factory.mktemp("databases")
        yield [f"sqlite:///{folder / name}.db" for name in ("open", "keyed")]
    else:
        server = request.getfixturevalue("postgresql")
        with server.new_database(migrated=True) as first, server.new_database(migrated=True) as second:
            yield [first, second]


@pytest.fixture(scope="module")
def services(urls: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Service]]:
    """One that asks for no key, and one that does."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        # Whoever is sent 1000 wrong requests in a minute is not told why.
        patch.setattr("windlass.service.limits._FAILURES_PER_MINUTE", 10**9)
        # What goes out to others, and what starts processes, is tested elsewhere.
        patch.setattr("windlass.service.webhooks.send", lambda *_, **__: 204)
        plan = asdict(PlanReport(feasible=False, reasons=("it has no weights",)))
        patch.setattr("windlass.service.plans._run", lambda *_: plan)
        for is_keyed, url in enumerate(urls):
            home = tmp_path_factory.mktemp("home")
            settings = Settings(home=home, port=8642, max_file_mib=1, database_url=url, requests_per_minute=10**9)
            settings.make_dirs()
            make_model(settings.models_dir / "tiny")
            migrate(url)
            database = Database(url)
            secrets = make_keys(database)[0] if is_keyed else {}
            app = create_app(settings, hub_files=no_hub)
            found.append(Service(app=app, settings=settings, database=database, secrets=secrets))
        yield found
        shutdown_lifespans()
        for service in found:
            service.database.close()


def name_what_is_there(case: Case, things: Things) -> None:
    """Have a request be about these things."""
    case.path_parameters = {name: things.ids.get(name, value) for name, value in case.path_parameters.items()}
    if isinstance(case.body, dict) and "training_file" in case.body:
        case.body = {**case.body, "model": "tiny", "training_file": things.file_id}


@schema.parametrize()
@hypothesis.settings(max_examples=NUM_CASES, deadline=None, derandomize=True, suppress_health_check=ALL_CHECKS)
def test_no_request_is_answered_with_what_is_not_described(case: Case, services: list[Service]) -> None:
    keyless, keyed = services
    is_open = case.operation.definition.raw.get("security") == []
    names_things = zlib.crc32(repr((case.path_parameters, case.query, case.body)).encode()) % 2
    for service, who in ((keyless, None), *((keyed, who) for who in (*STRANGERS, USER, ADMIN))):
        if names_things and who not in STRANGERS[1:]:
            name_what_is_there(case, service.new_things(who))
        status = service.ask(case, who)
        if service is keyed and who in STRANGERS and not is_open:
            assert status == 401
        else:
            assert status != 401


def test_the_description_has_every_call_that_is_answered_and_types_each_answer() -> None:
    described = describe()
    untyped = {
        (method, path)
        for path, operations in described["paths"].items()
        for method, operation in operations.items()
        for answer in operation["responses"]["200"]["content"].values()
        if not ({"$ref", "format"} & answer["schema"].keys() if "schema" in answer else answer.get("itemSchema"))
    }
    assert untyped == set()
    open_to_all = {path for path, each in described["paths"].items() if all("security" in e for e in each.values())}
    assert open_to_all == {"/healthz", "/readyz"}
