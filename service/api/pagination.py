"""Answers that are not one thing: lists, and what is gone."""

from collections.abc import Sequence
from typing import Generic, Literal, Self, TypeVar

from pydantic import BaseModel


class Identified(BaseModel):
    """Something with an id of its own."""

    id: str


Item = TypeVar("Item")
IdentifiedItem = TypeVar("IdentifiedItem", bound=Identified)


class ListOf(BaseModel, Generic[Item]):
    """A page of a list; where there is more, the last one's id as `after` asks for it."""

    object: Literal["list"] = "list"
    data: list[Item]
    has_more: bool = False


class PageOf(ListOf[IdentifiedItem], Generic[IdentifiedItem]):
    """A page that also names its ends."""

    first_id: str | None = None
    last_id: str | None = None

    @classmethod
    def of(cls, data: Sequence[IdentifiedItem], *, has_more: bool) -> Self:
        """With its ends."""
        first_id, last_id = (data[0].id, data[-1].id) if data else (None, None)
        return cls(data=list(data), has_more=has_more, first_id=first_id, last_id=last_id)


class Deleted(BaseModel):
    """What was removed."""

    id: str
    object: str
    deleted: Literal[True] = True
