"""Fills a database as after years of use: many finished jobs with their events and metrics, and files."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, create_engine, insert, make_url

from windlass.storage.sql import File, Job, JobStatus, migrate

_BATCH = 5000  # jobs per INSERT
_NUM_USERS = 20
_METRICS_STEPS = 10  # steps per job with metrics
HYPERPARAMETERS = {
    "epochs": 3,
    "batch_size": 16,
    "num_microbatches": 4,
    "sequence_length": 2048,
    "learning_rate": 2e-5,
    "warmup_steps": 12,
    "schedule": "linear",
    "weight_decay": 0.0,
    "beta1": 0.9,
    "beta2": 0.999,
    "epsilon": 1e-8,
    "clip_norm": 1.0,
    "precision": "bf16",
    "seed": 7,
}
# Data of a step's event. The database inserts the step's number.
_DATA = (
    '\'{{"step": \' || {n} || \', "total_steps": 100, "train_loss": 2.3456, "learning_rate": 1.9e-05, "step_s": 6.61, '
    '"tokens_per_s": 4210.4, "remaining_s": 661.0, "trained_tokens": 2783100}}\''
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """The stored amounts."""

    job_ids: Sequence[str]  # a sample
    num_jobs: int
    num_events: int
    seconds: float


def fill(url: str, *, num_jobs: int, num_events: int, file_id: str) -> Filled:
    """Creates the tables and fills them. The events are divided evenly among the jobs."""
    started_s = time.monotonic()
    migrate(url)
    parsed = make_url(url)
    is_sqlite = parsed.get_backend_name() == "sqlite"
    engine = create_engine(parsed if is_sqlite else parsed.set(drivername="postgresql+psycopg"))
    try:
        with engine.begin() as connection:
            connection.execute(insert(File), [_file(file_id)])
            ids = _add_jobs(connection, num_jobs)
            each = num_events // num_jobs
            message = "'Step ' || n || '/100: training loss=2.3456'"
            _add_steps(connection, "job_events", "seq, level, message, type", f"n, 'info', {message}, 'metrics'", each)
            _add_steps(connection, "job_metrics", "step", "n", _METRICS_STEPS)
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            # PostgreSQL would do this by itself later. SQLite has no such statistics in a home either.
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)" if is_sqlite else "VACUUM ANALYZE")
    finally:
        engine.dispose()
    sample = ids[:: max(1, len(ids) // 1000)]
    seconds = time.monotonic() - started_s
    return Filled(job_ids=sample, num_jobs=num_jobs, num_events=each * num_jobs, seconds=seconds)


def _file(file_id: str) -> dict[str, Any]:
    return {"id": file_id, "filename": "a.jsonl", "purpose": "fine-tune", "nbytes": 1, "created_at": time.time()}


def _add_jobs(connection: Connection, num_jobs: int) -> list[str]:
    begin_s = time.time() - 60.0 * num_jobs
    ids: list[str] = []
    for first in range(0, num_jobs, _BATCH):
        rows = [_job(number, begin_s + 60.0 * number) for number in range(first, min(num_jobs, first + _BATCH))]
        connection.execute(insert(Job), rows)
        ids += [row["id"] for row in rows]
    return ids


def _job(number: int, created_at: float) -> dict[str, Any]:
    job_id = f"ftjob-{secrets.token_hex(12)}"
    status = (JobStatus.SUCCEEDED, JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED)[number % 4]
    is_made = status is JobStatus.SUCCEEDED
    return {
        "id": job_id,
        "status": status,
        "attempt": 1,
        "created_at": created_at,
        "started_at": created_at + 20,
        "finished_at": created_at + 50,
        "owner": None if number % 2 else f"user-{number // 2 % _NUM_USERS}",
        "model": "Qwen3-1.7B",
        "training_file": f"file-{number % 5000}",
        "seed": number,
        "method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 3}}},
        "windlass": HYPERPARAMETERS,
        "metadata": {"team": f"team-{number % 7}"},
        "priority": 0,
        "hyperparameters": HYPERPARAMETERS,
        "cancel_requested": False,
        "step": 100,
        "total_steps": 100,
        "trained_tokens": 2_783_100,
        "plan_number": 0,
        "num_lost": 0,
        "journal_attempt": 1,
        "journal_seq": 100,
        "error": {"code": "x", "message": "it failed", "param": None} if status is JobStatus.FAILED else None,
        "fine_tuned_model": f"ft:Qwen3-1.7B::{job_id[6:18]}" if is_made else None,
        "result_files": [],
    }


def _add_steps(connection: Connection, table: str, columns: str, values: str, each: int) -> None:
    """Inserts rows for the first `each` steps of every job.

    The database makes them, which is a hundred times faster.
    """
    data = _DATA.format(n="n")
    if connection.dialect.name == "sqlite":
        numbers = f"WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {each}) "
        source = "jobs CROSS JOIN numbers"
    else:
        # A job's rows are adjacent, as after jobs that ran one after the other.
        numbers, data = "", f"CAST({data} AS json)"
        source = f"jobs CROSS JOIN LATERAL generate_series(1, {each} + 0 * jobs.attempt) AS numbers(n)"
    connection.exec_driver_sql(
        f"INSERT INTO {table} (job_id, attempt, created_at, {columns}, data) {numbers}"
        f"SELECT jobs.id, 1, jobs.created_at + n, {values}, {data} FROM {source}"
    )
