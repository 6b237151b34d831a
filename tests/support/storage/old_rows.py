"""Rows of every table for each revision of the schema, written by plain SQL as that version's programs would."""

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection

REVISIONS = tuple(f"{number:04}" for number in range(1, 16))

DONE, RUNNING = "ftjob-0123456789abcdef01234567", "ftjob-fedcba987654321001234567"
MODEL = "ft:tiny:mine:0123456789ab"
SETTINGS = {"epochs": 2, "batch_size": 4, "sequence_length": 64}
METHOD = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": "auto"}}}
HYPERPARAMETERS = {"epochs": 2, "batch_size": 4, "learning_rate": 1e-5}

_JOB: Mapping[str, Any] = {
    "attempt": 1,
    "created_at": 100.5,
    "started_at": 110.0,
    "model": "tiny",
    "training_file": "file-train",
    "validation_file": None,
    "suffix": "mine",
    "seed": 2**63 - 1,
    "method": METHOD,
    "windlass": SETTINGS,
    "metadata": {"team": "a 'b'"},
    "priority": -3,
    "idempotency_key": None,
    "request_digest": "d" * 64,
    "hyperparameters": HYPERPARAMETERS,
    "cancel_requested": False,
    "step": 2,
    "total_steps": 4,
    "trained_tokens": 2**40,
    "journal_attempt": 1,
    "journal_seq": 7,
    "result_files": [],
}
# The additions of each revision: new tables with rows, and new columns of existing rows.
_TABLES: Mapping[str, Mapping[str, tuple[Mapping[str, Any], ...]]] = {
    "0001": {
        "files": (
            {"id": "file-train", "filename": "a.jsonl", "purpose": "fine-tune", "nbytes": 2**33, "created_at": 99.0},
            {"id": "file-csv", "filename": "m.csv", "purpose": "fine-tune-results", "nbytes": 9, "created_at": 120.0},
        ),
        "jobs": (
            {
                **_JOB,
                "id": DONE,
                "status": "succeeded",
                "finished_at": 130.0,
                "idempotency_key": "once",
                "fine_tuned_model": MODEL,
                "result_files": ["file-csv"],
            },
            {**_JOB, "id": RUNNING, "status": "running", "created_at": 101.0, "estimated_finish": 200.0},
        ),
        "job_events": (
            {
                "job_id": DONE,
                "attempt": 0,
                "created_at": 100.5,
                "level": "info",
                "message": "Created",
                "type": "message",
            }
            | {"data": {"status": "validating_files"}, "seq": None},
            {"job_id": DONE, "attempt": 1, "created_at": 112.0, "level": "info", "message": "Step 1", "type": "metrics"}
            | {"data": {"step": 1, "train_loss": 2.5}, "seq": 1},
            {
                "job_id": RUNNING,
                "attempt": 1,
                "created_at": 113.0,
                "level": "warn",
                "message": "slow",
                "type": "message",
            }
            | {"data": {}, "seq": 1},
        ),
        "job_metrics": (
            {"job_id": DONE, "step": 1, "attempt": 1, "created_at": 112.0, "data": {"step": 1, "train_loss": 2.5}},
            {"job_id": DONE, "step": 2, "attempt": 1, "created_at": 114.0, "data": {"step": 2, "train_loss": 2.0}},
        ),
        "checkpoints": (
            {"id": "ftckpt-1", "job_id": DONE, "attempt": 1, "step_number": 1, "created_at": 113.0}
            | {"model": f"{MODEL}-step-1", "path": "/old/home/x", "metrics": {"step": 1, "train_loss": 2.5}},
        ),
    },
    "0003": {
        "webhook_endpoints": (
            {"id": "we_1", "name": "hook", "url": "https://hook.example/a", "secret": "sealed", "created_at": 90.0}
            | {"event_types": ["fine_tuning.job.succeeded"], "updated_at": 91.0, "owner": None},
        ),
        "webhook_deliveries": (
            {"endpoint_id": "we_1", "event_id": "evt_1", "body": "{}", "created_at": 130.0, "num_tries": 2}
            | {"next_try_at": 131.0, "last_error": "it was answered with 500"},
        ),
    },
    "0004": {
        "dispatchers": ({"id": "dispatcher-1", "node": "node-1", "machine": "boot-1", "heartbeat": 5},),
    },
    "0005": {
        "api_keys": (
            {"id": "key-1", "name": "laptop", "user_name": "ann", "role": "user", "digest": "e" * 64}
            | {"created_at": 80.0, "expires_at": None, "last_used_at": 120.0},
        ),
        "login_sessions": ({"digest": "f" * 64, "key_id": "key-1", "created_at": 81.0, "expires_at": 4e9},),
        "audit_events": (
            {"created_at": 100.5, "key_id": "key-1", "user_name": "ann", "action": "create_job", "target": DONE}
            | {"peer": "127.0.0.1", "result": "done"},
        ),
    },
    "0008": {
        "deleted_jobs": (
            {"id": "ftjob-aaaaaaaaaaaaaaaaaaaaaaaa", "owner": "ann", "node": "node-1", "attempt": 2}
            | {"model": "ft:tiny::aaaaaaaaaaaa", "keeps_model": True, "deleted_at": 140.0},
        ),
        "removals": ({"kind": "file", "name": "file-gone", "node": "node-1", "created_at": 141.0},),
    },
    "0012": {
        "stored_things": (
            {"kind": "model", "name": MODEL, "job_id": DONE, "owner": "ann", "node": "node-1", "nbytes": 2**40},
        ),
    },
    "0013": {
        "boxes": (
            {"id": "box-1", "name": "attic", "node": "node-2", "head": "node-1", "state": "draining"}
            | {"certificate": "d" * 64, "address": "10.0.0.2", "joined_at": 150.0, "seen_at": 151.0}
            | {"facts": {}},
        ),
        "join_codes": ({"digest": "c" * 64, "created_at": 149.0, "expires_at": 4e9},),
        "box_instructions": (
            {"ordinal": 7, "box_id": "box-1", "job_id": RUNNING, "kind": "pause", "body": {}, "created_at": 152.0},
        ),
    },
    "0014": {
        "job_parts": (
            {"job_id": RUNNING, "node": "node-2", "position": 1, "attempt": 2, "link": {"names": []}, "is_over": False}
            | {"state": "running", "served": 2, "port": 7700, "told": "as planned"},
        ),
    },
    "0015": {
        "network_rates": (
            {"head": "node-1", "source": "box-head", "target": "box-1", "bytes_per_s": 1e9, "round_trip_s": 1e-4}
            | {"measured_at": 153.0},
        ),
    },
}
_COLUMNS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "0002": {"jobs": {"plan_number": 3}},
    "0004": {"jobs": {"node": "node-1", "num_lost": 2, "lease_holder": "dispatcher-1"}},
    "0005": {"jobs": {"owner": "ann"}, "files": {"owner": "ann"}},
    "0006": {"checkpoints": {"reasons": ["interval"], "nbytes": 12345}},
    "0007": {"jobs": {"yields_to": "ftjob-more-urgent"}},
    "0009": {"files": {"node": "node-1"}},
    "0010": {"jobs": {"finish_is_measured": True}},
    "0011": {
        "jobs": {"preparation": {"step": "plan_job", "elapsed_s": 2.5}, "launched_at": 111.0, "keeps_place": True},
        "api_keys": {"limits": {"max_running_jobs": 2}},
    },
    "0013": {"jobs": {"box_cursor": 41}},
    "0015": {"boxes": {"probe": {"id": "1"}, "probe_answer": {"id": "1"}}},
}


def insert_rows(connection: Connection, revision: str) -> dict[str, int]:
    """Fills a database of this revision, and returns the number of rows of each table."""
    reached = REVISIONS[: REVISIONS.index(revision) + 1]
    more: dict[str, dict[str, Any]] = {}
    for each in reached:
        for table, columns in _COLUMNS.get(each, {}).items():
            more.setdefault(table, {}).update(columns)
    counts = {}
    for each in reached:
        for table, rows in _TABLES.get(each, {}).items():
            for row in rows:
                values = {**row, **more.get(table, {})}
                names, literals = ", ".join(values), ", ".join(map(_literal, values.values()))
                connection.exec_driver_sql(f"INSERT INTO {table} ({names}) VALUES ({literals})")
            counts[table] = len(rows)
    return counts


def _literal(value: object) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    text = value if isinstance(value, str) else json.dumps(value)
    return "'" + text.replace("'", "''") + "'"
