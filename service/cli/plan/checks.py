"""Checks options of the command `plan` that go with each other, or not."""

from typing import Any

from pydantic import ValidationError

from windlass.engine.memory_plan import UpdateOrder
from windlass.planner.hardware import Hardware
from windlass.planner.solver import GOALS_WITH_SLACK, Goal
from windlass.service.cli import OptionError
from windlass.service.installation import Settings
from windlass.service.validation import ApiError, WindlassSettings, plain_reason


def check_search(find: Goal | None, machine: Hardware, *, gpus: int | str, what_if: bool, slack: float | None) -> None:
    """Raises OptionError for options that do not go with a search, or with a plan without one."""
    if slack is not None and find not in GOALS_WITH_SLACK:
        searches = " or ".join(f"--find {goal}" for goal in GOALS_WITH_SLACK)
        raise OptionError(f"--slack: it goes with {searches}; add one of them, or leave it out")
    if find is None:
        return
    if gpus == "auto":
        raise OptionError("--gpus: a search (--find) is for a number of GPUs; name one")
    if find is Goal.SMALLEST_GPU and not machine.gpus.count:
        raise OptionError(f"--find: {find} needs a machine with a GPU, and this one has none")
    if what_if:
        raise OptionError("--what-if: a search (--find) changes the job or the machine itself; leave one of them out")


def check_order_of_updates(gradient_updates: str, *, clip: bool) -> None:
    """Raises OptionError for an unknown order, or one that does not go with clipping."""
    if gradient_updates not in ("auto", *UpdateOrder):
        raise OptionError(f"--gradient-updates: {gradient_updates!r} is not one of auto, {', '.join(UpdateOrder)}")
    if clip and gradient_updates != "auto" and not UpdateOrder(gradient_updates).keeps_grads:
        raise OptionError(
            f"--gradient-updates: with {gradient_updates} updates begin before the norm of all gradients is known; add "
            "--no-clip, or choose kept"
        )


def check_gpus_of(settings: Settings, gpus: int, *, other: Hardware | None) -> None:
    """Raises OptionError if the machine, or this one, has not so many GPUs. `other`: a machine that is not this one."""
    from windlass.service.machine import check_gpus

    try:
        check_gpus(settings, gpus, other=other)
    except ApiError as error:
        raise OptionError(f"--gpus: {str(error).removeprefix('windlass.gpus is ')}") from None


def settings_of(**asked: Any) -> WindlassSettings:
    """Checks settings in the same way as a request's object `windlass`.

    Raises:
        OptionError: an option is wrong; the text names it and says why.
    """
    try:
        return WindlassSettings(**asked)
    except ValidationError as error:
        (first, *_) = error.errors()
        option = str(first["loc"][0]).replace("_", "-")
        raise OptionError(f"--{option}: {plain_reason(first)}") from None
