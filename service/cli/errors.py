"""Errors that the command line reports in one line instead of a traceback."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import typer

from windlass.planner.hardware import YamlFileError
from windlass.service.validation import ERROR_PREFIX, ReportedError
from windlass.storage.memory import is_out_of_space
from windlass.storage.sql import NewerDatabase

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class CommandError(ReportedError):
    """A command cannot do what was requested. The message says why and what to do."""


def reported(command: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Wraps a command so that errors with a remedy become one line on stderr and exit code 1."""

    @functools.wraps(command)
    def wrapper(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        try:
            return command(*arguments, **options)
        except (ReportedError, YamlFileError, NewerDatabase) as error:
            print(f"{ERROR_PREFIX}{error}", file=sys.stderr)
            raise typer.Exit(1) from None
        except OSError as error:
            if not is_out_of_space(error):
                raise
            print(f"{ERROR_PREFIX}a disk is full ({error}); make room", file=sys.stderr)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None

    return wrapper
