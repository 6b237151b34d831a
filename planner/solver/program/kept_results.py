"""Results that are kept for groups of blocks, which are compared as objects, until the caller has no use for them."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

_AnyFunction = TypeVar("_AnyFunction", bound=Callable[..., Any])

_KEPT: list[Any] = []  # the functions whose results are kept


def kept(most: int) -> Callable[[_AnyFunction], _AnyFunction]:
    """Returns a decorator that keeps up to `most` results of a function, until `forget_programs`."""

    def decorated(function: _AnyFunction) -> _AnyFunction:
        keeping = functools.lru_cache(maxsize=most)(function)
        _KEPT.append(keeping)
        return cast("_AnyFunction", keeping)

    return decorated


def forget_programs() -> None:
    """Drops all that is kept of programs. The groups of the next question are other objects, so none of it is of use.

    HiGHS's programs take most: some 200 KiB each.
    """
    for keeping in _KEPT:
        keeping.cache_clear()
