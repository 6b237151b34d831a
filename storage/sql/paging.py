"""Pages of lists."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Page(Generic[Row]):
    """A part of a list. The last row's id, as `after`, requests the next page."""

    rows: tuple[Row, ...]
    has_more: bool


def page_of(rows: Sequence[Row], limit: int) -> Page[Row]:
    """Makes a page from the rows of a query for `limit + 1` rows."""
    return Page(tuple(rows[:limit]), len(rows) > limit)
