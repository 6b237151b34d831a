"""What goes wrong with a request."""

from typing import Any

_MAX_VALUE_CHARS = 80


class ApiError(Exception):
    """A request that cannot be done, in words for its sender."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, status, param, code)
        self.message, self.status, self.param, self.code = message, status, param, code

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, self.args

    def __str__(self) -> str:
        return self.message


def _rebuild(message: str, status: int, param: str | None, code: str | None) -> ApiError:
    return ApiError(message, status=status, param=param, code=code)


def describe_value(value: object) -> str:
    """A value as it goes into a message: cut where it is long."""
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}…"
