"""The threads of an actor: what goes wrong in one is told to the scheduler, as nobody else waits for it."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from windlass.actors.job import SCHEDULER
from windlass.actors.messages import ActorFailed, Message, in_words
from windlass.storage.ids import ActorName, JobId, Step

# Without a GPU, of all that shares the cores with the compute: what takes one from it stalls all its threads.
NICENESS_BESIDE_COMPUTE = 10


class _GuardedThread(threading.Thread):
    """`at`: what it was told that it works on."""

    at: Message | None = None


def works_at(message: Message) -> None:
    """Notes what this thread does from now on, for the text of an error in it."""
    thread = threading.current_thread()
    if isinstance(thread, _GuardedThread):
        thread.at = message


def shown_name(target: Callable[..., None]) -> str:
    """Of a thread, to `top -H` and the like, which know 15 characters; Python's names are not the kernel's."""
    return target.__qualname__.replace("._run", "")[:15]


def working_at(message: Message, callback: Callable[[], None]) -> Callable[[], None]:
    """The callback, for whichever thread calls it: what fails in it is told as a failure at this message."""

    def call() -> None:
        thread = threading.current_thread()
        before = thread.at if isinstance(thread, _GuardedThread) else None
        works_at(message)
        callback()
        if isinstance(thread, _GuardedThread):
            thread.at = before

    return call


class ActorThreads:
    """Threads that run until their actor is stopped. An error while it is being stopped is not told."""

    def __init__(
        self,
        name: ActorName,
        job: JobId,
        send: Callable[..., None],
        is_stopping: Callable[[], bool],
        *,
        owed: Callable[[], str] = lambda: "",
        under_way: Callable[[], Message | None] = lambda: None,
    ) -> None:
        """`owed`: what others owe the actor, in words; where something came too late, it tells whose fault that is.

        `under_way`: what the actor as a whole works at, for the text of an error in a thread that was told nothing.
        """
        self._name = name
        self._idle = Message(job=job, step=Step(0))
        self._send = send
        self._is_stopping = is_stopping
        self._owed = owed
        self._under_way = under_way
        self._threads: list[_GuardedThread] = []

    def __contains__(self, thread: threading.Thread) -> bool:
        return thread in self._threads

    def start(self, targets: Iterable[Callable[[], None]], *, niceness: int = 0) -> None:
        """One thread for each. `niceness`: above this process's; the system gives such threads the cores last."""
        for target in targets:
            name = f"{self._name} {target.__qualname__}"
            thread = _GuardedThread(target=self._guard, args=(target, niceness), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def join(self, deadline_s: float) -> None:
        """Waits for all to end, at most so long.

        Raises:
            TimeoutError: some hang; what they use stays theirs.
        """
        until_s = time.monotonic() + deadline_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        hanging = [each for each in self._threads if each.is_alive()]
        if hanging:
            names = ", ".join(each.name + (f" (at {in_words(each.at)})" if each.at else "") for each in hanging)
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
        except Exception as error:  # noqa: BLE001 - an actor's thread has nobody else to tell
            if self._is_stopping():
                return
            thread = threading.current_thread()
            assert isinstance(thread, _GuardedThread)
            if isinstance(error, TimeoutError) and (owed := self._owed()):
                error.add_note(owed)
            about = thread.at or self._under_way() or self._idle
            self._send(SCHEDULER, ActorFailed.of(error, actor=self._name, about=about))
