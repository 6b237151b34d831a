"""Answers that are not a single object: pages of lists, and deletions."""

from collections.abc import Sequence
from typing import Generic, Literal, Self, TypeVar

from pydantic import BaseModel


class Identified(BaseModel):
    """An object with an id of its own."""

    id: str


Item = TypeVar("Item")
IdentifiedItem = TypeVar("IdentifiedItem", bound=Identified)


class ListOf(BaseModel, Generic[Item]):
    """A page of a list. If `has_more` is true, `after` with the last object's id gets the next page."""

    object: Literal["list"] = "list"
    data: list[Item]
    has_more: bool = False


class PageOf(ListOf[IdentifiedItem], Generic[IdentifiedItem]):
    """A page that also names the ids of its first and last object."""

    first_id: str | None = None
    last_id: str | None = None

    @classmethod
    def of(cls, data: Sequence[IdentifiedItem], *, has_more: bool) -> Self:
        """Makes a page from its objects."""
        first_id, last_id = (data[0].id, data[-1].id) if data else (None, None)
        return cls(data=list(data), has_more=has_more, first_id=first_id, last_id=last_id)


class Deleted(BaseModel):
    """The object that was deleted."""

    id: str
    object: str
    deleted: Literal[True] = True
