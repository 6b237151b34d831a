"""The official `openai` client, synchronous and asynchronous, against a real server.

There is no Ray and no dispatcher: the repositories move the jobs.
"""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from openai import AsyncOpenAI, OpenAI
from sqlalchemy import select, update

from tests.integration.cutting_proxy import cutting_proxy
from tests.integration.waiting_client import Waiting
from tests.support.service.keyed import new_job
from windlass.actors.job.journal import JournalRecord
from windlass.service.api.app import create_app
from windlass.service.installation.settings import Settings
from windlass.storage.sql.database import Database
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.models import Job
from windlass.storage.sql.repositories.api_keys import KeyRepository, Role
from windlass.storage.sql.repositories.jobs import JobRepository
from windlass.storage.sql.repositories.journal_import import import_journal

_DEADLINE_S = 20.0
MADE = "ft:tiny:mine:0123456789ab"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    settings = Settings(home=tmp_path / "home", port=port, max_file_mib=1, max_files_per_user=2)
    settings.make_dirs()
    for folder in (settings.models_dir / "tiny", settings.models_dir / "org" / "big", settings.fine_tuned_dir / MADE):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")
    return settings


@pytest.fixture
def _server(settings: Settings) -> Iterator[None]:
    config = uvicorn.Config(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        log_level="warning",
        ws="none",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    deadline = time.monotonic() + _DEADLINE_S
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server.started
    yield
    server.should_exit = True
    thread.join(_DEADLINE_S)
    assert not thread.is_alive()


@pytest.fixture(params=["synchronous", pytest.param("asynchronous", marks=pytest.mark.long)])
def client(request: pytest.FixtureRequest, _server: None, settings: Settings) -> Iterator[Any]:
    options: dict[str, Any] = {"base_url": f"{settings.base_url}/v1", "api_key": "none", "max_retries": 0}
    if request.param == "synchronous":
        with OpenAI(**options) as client:
            yield client
        return
    with asyncio.Runner() as runner:
        asynchronous = AsyncOpenAI(**options)
        yield Waiting(asynchronous, runner)
        runner.run(asynchronous.close())


@pytest.fixture
def database(_server: None, settings: Settings) -> Iterator[Database]:
    database = Database(settings.database_url)
    yield database
    database.close()


@pytest.fixture
def file_id(client: Any) -> str:
    return client.files.create(file=("data.jsonl", b'{"text": "a"}\n'), purpose="fine-tune").id


def record(seq: int, kind: str, message: str, **data: Any) -> JournalRecord:
    return JournalRecord(
        attempt=1, seq=seq, created_at=time.time(), kind=kind, level="info", message=message, data=data
    )


def start(database: Database, job_id: str) -> None:
    with database.write() as session:
        jobs = JobRepository(session)
        jobs.transition(job_id, JobStatus.VALIDATING_FILES, JobStatus.QUEUED, message="Files validated")
        jobs.transition(job_id, JobStatus.QUEUED, JobStatus.RUNNING, message="Started", attempt=1)


def test_files(client: Any, tmp_path: Path) -> None:
    content = b'{"text": "a"}\n' * 50_000  # arrives in many pieces
    path = tmp_path / "train.jsonl"
    path.write_bytes(content)
    with path.open("rb") as source:
        file = client.files.create(file=source, purpose="fine-tune")
    assert (file.filename, file.bytes, file.object) == ("train.jsonl", len(content), "file")
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).content == content
    assert client.files.wait_for_processing(file.id) == file
    others = [client.files.create(file=("b.jsonl", b'{"text": "a"}\n'), purpose="fine-tune").id for _ in range(4)]
    assert [each.id for each in client.files.list(limit=2, order="asc")] == [file.id, *others]
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        client.files.retrieve(file.id)


