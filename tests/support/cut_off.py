"""Attempts that end in the middle, as if their process had been killed."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.training import has_direct_io, make_partition
from windlass.actors.job.spec import JobSpec
from windlass.actors.messages import ComputeProgressed, Event, Message, Phase
from windlass.actors.policy import Action, Pipeline
from windlass.actors.runtime.local_runner import run_local
from windlass.storage.ids import ActorName, Attempt


class CutOff(BaseException):
    """Stands for the end of the process."""


@contextmanager
def cut_off_at_gradient(step: int, block: int | None = None) -> Iterator[None]:
    """Cuts attempts off as the scheduler hears of a gradient of `step`, of any block or of `block`."""
    handle = Pipeline.handle

    def hear(self: Pipeline, event: Event, now_s: float) -> list[Action]:
        grads = event.grads if isinstance(event, ComputeProgressed) else ()
        if any(grad.step == step and block in (None, grad.block) for grad in grads):
            raise CutOff
        return handle(self, event, now_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pipeline, "handle", hear)
        yield


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
