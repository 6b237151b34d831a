"""The terms and results of requests to an I/O scheduler, and commits."""

from collections.abc import Callable
from dataclasses import dataclass

from windlass.storage.ids import Attempt, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class IoResult:
    """The time span of finished I/O, without its time in the queue, and its bytes."""

    start_s: float  # by time.monotonic
    end_s: float
    nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class IoTerms:
    """The urgency of a transfer, and the calls that report its end.

    The scheduler calls one of the two, once, from a thread of its own. An error that ends a thread, such as one in
    `on_done`, is passed to `on_failed` of the thread's last work, even after its `on_done`.
    """

    priority: tuple[int, int]  # the smallest goes first; ties in order of arrival
    on_done: Callable[[IoResult], None]
    on_failed: Callable[[Exception], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRequest:
    """A commit of a step, see `TensorStore.commit`, and the calls that report its end, as those of `IoTerms`."""

    step: Step
    attempt: Attempt
    trainer_state: str
    states_step: Step | None = None
    on_done: Callable[[IoResult], None]
    on_failed: Callable[[Exception], None]

    def __str__(self) -> str:
        return f"the commit of step {self.step}"