def test_a_job_from_creation_to_its_model(client: Any, database: Database, file_id: str) -> None:
    job = client.fine_tuning.jobs.create(
        model="tiny",
        training_file=file_id,
        suffix="mine",
        metadata={"team": "a"},
        method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": "auto"}}},
        extra_body={"windlass": {"sequence_length": 64}},
    )
    assert (job.status, job.hyperparameters.n_epochs, job.hyperparameters.batch_size) == ("validating_files", 2, "auto")
    assert job.method is not None
    assert job.method.type == "supervised"
    start(database, job.id)
    with database.write() as session:
        import_journal(
            session,
            job.id,
            1,
            [
                record(1, "metrics", "Step 1", step=1, total_steps=2, train_loss=2.5, remaining_s=60.0),
                record(
                    2,
                    "checkpoint",
                    "Saved",
                    step_number=1,
                    fine_tuned_model_checkpoint=f"{MADE}-step-1",
                    path="/x",
                    metrics={"step": 1, "train_loss": 2.5},
                ),
                record(3, "metrics", "Step 2", step=2, total_steps=2, train_loss=2.0, trained_tokens=128),
            ],
        )
    running = client.fine_tuning.jobs.retrieve(job.id)
    assert (running.status, running.trained_tokens, running.fine_tuned_model) == ("running", 128, None)
    assert running.estimated_finish is not None
    with database.write() as session:
        JobRepository(session).transition(
            job.id, JobStatus.RUNNING, JobStatus.SUCCEEDED, message="Succeeded", fine_tuned_model=MADE
        )
    done = client.fine_tuning.jobs.retrieve(job.id)
    assert (done.status, done.fine_tuned_model, done.error, done.estimated_finish) == ("succeeded", MADE, None, None)
    assert done.finished_at is not None

    newest = client.fine_tuning.jobs.list_events(job.id, limit=2)
    assert newest.has_more
    messages = [event.message for event in newest]  # the client requests further pages by itself
    assert messages == [
        *("Succeeded", "Step 2", "Saved", "Step 1", "Started", "Files validated"),
        f"Created fine-tuning job: {job.id}",
    ]
    assert next(event.data for event in newest if event.type == "metrics")["train_loss"] == 2.0
    (checkpoint,) = client.fine_tuning.jobs.checkpoints.list(job.id)
    assert (checkpoint.step_number, checkpoint.fine_tuned_model_checkpoint) == (1, f"{MADE}-step-1")
    assert checkpoint.metrics.train_loss == 2.5


def test_checkpoints_are_paged_through_by_themselves(client: Any, database: Database, file_id: str) -> None:
    job = client.fine_tuning.jobs.create(model="tiny", training_file=file_id)
    start(database, job.id)
    metrics = {"valid_loss": 2.25, "full_valid_loss": 2.25, "valid_mean_token_accuracy": 0.5}
    with database.write() as session:
        saved = [
            record(
                step,
                "checkpoint",
                "Saved",
                step_number=step,
                fine_tuned_model_checkpoint=f"{MADE}-step-{step}",
                path="/x",
                metrics={"step": step, "train_loss": 2.5, "train_mean_token_accuracy": 0.25} | metrics,
            )
            for step in range(1, 26)
        ]
        import_journal(session, job.id, 1, saved)
    page = client.fine_tuning.jobs.checkpoints.list(job.id)
    assert (len(page.data), page.has_more) == (10, True)
    found = list(page)
    assert [each.step_number for each in found] == list(range(25, 0, -1))
    assert len({each.id for each in found}) == 25
    last = found[-1]
    assert (last.object, last.fine_tuning_job_id) == ("fine_tuning.job.checkpoint", job.id)
    assert last.fine_tuned_model_checkpoint == f"{MADE}-step-1"
    assert (last.metrics.step, last.metrics.train_mean_token_accuracy) == (1, 0.25)
    assert (last.metrics.full_valid_loss, last.metrics.valid_mean_token_accuracy) == (2.25, 0.5)
    assert client.fine_tuning.jobs.checkpoints.list(job.id, after=last.id).data == []
    with pytest.raises(openai.NotFoundError, match="no checkpoint 'ftckpt-none'"):
        client.fine_tuning.jobs.checkpoints.list(job.id, after="ftckpt-none")


