"""The jobs of `benchmarks.chaos`: how they are submitted and watched, and what they leave."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.chaos.plan import Injury
from benchmarks.chaos.record import Wrong
from tests.e2e.installation import write_examples
from tests.integration.resume_stage import processes_of
from windlass.service.installation import Settings
from windlass.storage.ssd import Volume, has_volume

_JOB = {
    "epochs": 1,
    "batch_size": 2,
    "num_microbatches": 2,
    "sequence_length": 32,
    "precision": "bf16",
    "learning_rate": 1e-3,
    "commit_minutes": 0,  # every 10 steps, so that something is committed between two injuries
    "evaluate_every": 20,
    "checkpoint_every": 20,
    "keep_checkpoints": 2,
}
_SEED = 7
# Limit for a job of half a minute with any injuries.
JOB_DEADLINE_S = 900.0
_TERMINAL = ("succeeded", "failed", "cancelled")


class NotRightError(Exception):
    """A required behaviour that failed. The text is for the report."""

    def __init__(self, text: str, wrong: Wrong = Wrong.OTHER) -> None:
        super().__init__(text)
        self.wrong = wrong


def write_data(folder: Path, num_steps: int) -> None:
    """Writes the files of the examples of jobs of this length."""
    write_examples(folder / "train.jsonl", num_steps * int(str(_JOB["batch_size"])))
    write_examples(folder / "valid.jsonl", 4)


def submit_jobs(url: str, folder: Path, num_jobs: int = 1, *, num_boxes: int = 1) -> list[str]:
    """Submits equal jobs with the examples of a folder, each over this number of boxes. Returns their ids."""
    job = _JOB | ({"boxes": num_boxes} if num_boxes > 1 else {})
    with httpx.Client(base_url=url, timeout=60.0) as client:
        files = {}
        for name in ("train", "valid"):
            with (folder / f"{name}.jsonl").open("rb") as file:
                sent = {"file": (f"{name}.jsonl", file)}
                answer = client.post("/v1/files", files=sent, data={"purpose": "fine-tune"})
            files[name] = answer.raise_for_status().json()["id"]
        body = {"model": "tiny", "training_file": files["train"], "validation_file": files["valid"], "seed": _SEED}
        answers = [client.post("/v1/fine_tuning/jobs", json=body | {"windlass": job}) for _ in range(num_jobs)]
        return [str(answer.raise_for_status().json()["id"]) for answer in answers]


def leftovers(settings: Settings, job_id: str, arenas: Path) -> list[str]:
    """Returns the files of an ended job that should be gone from a home. Its model and record may stay.

    `arenas`: the folder of shared memory.
    """
    remaining = [str(path) for path in arenas.iterdir() if job_id in path.name]
    remaining += [str(path) for path in settings.fine_tuned_dir.glob(".*")]
    remaining += [str(path) for path in (settings.jobs_dir / job_id).glob("attempt-*")]
    for ssd_dir in settings.ssd_dirs:
        if not has_volume(ssd_dir):  # no job has run there yet
            continue
        volume = Volume.open(ssd_dir, direct=False)
        remaining += [f"states of {job} on {ssd_dir}" for job in volume.allocations() if job_id in str(job)]
        volume.close()
    return remaining


def processes_of_job(settings: Settings, job_id: str) -> dict[str, psutil.Process]:
    """Returns the processes of a job's newest attempt in a home, by their names."""
    job_dir = settings.jobs_dir / job_id
    attempts = [int(path.stem.partition("-")[2]) for path in job_dir.glob("attempt-*.lock")]
    return dict(processes_of(job_dir, max(attempts), settings.ssd_dirs)) if attempts else {}


def is_over(client: httpx.Client, job_id: str) -> bool:
    """Returns whether the API reports that a job has ended."""
    return ask(client, job_id)[0].get("status") in _TERMINAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A moment at which a job had a new step, or a new attempt."""

    at_s: float  # of the monotonic clock
    step: int
    attempt: int


class Observer(threading.Thread):
    """Polls a job as its owner would. Records when it has ended, and answers that are errors."""

    def __init__(self, url: str, job_id: str, *, interval_s: float = 0.1) -> None:
        super().__init__(name="observer", daemon=True)
        self.began_s = time.monotonic()
        self.took_s: float | None = None  # seconds from the submission to the end
        self.step = 0  # last step that the job has reported
        self.moments: list[Moment] = []  # of new steps and attempts
        self.faults: list[str] = []
        self._url, self._job_id, self._interval_s = url, job_id, interval_s
        self._ended = threading.Event()

    def run(self) -> None:
        # One client for all requests, because creating one is slow.
        with httpx.Client(base_url=self._url, timeout=90.0) as client:
            while not self._ended.wait(self._interval_s):
                job, fault = ask(client, self._job_id)
                if fault is not None and fault not in self.faults:
                    self.faults.append(fault)
                self._note(job.get("windlass", {}))
                if job.get("status") in _TERMINAL:
                    self.took_s = time.monotonic() - self.began_s
                    return

    def _note(self, told: Mapping[str, Any]) -> None:
        step, attempt = max(self.step, told.get("step", 0)), told.get("attempt", 0)
        last = self.moments[-1] if self.moments else Moment(at_s=self.began_s, step=0, attempt=0)
        if step > last.step or attempt > last.attempt:
            self.moments.append(Moment(at_s=time.monotonic(), step=step, attempt=max(attempt, last.attempt)))
        self.step = step

    def wait(self, timeout_s: float = JOB_DEADLINE_S) -> float:
        """Returns the seconds from the submission to the end. Raises NotRightError at the timeout."""
        self.join(timeout_s)
        self._ended.set()
        if self.took_s is None:
            raise NotRightError(f"the job was not over {timeout_s:g} s after the last injury", Wrong.HANG)
        return self.took_s


def wait_for_moment(observers: Sequence[Observer], injury: Injury, job_s: float) -> None:
    """Returns when an injury is due, or all jobs have ended. `job_s`: duration of undisturbed jobs."""
    until_s = time.monotonic() + injury.after * job_s
    while any(each.is_alive() for each in observers) and time.monotonic() < until_s:
        if max(each.step for each in observers) >= injury.by_step:
            return
        time.sleep(0.05)


def ask(client: httpx.Client, job_id: str) -> tuple[dict[str, Any], str | None]:
    """Returns the job, if the API returns it, and a description of a wrong answer."""
    try:
        answer = client.get(f"/v1/fine_tuning/jobs/{job_id}")
    except httpx.TransportError:
        return {}, None
    if answer.is_success:
        return answer.json(), None
    if answer.status_code == 503 and "Retry-After" in answer.headers and "error" in answer.json():
        return {}, None
    if answer.status_code == 408:  # the request came late, and is sent again
        return {}, None
    return {}, f"the API answered {answer.status_code}: {answer.text[:200]}"
