"""A job's journal: what its runner has to tell, one JSON line a record, for the dispatcher to import exactly once.

The runner never opens the database; it appends here and goes on, whether or not anybody reads. Records are numbered per
attempt, so a reader that remembers the last `(attempt, seq)` it took in misses none and takes none twice.
The last record of an attempt has kind "outcome"; `append_outcome` writes it.
"""

import errno
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JOURNAL_FILE = "journal.jsonl"  # in the job's folder
OUTCOME = "outcome"
METRICS = "metrics"

# A line that a crash or a full disk cut short is never rewritten: this makes it no JSON, even where only its newline
# was missing (its number is used again), and readers skip it.
_CLOSE_TORN = "#\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRecord:
    """One line of a journal."""

    attempt: int
    seq: int  # from 1, without gaps within an attempt
    created_at: float  # Unix time, seconds
    kind: str  # "message", "metrics", "checkpoint", "outcome", ...
    level: str  # "info", "warn", "error"
    message: str
    data: dict[str, Any]


class Journal:
    """Appends an attempt's records, each with one write, numbered on from what the file holds of that attempt."""

    def __init__(self, path: Path, attempt: int) -> None:
        self.path = path
        self._attempt = attempt
        self._seq = max((record.seq for record in _records(path) if record.attempt == attempt), default=0)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._torn = _ends_torn(self._fd)

    def append(self, kind: str, message: str, level: str = "info", **data: Any) -> JournalRecord:
        """Add a record; when this returns, it survives the death of this process."""
        record = JournalRecord(
            attempt=self._attempt,
            seq=self._seq + 1,
            created_at=time.time(),
            kind=kind,
            level=level,
            message=message,
            data=data,
        )
        line = (_CLOSE_TORN if self._torn else "") + _encode(record) + "\n"
        encoded = line.encode()
        self._torn = True
        if (written := os.write(self._fd, encoded)) != len(encoded):
            raise OSError(
                errno.ENOSPC,
                f"journal record {record.seq} was cut at {written} of {len(encoded)} bytes: the disk is full",
            )
        self._torn = False
        self._seq = record.seq
        return record

    def append_outcome(self, status: str, message: str, error: dict[str, Any] | None = None, **data: Any) -> None:
        """Add the attempt's last record. `status`: "failed" comes with an error {code, message, param}."""
        level = "error" if status == "failed" else "info"
        self.append(OUTCOME, message, level, status=status, error=error, **data)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class JournalReader:
    """Reads what was added to a journal since the last call, in order, without reading the file from the start."""

    def __init__(self, path: Path, after: tuple[int, int] = (0, 0)) -> None:
        self._path = path
        self._after = after  # the last (attempt, seq) that was handed out
        self._offset = 0  # of the first byte not yet looked at

    def read_new(self) -> list[JournalRecord]:
        """Records after the last one handed out. Those of an attempt older than one seen already are not: it lost."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            tail = file.read()
        complete = tail[: tail.rfind(b"\n") + 1]
        self._offset += len(complete)
        fresh = []
        for line in complete.splitlines():
            record = _decode(line)
            if record is not None and (record.attempt, record.seq) > self._after:
                self._after = (record.attempt, record.seq)
                fresh.append(record)
        return fresh


def read_journal(path: Path, after: tuple[int, int] = (0, 0)) -> Iterator[JournalRecord]:
    """The records after `(attempt, seq)`, in order; a last line that is not complete yet is left for the next time."""
    yield from JournalReader(path, after).read_new()


def _records(path: Path) -> Iterator[JournalRecord]:
    """All whole records, stale ones too."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n") and (record := _decode(line)) is not None:
                yield record


def _ends_torn(fd: int) -> bool:
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) != b"\n"


def _encode(record: JournalRecord) -> str:
    fields = {name: getattr(record, name) for name in JournalRecord.__slots__}
    return json.dumps(_finite(fields), separators=(",", ":"), allow_nan=False)


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: they become null, as a diverged loss must not end the run that reports it."""
    if isinstance(value, float):
        return value if value - value == 0.0 else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _decode(line: bytes) -> JournalRecord | None:
    """The record on a line; None for what is left of a write that was cut short."""
    try:
        return JournalRecord(**json.loads(line))
    except (ValueError, TypeError):
        return None
