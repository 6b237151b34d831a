"""Errors of requests, and the values in their messages."""

import reprlib
from collections.abc import Mapping
from typing import Any

_MAX_VALUE_CHARS = 80
# Represents only the outer levels of a value, because a user's value may be large, or nested deeper than Python's
# recursion limit.
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 4
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 2 * _MAX_VALUE_CHARS

# Plain words for pydantic's errors about the type of a value, by the beginning of the error's type.
_TYPES = {
    "int_": "must be a whole number",
    "float_": "must be a number",
    "bool_": "must be true or false",
    "string_type": "must be text",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": "must be an object with keys and values",
    "model_": "must be an object with keys and values",
}


class ApiError(Exception):
    """An error answer to a request, in words for the client."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
    ) -> None:
        super().__init__(message, status, param, code, kind)
        self.message, self.status, self.param, self.code = message, status, param, code
        self.kind = kind or ("server_error" if status >= 500 else "invalid_request_error")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, self.args

    def __str__(self) -> str:
        return self.message


def _rebuild(message: str, status: int, param: str | None, code: str | None, kind: str | None) -> ApiError:
    return ApiError(message, status=status, param=param, code=code, kind=kind)


def describe_value(value: object) -> str:
    """Formats a value for a message, and truncates a long one."""
    text = _SHORT.repr(value)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}…"


def plain_reason(problem: Mapping[str, Any]) -> str:
    """Explains one of pydantic's errors in plain words: "must be a whole number"."""
    for kind, words in _TYPES.items():
        if problem["type"].startswith(kind):
            return words
    reason: str = problem["msg"].removeprefix("Value error, ")
    return reason.replace("Input should be", "must be", 1)
