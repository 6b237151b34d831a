"""Reads and validates YAML files written by users. Every error names the file, the key and the value."""

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

Model = TypeVar("Model", bound=BaseModel)


class YamlFileError(ValueError):
    """An unusable file. The text has one line for each problem."""


class Part(BaseModel):
    """A mapping in such a file. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys, because YAML would silently use the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Builds a mapping; see yaml.SafeLoader."""
        scalars = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := sorted({key for key in scalars if scalars.count(key) > 1}):
            raise yaml.YAMLError(f"{', '.join(twice)} is given twice, at line {node.start_mark.line + 1} or below")
        return super().construct_mapping(node, deep)


def load(kind: type[Model], path: Path) -> Model:
    """Reads and validates a file. Raises `YamlFileError`."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise YamlFileError(f"{path}: cannot be read: {error}") from None
    try:
        content = yaml.load(text, _Loader)  # a subclass of SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # invalid dates, too deep nesting
        raise YamlFileError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    return parse(kind, content, str(path))


def parse(kind: type[Model], content: Any, source: str) -> Model:
    """Validates the content of a file. Raises `YamlFileError`, whose lines begin with `source`."""
    if not isinstance(content, Mapping):
        raise YamlFileError(f"{source}: holds {content!r}; a mapping with {', '.join(_required(kind))} is needed")
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise YamlFileError("\n".join(f"{source}: {line}" for line in _lines(kind, error))) from None


def _lines(kind: type[BaseModel], error: ValidationError) -> Iterator[str]:
    for problem in error.errors():
        key = ".".join(map(str, problem["loc"]))
        prefix = f"{key}: " if key else ""
        value = problem["input"]
        match problem["type"]:
            case "missing":
                yield f"{key}: is missing"
            case "extra_forbidden":
                yield f"{key}: is not a key here{_suggestion(kind, problem['loc'])}"
            case "value_error":
                yield f"{prefix}{problem['ctx']['error']}"
            case "model_type":
                keys = ", ".join(_required(_part_at(kind, problem["loc"])))
                yield f"{prefix}{value!r}: a mapping with {keys} is needed"
            case _:
                yield f"{prefix}{value!r}: {problem['msg'][:1].lower()}{problem['msg'][1:]}{_hint(value)}"


def _required(kind: type[BaseModel]) -> list[str]:
    return [name for name, field in kind.model_fields.items() if field.is_required()]


def _part_at(kind: type[BaseModel], place: tuple[int | str, ...]) -> type[BaseModel]:
    """Returns the model of the mapping at a place, or of the nearest one around it."""
    for key in place:
        field = kind.model_fields.get(str(key))
        part = None if field is None else field.annotation
        if not (isinstance(part, type) and issubclass(part, BaseModel)):
            break
        kind = part
    return kind


def _suggestion(kind: type[BaseModel], place: tuple[int | str, ...]) -> str:
    keys = list(_part_at(kind, place).model_fields)
    near = difflib.get_close_matches(str(place[-1]), keys, n=1)
    return f"; did you mean {near[0]}?" if near else f"; there are {', '.join(keys)}"


def _hint(value: object) -> str:
    """Returns a hint if a text looks like a number that YAML does not parse as one."""
    if not isinstance(value, str):
        return ""
    try:
        float(value)
    except ValueError:
        return ""
    return "; to YAML this is text: write it without quotes, and an exponent as in 5.0e+9"
