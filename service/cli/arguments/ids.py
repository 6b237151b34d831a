"""Ids on the command line.

An invalid id is refused before any request, and an unknown one is reported with the nearest.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from windlass.service.cli import CommandError
from windlass.service.installation import RequestRefusedError, ServiceClient, load_settings, open_client
from windlass.service.validation import did_you_mean, near_names

JOB, FILE, MODEL = "ftjob-", "file-", "ft:"

_PLAIN = re.compile(r"[A-Za-z0-9_-]+")


@contextmanager
def client_for_job(home: Path | None, job_id: str) -> Iterator[ServiceClient]:
    """Opens a client for a command about one job. Raises CommandError for an invalid or unknown job id."""
    for prefix, kind in ((FILE, "a file"), (MODEL, "a model")):
        if job_id.startswith(prefix):
            raise CommandError(f"{job_id!r} is the id of {kind}, not of a job ({JOB}…); `windlass jobs` lists jobs")
    if not _PLAIN.fullmatch(job_id):
        raise CommandError(f"{job_id!r} is not the id of a job ({JOB}…); `windlass jobs` lists jobs")
    with open_client(load_settings(home)) as client, told_if_unknown(client, job_id):
        yield client


@contextmanager
def told_if_unknown(client: ServiceClient, row_id: str) -> Iterator[None]:
    """Adds the nearest id, or the command that lists ids, to the service's error about an unknown job or file."""
    try:
        yield
    except RequestRefusedError as error:
        if error.code != "not_found":
            raise
        rows, command = (client.files(), "files") if row_id.startswith(FILE) else (client.jobs(), "jobs")
        near = _near_ids(row_id, rows)
        advice = did_you_mean(near, f"`windlass {command}` lists what there is")
        raise CommandError(f"{error}; {advice}") from None


def _near_ids(row_id: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the ids that begin like the given one, with or without its prefix, else those that are similar."""
    ids = [row["id"] for row in rows]
    begin = row_id.rsplit("-", 1)[-1]
    same = [each for each in ids if begin and each.rsplit("-", 1)[-1].startswith(begin)]
    return same or near_names(row_id, ids, separator="-")
