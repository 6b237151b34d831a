"""The threads of an actor. An error in one is sent to the scheduler, because no caller waits for the thread."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from windlass.actors.job import SCHEDULER
from windlass.actors.messages import ActorFailed, Message, in_words
from windlass.storage.ids import ActorName, JobId, Step

# Added to the niceness of all other processes and threads if the model is computed on the CPU: one core taken from the
# compute stalls all its threads.
NICENESS_BESIDE_COMPUTE = 10


class _GuardedThread(threading.Thread):
    """A thread of an actor."""

    at: Message | None = None  # the message that the thread works on, as `works_at` has set it


def works_at(message: Message) -> None:
    """Records the message that this thread works on from now on, for the texts of its errors."""
    thread = threading.current_thread()
    if isinstance(thread, _GuardedThread):
        thread.at = message


def shown_name(target: Callable[..., None]) -> str:
    """Returns the name under which the kernel shows a thread, for example in `top -H`: at most 15 characters."""
    return target.__qualname__.replace("._run", "")[:15]


def working_at(message: Message, callback: Callable[[], None]) -> Callable[[], None]:
    """Wraps a callback so that an error in it is reported as an error at `message`, in any thread that calls it."""

    def call() -> None:
        thread = threading.current_thread()
        before = thread.at if isinstance(thread, _GuardedThread) else None
        works_at(message)
        callback()
        if isinstance(thread, _GuardedThread):
            thread.at = before

    return call


class ActorThreads:
    """Threads that run until their actor is stopped. Errors while it is being stopped are not reported."""

    def __init__(
        self,
        name: ActorName,
        job: JobId,
        send: Callable[..., None],
        is_stopping: Callable[[], bool],
        *,
        describe_pending: Callable[[], str] = lambda: "",
        under_way: Callable[[], Message | None] = lambda: None,
    ) -> None:
        """Creates no threads yet.

        `describe_pending` describes the replies that the actor waits for. It is added to a timeout's text, to name the
        actor that is late. `under_way` returns the message that the actor as a whole works on, for errors in threads
        without a message of their own.
        """
        self._name = name
        self._idle = Message(job=job, step=Step(0))
        self._send = send
        self._is_stopping = is_stopping
        self._describe_pending = describe_pending
        self._under_way = under_way
        self._threads: list[_GuardedThread] = []

    def __contains__(self, thread: threading.Thread) -> bool:
        return thread in self._threads

    def start(self, targets: Iterable[Callable[[], None]], *, niceness: int = 0) -> None:
        """Starts one thread for each target. `niceness` is added to that of the process."""
        for target in targets:
            name = f"{self._name} {target.__qualname__}"
            thread = _GuardedThread(target=self._guard, args=(target, niceness), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def join(self, deadline_s: float) -> None:
        """Waits until all threads have ended, `deadline_s` seconds at most.

        Raises:
            TimeoutError: some threads hang. They may still use the job's memory and SSDs.
        """
        until_s = time.monotonic() + deadline_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        hanging = [thread for thread in self._threads if thread.is_alive()]
        if hanging:
            names = ", ".join(thread.name + (f" (at {in_words(thread.at)})" if thread.at else "") for thread in hanging)
            raise TimeoutError(
                f"threads of job {self._idle.job} did not end within {deadline_s:g} s: {names}; they may still use its "
                "memory and its SSDs: end this process before the job goes on"
            )

    def _guard(self, target: Callable[[], None], niceness: int) -> None:
        thread_id = threading.get_native_id()
        if niceness:
            os.setpriority(os.PRIO_PROCESS, thread_id, os.getpriority(os.PRIO_PROCESS, thread_id) + niceness)
        with contextlib.suppress(OSError):
            Path(f"/proc/self/task/{thread_id}/comm").write_text(shown_name(target))
        try:
            target()
        except Exception as error:  # noqa: BLE001 - the scheduler must learn of every error
            if self._is_stopping():
                return
            thread = threading.current_thread()
            assert isinstance(thread, _GuardedThread)
            if isinstance(error, TimeoutError) and (pending := self._describe_pending()):
                error.add_note(pending)
            about = thread.at or self._under_way() or self._idle
            self._send(SCHEDULER, ActorFailed.of(error, actor=self._name, about=about))