def test_lists_page_and_filter(client: Any, file_id: str) -> None:
    ids = [
        client.fine_tuning.jobs.create(model="tiny", training_file=file_id, metadata={"parity": str(index % 2)}).id
        for index in range(5)
    ]
    assert [job.id for job in client.fine_tuning.jobs.list(limit=2)] == ids[::-1]
    odd = client.fine_tuning.jobs.list(limit=1, metadata={"parity": "1"})
    assert [job.id for job in odd] == [ids[3], ids[1]]


def test_cancel(client: Any, database: Database, file_id: str) -> None:
    waiting, running = (client.fine_tuning.jobs.create(model="tiny", training_file=file_id).id for _ in range(2))
    assert client.fine_tuning.jobs.cancel(waiting).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="is cancelled and cannot become cancelled"):
        client.fine_tuning.jobs.cancel(waiting)
    start(database, running)
    assert client.fine_tuning.jobs.cancel(running).status == "running"  # until its runner has stopped
    with database.write() as session:
        assert JobRepository(session).get(running).cancel_requested
        JobRepository(session).transition(running, JobStatus.RUNNING, JobStatus.CANCELLED, message="Cancelled")
    assert client.fine_tuning.jobs.retrieve(running).status == "cancelled"


def test_pause_and_resume(client: Any, database: Database, file_id: str) -> None:
    waiting, running = (client.fine_tuning.jobs.create(model="tiny", training_file=file_id).id for _ in range(2))
    assert client.fine_tuning.jobs.pause(waiting).status == "paused"
    assert client.fine_tuning.jobs.resume(waiting).status == "validating_files"
    start(database, running)
    assert client.fine_tuning.jobs.pause(running).status == "pausing"  # until its runner has stopped
    with database.write() as session:
        JobRepository(session).transition(running, JobStatus.PAUSING, JobStatus.PAUSED, message="Paused")
    assert client.fine_tuning.jobs.retrieve(running).status == "paused"
    with pytest.raises(openai.BadRequestError, match="is paused and cannot become paused"):
        client.fine_tuning.jobs.pause(running)
    assert client.fine_tuning.jobs.cancel(running).status == "cancelled"


def test_errors_are_typed(client: Any, file_id: str) -> None:
    jobs = client.fine_tuning.jobs
    with pytest.raises(openai.BadRequestError) as caught:
        jobs.create(model="tiny", training_file=file_id, extra_body={"windlass": {"learning_rate": 2}})
    assert (caught.value.param, caught.value.code) == ("windlass.learning_rate", "invalid_value")
    assert "less than or equal to 1, got 2" in caught.value.message
    with pytest.raises(openai.BadRequestError, match='only "supervised" is supported yet'):
        jobs.create(model="tiny", training_file=file_id, method={"type": "dpo", "dpo": {}})
    with pytest.raises(openai.NotFoundError) as missing:
        jobs.create(model="none", training_file=file_id)
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.BadRequestError, match="there is no file 'file-none'"):
        jobs.create(model="tiny", training_file="file-none")
    with pytest.raises(openai.NotFoundError):
        jobs.retrieve("ftjob-none")
    job = jobs.create(model="tiny", training_file=file_id)
    with pytest.raises(openai.BadRequestError, match="was expected to be paused but is validating_files") as refused:
        jobs.resume(job.id)
    assert refused.value.code == "invalid_state"


def test_a_file_over_the_limit_gets_its_answer(client: Any) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.files.create(file=("big.jsonl", b"x" * 30 * 1024**2), purpose="fine-tune")
    assert caught.value.status_code == 413
    assert "1.06 MiB" in caught.value.message
    assert list(client.files.list()) == []


