"""Errors that the command line reports in one line instead of a traceback."""

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import typer
from pydantic import ValidationError
from typer.core import TyperGroup

from windlass.planner.hardware import YamlFileError
from windlass.service.validation import ERROR_PREFIX, ReportedError, plain_reason
from windlass.storage.memory import is_out_of_space
from windlass.storage.sql import NewerDatabase

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class CommandError(ReportedError):
    """A command cannot do what was requested. The message says why and what to do."""

    exit_code = 1


class OptionError(CommandError):
    """An option has a wrong value, or does not go with another one. The message names it."""

    exit_code = 2  # as for options that cannot be parsed


class PlainGroup(TyperGroup):
    """Commands whose errors about options have no words of the library that checks them."""

    def invoke(self, ctx: Any) -> Any:
        """Runs a command; see TyperGroup."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = _plain_message(error)
            raise


def _plain_message(error: typer.BadParameter) -> str:
    cause = error.__cause__
    if not isinstance(cause, ValidationError):
        return plain_reason({"type": "", "msg": error.message})
    problem = cause.errors()[0]
    is_nan = str(problem["input"]).strip().casefold().lstrip("+-") == "nan"  # it is refused by a range, if any
    return plain_reason({"type": "float_" if is_nan else problem["type"], "msg": error.message})


def reported(command: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Wraps a command so that errors with a remedy become one line on stderr, and exit code 1 or that of the error."""

    @functools.wraps(command)
    def wrapper(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        try:
            return command(*arguments, **options)
        except (ReportedError, YamlFileError, NewerDatabase) as error:
            print(f"{ERROR_PREFIX}{error}", file=sys.stderr)
            raise typer.Exit(error.exit_code if isinstance(error, CommandError) else 1) from None
        except OSError as error:
            if not is_out_of_space(error):
                raise
            print(f"{ERROR_PREFIX}a disk is full ({error}); make room", file=sys.stderr)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None

    return wrapper
