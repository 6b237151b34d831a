"""The threads of an actor. An error in one is sent to the scheduler, because no caller waits for the thread."""

import threading
from collections.abc import Callable

from windlass.actors.job import SCHEDULER
from windlass.actors.messages import ActorFailed, Message, StatusDescribed, in_words
from windlass.storage.cancellation import CancelToken
from windlass.storage.ids import ActorName, JobId, Step
from windlass.storage.threads import CancellableThreads, GuardedThread
from windlass.storage.threads import works_at as works_at

# Added to the niceness of all other processes and threads if the model is computed on the CPU: one core taken from the
# compute stalls all its threads.
NICENESS_BESIDE_COMPUTE = 10


def working_at(message: Message, callback: Callable[[], None]) -> Callable[[], None]:
    """Wraps a callback so that an error in it is reported as an error at `message`, in any thread that calls it."""

    def call() -> None:
        thread = threading.current_thread()
        before = thread.at if isinstance(thread, GuardedThread) else None
        works_at(message)
        callback()
        if isinstance(thread, GuardedThread):
            thread.at = before

    return call


class ActorThreads(CancellableThreads):
    """The threads of an actor, with the resources that they use. Their errors are sent to the scheduler."""

    def __init__(
        self,
        name: ActorName,
        job: JobId,
        token: CancelToken,
        send: Callable[..., None],
        *,
        deadline_s: float,
        under_way: Callable[[], Message | None] = lambda: None,
    ) -> None:
        """Creates no threads yet. Each thread passes the messages that it works at to `works_at`.

        `under_way` returns the message that the actor as a whole works on, for errors in threads
        without a message of their own.
        """
        super().__init__(name, job, token, self._report, in_words, deadline_s=deadline_s)
        self._name = name
        self._idle = Message(job=job, step=Step(0))
        self._send = send
        self._under_way = under_way

    def report_status(self, pending: str) -> None:
        """Tells the scheduler what the threads do. `pending` describes the requests that the actor waits for."""
        text = "; ".join(filter(None, (self.describe(), pending)))
        self._send(SCHEDULER, StatusDescribed(job=self._idle.job, step=Step(0), actor=self._name, text=text))

    def _report(self, error: Exception, at: Message | None) -> None:
        about = at or self._under_way() or self._idle
        self._send(SCHEDULER, ActorFailed.of(error, actor=self._name, about=about))
