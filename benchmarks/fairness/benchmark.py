"""Measures how long a user's small job waits while another user requests as much as the limits allow.

`python -m benchmarks.fairness` runs a complete service, and two users with keys. The greedy user does one of these:

- has large files and an endless chat template prepared
- requests plans of huge batches
- trains a job and fills the queue
- has webhook endpoints that send their answers one byte at a time
- opens connections that send nothing

Then the greedy user does all of it at once, except what occupies the device. Meanwhile the modest user submits a small
job. The time from its submission to its first step is compared with that of the same job alone.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.api.load import Order
from benchmarks.api.service import FILE_ID, MODEL, Running, job_body, make_home, run_load, running
from benchmarks.fairness.pressure import idle_connections, told_webhooks, trickling_server
from benchmarks.reporting.report import Report, ratio
from benchmarks.scratch_folder import scratch_folder
from windlass.storage.sql import Database, migrate
from windlass.storage.sql.repositories import FileRepository, KeyRepository, Role

_JOBS = "/v1/fine_tuning/jobs"
_GREEDY, _MODEST = "greedy", "modest"
_HOSTILE = "endless-template"
_LARGE, _ONE_CHAT = "file-large", "file-chat"
_LARGE_NBYTES = 200 * 1024**2  # minimum size of a large training file
_NUM_QUEUED = 60  # jobs that the greedy user submits
_NUM_ENDPOINTS = 10  # the maximum for a user
_NUM_CONNECTIONS = 1500
_SETTLE_S = 4.0  # seconds until the requested work is under way
# The one device is in use when the small job comes, so another job must be paused first.
_QUEUE = "a job of lower priority trains, and more of them wait"
_RATE, _LOAD_S = 20.0, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Users:
    """The service, with its two users' clients and keys."""

    service: Running
    greedy: httpx.Client
    modest: httpx.Client
    modest_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """The median times of the modest user's job."""

    validated_s: float
    first_step_s: float


