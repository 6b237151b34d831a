"""What the command line reports in one line instead of a traceback."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import typer

from windlass.planner.yaml_files import YamlFileError
from windlass.service.client import RequestRefusedError, ServiceUnreachableError
from windlass.service.doctor import DoctorError
from windlass.service.home import AlreadyUpError, HomeError
from windlass.service.lifecycle import ERROR_PREFIX, JobsRunningError, StartError
from windlass.service.ray_cluster import RayStartError
from windlass.service.settings import SettingsError
from windlass.service.supervisor import PortInUseError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class CommandError(Exception):
    """A command can't do what it was asked; the message says why and what to do."""


_REPORTED = (
    AlreadyUpError,
    CommandError,
    DoctorError,
    HomeError,
    JobsRunningError,
    PortInUseError,
    RayStartError,
    RequestRefusedError,
    ServiceUnreachableError,
    SettingsError,
    StartError,
    YamlFileError,
)


def reported(command: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The command, with the errors that people can do something about told in one line on stderr, exit code 1."""

    @functools.wraps(command)
    def wrapper(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        try:
            return command(*arguments, **options)
        except _REPORTED as error:
            print(f"{ERROR_PREFIX}{error}", file=sys.stderr)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None

    return wrapper
