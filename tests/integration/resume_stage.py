"""A dispatcher on real Ray with tiny jobs to train, and helpers that kill its processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import psutil
import pytest

from tests.support.training import CHUNK_NUMEL, NUM_VALIDATION_EXAMPLES, TRAINING, keep_calibration, make_dataset
from tests.support.training import make_model as make_tiny_model
from windlass.actors.job.journal import JournalRecord, read_journal
from windlass.engine.model.partition import Partition, build_meta_model, load_config
from windlass.service.installation.process_ids import find_process
from windlass.service.installation.settings import Settings
from windlass.service.jobs.spec_builder import ARENA_DIR, ResolvedJob
from windlass.service.machine.ray_cluster import RayCluster
from windlass.storage.sql.database import Database, migrate
from windlass.storage.sql.job_status import TERMINAL_STATUSES, JobStatus
from windlass.storage.sql.models import Job
from windlass.storage.sql.repositories.events import EventRepository
from windlass.storage.sql.repositories.jobs import JobRepository, NewJob
from windlass.storage.ssd.volume import Volume

# Seconds, for every wait; only a hang takes that long.
DEADLINE_S = 150.0
# Enough that a job still runs when a test asks it to pause or to take another plan.
NUM_STEPS = 60
RAY = ("raylet", "gcs_server")
_RUNNERS = ("ray::Runner", "ray::LeadRunner", "ray::BoxRunner")


@dataclass(frozen=True)
class Undisturbed:
    """The results of a job that is not disturbed: the loss of each step, and the model file."""

    losses: dict[int, float]
    model: bytes


class ResumeStage:
    """A home with a model, its database, and a dispatcher that is restarted whenever it ends."""

    def __init__(self, home: Path, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self.settings = Settings(home=home)
        self.settings.make_dirs()
        home.chmod(0o700)
        migrate(self.settings.database_url)
        self.database = Database(self.settings.database_url)
        # With dropout: random numbers must repeat exactly, too.
        make_tiny_model(self.settings.models_dir / "tiny", dropout=0.1)
        for ssd_dir in self.settings.ssd_dirs:
            keep_calibration(ssd_dir)
        self.cluster = RayCluster(home)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            self.cluster.ensure_running(num_cpus=2, num_gpus=0)
        self._dispatcher: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        """Ends the dispatcher and Ray."""
        if self._dispatcher is not None:
            self._dispatcher.kill()
            self._dispatcher.wait()
        self.cluster.stop()
        self.database.close()

    def tend(self) -> None:
        """Starts the dispatcher if it does not run, as the supervisor does."""
        if self._dispatcher is None or self._dispatcher.poll() is not None:
            command = [sys.executable, "-m", "windlass.service", "dispatcher", f"--parent-pid={os.getpid()}"]
            environment = {
                **os.environ,
                **self.cluster.environment,
                **self._environment,
                "WINDLASS_HOME": str(self.settings.home),
                # Warnings of this process come from libraries.
                "PYTHONWARNINGS": "ignore",
            }
            with (self.settings.home / "dispatcher.log").open("ab") as log:
                self._dispatcher = subprocess.Popen(
                    command, env=environment, cwd=self.settings.home, stdout=log, stderr=log
                )

    def submit(self, num_steps: int = NUM_STEPS, *, priority: int = 0) -> str:
        """Creates a prepared job with the files that the preparation leaves. Returns its id."""
        training = replace(TRAINING, clip_norm=0.5)
        new = NewJob(
            model="tiny",
            training_file="file-train",
            validation_file="file-valid",
            suffix=None,
            seed=training.seed,
            method={"type": "supervised", "supervised": {"hyperparameters": {}}},
            windlass={"precision": "fp32", "evaluate_every": 4, "checkpoint_every": 8},
            metadata={},
            priority=priority,
            idempotency_key=None,
            request_digest=None,
        )
        with self.database.write() as session:
            jobs = JobRepository(session)
            job_id = jobs.create(new).id
            self._prepare(job_id)
            jobs.transition(
                job_id,
                JobStatus.VALIDATING_FILES,
                JobStatus.QUEUED,
                message="",
                hyperparameters=ResolvedJob(training=training, summary="", warnings=()).hyperparameters,
                total_steps=num_steps,
            )
        return job_id

    def train_undisturbed(self, num_steps: int = NUM_STEPS) -> Undisturbed:
        """Runs a job to its end without disturbing it."""
        job_id = self.submit(num_steps)
        self.finish(job_id)
        assert self.job(job_id).attempt == 1
        losses = self.losses(job_id)
        assert sorted(losses) == list(range(1, num_steps + 1))
        return Undisturbed(losses, self.model(job_id))

    def _prepare(self, job_id: str) -> None:
        folder = self.folder(job_id)
        (folder / "prepare").mkdir(parents=True)
        make_dataset(folder / "dataset")
        prepared = f'{{"num_validation_examples": {NUM_VALIDATION_EXAMPLES}}}'
        (folder / "prepare" / "prepare_data.json").write_text(prepared)
        model = build_meta_model(load_config(self.settings.models_dir / "tiny"), TRAINING.precision)
        (folder / "layout.json").write_text(Partition(model, CHUNK_NUMEL).layout.to_json())

    # --- reading the state ------------------------------------------------------------------------------------------

    def folder(self, job_id: str) -> Path:
        """The job's folder."""
        return self.settings.jobs_dir / job_id

    def job(self, job_id: str) -> Job:
        """The job's present row."""
        with self.database.read() as session:
            return JobRepository(session).get(job_id)

    def is_over(self, job_id: str) -> bool:
        """Returns whether the job has ended."""
        return self.job(job_id).status in TERMINAL_STATUSES

    def messages(self, job_id: str) -> list[str]:
        """The messages of the job's events, oldest first."""
        with self.database.read() as session:
            return [event.message for event in EventRepository(session).since(0, limit=10_000, job_id=job_id)]

    def journal(self, job_id: str) -> list[JournalRecord]:
        """The journal of the job's runners."""
        return list(read_journal(self.folder(job_id) / "journal.jsonl"))

    def losses(self, job_id: str) -> dict[int, float]:
        """The training loss of every step. Checks that no step is reported twice."""
        told = [record for record in self.journal(job_id) if "train_loss" in record.data]
        losses = {record.data["step"]: record.data["train_loss"] for record in told}
        assert len(losses) == len(told), "a step reported its loss twice"
        return losses

    def model(self, job_id: str) -> bytes:
        """The weights of the fine-tuned model."""
        name = self.job(job_id).fine_tuned_model
        assert name is not None
        return (self.settings.fine_tuned_dir / name / "model.safetensors").read_bytes()

    def leftovers(self, job_id: str) -> list[str]:
        """Files and allocations that an ended job has left, except its model and its record."""
        found = [str(path) for path in ARENA_DIR.iterdir() if job_id in path.name]
        found += [str(path) for path in self.settings.fine_tuned_dir.glob(".*")]
        found += [str(path) for path in self.folder(job_id).glob("attempt-*")]
        for ssd_dir in self.settings.ssd_dirs:
            volume = Volume.open(ssd_dir)
            found += [f"{job} on {ssd_dir}" for job in volume.allocations() if job_id in str(job)]
            volume.close()
        return found

    # --- acting -----------------------------------------------------------------------------------------------------

    def wait_for(self, done: Callable[[], bool], what: str, job_id: str) -> None:
        """Waits until `done` returns true, and keeps the dispatcher running meanwhile."""
        until_s = time.monotonic() + DEADLINE_S
        while not done():
            assert time.monotonic() < until_s, f"no {what} within {DEADLINE_S:g} s: {self.messages(job_id)[-5:]}"
            self.tend()
            time.sleep(0.02)

    def wait_for_step(self, job_id: str, attempt: int, step: int) -> None:
        """Waits until the attempt has begun and any attempt has committed the step, or until the job is over."""

        def has_come() -> bool:
            return self.is_over(job_id) or (
                self.job(job_id).attempt >= attempt and max(self.losses(job_id), default=0) >= step
            )

        self.wait_for(has_come, f"step {step} in attempt {attempt}", job_id)

    def wait_for_attempt(self, job_id: str, attempt: int) -> None:
        """Waits until an attempt has been launched, or until the job is over."""
        self.wait_for(lambda: self.is_over(job_id) or self.job(job_id).attempt >= attempt, f"attempt {attempt}", job_id)

    def finish(self, job_id: str) -> None:
        """Waits for the job's success, and for the end of its processes."""
        self.wait_for(lambda: self.is_over(job_id), "end", job_id)
        job = self.job(job_id)
        assert job.status is JobStatus.SUCCEEDED, f"{job.error}: {self.messages(job_id)[-5:]}"
        self.wait_for(lambda: self.leftovers(job_id) == [], f"end of {self.leftovers(job_id)}", job_id)

    def kill(self, job_id: str, what: str) -> list[str]:
        """Kills processes of the job's attempt, or a part of Ray. Returns the names of the killed processes."""
        if what in RAY:
            victims = {what: next(each for each in map(psutil.Process, self.cluster.pids) if each.name() == what)}
        else:
            attempt = self.job(job_id).attempt
            found = dict(processes_of(self.folder(job_id), attempt, self.settings.ssd_dirs))
            victims = found if what == "all" else {name: each for name, each in found.items() if name == what}
        for process in victims.values():
            _send_kill(process)
        return sorted(victims)


