"""Threads that have a name for the kernel, report their errors, and say at their end what they hang at."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from windlass.storage.cancellation import CancelToken


class GuardedThread(threading.Thread):
    """A thread of an owner."""

    at: Any = None  # the work of the thread, as `works_at` has set it


def works_at(work: object) -> None:
    """Records the work that this thread does from now on, for the texts of its errors."""
    thread = threading.current_thread()
    if isinstance(thread, GuardedThread):
        thread.at = work


def shown_name(target: Callable[..., None]) -> str:
    """Returns the name under which the kernel shows a thread, for example in `top -H`: at most 15 characters."""
    return target.__qualname__.replace("._run", "")[:15]


class GuardedThreads:
    """The threads of one owner. Each runs until its function ends or raises."""

    def __init__(
        self,
        owner: str,
        job: str,
        on_error: Callable[[Exception, Any], None],
        describe: Callable[[Any], str] = str,
    ) -> None:
        """Creates no threads yet.

        `on_error` gets the error that ended a thread, and its work. It is called in that thread. `describe` describes
        a thread's work.
        """
        self._owner = owner
        self._job = job
        self._on_error = on_error
        self._describe = describe
        self._threads: list[GuardedThread] = []

    @property
    def include_caller(self) -> bool:
        """Returns whether the calling thread is one of them."""
        return threading.current_thread() in self._threads

    def start(self, targets: Iterable[Callable[[], None]], *, niceness: int = 0) -> None:
        """Starts one thread for each target. `niceness` is added to that of the process."""
        for target in targets:
            name = f"{self._owner} {target.__qualname__}"
            thread = GuardedThread(target=self._guard, args=(target, niceness), name=name, daemon=True)
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
            names = ", ".join(
                thread.name + (f" (at {self._describe(thread.at)})" if thread.at is not None else "")
                for thread in hanging
            )
            raise TimeoutError(
                f"threads of job {self._job} did not end within {deadline_s:g} s: {names}; they may still use its "
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
        except Exception as error:  # noqa: BLE001 - the owner must learn of every error
            thread = threading.current_thread()
            assert isinstance(thread, GuardedThread)
            self._on_error(error, thread.at)


class CancellableThreads(GuardedThreads):
    """Threads that end when their token is cancelled, with the resources that they use.

    Errors in threads are not reported from then on, because each wait raises one.
    """

    def __init__(
        self,
        owner: str,
        job: str,
        token: CancelToken,
        on_error: Callable[[Exception, Any], None],
        describe: Callable[[Any], str] = str,
        *,
        deadline_s: float,
    ) -> None:
        """Creates no threads yet. `deadline_s` is the timeout of `stop`; see GuardedThreads for the others."""

        def report(error: Exception, at: Any) -> None:
            if not token.is_cancelled:
                on_error(error, at)

        super().__init__(owner, job, report, describe)
        self._token = token
        self._deadline_s = deadline_s
        self.resources = contextlib.ExitStack()  # closed by `stop`, the last one first

    def stop(self) -> None:
        """Ends the threads, whatever they wait for, and closes the resources. It may be called again.

        Raises:
            TimeoutError: a thread hangs. The resources stay open, because the thread may still use them.
        """
        self._token.cancel()
        self.join(self._deadline_s)
        self.resources.close()

    def describe(self) -> str:
        """Describes what each thread waits for or works at. Threads that wait for work are left out."""
        waits, texts = self._token.describe_waits(), []
        for thread in self._threads:
            if thread.is_alive() and (doing := waits.get(thread, "is busy")):
                at = "" if thread.at is None else f" (at {self._describe(thread.at)})"
                texts.append(f"{thread.name.removeprefix(f'{self._owner} ')} {doing}{at}")
        return "; ".join(texts)

    @contextlib.contextmanager
    def stopped_on_error(self) -> Iterator[None]:
        """Stops the threads if the context ends with an error. It is for the start of their owner."""
        try:
            yield
        except BaseException:
            self.stop()
            raise