def main() -> None:
    """Measures alone and beside each kind of load, and prints the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fairness", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one run of each, and no measured machine")
    parser.add_argument("--directory", type=Path, help="where the home goes (default: a temporary one)")
    options = parser.parse_args()
    num_runs = 1 if options.quick else 3
    report = Report(
        title="Fairness between two users",
        directory=options.directory or Path(tempfile.gettempdir()),
        configuration={
            "small job": f"{MODEL}, 1,024 short chats, planned" if not options.quick else f"{MODEL}, not planned",
            "runs": f"{num_runs} beside each kind and as many alone before it, medians, after one that warms",
            "measured": "from the request that submits the job, to its first step as the API tells it",
        },
    )
    os.environ["WINDLASS_WEBHOOK_PRIVATE_ADDRESSES"] = "1"
    with scratch_folder(options.directory) as folder:
        home = folder / "home"
        home.mkdir(mode=0o700)
        url = f"sqlite:///{home / 'windlass.db'}"
        migrate(url)
        with running(home, url, trains=True, measures=not options.quick) as service, _two_users(service, url) as users:
            report.finish(_measure(report, users, url, num_runs))


def _measure(report: Report, users: _Users, url: str, num_runs: int) -> dict[str, Any]:
    _make_files(users.service, url)
    _small_job(users)  # the first one warms up
    alone: list[_Times] = []
    beside: dict[str, list[_Times]] = {}
    answers: dict[str, tuple[float, float]] = {"alone": _answers(users)}
    kinds: dict[str, Callable[[_Users], Any]] = {
        "large files and an endless template are prepared": _preparing,
        "plans of huge batches are asked for": _planning,
        _QUEUE: _queueing,
        "webhook endpoints trickle their answers": _trickling,
        f"{_NUM_CONNECTIONS} connections send nothing": _connecting,
        "all of it at once, but for jobs that train": _everything,
    }
    for title, begin in kinds.items():
        # Measure alone in between, because a machine's speed changes over time.
        alone += [_small_job(users) for _ in range(num_runs)]
        with begin(users):
            time.sleep(_SETTLE_S)
            beside[title] = [_small_job(users) for _ in range(num_runs)]
            answers[title] = _answers(users)
        _end_all(users.greedy)
    return _tell(report, alone, beside, answers)


def _tell(
    report: Report,
    alone_runs: Sequence[_Times],
    beside_runs: dict[str, list[_Times]],
    answers: dict[str, tuple[float, float]],
) -> dict[str, Any]:
    alone, beside = _median(alone_runs), {title: _median(runs) for title, runs in beside_runs.items()}
    slowdowns = {title: ratio(found.first_step_s, alone.first_step_s) for title, found in beside.items()}
    rows = []
    for title, found in {"alone": alone, **beside}.items():
        slowdown = f"{slowdowns[title]:.2f}" if title in slowdowns else ""
        webhook_s, p99_ms = answers[title]
        times = (f"{found.validated_s:.1f}", f"{found.first_step_s:.1f}", slowdown)
        each = " ".join(f"{run.first_step_s:.1f}" for run in beside_runs.get(title, alone_runs))
        rows.append((title, *times, f"{webhook_s:.2f}", f"{p99_ms:.0f}", each))
    report.add("", "The modest user's small job and requests, while the greedy one asks for what the limits allow:")
    report.add_table(
        ("meanwhile", "validated, s", "first step, s", "over alone", "webhook, s", "p99 of the API, ms", "each run, s"),
        rows,
    )
    return {
        "slowdown_max": max(filter(None, slowdowns.values())),
        "slowdown_max_device_free": max(value for title, value in slowdowns.items() if value and title != _QUEUE),
        "small_file_wait_s": max(found.validated_s for found in beside.values()),
        "small_file_alone_s": alone.validated_s,
        "webhook_delay_s_max": max(webhook_s for webhook_s, _ in answers.values()),
        "p99_ms_max": max(p99_ms for _, p99_ms in answers.values()),
        "p99_ms_alone": answers["alone"][1],
        **{f"slowdown: {title}": value for title, value in slowdowns.items()},
    }


@contextmanager
def _two_users(service: Running, url: str) -> Iterator[_Users]:
    database = Database(url)
    with database.write() as session:
        secrets = {
            user: KeyRepository(session).create(name=user, user=user, role=Role.USER)[1] for user in (_GREEDY, _MODEST)
        }
    database.close()
    with ExitStack() as opened:
        clients = {
            user: opened.enter_context(
                httpx.Client(
                    base_url=service.settings.base_url,
                    headers={"Authorization": f"Bearer {secret}"},
                    timeout=120.0,
                    trust_env=False,
                )
            )
            for user, secret in secrets.items()
        }
        yield _Users(service=service, greedy=clients[_GREEDY], modest=clients[_MODEST], modest_key=secrets[_MODEST])


def _make_files(service: Running, url: str) -> None:
    """Creates the demo's model and data for both users, and a large file and a model for the greedy one."""
    make_home(service.settings)
    folder = service.settings.files_dir
    demo = (folder / FILE_ID).read_bytes()
    with (folder / _LARGE).open("wb") as large:
        while large.tell() < _LARGE_NBYTES:
            large.write(demo)
    (folder / _ONE_CHAT).write_bytes(demo[: demo.index(b"\n") + 1])
    hostile = service.settings.models_dir / _HOSTILE
    shutil.copytree(service.settings.models_dir / MODEL, hostile)
    loops = "{% for i in range(100000) %}{% for j in range(100000) %}{{ '' }}{% endfor %}{% endfor %}"
    (hostile / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((hostile / "tokenizer_config.json").read_text())
    (hostile / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": loops}))
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (folder / _ONE_CHAT).write_text(json.dumps(chat) + "\n")
    (folder / "file-modest").write_bytes(demo)
    database = Database(url)
    with database.write() as session:
        files = FileRepository(session)
        for file_id, owner in ((_LARGE, _GREEDY), (_ONE_CHAT, _GREEDY), (FILE_ID, _GREEDY), ("file-modest", _MODEST)):
            files.add(file_id=file_id, filename="a.jsonl", purpose="fine-tune", nbytes=1, owner=owner)
    database.close()


# --- the modest user ---


def _median(runs: Sequence[_Times]) -> _Times:
    return _Times(
        validated_s=statistics.median(run.validated_s for run in runs),
        first_step_s=statistics.median(run.first_step_s for run in runs),
    )


def _answers(users: _Users) -> tuple[float, float]:
    """Returns a webhook's delay in seconds, and the 99th percentile of the API's latency in milliseconds."""
    return told_webhooks(users.modest, _cancelled_job(users)), _p99_ms(users)


def _small_job(users: _Users) -> _Times:
    """Runs one job from its submission to its first step, and cancels it."""
    began_s = time.monotonic()
    job_id = users.modest.post(_JOBS, json=_modest_body()).raise_for_status().json()["id"]
    validated_s = 0.0
    while True:
        job = users.modest.get(f"{_JOBS}/{job_id}").raise_for_status().json()
        if not validated_s and job["status"] != "validating_files":
            validated_s = time.monotonic() - began_s
        if job["windlass"]["step"] >= 1:
            break
        if job["finished_at"] is not None:
            raise RuntimeError(f"job {job_id} is {job['status']}: {job['error']}")
        time.sleep(0.1)
    first_step_s = time.monotonic() - began_s
    _end(users.modest, job_id)
    return _Times(validated_s=validated_s, first_step_s=first_step_s)


def _modest_body() -> dict[str, Any]:
    return {**job_body(), "training_file": "file-modest"}


def _cancelled_job(users: _Users) -> Callable[[], None]:
    """Returns a function that ends a job of the modest user, which causes a webhook."""

    def end_one() -> None:
        job_id = users.modest.post(_JOBS, json=_modest_body()).raise_for_status().json()["id"]
        users.modest.post(f"{_JOBS}/{job_id}/cancel").raise_for_status()

    return end_one


def _p99_ms(users: _Users) -> float:
    jobs = [job["id"] for job in users.modest.get(_JOBS).raise_for_status().json()["data"]]
    order = Order(
        url=users.service.settings.base_url,
        seconds=_LOAD_S,
        job_ids=jobs,
        job=_modest_body(),
        key=users.modest_key,
        rate=_RATE,
        kinds={"retrieve": 2, "list": 1, "events": 1},
    )
    measured = run_load(asdict(order))
    values = sorted(value for kind in measured["latencies_s"].values() for value in kind)
    return 1000 * float(values[min(len(values) - 1, int(0.99 * len(values)))])


# --- the greedy user ---


@contextmanager
def _preparing(users: _Users) -> Iterator[None]:
    for model, file_id in ((_HOSTILE, _ONE_CHAT), (MODEL, _LARGE)) * 4:
        body = {**job_body(), "model": model, "training_file": file_id}
        users.greedy.post(_JOBS, json=body).raise_for_status()
    yield


@contextmanager
def _planning(users: _Users) -> Iterator[None]:
    ending = threading.Event()
    settings = {"batch_size": 4096, "num_microbatches": 4096, "sequence_length": 1024}
    body = {"model": MODEL, "batch_size": 4096, "windlass": settings}

    def ask() -> None:
        while not ending.is_set():
            try:
                users.greedy.post("/v1/fine_tuning/plans", json=body)
            except httpx.HTTPError:
                return  # the benchmark continues without this thread
            ending.wait(0.1)  # most requests are refused, because one plan is made at a time

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for each in threads:
        each.start()
    try:
        yield
    finally:
        ending.set()
        for each in threads:
            each.join()


@contextmanager
def _queueing(users: _Users) -> Iterator[None]:
    """Submits as many jobs as the queue takes, one of which trains.

    Checks that users cannot get the highest priority.
    """
    body = {**job_body(), "training_file": FILE_ID}
    refused = users.greedy.post(_JOBS, json={**body, "windlass": {**body["windlass"], "priority": -1000}})
    assert refused.status_code == 403, "a user may not ask for it"
    for _ in range(_NUM_QUEUED):
        users.greedy.post(_JOBS, json={**body, "windlass": {**body["windlass"], "priority": 1}}).raise_for_status()
    yield


@contextmanager
def _trickling(users: _Users) -> Iterator[None]:
    with trickling_server() as url:
        made = []
        for number in range(_NUM_ENDPOINTS):
            body = {"name": f"slow {number}", "url": url, "event_types": ["fine_tuning.job.cancelled"]}
            made.append(users.greedy.post("/v1/webhook_endpoints", json=body).raise_for_status().json()["id"])
        for _ in range(5):  # 50 deliveries
            job = users.greedy.post(_JOBS, json={**job_body(), "training_file": FILE_ID}).raise_for_status().json()
            _end(users.greedy, job["id"])
        try:
            yield
        finally:
            for each in made:
                users.greedy.delete(f"/v1/webhook_endpoints/{each}")


@contextmanager
def _connecting(users: _Users) -> Iterator[None]:
    with idle_connections(users.service.settings.port, _NUM_CONNECTIONS):
        yield


@contextmanager
def _everything(users: _Users) -> Iterator[None]:
    with ExitStack() as begun:
        for begin in (_trickling, _connecting, _planning, _preparing):  # the device stays free
            begun.enter_context(begin(users))
        yield


def _end(client: httpx.Client, job_id: str) -> None:
    client.post(f"{_JOBS}/{job_id}/cancel")
    while client.get(f"{_JOBS}/{job_id}").raise_for_status().json()["finished_at"] is None:
        time.sleep(0.1)


def _end_all(client: httpx.Client) -> None:
    jobs: Sequence[dict[str, Any]] = client.get(_JOBS, params={"limit": 1000}).raise_for_status().json()["data"]
    for job in jobs:
        if job["finished_at"] is None:
            _end(client, job["id"])


if __name__ == "__main__":
    main()
