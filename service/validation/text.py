"""Checks of user-supplied text before it is stored, and wordings for users."""

from collections.abc import Sequence
from typing import Any

# The keys are the names in `service.preparation`.
_STEPS = {
    "download_model": "Downloading the model",
    "check_model": "Checking the model",
    "prepare_data": "Reading the files",
    "plan_job": "Planning",
    "check_budgets": "Checking the budgets",
}


def check_storable(value: str) -> str:
    """Returns text that every database can store. Raises ValueError for any other.

    PostgreSQL cannot store null characters, and lone surrogates cannot be encoded.
    """
    if "\0" in value:
        raise ValueError("must have no null characters")
    if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
        raise ValueError("must be Unicode text, without lone surrogates")
    return value


def count_text(number: int, thing: str) -> str:
    """Formats a number of things: "1 step", "2 steps"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def told_jobs(ids: Sequence[str]) -> str:
    """Lists one or more jobs: "job A", "jobs A, B"."""
    return f"job{'s' if len(ids) > 1 else ''} {', '.join(ids)}"


def told_jobs_beside(own: Sequence[str], num_jobs: int) -> str:
    """Describes `num_jobs` jobs to an owner: the owner's jobs by their ids, the others by their number."""
    num_others = num_jobs - len(own)
    parts = [told_jobs(own)] if own else []
    if num_others:
        parts.append(f"{count_text(num_others, 'job')} of others")
    return " and ".join(parts)


def told_preparation(preparation: dict[str, Any]) -> str:
    """Describes a preparation's progress: "Reading the files: 40 percent, line 7 of a.jsonl; 12 s so far"."""
    told = _STEPS.get(preparation["step"], preparation["step"])
    if preparation.get("percent") is not None:
        told += f": {preparation['percent']} percent, line {preparation['line']} of {preparation['file']}"
    return f"{told}; {preparation['elapsed_s']:.0f} s so far"
