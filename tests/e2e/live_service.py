"""A real API process on a fresh home, and jobs in its database, written as the dispatcher would."""

import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import uvicorn  # noqa: F401  # see `_FORKS`

from benchmarks.api.fill import HYPERPARAMETERS
from windlass.actors.job.journal import JournalRecord
from windlass.service.__main__ import main
from windlass.service.api import create_app  # noqa: F401  # see `_FORKS`
from windlass.service.cli.commands import main as run_command
from windlass.service.cli.every_command import add_commands  # noqa: F401  # see `_FORKS`
from windlass.service.http import bounded_protocol  # noqa: F401  # see `_FORKS`
from windlass.service.installation.local_key import KEY_VARIABLE, open_client
from windlass.service.installation.settings import SETTINGS_FILE, Settings
from windlass.storage.sql.database import Database, migrate
from windlass.storage.sql.job_status import JobStatus
from windlass.storage.sql.models import Job
from windlass.storage.sql.repositories.files import FileRepository
from windlass.storage.sql.repositories.jobs import JobRepository, NewJob
from windlass.storage.sql.repositories.journal_import import import_journal

# A server that has imported all that the API needs makes its processes, because importing takes longer than most tests.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([__name__])


def _serve(listener: socket.socket, home: Path) -> None:
    """Runs the API of a home, as `python -m windlass.service api` does."""
    os.environ.update({"WINDLASS_HOME": str(home), "WINDLASS_PORT": str(listener.getsockname()[1])})
    os.chdir(home)
    sys.exit(main(["api", f"--listener={listener.detach()}"]))


def _command(home: Path, port: int, arguments: Sequence[str], output: Path) -> None:
    """Runs a command, as `windlass` does."""
    os.environ.update({"WINDLASS_HOME": str(home), "WINDLASS_PORT": str(port)})
    os.environ.pop(KEY_VARIABLE, None)
    sys.argv = ["windlass", *arguments]
    with output.open("w") as sys.stdout, output.with_suffix(".errors").open("w") as sys.stderr:
        run_command()


