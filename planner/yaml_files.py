"""YAML files that people write: read, checked, and every problem told with file, key and value."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

Model = TypeVar("Model", bound=BaseModel)


class YamlFileError(ValueError):
    """A file cannot be used. The text has a line for each problem."""


class Part(BaseModel):
    """A mapping in such a file: keys that it does not know are problems."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def load(kind: type[Model], path: Path) -> Model:
    """Read a file. Raises `YamlFileError`."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise YamlFileError(f"{path}: cannot be read: {error}") from None
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date that is none, too many brackets
        raise YamlFileError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    return parse(kind, found, str(path))


def parse(kind: type[Model], found: Any, source: str) -> Model:
    """Check what a file holds. Raises `YamlFileError`; `source` is what its lines begin with."""
    if not isinstance(found, Mapping):
        keys = ", ".join(name for name, field in kind.model_fields.items() if field.is_required())
        raise YamlFileError(f"{source}: holds {found!r}; a mapping with {keys} is needed")
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        raise YamlFileError("\n".join(f"{source}: {line}" for line in _lines(error))) from None


def _lines(error: ValidationError) -> Iterator[str]:
    for each in error.errors():
        key = ".".join(map(str, each["loc"]))
        prefix = f"{key}: " if key else ""
        if each["type"] == "missing":
            yield f"{key}: is missing"
        elif each["type"] == "extra_forbidden":
            yield f"{key}: is not a key here"
        elif each["type"] == "value_error":
            yield f"{prefix}{each['ctx']['error']}"
        else:
            yield f"{prefix}{each['input']!r}: {each['msg'][:1].lower()}{each['msg'][1:]}"
