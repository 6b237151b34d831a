"""Runs a complete service for a benchmark: supervisor, API, dispatcher and Ray, on a given database."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from typing import Any

import httpx
import psutil

from windlass.service.demo.data import write_demo_files
from windlass.service.demo.model import make_demo_model
from windlass.service.installation import Settings, find_serving
from windlass.storage.sql import Database
from windlass.storage.sql.repositories import KeyRepository, Role

MODEL = "demo-20m"
FILE_ID = "file-demo"
_JOBS = "/v1/fine_tuning/jobs"
_DEADLINE_S = 600.0  # timeout for the service's start and for jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A running service, and a client for it."""

    settings: Settings
    key: str
    client: httpx.Client
    api: psutil.Process

    def api_cpu_s(self) -> float:
        """Returns the processor seconds of the API's process so far."""
        times = self.api.cpu_times()
        return times.user + times.system

    @property
    def dispatcher(self) -> psutil.Process:
        """The dispatcher's process."""
        return _process_of(self.settings.home, "dispatcher")

    def submit(self, **settings: Any) -> str:
        """Submits a job on the demo's model and data, and returns its id."""
        response = self.client.post(_JOBS, json=job_body(**settings))
        response.raise_for_status()
        return str(response.json()["id"])

    def job(self, job_id: str) -> dict[str, Any]:
        """Returns a job as the API shows it."""
        job: dict[str, Any] = self.client.get(f"{_JOBS}/{job_id}").raise_for_status().json()
        return job

    def wait_for_step(self, job_id: str, step: int = 1) -> None:
        """Waits until a job has reached a step. Raises RuntimeError if it ends earlier."""
        until_s = time.monotonic() + _DEADLINE_S
        while (job := self.job(job_id))["windlass"]["step"] < step:
            if job["finished_at"] is not None or time.monotonic() > until_s:
                raise RuntimeError(f"job {job_id} is {job['status']} at step {job['windlass']['step']}: {job['error']}")
            time.sleep(0.2)

    def end_job(self, job_id: str) -> None:
        """Cancels a job and waits for its end."""
        self.client.post(f"{_JOBS}/{job_id}/cancel")
        until_s = time.monotonic() + _DEADLINE_S
        while self.job(job_id)["finished_at"] is None and time.monotonic() < until_s:
            time.sleep(0.2)


def job_body(**settings: Any) -> dict[str, Any]:
    """Returns the request body of a job on the demo's model and data."""
    training = {"epochs": 1000, "batch_size": 8, "num_microbatches": 1, "sequence_length": 96, **settings}
    return {"model": MODEL, "training_file": FILE_ID, "windlass": training}


def make_home(settings: Settings) -> None:
    """Creates a model and a file to train on."""
    settings.make_dirs()
    validation = settings.home / "validation.jsonl"
    write_demo_files(settings.files_dir / FILE_ID, validation, num_train=1024, num_validation=1)
    make_demo_model(settings.models_dir / MODEL, settings.files_dir / FILE_ID)


@contextmanager
def running(home: Path, database_url: str, *, trains: bool, measures: bool = True) -> Iterator[Running]:
    """Runs `windlass up`, and `windlass down` at the end. Without `trains`, runs the API alone.

    `measures`: measure the machine, which takes half a minute the first time, so that jobs are planned.
    """
    home.mkdir(mode=0o700, exist_ok=True)
    settings = Settings(home=home, port=free_port(), database_url=database_url)
    database = Database(database_url)
    with database.write() as session:
        _, key = KeyRepository(session).create(name="load", user="load", role=Role.ADMIN)
    database.close()
    environment = {
        **os.environ,
        "WINDLASS_HOME": str(home),
        "WINDLASS_PORT": str(settings.port),
        "WINDLASS_DATABASE_URL": database_url,
        "WINDLASS_MEASURE": str(int(measures)),
        "WINDLASS_REQUESTS_PER_MINUTE": str(10**9),
        "HF_HUB_OFFLINE": "1",
    }
    program = Path(sys.executable).with_name("windlass")
    if trains:
        subprocess.run([program, "up", "--detach"], env=environment, check=True, stdout=subprocess.DEVNULL)
        api = None
    else:
        with (home / "api.log").open("ab") as log:
            command = [sys.executable, "-m", "windlass.service", "api"]
            api = subprocess.Popen(command, env=environment, cwd=home, stdout=log, stderr=log)
    headers = {"Authorization": f"Bearer {key}"}
    try:
        with httpx.Client(base_url=settings.base_url, headers=headers, timeout=60.0, trust_env=False) as client:
            _wait(client)
            process = _process_of(home, "api") if api is None else psutil.Process(api.pid)
            yield Running(settings=settings, key=key, client=client, api=process)
    finally:
        if api is None:
            subprocess.run([program, "down", "--force"], env=environment, check=False, stdout=subprocess.DEVNULL)
        else:
            api.terminate()
            api.wait(_DEADLINE_S)


def _process_of(home: Path, role: str) -> psutil.Process:
    """Returns the API's or the dispatcher's process of `windlass up`."""
    serving = find_serving(home)
    assert serving is not None, "it is up"
    children = psutil.Process(serving.process.pid).children()
    return next(child for child in children if role in child.cmdline())


def _wait(client: httpx.Client) -> None:
    until_s = time.monotonic() + _DEADLINE_S
    while True:
        try:
            client.get("/readyz").raise_for_status()
            return
        except httpx.HTTPError:
            if time.monotonic() > until_s:
                raise
        time.sleep(0.1)


def free_port() -> int:
    """Returns a port that is free now."""
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_load(order: Mapping[str, Any]) -> dict[str, Any]:
    """Runs the load generator in its own process, and returns its measurements."""
    command = [sys.executable, "-m", "benchmarks.api.load"]
    done = subprocess.run(command, input=json.dumps(order), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the load generator failed: {done.stderr[-2000:]}")
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured
