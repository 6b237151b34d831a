"""A service with keys: two users and an admin, each with a file, a job and a model, and keys that are not valid."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import pytest
from fastapi.testclient import TestClient
from starlette.routing import BaseRoute, Mount, Route

from tests.support.service.api_client import context_of, make_model, serve
from tests.support.service.boxes import add_box
from windlass.actors.job.journal import METRICS, JournalRecord
from windlass.actors.messages import SpanKind, WorkSpan
from windlass.actors.timeline.span_files import FOLDER, SIMULATED_FOLDER, StepSpans, keep_step
from windlass.planner.question.report import PlanReport
from windlass.service.auth.caller import Caller
from windlass.service.installation.settings import Settings
from windlass.service.jobs.spec_builder import job_dir
from windlass.service.webhooks.secret_box import SecretBox
from windlass.storage.sql.database import Database
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.models import Checkpoint
from windlass.storage.sql.repositories.api_keys import KeyRepository, Role
from windlass.storage.sql.repositories.files import FileRepository
from windlass.storage.sql.repositories.jobs import JobRepository, NewJob
from windlass.storage.sql.repositories.journal_import import import_journal
from windlass.storage.sql.repositories.webhooks import WebhookRepository

USERS = ("alice", "bob")
ADMIN = "root"
BOX = "attic"  # the name of a box


@dataclass(frozen=True, slots=True, kw_only=True)
class Things:
    """The objects of one user, by their names in paths."""

    file_id: str
    job_id: str  # queued
    done_id: str  # id of a job that succeeded
    model: str  # of the job that succeeded
    endpoint_id: str  # that receives webhooks
    checkpoint_id: str  # of the queued job

    @property
    def ids(self) -> dict[str, str]:
        return {
            "file_id": self.file_id,
            "job_id": self.job_id,
            "model": self.model,
            "endpoint_id": self.endpoint_id,
            "checkpoint_id": self.checkpoint_id,
        }


NOTHING = Things(
    file_id="file-0123456789",
    job_id="ftjob-0123456789",
    done_id="ftjob-9876543210",
    model="ft:tiny:x:0123456789ab",
    endpoint_id="we_0123456789",
    checkpoint_id="ftckpt-0123456789",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The service and its users."""

    client: TestClient
    secrets: dict[str, str]  # by user, and of the keys "expired" and "revoked"
    key_ids: dict[str, str]
    things: dict[str | None, Things]  # by user; None: without an owner, from before there were keys

    def ask(self, who: str | None, method: str, path: str, **arguments: Any) -> Any:
        """Makes a request with the key of the user `who`, or without one. Follows no redirects."""
        headers = {} if who is None else {"Authorization": f"Bearer {self.secrets[who]}"}
        headers |= arguments.pop("headers", {})
        return self.client.request(method, path, headers=headers, follow_redirects=False, **arguments)


@contextmanager
def keyed_world(settings: Settings) -> Iterator[World]:
    """A service with all of these users and objects."""
    make_model(settings.models_dir / "tiny")
    with serve(settings) as client:
        things: dict[str | None, Things] = {
            user: make_things(context_of(client).database, settings, user) for user in (None, *USERS, ADMIN)
        }
        add_box(context_of(client), BOX)
        secrets, key_ids = make_keys(context_of(client).database)
        yield World(client=client, secrets=secrets, key_ids=key_ids, things=things)


def routes_of(client: TestClient) -> list[tuple[str, str]]:
    """Method and path of every endpoint of the client's app; mounted folders as one path."""
    return routes_in(client.app)


def routes_in(app: Any) -> list[tuple[str, str]]:
    """Method and path of every endpoint of an app."""
    found = []
    for route in _walk(app.routes):
        if isinstance(route, Mount):
            found.append(("GET", f"{route.path}/{{path}}"))
        else:
            assert isinstance(route, Route), f"a kind of route that this test does not know: {route}"
            found += [(method, route.path) for method in route.methods or () if method != "HEAD"]
    return sorted(found, key=_turn)


def _turn(route: tuple[str, str]) -> tuple[object, ...]:
    """The sort key of a route: deletions come last, and among them parts before the whole."""
    method, path = route
    takes = method == "DELETE" or path.endswith(("/cancel", "/remove"))
    return takes, method == "DELETE", path == "/logout", -path.count("/") if takes else 0, route


def _walk(routes: list[BaseRoute]) -> Iterator[BaseRoute]:
    for route in routes:
        included = getattr(route, "original_router", None)
        if included is None:
            yield route
        else:
            yield from _walk(included.routes)


def new_job(file_id: str, owner: str | None, model: str = "tiny") -> NewJob:
    return NewJob(
        model=model,
        training_file=file_id,
        validation_file=None,
        suffix=None,
        seed=1,
        method={"type": "supervised", "supervised": {"hyperparameters": {}}},
        windlass={},
        metadata={},
        priority=0,
        idempotency_key=None,
        request_digest=None,
        owner=owner,
    )


