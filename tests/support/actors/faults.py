"""Fault injection between real actors in one process: a message is lost or late, or breaks or hangs its receiver.

Some messages carry others: operations, or reports. A fault at one that is carried loses, delays or breaks its carrier.
"""

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pytest

from windlass.actors.gpu_worker.worker import GpuWorker
from windlass.actors.job.context import SCHEDULER
from windlass.actors.messages import ActorFailed, ComputeBlocks, ComputeProgressed, Message
from windlass.actors.optimizer.worker import CpuOptimizer
from windlass.actors.runtime.local_link import LocalLink
from windlass.actors.scheduler import scheduler
from windlass.actors.scheduler.scheduler import Scheduler
from windlass.actors.ssd.param_server import ParamServer
from windlass.actors.ssd.server import SsdServer
from windlass.storage import threads
from windlass.storage.ids import ActorName

BROKEN = "broken for the test"


class FaultKind(StrEnum):
    """The fault that a message triggers."""

    LOST = "lost"  # the message never arrives
    # neither the message nor any later one to that actor arrives: to the other actors, a process that hangs
    DEAF = "deaf"
    BREAKS = "breaks"  # the receiver raises when the message arrives
    BREAKS_THREAD = "breaks the thread"  # the receiver's thread that handles the message raises
    HANGS_THREAD = "hangs the thread"  # the receiver's thread that handles the message blocks forever
    LATE = "late"  # the message arrives after the attempt is over


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault at the `nth` message, counted from 1, of one type to one actor."""

    to: ActorName
    message: type[Message]
    nth: int
    kind: FaultKind
    # The receiver's thread to break or to hang, at the `nth` message that it works at. "": the first thread that reads
    # the message.
    thread: str = ""


class FaultError(RuntimeError):
    """An unexpected error in an actor."""


def parts_of(message: Message) -> tuple[Message, ...]:
    """The messages that a message carries; of most messages, itself."""
    match message:
        case ComputeBlocks():
            return message.operations
        case ComputeProgressed():
            return (*message.computed, *message.grads)
        case _:
            return (message,)


class Double:
    """Sees every message between the actors of the attempts that run while it is installed."""

    def __init__(self, fault: Fault | None) -> None:
        self.delivered: list[tuple[ActorName, Message]] = []  # without those that carry others
        self.begun: Counter[tuple[str, type[Message]]] = Counter()  # by thread: how often it began to work at such one
        self.hit: Message | None = None  # the message at which the fault was injected
        self.carrier: Message | None = None  # the message that carried it, often itself
        self._fault = fault
        self._num_seen = 0
        self._lock = threading.Lock()
        self._late: Callable[[], None] = lambda: None
        self._released = threading.Event()

    def deliver(self, to: ActorName, message: Message, post: Callable[[Message], None]) -> None:
        """Passes a message to `post`, or injects the fault. Runs in the sender's thread."""

        def arrive(message: Message) -> None:
            self.delivered += [(to, part) for part in parts_of(message)]
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
        if fault is None or to != fault.to or fault.thread:
            return None
        with self._lock:
            for part in parts_of(message):
                self._num_seen += type(part) is fault.message
                if type(part) is fault.message and self._num_seen == fault.nth:
                    self.hit, self.carrier = part, message
                    return fault.kind
            return FaultKind.DEAF if self.hit is not None and fault.kind is FaultKind.DEAF else None

    def begins(self, thread: str, message: Message) -> None:
        """Notes that a thread begins to work at a message, or injects the fault. Runs in that thread."""
        fault = self._fault
        with self._lock:
            self.begun[thread, type(message)] += 1
            if fault is None or thread != f"{fault.to} {fault.thread}" or type(message) is not fault.message:
                return
            if self.begun[thread, fault.message] != fault.nth:
                return
            self.hit = self.carrier = message
        if fault.kind is FaultKind.BREAKS_THREAD:
            raise FaultError(BROKEN)
        self._released.wait()

    def attempt_over(self) -> None:
        """Delivers a message that was held back. The scheduler has ended; the other actors still run."""
        late, self._late = self._late, lambda: None
        late()

    def release(self) -> None:
        """Lets a blocked thread continue."""
        self._released.set()

    def _trapped(self, message: Message, to: ActorName, kind: FaultKind) -> Message:
        """A copy of the message that breaks or blocks the first thread of its receiver that reads a field of it."""
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
    """Routes the messages of every actor made in the context through the double."""
    double = Double(fault)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "_TICK_S", 0.1)  # timeouts are short here, so they are checked more often
        for actor in (GpuWorker, CpuOptimizer, SsdServer, ParamServer, Scheduler, LocalLink):
            patch.setattr(actor, "post", _between(double, actor.post))
        patch.setattr(threads.GuardedThread, "at", _noting(double))
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


def _noting(double: Double) -> property:
    """The attribute of a thread that names the message at which it works."""

    def set_at(thread: threading.Thread, message: Message | None) -> None:
        is_new = message is not vars(thread).get("at")
        vars(thread)["at"] = message
        if is_new and message is not None:
            double.begins(thread.name, message)

    return property(lambda thread: vars(thread).get("at"), set_at)


def _between(double: Double, post: Callable[[Any, Message], None]) -> Callable[[Any, Message], None]:
    def deliver(self: Any, message: Message) -> None:
        to = SCHEDULER if isinstance(self, Scheduler) else self.name
        if isinstance(message, ActorFailed):
            post(self, message)
        else:
            double.deliver(to, message, lambda each: post(self, each))

    return deliver
