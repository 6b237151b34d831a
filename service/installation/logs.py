"""Logging of the service's processes: lines of text or JSON, each with the job and the attempt that it is about."""

import contextlib
import logging
import os
import shutil
import sys
from enum import StrEnum
from pathlib import Path

_TEXT = "%(asctime)s %(levelname)s %(name)s: "
_RENAMED = {"asctime": "time", "levelname": "level", "name": "logger"}


class LogFormat(StrEnum):
    """The format of each line."""

    TEXT = "text"
    JSON = "json"


def set_up_logs(format: LogFormat, role: str) -> None:
    """Logs to stderr. `role`: the name of this process in JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    if format is LogFormat.JSON:
        from pythonjsonlogger.json import JsonFormatter

        formatter: logging.Formatter = JsonFormatter(
            "%(asctime)s %(levelname)s %(name)s %(message)s", rename_fields=_RENAMED, static_fields={"process": role}
        )
        formatter.default_time_format, formatter.default_msec_format = "%Y-%m-%dT%H:%M:%S", "%s.%03d"
    else:
        formatter = _TextFormatter(_TEXT)
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def rotate_logs(folder: Path, *, limit_nbytes: int) -> None:
    """Moves the content of each log beyond the limit to `NAME.1`, which it replaces.

    The log file itself is truncated, because processes have it open to append. Lines written during the copy may be
    lost.
    """
    for path in folder.glob("*.log"):
        with contextlib.suppress(OSError):  # a full disk, or a log that was just removed; the next call retries
            if path.stat().st_size > limit_nbytes:
                kept = path.with_name(f"{path.name}.1")
                shutil.copyfile(path, kept)
                os.truncate(path, 0)


def about(job_id: str, attempt: int = 0) -> dict[str, object]:
    """Makes the `extra` of a log line about a job, or about one of its attempts."""
    return {"job": job_id, "attempt": attempt} if attempt else {"job": job_id}


class _TextFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = vars(record)
        subject = ", ".join(f"{name} {fields[name]}" for name in ("job", "attempt") if name in fields)
        return f"{super().formatMessage(record)}{f'{subject}: ' if subject else ''}{record.message}"
