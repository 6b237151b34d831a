"""The bytes that jobs have written to each SSD of this home, kept in a file because jobs' rows do not stay."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from windlass.service.installation import Settings
from windlass.storage.files import write_durably
from windlass.storage.sql import Database
from windlass.storage.sql.repositories import BoxRepository, EventRepository

LEDGER_FILE = "ssd_written.json"  # in the home
# An ended job is looked up again for so long, and stays apart from the total for longer, so that it counts once.
_LOOK_AGAIN_S = 600.0
_STAYS_APART_S = 3600.0
_NUM_AT_ONCE = 500


def written_by_ssd(settings: Settings) -> Mapping[str, int]:
    """Returns the bytes by the paths of SSDs. An SSD of which nothing is known is left out."""
    ledger = _load(settings.home)
    total = Counter(ledger["ended"])
    for job in ledger["jobs"].values():
        total.update(job["ssds"])
    return total


def note_written(database: Database, settings: Settings, node: str, *, clock: Callable[[], float] = time.time) -> None:
    """Adds to the file what this home's jobs have written since the last time. One process of a home calls it.

    A job counts with its last metrics, which are of all its attempts. `node`: this home. Raises OSError.
    """
    ledger, now_s = _load(settings.home), clock()
    jobs: dict[str, Any] = ledger["jobs"]
    with database.read() as session:
        found = BoxRepository(session).trained_at(node, ended_after_s=ledger["noted_at"] - _LOOK_AGAIN_S)
        for begin in range(0, len(found), _NUM_AT_ONCE):
            some = found[begin : begin + _NUM_AT_ONCE]
            metrics = EventRepository(session).last_metrics([job_id for job_id, _ in some])
            for job_id, finished_at in some:
                written = metrics.get(job_id, {}).get("ssd_bytes_written_by_ssd", ())
                if len(written) == len(settings.ssd_dirs):  # else other SSDs were set, and these cannot be told apart
                    ssds = {str(path): nbytes for path, nbytes in zip(settings.ssd_dirs, written, strict=True)}
                    jobs[job_id] = {"ssds": ssds, "ended_at": finished_at}
                elif job_id in jobs:
                    jobs[job_id]["ended_at"] = finished_at
    _fold(ledger, {job_id for job_id, _ in found}, now_s)
    write_durably(settings.home / LEDGER_FILE, json.dumps(ledger | {"noted_at": now_s}))


def _fold(ledger: dict[str, Any], found: Iterable[str], now_s: float) -> None:
    """Moves jobs that will not be looked up again into the total."""
    known, total = set(found), Counter(ledger["ended"])
    for job_id, job in list(ledger["jobs"].items()):
        is_active = job_id in known and job["ended_at"] is None
        if is_active or (job["ended_at"] is not None and now_s - job["ended_at"] < _STAYS_APART_S):
            continue
        total.update(job["ssds"])
        del ledger["jobs"][job_id]
    ledger["ended"] = dict(total)


def _load(home: Path) -> dict[str, Any]:
    try:
        ledger: dict[str, Any] = json.loads((home / LEDGER_FILE).read_text())
        return {name: ledger[name] for name in ("ended", "jobs", "noted_at")}
    except (OSError, ValueError, LookupError, TypeError):  # there is none yet, or it cannot be read: it begins anew
        return {"ended": {}, "jobs": {}, "noted_at": 0.0}
