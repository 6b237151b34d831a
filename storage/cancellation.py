"""A token that ends the waits of an owner's threads, and queues, permits and signals that wait with it.

Each wait of an owner's threads goes through its token. So `cancel` wakes every thread, whatever it waits for.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

# What a thread waits for, as a noun phrase for error texts. A function is called only if the text is needed.
What = str | Callable[[], str]

_Task = TypeVar("_Task")
_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    """A wait that has not ended."""

    thread: threading.Thread
    condition: threading.Condition
    what: What | None  # None: for work
    since_s: float

    def __str__(self) -> str:
        what = self.what() if callable(self.what) else self.what
        return f"has waited {time.monotonic() - self.since_s:.1f} s for {what}"


class CancelToken:
    """Ends the waits of an owner's threads. All methods are thread-safe."""

    def __init__(self, deadline_s: float | None = None) -> None:
        """`deadline_s` is the timeout of each `wait_for`; None: it has none."""
        self._deadline_s = deadline_s
        self._is_cancelled = False
        self._lock = threading.Lock()  # of `_waits`
        self._waits: set[_Wait] = set()
        self._never = threading.Condition()

    @property
    def is_cancelled(self) -> bool:
        """True from the call of `cancel` on."""
        return self._is_cancelled

    def cancel(self) -> None:
        """Ends all present and later waits. It may be called again."""
        with self._lock:
            self._is_cancelled = True
            conditions = {wait.condition for wait in self._waits}
        for condition in conditions:
            with condition:
                condition.notify_all()

    def check(self) -> None:
        """Raises InterruptedError if the token is cancelled."""
        if self._is_cancelled:
            raise self._stopped()

    def wait_for(self, condition: threading.Condition, find: Callable[[], _Found | None], what: What) -> _Found:
        """Waits until `find` returns something true, and returns that. The caller holds the condition.

        Raises:
            InterruptedError: the token is cancelled.
            TimeoutError: it returned nothing true in time; the text names `what`.
        """
        self.check()
        found = find()
        if not found:

            def look() -> bool:
                nonlocal found
                found = find()
                return bool(found)

            self._wait(condition, look, what, self._deadline_s)
            self.check()
        if not found:
            raise self._overdue(what if isinstance(what, str) else what())
        return found

    def wait_for_work(self, condition: threading.Condition, is_there: Callable[[], bool]) -> None:
        """Waits, without a timeout, until there is work or the token is cancelled. The caller holds the condition."""
        if not is_there():
            self._wait(condition, is_there, None, None)

    def pause(self, duration_s: float) -> bool:
        """Waits for some seconds. Returns True, and earlier, if the token is cancelled."""
        with self._never:
            self._wait(self._never, lambda: False, None, duration_s)
        return self._is_cancelled

    def describe_waits(self) -> dict[threading.Thread, str]:
        """Returns what each waiting thread waits for, and for how long; "" if it waits for work."""
        with self._lock:
            waits = list(self._waits)
        return {wait.thread: "" if wait.what is None else str(wait) for wait in waits}

    def _wait(
        self, condition: threading.Condition, is_done: Callable[[], bool], what: What | None, timeout_s: float | None
    ) -> bool:
        wait = _Wait(threading.current_thread(), condition, what, time.monotonic())
        # Before the first check below, so that `cancel` either knows the condition or is seen by that check.
        with self._lock:
            self._waits.add(wait)
        try:
            return condition.wait_for(lambda: self._is_cancelled or is_done(), timeout_s)
        finally:
            with self._lock:
                self._waits.remove(wait)

    def _stopped(self) -> Exception:
        """Returns the error of a wait after `cancel`."""
        return InterruptedError("the job was stopped")

    def _overdue(self, what: str) -> Exception:
        """Returns the error of a wait that took too long."""
        return TimeoutError(f"waited {self._deadline_s:g} s for {what}")


class TaskQueue(Generic[_Task]):
    """Tasks for threads of the token's owner, in order of arrival. Thread-safe."""

    def __init__(self, token: CancelToken) -> None:
        self._token = token
        self._changed = threading.Condition()
        self._tasks: deque[_Task] = deque()

    def put(self, *tasks: _Task) -> None:
        """Adds tasks."""
        with self._changed:
            for task in tasks:
                self._tasks.append(task)
            self._changed.notify(len(tasks))

    def drop_all(self) -> list[_Task]:
        """Removes and returns all tasks."""
        with self._changed:
            tasks = list(self._tasks)
            self._tasks.clear()
        return tasks

    def take(self) -> _Task | None:
        """Waits for the next task and removes it. Returns None once the token is cancelled and no task is left."""
        with self._changed:
            self._token.wait_for_work(self._changed, lambda: bool(self._tasks))
            return self._tasks.popleft() if self._tasks else None

    def take_some(self, count: Callable[[Iterable[_Task]], int]) -> list[_Task]:
        """Waits for the next task, and removes it and others that are there. Returns none where `take` returns None.

        `count` gets all tasks in their order, and returns how many are removed: at least one. It must not wait.
        """
        with self._changed:
            self._token.wait_for_work(self._changed, lambda: bool(self._tasks))
            number = count(self._tasks[index] for index in range(len(self._tasks))) if self._tasks else 0
            return [self._tasks.popleft() for _ in range(number)]


class Permits:
    """A number of permits, which any thread may release. Thread-safe."""

    def __init__(self, token: CancelToken, number: int) -> None:
        self._token = token
        self._number = number
        self._changed = threading.Condition()

    def acquire(self, what: What) -> None:
        """Acquires a permit, which the error texts call `what`. Raises the errors of `CancelToken.wait_for`."""
        with self._changed:
            self._token.wait_for(self._changed, lambda: self._number > 0, what)
            self._number -= 1

    def release(self) -> None:
        """Releases a permit."""
        with self._changed:
            self._number += 1
            self._changed.notify()


class Signal:
    """An event that happens once. Thread-safe."""

    def __init__(self, token: CancelToken) -> None:
        self._token = token
        self._is_set = False
        self._changed = threading.Condition()

    @property
    def is_set(self) -> bool:
        """True if it has happened."""
        return self._is_set

    def set(self) -> None:
        """Records that it has happened."""
        with self._changed:
            self._is_set = True
            self._changed.notify_all()

    def wait(self, what: What) -> None:
        """Waits until it happens. Raises the errors of `CancelToken.wait_for`."""
        with self._changed:
            self._token.wait_for(self._changed, lambda: self._is_set, what)
