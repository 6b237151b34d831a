"""Which parameter a client may have meant by a name that a request's body has no place for."""

import difflib
from collections.abc import Iterator, Sequence
from types import UnionType
from typing import Annotated, Union, get_args, get_origin

from pydantic import BaseModel


def hint(body: object, location: Sequence[str | int]) -> str:
    """A suggestion, or the names that there are at that place; empty where nothing is known of the body.

    `body`: the type of the whole body. `location`: the unknown name's path in it.
    """
    names = list(_names(body))
    if not names:
        return ""
    name, path = str(location[-1]), ".".join(map(str, location))
    last_parts = [known.split(".")[-1] for known in names]
    if near := nearest(name, last_parts):
        return f"; did you mean {names[last_parts.index(near)]}?"
    above = path.removesuffix(name)
    here = [known.removeprefix(above) for known in names if known.startswith(above)]
    return f"; there are {', '.join(known for known in here if '.' not in known)}" if here else ""


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The known name that is most like one that is not: an abbreviation such as lr, or a slip; None if none is."""
    abbreviated = [each for each in known if name == "".join(word[:1] for word in each.split("_"))]
    near = abbreviated or difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return near[0] if near else None


def _names(of: object) -> Iterator[str]:
    """The names of all fields, those of parts with the names of what they are in before them."""
    for model in _models(of):
        for name, field in model.model_fields.items():
            known = field.alias or name
            yield known
            yield from (f"{known}.{inner}" for inner in _names(field.annotation))


def _models(of: object) -> Iterator[type[BaseModel]]:
    """The models that a value of a type may be, but not those inside of lists and dicts."""
    if isinstance(of, type) and issubclass(of, BaseModel):
        yield of
    elif get_origin(of) in (Annotated, Union, UnionType):
        for part in get_args(of):
            yield from _models(part)