def make_keys(database: Database) -> tuple[dict[str, str], dict[str, str]]:
    """The secrets, and the ids, of all keys."""
    secrets, key_ids = {"wrong": "wk-" + "x" * 43}, {}
    with database.write() as session:
        keys = KeyRepository(session)
        for name in (*USERS, ADMIN, "expired", "revoked"):
            key, secrets[name] = keys.create(
                name=name,
                user=name if name in (*USERS, ADMIN) else USERS[0],
                role=Role.ADMIN if name == ADMIN else Role.USER,
                expires_at=time.time() - 1 if name == "expired" else None,
            )
            key_ids[name] = key.id
        keys.revoke(key_ids["revoked"])
    return secrets, key_ids


def make_things(database: Database, settings: Settings, owner: str | None, *, number: int | None = None) -> Things:
    """Makes one object of each kind. `number`: distinguishes further objects of the same user."""
    file_id = f"file-of-{owner}" if number is None else f"file-of-{owner}-{number}"
    (settings.files_dir / file_id).write_bytes(b'{"text": "a"}\n')
    with database.write() as session:
        FileRepository(session).add(file_id=file_id, filename="a.jsonl", purpose="fine-tune", nbytes=14, owner=owner)
        jobs = JobRepository(session)
        done, job = (jobs.create(new_job(file_id, owner)) for _ in range(2))
        model = f"ft:tiny::{done.id.removeprefix('ftjob-')[:12]}"
        jobs.transition(done.id, JobStatus.VALIDATING_FILES, JobStatus.QUEUED, message="queued")
        jobs.transition(done.id, JobStatus.QUEUED, JobStatus.RUNNING, message="started", attempt=1)
        jobs.transition(done.id, JobStatus.RUNNING, JobStatus.SUCCEEDED, message="done", fine_tuned_model=model)
        jobs.transition(job.id, JobStatus.VALIDATING_FILES, JobStatus.QUEUED, message="queued")
        sealed = SecretBox(settings.home).close("whsec_aGVsbG8=")
        url, types = "https://192.0.2.1/hook", ("fine_tuning.job.failed",)
        endpoint = WebhookRepository(session).add(name="a", url=url, event_types=types, secret=sealed, owner=owner)
        checkpoint_id = file_id.replace("file", "ftckpt", 1)
        about = {"attempt": 1, "step_number": 1, "created_at": 1.0, "path": "", "metrics": {}, "reasons": ["interval"]}
        name = f"ft:tiny::{job.id.removeprefix('ftjob-')[:12]}-step-1"
        session.add(Checkpoint(id=checkpoint_id, job_id=job.id, model=name, **about))
    make_model(settings.fine_tuned_dir / model)
    return Things(
        file_id=file_id,
        job_id=job.id,
        done_id=done.id,
        model=model,
        endpoint_id=endpoint.id,
        checkpoint_id=checkpoint_id,
    )


def leave_traces(database: Database, settings: Settings, job_id: str, *, message: str = "Step 1") -> None:
    """Writes all files and rows of a job that was planned and has trained. `message`: of its event."""
    folder = job_dir(settings, job_id)
    (folder / "prepare").mkdir(parents=True)
    span = WorkSpan("ssd-0", SpanKind.READ_STATES, 1, 2, 7, 10.5, 11.0, 4096)
    spans = StepSpans(step=1, start_s=10.0, end_s=11.0, summary={"period_s": 1.0}, spans=(span,))
    for kept in (folder / FOLDER, folder / "prepare" / SIMULATED_FOLDER):
        keep_step(kept, spans)
    plan = {
        **asdict(PlanReport(feasible=True, reasons=("it fits",), step_s=1.0)),
        "engine_gib": dict.fromkeys(("gpu", "host", "ssd"), 1.0),
    }
    (folder / "prepare" / "plan_job.json").write_text(json.dumps({"ok": True, "plan": plan}))
    told = {"step": 1, "train_loss": 1.0, "measured": {"step_s": 2.0, "num_steps": 1, "peak_bytes": {"gpu": 1}}}
    record = JournalRecord(attempt=1, seq=1, created_at=1.0, kind=METRICS, level="info", message=message, data=told)
    with database.write() as session:
        import_journal(session, job_id, 1, [record])


def end_streams(patch: pytest.MonkeyPatch) -> None:
    """Makes each event stream read the events once, and end."""
    seen: dict[int, Caller] = {}  # keeps the callers alive, as a new one could otherwise get the same id

    def is_still_in(caller: Caller, _session: object) -> bool:
        is_first = id(caller) not in seen
        seen[id(caller)] = caller
        return is_first

    patch.setattr(Caller, "is_still_in", is_still_in)
    patch.setattr("windlass.service.api.routes.events._POLL_INTERVAL_S", 0)
    patch.setattr("windlass.service.api.routes.events._LOOK_AGAIN_S", 0)
