"""Attempts that end in the middle, as if their process had been killed."""

import dataclasses
from pathlib import Path
from typing import Any

from tests.support.training import has_direct_io, make_partition
from windlass.actors.job.spec import JobSpec
from windlass.actors.messages import Message, Phase
from windlass.actors.runtime.local_runner import run_local
from windlass.storage.ids import ActorName, Attempt


class CutOff(BaseException):
    """Stands for the end of the process."""


def run_attempt(
    spec: JobSpec, number: int = 1, cut_off_at: tuple[type[Message], int] | None = None, *, phase: Phase | None = None
) -> dict[str, Any] | None:
    """Runs one attempt and returns its outcome, or None if it was cut off.

    The attempt is cut off when the scheduler sends the first message of the type and step in `cut_off_at`. If `phase`
    is given, messages of another phase do not count.
    """

    def look(to: ActorName, message: Message) -> None:
        if cut_off_at == (type(message), message.step) and phase in (None, getattr(message, "phase", phase)):
            raise CutOff

    again = dataclasses.replace(spec, attempt=Attempt(number))
    direct = has_direct_io(Path(spec.model_dir))
    try:
        return run_local(again, partition=make_partition(spec), direct=direct, on_message=look)
    except CutOff:
        return None