@pytest.mark.usefixtures("_server")
def test_a_client_that_sends_all_before_it_reads_still_gets_its_answer(settings: Settings) -> None:
    num_nbytes = 30 * 1024**2
    head = (
        "POST /v1/files HTTP/1.1",
        "Host: 127.0.0.1",
        "Connection: close",
        "Content-Type: multipart/form-data; boundary=x",
        f"Content-Length: {num_nbytes}",
        "\r\n",
    )
    with socket.create_connection((settings.host, settings.port), timeout=_DEADLINE_S) as connection:
        connection.sendall("\r\n".join(head).encode())
        connection.sendall(b"x" * num_nbytes)
        assert connection.recv(12) == b"HTTP/1.1 413"


def test_idempotency_key(client: Any, file_id: str) -> None:
    def create(**more: Any) -> str:
        return client.fine_tuning.jobs.create(
            model="tiny", training_file=file_id, extra_headers={"Idempotency-Key": "once"}, **more
        ).id

    assert create() == create()
    with pytest.raises(openai.BadRequestError, match="another body"):
        create(seed=4)


@pytest.mark.parametrize("client", ["synchronous", pytest.param("asynchronous", marks=pytest.mark.long)], indirect=True)
def test_request_that_is_retried_makes_one_job(client: Any, database: Database, file_id: str) -> None:
    """The service has made the job when the connection is cut, and the client retries by itself."""

    def num_jobs() -> int:
        with database.read() as session:
            return len(session.scalars(select(Job)).all())

    def create(**more: Any) -> str:
        with cutting_proxy(client.base_url.port) as port:
            trying = client.with_options(base_url=f"http://127.0.0.1:{port}/v1", max_retries=2)
            job_id: str = trying.fine_tuning.jobs.create(model="tiny", training_file=file_id, **more).id
            return job_id

    made = create(extra_headers={"Idempotency-Key": "once"})
    assert num_jobs() == 1
    assert [job.id for job in client.fine_tuning.jobs.list()] == [made]
    create()  # without a key the service cannot recognize the retry
    assert num_jobs() == 3


def test_a_list_of_more_than_a_thousand_jobs_is_read_to_its_end(client: Any, database: Database, file_id: str) -> None:
    new = new_job(file_id, None)
    with database.write() as session:
        ids = [JobRepository(session).create(new).id for _ in range(1050)]
        for number in range(0, len(ids), 7):  # jobs of the same moment are in order too
            session.execute(update(Job).where(Job.id.in_(ids[number : number + 7])).values(created_at=float(number)))
    listed = []
    for job in client.fine_tuning.jobs.list(limit=100):
        listed.append((job.created_at, job.id))
        if len(listed) == 250:  # jobs created meanwhile shift nothing
            client.fine_tuning.jobs.create(model="tiny", training_file=file_id)
    assert listed == sorted(listed, reverse=True)
    assert {job_id for _, job_id in listed} == set(ids)
    assert len(listed) == len(ids)
    assert len(list(client.fine_tuning.jobs.list())) == 1051  # twenty a page


def test_errors_of_access_are_typed(client: Any, database: Database, file_id: str) -> None:
    with database.write() as session:
        _, secret = KeyRepository(session).create(name="ann", user="ann", role=Role.USER)
    with pytest.raises(openai.AuthenticationError) as caught:
        client.models.list()
    assert (caught.value.status_code, caught.value.code) == (401, "invalid_api_key")
    ann = client.with_options(api_key=secret)
    with pytest.raises(openai.NotFoundError):
        ann.files.retrieve(file_id)  # a file without an owner, from before there were keys
    for _ in range(2):
        ann.files.create(file=("data.jsonl", b'{"text": "a"}\n'), purpose="fine-tune")
    with pytest.raises(openai.PermissionDeniedError) as refused:
        ann.files.create(file=("data.jsonl", b'{"text": "a"}\n'), purpose="fine-tune")
    assert refused.value.code == "file_quota_exceeded"
    for _ in range(59):  # with the request above, that is the limit for a minute
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
    with pytest.raises(openai.RateLimitError) as limited:
        client.models.list()
    assert limited.value.code == "rate_limit_exceeded"
    assert int(limited.value.response.headers["retry-after"]) > 0
    assert {model.id for model in ann.models.list()} == {"tiny", "org/big"}