class LiveService:
    """The API as `windlass up` runs it. It can be killed and started again at the same address."""

    def __init__(self, home: Path, **options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        (home / SETTINGS_FILE).write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in options.items()))
        self.settings = Settings(home=home, port=self.port, **options)  # type: ignore[arg-type]
        self.settings.make_dirs()
        migrate(self.settings.database_url)
        self.database = Database(self.settings.database_url)
        self._add_files()
        self._process: ForkServerProcess | None = None
        self._seqs: dict[tuple[str, int], int] = {}

    @property
    def url(self) -> str:
        """The URL of the dashboard."""
        return self.settings.base_url

    def start(self) -> None:
        """Starts the API, and returns once it answers."""
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", self.port))
            listener.listen(128)
            self._process = _FORKS.Process(target=_serve, args=(listener, self.settings.home))
            self._process.start()
        deadline = time.monotonic() + 60
        with open_client(self.settings) as client:
            while not client.is_healthy():
                assert self._process.exitcode is None, "the API ended at once"
                assert time.monotonic() < deadline, "the API did not answer within a minute"
                time.sleep(0.05)

    def command(self, *arguments: str) -> str:
        """The output of a command, which a process of its own runs."""
        output = self.settings.home.parent / "output-of-command"
        process = _FORKS.Process(target=_command, args=(self.settings.home, self.port, arguments, output))
        process.start()
        process.join(120)
        assert process.exitcode == 0, output.with_suffix(".errors").read_text()
        return output.read_text().removesuffix("\n")

    def kill(self) -> None:
        """Ends the API as a crash would: its streams break off and its port is closed."""
        assert self._process is not None
        self._process.kill()
        self._process.join()
        self._process = None

    def close(self) -> None:
        """Ends the API, running or not."""
        if self._process is not None:
            self.kill()
        self.database.close()

    def forget_everything(self) -> None:
        """Replaces the database with a new one, whose events are numbered from one again."""
        self.database.close()
        for path in self.settings.home.glob("windlass.db*"):
            path.unlink()
        migrate(self.settings.database_url)
        self.database = Database(self.settings.database_url)
        self._add_files()
        self._seqs.clear()

    def _add_files(self) -> None:
        with self.database.write() as session:
            for file_id, name in (("file-train", "support-chats.jsonl"), ("file-valid", "support-chats-valid.jsonl")):
                FileRepository(session).add(file_id=file_id, filename=name, purpose="fine-tune", nbytes=1)

    # --- writes of the dispatcher ---

    def submit(self, **fields: Any) -> str:
        """Creates a job and returns its id."""
        new: dict[str, Any] = {
            "model": "Qwen3-1.7B",
            "training_file": "file-train",
            "validation_file": None,
            "suffix": None,
            "seed": 7,
            "method": {"type": "supervised", "supervised": {"hyperparameters": {}}},
            "windlass": {"epochs": 3, "precision": "bf16", "learning_rate": None},
            "metadata": {},
            "priority": 0,
            "idempotency_key": None,
            "request_digest": None,
        }
        with self.database.write() as session:
            return JobRepository(session).create(NewJob(**(new | fields))).id

    def queue(self, total_steps: int = 10, **fields: Any) -> str:
        """A job whose files have been read."""
        job_id = self.submit(**fields)
        self.move(
            job_id,
            JobStatus.VALIDATING_FILES,
            JobStatus.QUEUED,
            "Files validated, job queued",
            hyperparameters=dict(HYPERPARAMETERS),
            total_steps=total_steps,
        )
        return job_id

    def run(self, total_steps: int = 10, **fields: Any) -> str:
        """A running job."""
        job_id = self.queue(total_steps, **fields)
        self.move(job_id, JobStatus.QUEUED, JobStatus.RUNNING, "Fine-tuning job started", attempt=1)
        return job_id

    def move(self, job_id: str, source: JobStatus, target: JobStatus, message: str, **fields: Any) -> None:
        """Changes a job's status."""
        level = "error" if target is JobStatus.FAILED else "info"
        with self.database.write() as session:
            JobRepository(session).transition(job_id, source, target, message=message, level=level, **fields)

    def wait_because(self, job_id: str, reason: str) -> None:
        """Sets the reason why a job waits."""
        with self.database.write() as session:
            JobRepository(session).set_waiting_reason(job_id, reason)

    def tell(self, job_id: str, kind: str, message: str, *, attempt: int = 1, level: str = "info", **data: Any) -> None:
        """Adds one record of the runner's journal."""
        seq = self._seqs[job_id, attempt] = self._seqs.get((job_id, attempt), 0) + 1
        record = JournalRecord(
            attempt=attempt, seq=seq, created_at=time.time(), kind=kind, level=level, message=message, data=data
        )
        with self.database.write() as session:
            import_journal(session, job_id, attempt, [record])

    def train(
        self, job_id: str, step: int, loss: float, *, total_steps: int = 10, attempt: int = 1, **data: Any
    ) -> None:
        """Adds the metrics of one step."""
        metrics = {
            "step": step,
            "total_steps": total_steps,
            "train_loss": loss,
            "learning_rate": 2e-5 * min(1.0, step / 12) * (1 - step / (total_steps + 1)),
            "step_s": 6.61,
            "tokens_per_s": 4210.4,
            "remaining_s": 6.61 * (total_steps - step),
            "trained_tokens": step * 27831,
            "ssd_bytes_read": step * 24_100_000_000,
            "ssd_bytes_written": step * 20_650_000_000,
            "ssd_bytes_written_step": 20_650_000_000,
            "ssd_bytes_written_step_by_ssd": [10_325_000_000] * 2,
            "ssd_bytes_written_by_ssd": [step * 10_325_000_000] * 2,
        }
        message = f"Step {step}/{total_steps}: training loss={loss:.4f}"
        self.tell(job_id, "metrics", message, attempt=attempt, **(metrics | data))

    def validate(self, job_id: str, step: int, loss: float, *, attempt: int = 1) -> None:
        """Adds one validation loss."""
        data = {"step": step, "valid_loss": loss, "full_valid_loss": loss}
        self.tell(job_id, "metrics", f"Step {step}: validation loss={loss:.4f}", attempt=attempt, **data)

    def job(self, job_id: str) -> Job:
        """The job's row."""
        with self.database.read() as session:
            return JobRepository(session).get(job_id)
