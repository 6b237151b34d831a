"""A job's journal: the runner's reports, one JSON line a record, which the dispatcher imports exactly once.

The runner never opens the database. It appends to the journal and never waits for a reader. Records are numbered per
attempt. A reader that stores the last `(attempt, seq)` it imported therefore misses none and imports none twice.
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

# Appended to a line that a crash or a full disk cut short. It makes the line invalid JSON even if only its newline was
# missing, so that readers skip it. The record's number is used again.
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
    """Appends an attempt's records, each with one write, and continues the numbers of those already in the file."""

    def __init__(self, path: Path, attempt: int) -> None:
        self.path = path
        self._attempt = attempt
        self._seq = max((record.seq for record in _records(path) if record.attempt == attempt), default=0)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._torn = _ends_torn(self._fd)

    def append(self, kind: str, message: str, level: str = "info", **data: Any) -> JournalRecord:
        """Appends a record, which from then on survives the death of this process."""
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
        """Appends the attempt's last record. With `status` "failed", `error` is {code, message, param}."""
        level = "error" if status == "failed" else "info"
        self.append(OUTCOME, message, level, status=status, error=error, **data)

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class JournalReader:
    """Reads the records that were added to a journal since the last call, without reading the file from the start."""

    def __init__(self, path: Path, after: tuple[int, int] = (0, 0)) -> None:
        self._path = path
        self._after = after  # the last (attempt, seq) returned
        self._offset = 0  # of the first byte not yet read

    def read_new(self) -> list[JournalRecord]:
        """Returns the records after the last one returned, without those of an attempt that a later one replaced."""
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
    """Yields the records after `(attempt, seq)`, in order, without an incomplete last line."""
    yield from JournalReader(path, after).read_new()


def _records(path: Path) -> Iterator[JournalRecord]:
    """Yields all complete records, also those of replaced attempts."""
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
    """Replaces NaN and infinity by None, because JSON has neither and a diverged loss must not fail the journal."""
    if isinstance(value, float):
        return value if value - value == 0.0 else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _decode(line: bytes) -> JournalRecord | None:
    """Returns the record of a line; None if the line was cut short."""
    try:
        return JournalRecord(**json.loads(line))
    except (ValueError, TypeError):
        return None
