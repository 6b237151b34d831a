"""JSON values in which equal parts are stored once.

A family's file repeats the same few thousand formulas, and lists of them, up to hundreds of times. A shared part is
replaced by the text "@" and its number. No recorded text begins with "@".
"""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

SHARED = "shared"  # the key of the list of shared parts
# Characters of JSON text: shorter parts are not shared, because a reference takes about as many.
_LEAST_LENGTH = 8


def with_shared_parts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values with references to parts that occur more than once, and the list of these parts."""
    counts: Counter[str] = Counter()

    def count(value: Any) -> None:
        text = json.dumps(value)
        counts[text] += 1
        if counts[text] == 1:  # else all of it is shared
            for part in _parts(value):
                count(part)

    numbers: dict[str, int] = {}
    shared: list[Any] = []

    def replaced(value: Any) -> Any:
        text = json.dumps(value)
        if text not in numbers:
            match value:
                case dict():
                    short: Any = {key: replaced(part) for key, part in value.items()}
                case list():
                    short = [replaced(part) for part in value]
                case _:
                    short = value
            if counts[text] == 1 or len(text) < _LEAST_LENGTH or not isinstance(value, dict | list | str):
                return short
            numbers[text] = len(shared)  # after its own parts, so that a list is restored from its start
            shared.append(short)
        return f"@{numbers[text]}"

    for value in values.values():
        count(value)
    return {key: replaced(value) for key, value in values.items()} | {SHARED: shared}


def without_shared_parts(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that `with_shared_parts` was given. Equal parts are the same object."""
    shared: list[Any] = []

    def restored(value: Any) -> Any:
        if isinstance(value, str):  # first, because most parts are formulas
            return shared[int(value[1:])] if value.startswith("@") else value
        if isinstance(value, list):
            return [restored(part) for part in value]
        return {key: restored(part) for key, part in value.items()} if isinstance(value, dict) else value

    for part in stored.get(SHARED, ()):
        shared.append(restored(part))  # one after the other, because a part refers to those before it
    return {key: restored(value) for key, value in stored.items() if key != SHARED}


def _parts(value: Any) -> list[Any]:
    match value:
        case dict():
            return list(value.values())
        case list():
            return value
    return []
