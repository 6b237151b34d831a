"""Text from strangers that goes into the database, and words for people."""

from collections.abc import Sequence
from typing import Any

# By the names of `service.preparation`.
_STEPS = {
    "download_model": "Downloading the model",
    "check_model": "Checking the model",
    "prepare_data": "Reading the files",
    "plan_job": "Planning",
    "check_budgets": "Checking the budgets",
}


def check_storable(value: str) -> str:
    """Return text that every database takes; ValueError for any other.

    PostgreSQL stores no null character, and what is no Unicode can be written nowhere.
    """
    if "\0" in value:
        raise ValueError("must have no null characters")
    if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
        raise ValueError("must be Unicode text, without lone surrogates")
    return value


def count_text(number: int, thing: str) -> str:
    """A number of things: "1 step", "2 steps"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def told_jobs(ids: Sequence[str]) -> str:
    """Ids of one or more jobs in words: "job A", "jobs A, B"."""
    return f"job{'s' if len(ids) > 1 else ''} {', '.join(ids)}"


def told_jobs_beside(own: Sequence[str], num_jobs: int) -> str:
    """So many jobs in the words for one owner, who is told the ids of the own ones and only the number of others."""
    num_others = num_jobs - len(own)
    parts = [told_jobs(own)] if own else []
    if num_others:
        parts.append(f"{count_text(num_others, 'job')} of others")
    return " and ".join(parts)


def told_preparation(preparation: dict[str, Any]) -> str:
    """How far a job's preparation is: "Reading the files: 40 percent, line 7 of a.jsonl; 12 s so far"."""
    told = _STEPS.get(preparation["step"], preparation["step"])
    if preparation.get("percent") is not None:
        told += f": {preparation['percent']} percent, line {preparation['line']} of {preparation['file']}"
    return f"{told}; {preparation['elapsed_s']:.0f} s so far"