def test_client_has_no_calls_without_a_test() -> None:
    """A new call of the client must be served, and tested here."""
    client = OpenAI(api_key="none")
    calls = {
        name: {each for each in dir(resource) if not each.startswith("_") and callable(getattr(resource, each))}
        for name, resource in {
            "files": client.files,
            "jobs": client.fine_tuning.jobs,
            "checkpoints": client.fine_tuning.jobs.checkpoints,
            "models": client.models,
            "what is not here": client.fine_tuning.checkpoints.permissions,
            "nor this": client.fine_tuning.alpha.graders,
        }.items()
    }
    assert calls == {
        "files": {"create", "retrieve", "list", "delete", "content", "retrieve_content", "wait_for_processing"},
        "jobs": {"create", "retrieve", "list", "cancel", "list_events", "pause", "resume"},
        "checkpoints": {"list"},
        "models": {"retrieve", "list", "delete"},
        "what is not here": {"create", "retrieve", "list", "delete"},
        "nor this": {"run", "validate"},
    }


def test_calls_that_only_openai_serves_are_not_found(client: Any) -> None:
    """Permissions share checkpoints among an organization's projects; graders are for reinforcement."""
    permissions, graders = client.fine_tuning.checkpoints.permissions, client.fine_tuning.alpha.graders
    grader = {"type": "string_check", "name": "a", "input": "a", "reference": "a", "operation": "eq"}
    for call in (
        lambda: permissions.create(MADE, project_ids=["a"]).data,
        lambda: permissions.list(MADE).data,
        lambda: permissions.delete("a", fine_tuned_model_checkpoint=MADE),
        lambda: graders.run(grader=grader, model_sample="a"),
        lambda: graders.validate(grader=grader),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            call()
        assert caught.value.body["message"]  # in the form that the client reads


def test_models(client: Any) -> None:
    assert {model.id for model in client.models.list()} == {"tiny", "org/big", MADE}
    assert client.models.retrieve("org/big").id == "org/big"
    assert client.models.delete(MADE).deleted
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve(MADE)
    with pytest.raises(openai.BadRequestError, match="only fine-tuned models"):
        client.models.delete("tiny")


def test_a_live_stream_brings_new_events_and_replays_after_a_break(
    client: Any, database: Database, settings: Settings, file_id: str
) -> None:
    job_id = client.fine_tuning.jobs.create(model="tiny", training_file=file_id).id

    def read(count: int, last: str | None, act: Any = None) -> list[tuple[str, str]]:
        headers = {} if last is None else {"Last-Event-ID": last}
        url, found, event_id = f"{settings.base_url}/v1/events/stream", [], ""
        with httpx.stream("GET", url, headers=headers, timeout=_DEADLINE_S) as response:
            message = ""
            for line in response.iter_lines():
                if line.startswith("data: "):
                    message = json.loads(line[6:])["message"]
                elif line.startswith("id: "):
                    event_id = line[4:]
                    found.append((event_id, message))
                    if act is not None:
                        act()
                        act = None
                if len(found) == count:
                    break
        return found

    # The stream is open when the job moves on.
    seen = read(3, None, act=lambda: start(database, job_id))
    assert [message for _, message in seen] == [f"Created fine-tuning job: {job_id}", "Files validated", "Started"]
    client.fine_tuning.jobs.cancel(job_id)  # while no client reads the stream
    missed = read(2, seen[1][0])
    assert [message for _, message in missed] == ["Started", "Cancelling: the runner is asked to stop"]
