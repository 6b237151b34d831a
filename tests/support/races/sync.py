"""Follows how host threads wait for each other: threads, locks, conditions, events, semaphores and queues.

A hand-over passes on all that its thread knows. A lock passes on only what is known of host threads: a stream's work
must not seem ordered because two threads have used the same lock.
"""

import _thread
import queue
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.races.checker import RaceChecker
from tests.support.races.clocks import Clock
from windlass.storage.cancellation import CancelToken, TaskQueue


def follow_threads(checker: RaceChecker, patch: pytest.MonkeyPatch) -> None:
    """Replaces the primitives of `threading` and `queue` by those that the checker follows."""
    patch.setattr(threading, "Lock", lambda: _Lock(checker, _thread.allocate_lock()))
    patch.setattr(threading, "RLock", lambda: _ReentrantLock(checker))
    _follow_conditions(checker, patch)
    _follow_events(checker, patch)
    _follow_semaphores(checker, patch)
    _follow_queues(checker, patch)
    _follow_starts(checker, patch)


class _Lock:
    """A lock that passes on what its last holder knew of host threads."""

    def __init__(self, checker: RaceChecker, lock: Any) -> None:
        self._checker = checker
        self._lock = lock
        self._clock: Clock | None = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        acquired: bool = self._lock.acquire(blocking, timeout)
        if acquired:
            self._entered()
        return acquired

    def release(self) -> None:
        self._leaving()
        self._lock.release()

    def locked(self) -> bool:
        held: bool = self._lock.locked()
        return held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _entered(self) -> None:
        if self._clock is not None:
            self._checker.learn_of_hosts(self._clock)

    def _leaving(self) -> None:
        self._clock = self._checker.snapshot()


class _ReentrantLock(_Lock):
    """The same for a lock that its holder may acquire again."""

    def __init__(self, checker: RaceChecker) -> None:
        super().__init__(checker, _thread.RLock())
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        acquired: bool = self._lock.acquire(blocking, timeout)
        if acquired:
            self._depth += 1
            if self._depth == 1:
                self._entered()
        return acquired

    def release(self) -> None:
        if self._depth == 1:
            self._leaving()
        self._depth -= 1
        self._lock.release()

    def _is_owned(self) -> bool:
        owned: bool = self._lock._is_owned()
        return owned

    def _release_save(self) -> tuple[Any, int]:
        self._leaving()
        depth, self._depth = self._depth, 0
        return self._lock._release_save(), depth

    def _acquire_restore(self, saved: tuple[Any, int]) -> None:
        state, depth = saved
        self._lock._acquire_restore(state)
        self._depth = depth
        self._entered()


def _joined(clock: Clock | None, other: Clock) -> Clock:
    if clock is None:
        return other
    clock.join(other)
    return clock


def _follow_conditions(checker: RaceChecker, patch: pytest.MonkeyPatch) -> None:
    """A thread that has waited, or holds the condition, knows what those knew that have notified."""
    notify, wait, enter = threading.Condition.notify, threading.Condition.wait, threading.Condition.__enter__

    def notify_and_tell(self: Any, n: int = 1) -> None:
        if not getattr(self, "is_quiet", False):
            with checker.lock:
                self.clock = _joined(getattr(self, "clock", None), checker.snapshot())
        notify(self, n)

    def learn(self: Any) -> None:
        if (clock := getattr(self, "clock", None)) is not None:
            checker.learn(clock)

    def wait_and_learn(self: Any, timeout: float | None = None) -> Any:
        result = wait(self, timeout)
        learn(self)
        return result

    def enter_and_learn(self: Any) -> Any:
        result = enter(self)
        learn(self)
        return result

    patch.setattr(threading.Condition, "notify", notify_and_tell)
    patch.setattr(threading.Condition, "wait", wait_and_learn)
    patch.setattr(threading.Condition, "__enter__", enter_and_learn)


def _follow_events(checker: RaceChecker, patch: pytest.MonkeyPatch) -> None:
    set_event, wait, is_set = (getattr(threading.Event, name) for name in ("set", "wait", "is_set"))

    def learned(self: Any, result: bool) -> bool:
        if result and (clock := getattr(self, "clock", None)) is not None:
            checker.learn(clock)
        return result

    def set_and_tell(self: Any) -> None:
        with checker.lock:
            self.clock = _joined(getattr(self, "clock", None), checker.snapshot())
        set_event(self)

    patch.setattr(threading.Event, "set", set_and_tell)
    patch.setattr(threading.Event, "wait", lambda self, timeout=None: learned(self, wait(self, timeout)))
    patch.setattr(threading.Event, "is_set", lambda self: learned(self, is_set(self)))


