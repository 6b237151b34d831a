"""Suggestions for misspelt names of a request's parameters, of settings, of models, and of ids."""

import difflib
from collections.abc import Collection, Iterator, Sequence
from types import UnionType
from typing import Annotated, Union, get_args, get_origin

from pydantic import BaseModel

# Minimum similarity (`difflib`'s ratio) at which a name counts as a misspelt other one.
_NEAR = 0.75


def near_names(name: str, known: Collection[str], *, separator: str = ".") -> list[str]:
    """Returns the known names that are similar to a name, the most similar first. Case is ignored.

    A name is also similar by the part after its last `separator`, or by its words' initials, such as lr. So is a name
    that has only the first words, such as gpu for gpu_gib.
    """
    last = name.casefold().rsplit(separator, 1)[-1]
    parts = {each: each.casefold().rsplit(separator, 1)[-1] for each in known}
    initials = [each for each, part in parts.items() if last == "".join(word[:1] for word in part.split("_"))]
    wholes = _near(name.casefold(), {each: each.casefold() for each in known})
    beginnings = [each for each, part in parts.items() if part.startswith(f"{last}_")]
    return list(dict.fromkeys([*initials, *_near(last, parts), *wholes, *beginnings]))


def did_you_mean(near: Sequence[str], otherwise: str) -> str:
    """Returns a question after the nearest name, or `otherwise` if there is none."""
    return f"did you mean {near[0]}?" if near else otherwise


def name_hint(name: str, known: Collection[str]) -> str:
    """Returns a suggestion for the end of a message about an unknown name, or "" if no known name is similar."""
    near = near_names(name, known)
    return f"; did you mean {near[0]}?" if near else ""


def _near(name: str, known: dict[str, str]) -> list[str]:
    """Returns the keys of the values that are similar to a name."""
    values = difflib.get_close_matches(name, set(known.values()), n=5, cutoff=_NEAR)
    return [key for value in values for key, each in known.items() if each == value]


def hint(body: object, location: Sequence[str | int]) -> str:
    """Returns a suggestion, or the known names at that place, or "" if the body's type has no names.

    `body`: the type of the whole body. `location`: the unknown name's path in it.
    """
    names = list(_names(body))
    if not names:
        return ""
    name, path = str(location[-1]), ".".join(map(str, location))
    above = path.removesuffix(name)
    here = [known.removeprefix(above) for known in names if known.startswith(above)]
    # Names at the same place come first, because several parts of a request have a batch_size.
    if near := near_names(name, [known for known in here if "." not in known]):
        return f"; did you mean {above}{near[0]}?"
    # A job's settings are misplaced more often than a machine's parts, which have the same names.
    if suggestion := name_hint(name, sorted(names, key=lambda known: not known.startswith("windlass."))):
        return suggestion
    return f"; there are {', '.join(known for known in here if '.' not in known)}" if here else ""


def _names(of: object) -> Iterator[str]:
    """Yields the names of all fields. Names inside a part are prefixed with the part's name."""
    for model in _models(of):
        for name, field in model.model_fields.items():
            known = field.alias or name
            yield known
            yield from (f"{known}.{inner}" for inner in _names(field.annotation))


def _models(of: object) -> Iterator[type[BaseModel]]:
    """Yields the models that a value of this type may be, without those inside lists and dicts."""
    if isinstance(of, type) and issubclass(of, BaseModel):
        yield of
    elif get_origin(of) in (Annotated, Union, UnionType):
        for part in get_args(of):
            yield from _models(part)
