"""Streams, which are ordered queues of work for a device, and events, which are points in a stream.

Streams wait for each other's events, while the thread that submits work continues. On a GPU they are CUDA's
(`cuda_streams`). On a CPU there are two kinds. A `DirectStream` runs work before the call returns, as a rule in the
submitting thread. A `ThreadStream` has a thread of its own.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch

from windlass.storage.cancellation import CancelToken, Signal, TaskQueue

# Starts a thread for each function, and reports the exceptions that they raise.
StartThreads = Callable[[Iterable[Callable[[], None]]], None]


class Event(Protocol):
    """A point in a stream."""

    def is_over(self) -> bool:
        """Checks whether the stream has reached the event; false if earlier work failed."""

    def wait(self) -> None:
        """Blocks the calling thread until the stream has reached the event.

        Raises the errors of `CancelToken.wait_for`. Failed earlier work raises its own error.
        """

    def time_s(self) -> float:
        """Returns the time at which the stream reached the event, in seconds of CLOCK_MONOTONIC. It must be over."""


class Stream(Protocol):
    """A queue of work. Its methods are thread-safe, and the work of each thread runs in the order of its calls."""

    def run(self, work: Callable[[], object]) -> None:
        """Queues work. On a GPU `work` is called at once and only launches kernels and copies.

        The memory that they use must not change until the stream has run them.
        """

    def wait(self, event: Event) -> None:
        """Makes all work that is queued from now on wait for the event."""

    def record(self) -> Event:
        """Returns an event after all work that is queued so far."""

    def turn(self) -> contextlib.AbstractContextManager[None]:
        """Keeps the work of other threads out of what the calling thread submits, where work runs as it is submitted.

        Elsewhere it does nothing, because the stream's order says what runs when.
        """

    def then(self, callback: Callable[[], None]) -> None:
        """Calls back in a thread of the device when all work queued so far is over. Callbacks run in call order."""


class Streams(Protocol):
    """The streams of a device. Their threads end after the queued work once the device's token is cancelled."""

    compute: Stream  # runs kernels
    h2d: Stream  # copies from host memory
    d2h: Stream  # copies to host memory

    def open(self) -> Stream:
        """Opens a further stream, which has a thread on a CPU."""

    def record_current(self) -> Event:
        """Returns an event after all work on torch's current stream of the calling thread."""


