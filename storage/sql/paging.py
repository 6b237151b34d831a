"""Lists in pages: what a caller gets and how it goes on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Page(Generic[Row]):
    """A stretch of a list; the last row's id, as `after`, asks for what follows."""

    rows: tuple[Row, ...]
    has_more: bool


def page_of(rows: Sequence[Row], limit: int) -> Page[Row]:
    """Make a page of what a query for `limit + 1` rows returned."""
    return Page(tuple(rows[:limit]), len(rows) > limit)
