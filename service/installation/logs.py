"""How the service's processes log: lines for people, or JSON, with the job and the attempt that a line is about."""

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
    """Of each line."""

    TEXT = "text"
    JSON = "json"


def set_up_logs(format: LogFormat, role: str) -> None:
    """To standard error. `role`: which process this is."""
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
    """Start each log of a folder anew that has grown beyond the limit; what it held goes to `NAME.1`, in its place.

    The file stays the same one, emptied: processes that have it open, to append, go on in it. Lines that are written
    while it is copied may be lost.
    """
    for path in folder.glob("*.log"):
        with contextlib.suppress(OSError):  # a full disk, or a log that has just gone: next time
            if path.stat().st_size > limit_nbytes:
                kept = path.with_name(f"{path.name}.1")
                shutil.copyfile(path, kept)
                os.truncate(path, 0)


def about(job_id: str, attempt: int = 0) -> dict[str, object]:
    """For `extra` of a line about a job, or about one of its attempts."""
    return {"job": job_id, "attempt": attempt} if attempt else {"job": job_id}


class _TextFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = vars(record)
        subject = ", ".join(f"{name} {fields[name]}" for name in ("job", "attempt") if name in fields)
        return f"{super().formatMessage(record)}{f'{subject}: ' if subject else ''}{record.message}"
