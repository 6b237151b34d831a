"""Text from strangers that goes into the database, and words for people."""

from collections.abc import Sequence


def check_storable(value: str) -> str:
    """Return text that every database takes; ValueError for any other.

    PostgreSQL stores no null character, and what is no Unicode can be written nowhere.
    """
    if "\0" in value:
        raise ValueError("must have no null characters")
    if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
        raise ValueError("must be Unicode text, without lone surrogates")
    return value


def told_count(number: int, thing: str) -> str:
    """A number of things: "1 step", "2 steps"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def told_jobs(ids: Sequence[str]) -> str:
    """Ids of one or more jobs in words: "job A", "jobs A, B"."""
    return f"job{'s' if len(ids) > 1 else ''} {', '.join(ids)}"
