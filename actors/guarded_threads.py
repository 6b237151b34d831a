"""The threads of an actor: what goes wrong in one is told to the scheduler, as nobody else waits for it."""

import threading
from collections.abc import Callable, Iterable

from windlass.actors.context import SCHEDULER
from windlass.actors.messages import ActorFailed
from windlass.storage.ids import ActorName, JobId, Step


class GuardedThreads:
    """Threads that run until their actor is stopped. An error while it is being stopped is not told."""

    def __init__(self, name: ActorName, job: JobId, send: Callable[..., None], is_stopping: Callable[[], bool]) -> None:
        self._name = name
        self._job = job
        self._send = send
        self._is_stopping = is_stopping
        self._threads: list[threading.Thread] = []

    def start(self, targets: Iterable[Callable[[], None]]) -> None:
        """One thread for each."""
        for target in targets:
            thread = threading.Thread(target=self._guard, args=(target,), name=target.__name__, daemon=True)
            thread.start()
            self._threads.append(thread)

    def join(self, deadline_s: float) -> None:
        """Waits for each to end, at most so long."""
        for thread in self._threads:
            thread.join(deadline_s)

    def _guard(self, target: Callable[[], None]) -> None:
        try:
            target()
        except Exception as error:  # noqa: BLE001 - an actor's thread has nobody else to tell
            if not self._is_stopping():
                self._send(SCHEDULER, ActorFailed.of(error, job=self._job, step=Step(0), actor=self._name))