class _CompletedEvent:
    """An event that is over when it is recorded."""

    def __init__(self) -> None:
        self._time_s = time.monotonic()

    def is_over(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def time_s(self) -> float:
        return self._time_s


class _Awaited:
    """A wait of a thread at a `DirectStream`, for its turn or for the end of its work in another thread's turn."""

    def __init__(self, work: Callable[[], object] | None) -> None:
        self.thread = threading.get_ident()
        self.work = work
        self.is_done = False
        self.failure: BaseException | None = None
        self._over = threading.Lock()
        self._over.acquire()

    def wait(self) -> None:
        """Blocks until the turn has come, or the work is done. Raises the error of the work."""
        self._over.acquire()
        if self.failure is not None:
            raise self.failure

    def begin(self) -> None:
        """Gives the turn to the waiting thread."""
        self._over.release()

    def do(self) -> None:
        """Does the work for the waiting thread."""
        assert self.work is not None, "only work is done for others"
        try:
            self.work()
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
            self.failure = error
        self.work, self.is_done = None, True
        self._over.release()


class DirectStream:
    """Runs work in the submitting thread, one piece of work at a time, in the order of submission.

    Two parallel computations on the same cores would wait for each other's threads. Updates of states on the device
    took seven times as long beside a forward pass (measured on two cores).

    A thread that computes for long does so in a `turn`. At the end of the turn it also does the work that other threads
    have submitted meanwhile. Its OpenMP threads are ready for it. Another thread would have to start its own, while
    those still spin: an update of 3 million parameters took 4 ms instead of 1.6 (measured on two cores).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of the following
        self._owner: int | None = None  # the thread whose turn it is
        self._awaited: deque[_Awaited] = deque()

    def run(self, work: Callable[[], object]) -> None:
        """See Stream. Work may submit work."""
        if self._owner == threading.get_ident():
            work()
        elif self._begin(work):
            try:
                work()
            finally:
                self._end(does_others=False)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """See Stream."""
        if self._owner == threading.get_ident():
            yield
            return
        self._begin(None)
        try:
            yield
        finally:
            self._end(does_others=True)

    def _begin(self, work: Callable[[], object] | None) -> bool:
        """Waits until it is the calling thread's turn. Returns False if another thread has done the work meanwhile."""
        with self._lock:
            if self._owner is None:
                self._owner = threading.get_ident()
                return True
            awaited = _Awaited(work)
            self._awaited.append(awaited)
        awaited.wait()
        return not awaited.is_done

    def _end(self, *, does_others: bool) -> None:
        """Ends the turn of the calling thread. `does_others`: first does the work that others have submitted."""
        while (next_one := self._next(does_others=does_others)) is not None:
            next_one.do()

    def _next(self, *, does_others: bool) -> _Awaited | None:
        """Returns work to do for another thread, or passes the turn on."""
        with self._lock:
            if not self._awaited:
                self._owner = None
                return None
            first = self._awaited.popleft()
            if does_others and first.work is not None:
                return first
            self._owner = first.thread
        first.begin()
        return None

    def wait(self, event: Event) -> None:
        """See Stream. Raises the errors of `Event.wait`."""
        event.wait()

    def record(self) -> Event:
        """See Stream."""
        return _CompletedEvent()

    def then(self, callback: Callable[[], None]) -> None:
        """See Stream."""
        callback()


class _ThreadEvent:
    """An event of a stream with a thread."""

    def __init__(self, token: CancelToken) -> None:
        self._completed = Signal(token)
        self._time_s = 0.0
        self._failure: Exception | None = None

    def set(self, failure: Exception | None) -> None:
        self._time_s, self._failure = time.monotonic(), failure
        self._completed.set()

    def is_over(self) -> bool:
        return self._completed.is_set and self._failure is None

    def wait(self) -> None:
        self._completed.wait("the end of work on a device stream; a copy is stuck or slow")
        if self._failure is not None:
            raise self._failure

    def time_s(self) -> float:
        return self._time_s


class ThreadStream:
    """Runs work in a thread of its own. After a failure it discards all work, and its events raise the failure."""

    def __init__(self, token: CancelToken, start_threads: StartThreads) -> None:
        """The thread ends after its queued work once `token` is cancelled."""
        self._token = token
        self._lock = threading.Lock()
        self._failure: Exception | None = None  # set after a failure: the stream accepts no more work
        self._tasks: TaskQueue[Callable[[], object] | _ThreadEvent] = TaskQueue(token)
        start_threads((self._run,))

    def run(self, work: Callable[[], object]) -> None:
        """See Stream."""
        self._submit(work)

    def wait(self, event: Event) -> None:
        """See Stream."""
        self._submit(event.wait)

    def record(self) -> Event:
        """See Stream."""
        event = _ThreadEvent(self._token)
        self._submit(event)
        return event

    def turn(self) -> contextlib.AbstractContextManager[None]:
        """See Stream."""
        return contextlib.nullcontext()

    def then(self, callback: Callable[[], None]) -> None:
        """See Stream."""
        self._submit(callback)

    def _submit(self, task: Callable[[], object] | _ThreadEvent) -> None:
        with self._lock:
            if self._failure is None:
                self._tasks.put(task)
            elif isinstance(task, _ThreadEvent):
                task.set(self._failure)

    def _run(self) -> None:
        try:
            while self._do_next():
                pass
        except Exception as error:
            with self._lock:
                self._failure = error
                for task in self._tasks.drop_all():
                    if isinstance(task, _ThreadEvent):
                        task.set(error)
            raise

    def _do_next(self) -> bool:
        """Waits for one task and runs it. Returns False if there will be no more.

        It is a separate function so that no variable holds a task, and its memory, during the next wait.
        """
        task = self._tasks.take()
        if task is None:
            return False
        if isinstance(task, _ThreadEvent):
            task.set(None)
        else:
            task()
        return True


class CpuStreams:
    """The streams of a CPU. The three standard ones run work in the submitting thread."""

    def __init__(self, token: CancelToken, start_threads: StartThreads) -> None:
        self._token = token
        self._start_threads = start_threads
        self.compute: Stream = DirectStream()
        self.h2d: Stream = DirectStream()
        self.d2h: Stream = DirectStream()

    def open(self) -> Stream:
        """See Streams."""
        return ThreadStream(self._token, self._start_threads)

    def record_current(self) -> Event:
        """See Streams."""
        return self.compute.record()


def open_streams(device: torch.device, token: CancelToken, start_threads: StartThreads) -> Streams:
    """Opens the streams of a device. `token` ends the waits for events, and the streams' threads."""
    if device.type != "cuda":
        return CpuStreams(token, start_threads)
    # Imported here, because a machine without a GPU does not need it.
    from windlass.engine.device.cuda_streams import CudaStreams

    return CudaStreams(device, token, start_threads)