def _follow_semaphores(checker: RaceChecker, patch: pytest.MonkeyPatch) -> None:
    acquire, release = threading.Semaphore.acquire, threading.Semaphore.release

    def acquire_and_learn(self: Any, blocking: bool = True, timeout: float | None = None) -> bool:
        acquired = acquire(self, blocking, timeout)
        if acquired and (clock := getattr(self, "clock", None)) is not None:
            checker.learn(clock)
        return acquired

    def release_and_tell(self: Any, n: int = 1) -> None:
        with checker.lock:
            self.clock = _joined(getattr(self, "clock", None), checker.snapshot())
        release(self, n)

    patch.setattr(threading.Semaphore, "acquire", acquire_and_learn)
    patch.setattr(threading.Semaphore, "release", release_and_tell)


def _follow_queues(checker: RaceChecker, patch: pytest.MonkeyPatch) -> None:
    """An item passes on what its sender knew, and nothing of other senders."""
    make = queue.Queue.__init__

    def make_quiet(self: Any, maxsize: int = 0) -> None:
        make(self, maxsize)
        for condition in (self.not_empty, self.not_full, self.all_tasks_done):
            condition.is_quiet = True

    def put(self: Any, item: object) -> None:
        self.queue.append((item, checker.snapshot()))

    def get(self: Any) -> object:
        item, clock = self.queue.popleft()
        checker.learn(clock)
        return item

    patch.setattr(queue.Queue, "__init__", make_quiet)
    patch.setattr(queue.Queue, "_put", put)
    patch.setattr(queue.Queue, "_get", get)
    patch.setattr(queue, "SimpleQueue", lambda: _SimpleQueue(checker))
    make_tasks = TaskQueue.__init__

    def make_quiet_tasks(self: Any, token: CancelToken) -> None:
        make_tasks(self, token)
        self._tasks, self._changed.is_quiet = _Tasks(checker), True

    patch.setattr(TaskQueue, "__init__", make_quiet_tasks)


class _Tasks(deque[Any]):
    """The tasks of a TaskQueue, each with what its sender knew."""

    def __init__(self, checker: RaceChecker) -> None:
        super().__init__()
        self._checker = checker

    def append(self, task: object) -> None:
        super().append((task, self._checker.snapshot()))

    def __getitem__(self, index: Any) -> Any:
        """Returns a task for a look at it, which passes nothing on."""
        return super().__getitem__(index)[0]

    def popleft(self) -> Any:
        task, clock = super().popleft()
        self._checker.learn(clock)
        return task

    def __iter__(self) -> Iterator[Any]:
        for task, clock in super().__iter__():
            self._checker.learn(clock)
            yield task


class _SimpleQueue:
    """A queue.SimpleQueue in Python."""

    def __init__(self, checker: RaceChecker) -> None:
        self._checker = checker
        self._items: deque[tuple[Any, Clock]] = deque()
        self._lock = _thread.allocate_lock()
        self._num_items = _thread.allocate_lock()  # held while the queue is empty
        self._num_items.acquire()

    def put(self, item: object, block: bool = True, timeout: float | None = None) -> None:
        with self._lock:
            self._items.append((item, self._checker.snapshot()))
            if self._num_items.locked():
                self._num_items.release()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not self._num_items.acquire(block, -1 if timeout is None or not block else timeout):
            raise queue.Empty
        with self._lock:
            item, clock = self._items.popleft()
            if self._items and self._num_items.locked():
                self._num_items.release()
        self._checker.learn(clock)
        return item

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def put_nowait(self, item: object) -> None:
        self.put(item)


def _follow_starts(checker: RaceChecker, patch: pytest.MonkeyPatch) -> None:
    start, run, join = threading.Thread.start, threading.Thread.run, threading.Thread.join

    def start_and_tell(self: Any) -> None:
        self.started_clock = checker.snapshot()
        start(self)

    def learn_and_run(self: Any) -> None:
        checker.learn(self.started_clock)
        checker.host.name = self.name
        try:
            run(self)
        finally:
            self.ended_clock = checker.snapshot()

    def join_and_learn(self: Any, timeout: float | None = None) -> None:
        join(self, timeout)
        if not self.is_alive() and (clock := getattr(self, "ended_clock", None)) is not None:
            checker.learn(clock)

    patch.setattr(threading.Thread, "start", start_and_tell)
    patch.setattr(threading.Thread, "run", learn_and_run)
    patch.setattr(threading.Thread, "join", join_and_learn)
