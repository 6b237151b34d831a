"""A double between real actors, all in one process: one message is lost, breaks or hangs its receiver, or is late."""

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pytest

from windlass.actors.gpu_worker.worker import GpuWorker
from windlass.actors.job.context import SCHEDULER
from windlass.actors.messages import ActorFailed, Message
from windlass.actors.optimizer.worker import CpuOptimizer
from windlass.actors.scheduler import scheduler
from windlass.actors.scheduler.scheduler import Scheduler
from windlass.actors.ssd import client as chunk_io
from windlass.actors.ssd import server as ssd_server
from windlass.actors.ssd.server import SsdServer
from windlass.storage.ids import ActorName

BROKEN = "broken for the test"


class FaultKind(StrEnum):
    """What happens at the message."""

    LOST = "lost"  # it never arrives
    DEAF = "deaf"  # nor does anything that comes later to the same actor: to others, a process that hangs
    BREAKS = "breaks"  # its receiver raises when it takes it
    BREAKS_THREAD = "breaks the thread"  # ... in the thread that works at it
    HANGS_THREAD = "hangs the thread"  # the thread that works at it never comes back
    LATE = "late"  # it arrives when the attempt is over


@dataclass(frozen=True, kw_only=True)
class Fault:
    """The `nth` message of a type to an actor, from 1."""

    to: ActorName
    message: type[Message]
    nth: int
    kind: FaultKind


class FaultError(RuntimeError):
    """What nobody has foreseen."""


class Double:
    """Stands between all actors of the attempts that are run while it is installed."""

    def __init__(self, fault: Fault | None) -> None:
        self.delivered: list[tuple[ActorName, Message]] = []
        self.hit: Message | None = None  # where the fault has come about
        self._fault = fault
        self._num_seen = 0
        self._lock = threading.Lock()
        self._late: Callable[[], None] = lambda: None
        self._released = threading.Event()

    def deliver(self, to: ActorName, message: Message, post: Callable[[Message], None]) -> None:
        """In the sender's thread, as is `post`."""

        def arrive(message: Message) -> None:
            self.delivered.append((to, message))
            post(message)

        match self._fault_at(to, message):
            case None:
                arrive(message)
            case FaultKind.LOST | FaultKind.DEAF:
                pass
            case FaultKind.LATE:
                self._late = lambda: arrive(message)
            case FaultKind.BREAKS:
                raise FaultError(BROKEN)
            case kind:
                arrive(self._trapped(message, to, kind))

    def _fault_at(self, to: ActorName, message: Message) -> FaultKind | None:
        fault = self._fault
        if fault is None or to != fault.to:
            return None
        with self._lock:
            self._num_seen += type(message) is fault.message
            if type(message) is fault.message and self._num_seen == fault.nth:
                self.hit = message
                return fault.kind
            return FaultKind.DEAF if self.hit is not None and fault.kind is FaultKind.DEAF else None

    def attempt_over(self) -> None:
        """The scheduler has ended; the actors are still there. What was held back comes now."""
        late, self._late = self._late, lambda: None
        late()

    def release(self) -> None:
        """Lets a thread that hangs go on."""
        self._released.set()

    def _trapped(self, message: Message, to: ActorName, kind: FaultKind) -> Message:
        """The same message, which the first thread of its receiver that looks at it runs into."""
        sprung = threading.Event()

        class Trapped(type(message)):  # type: ignore[misc]
            __slots__ = ()

            def __getattribute__(trapped, name: str) -> Any:
                is_receivers = threading.current_thread().name.startswith(f"{to} ")
                if is_receivers and not name.startswith("__") and not sprung.is_set():
                    sprung.set()
                    if kind is FaultKind.BREAKS_THREAD:
                        raise FaultError(BROKEN)
                    self._released.wait()
                return super().__getattribute__(name)

        Trapped.__name__ = type(message).__name__
        fields = {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}
        return Trapped(**fields)  # type: ignore[no-any-return]


@contextmanager
def double_between_actors(fault: Fault | None = None) -> Iterator[Double]:
    """Every actor made in here takes its messages from the double."""
    double = Double(fault)
    with pytest.MonkeyPatch.context() as patch:
        # Deadlines are short here: who looks after them does so more often.
        for module in (scheduler, chunk_io, ssd_server):
            patch.setattr(module, "_TICK_S", 0.1)
        for actor in (GpuWorker, CpuOptimizer, SsdServer, Scheduler):
            patch.setattr(actor, "post", _between(double, actor.post))
        run = Scheduler.run

        def run_and_tell(self: Scheduler) -> dict[str, Any]:
            outcome = run(self)
            double.attempt_over()
            return outcome

        patch.setattr(Scheduler, "run", run_and_tell)
        try:
            yield double
        finally:
            double.release()


def _between(double: Double, post: Callable[[Any, Message], None]) -> Callable[[Any, Message], None]:
    def deliver(self: Any, message: Message) -> None:
        to = SCHEDULER if isinstance(self, Scheduler) else self.name
        if isinstance(message, ActorFailed):
            post(self, message)
        else:
            double.deliver(to, message, lambda each: post(self, each))

    return deliver
