"""How the service's processes log: lines for people, or JSON, with the job and the attempt that a line is about."""

import logging
import sys
from enum import StrEnum

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


def about(job_id: str, attempt: int = 0) -> dict[str, object]:
    """For `extra` of a line about a job, or about one of its attempts."""
    return {"job": job_id, "attempt": attempt} if attempt else {"job": job_id}


class _TextFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = vars(record)
        subject = ", ".join(f"{name} {fields[name]}" for name in ("job", "attempt") if name in fields)
        return f"{super().formatMessage(record)}{f'{subject}: ' if subject else ''}{record.message}"
