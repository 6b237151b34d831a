"""Integers in JSON: 1.0 and 1 are the same number, and both are an integer."""

from typing import Any, get_args

from pydantic import BaseModel, ValidationInfo, field_validator


class JsonNumbers(BaseModel):
    """A strict model that accepts 1.0 for an integer, as JSON Schema specifies."""

    @field_validator("*", mode="before")
    @classmethod
    def _whole_floats_are_integers(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, float) and value.is_integer():
            assert info.field_name is not None, "it is a field's validator"
            if _asks_for_integer(cls.model_fields[info.field_name].annotation):
                return int(value)
        return value


def _asks_for_integer(annotation: Any) -> bool:
    kinds = (annotation, *get_args(annotation))
    return float not in kinds and (int in kinds or any(type(kind) is int for kind in kinds))