@contextmanager
def resume_stage(home: Path, environment: Mapping[str, str] = MappingProxyType({})) -> Iterator[ResumeStage]:
    """A stage that leaves no process running. `environment`: extra variables for its processes."""
    stage = ResumeStage(home, environment)
    try:
        yield stage
    finally:
        stage.close()


def processes_of(folder: Path, attempt: int, ssd_dirs: tuple[Path, ...]) -> Iterator[tuple[str, psutil.Process]]:
    """The names and processes of an attempt, recognized by the files that they have open or mapped."""
    for process in psutil.process_iter():
        try:
            held = {Path(each.path) for each in process.open_files()}
            if folder / f"attempt-{attempt}.lock" not in held:
                continue
            held |= {Path(each.path) for each in process.memory_maps(grouped=True)}
        except psutil.Error:
            continue
        volumes = [i for i, ssd_dir in enumerate(ssd_dirs) if ssd_dir / "windlass.volume" in held]
        if folder / "journal.jsonl" in held or process.name().startswith(_RUNNERS):
            yield "runner", process
        elif volumes:
            yield f"ssd-{volumes[0]}", process
        elif folder / "dataset" / "train.tokens" in held:
            yield "gpu-0", process
        elif any(path.suffix == ".arena" for path in held):
            yield "optimizer-0", process
        else:
            yield f"starting-{process.pid}", process


def _send_kill(process: psutil.Process) -> None:
    if find_process(process.pid) is not None:
        process.send_signal(signal.SIGKILL)
