"""Suggestions for misspelt names: of a request's parameters, of settings, of models, of ids."""

import difflib
from collections.abc import Collection, Iterator, Sequence
from types import UnionType
from typing import Annotated, Union, get_args, get_origin

from pydantic import BaseModel

# The least ratio of characters in common at which a name is taken for another one misspelt.
_NEAR = 0.75


def near_names(name: str, known: Collection[str], *, separator: str = ".") -> list[str]:
    """The known names that are near a name, the nearest first. Case does not count.

    A name is also near by what stands behind its last `separator`, or by its words' initials, such as lr.
    """
    last = name.casefold().rsplit(separator, 1)[-1]
    parts = {each: each.casefold().rsplit(separator, 1)[-1] for each in known}
    initials = [each for each, part in parts.items() if last == "".join(word[:1] for word in part.split("_"))]
    wholes = _near(name.casefold(), {each: each.casefold() for each in known})
    return list(dict.fromkeys([*initials, *_near(last, parts), *wholes]))


def name_hint(name: str, known: Collection[str]) -> str:
    """A suggestion for the end of a message about an unknown name; empty where no known name is near."""
    near = near_names(name, known)
    return f"; did you mean {near[0]}?" if near else ""


def _near(name: str, known: dict[str, str]) -> list[str]:
    """The keys of those values that are near a name."""
    values = difflib.get_close_matches(name, set(known.values()), n=5, cutoff=_NEAR)
    return [key for value in values for key, each in known.items() if each == value]


def hint(body: object, location: Sequence[str | int]) -> str:
    """A suggestion, or the names that there are at that place; empty where nothing is known of the body.

    `body`: the type of the whole body. `location`: the unknown name's path in it.
    """
    names = list(_names(body))
    if not names:
        return ""
    name, path = str(location[-1]), ".".join(map(str, location))
    above = path.removesuffix(name)
    here = [known.removeprefix(above) for known in names if known.startswith(above)]
    # One at the same place before those elsewhere: several parts of a request have a batch_size.
    if near := near_names(name, [known for known in here if "." not in known]):
        return f"; did you mean {above}{near[0]}?"
    if suggestion := name_hint(name, names):
        return suggestion
    return f"; there are {', '.join(known for known in here if '.' not in known)}" if here else ""


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
