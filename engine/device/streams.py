"""Streams, which are ordered queues of work for a device, and events, which are points in a stream.

Streams wait for each other's events, while the thread that submits work continues. On a GPU they are CUDA's
(`cuda_streams`). On a CPU there are two kinds. A `DirectStream` runs work in the submitting thread before the call
returns. A `ThreadStream` has a thread of its own.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

# Starts a thread for each function, and reports the exceptions that they raise.
StartThreads = Callable[[Iterable[Callable[[], None]]], None]


class Event(Protocol):
    """A point in a stream."""

    def is_over(self) -> bool:
        """Checks whether the stream has reached the event; false if earlier work failed."""

    def wait(self, deadline_s: float) -> None:
        """Blocks the calling thread until the stream has reached the event.

        Raises:
            TimeoutError: the stream did not reach it within `deadline_s`. Failed earlier work raises its own error.
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

    def then(self, callback: Callable[[], None]) -> None:
        """Calls back in a thread of the device when all work queued so far is over. Callbacks run in call order."""

    def close(self) -> None:
        """Ends the stream's thread after its queued work. Work that is queued later is discarded."""


class Streams(Protocol):
    """The streams of a device."""

    compute: Stream  # runs kernels
    h2d: Stream  # copies from host memory
    d2h: Stream  # copies to host memory

    def open(self) -> Stream:
        """Opens a further stream, which has a thread on a CPU. The caller closes it."""

    def record_current(self) -> Event:
        """Returns an event after all work on torch's current stream of the calling thread."""

    def close(self) -> None:
        """Closes the three streams."""


class _CompletedEvent:
    """An event that is over when it is recorded."""

    def __init__(self) -> None:
        self._time_s = time.monotonic()

    def is_over(self) -> bool:
        return True

    def wait(self, deadline_s: float) -> None:
        pass

    def time_s(self) -> float:
        return self._time_s


class DirectStream:
    """Runs work in the submitting thread, one piece of work at a time.

    A lock orders the threads, because two parallel computations on the same cores would wait for each other's threads.
    Updates of states on the device took seven times as long beside a forward pass (measured on two cores).
    """

    def __init__(self, deadline_s: float) -> None:
        """`deadline_s`: timeout of waits for events of streams with a thread."""
        self._deadline_s = deadline_s
        self._turn = threading.RLock()  # reentrant: work may submit work

    def run(self, work: Callable[[], object]) -> None:
        """See Stream."""
        with self._turn:
            work()

    def wait(self, event: Event) -> None:
        """See Stream. Raises the errors of `Event.wait`."""
        event.wait(self._deadline_s)

    def record(self) -> Event:
        """See Stream."""
        return _CompletedEvent()

    def then(self, callback: Callable[[], None]) -> None:
        """See Stream."""
        callback()

    def close(self) -> None:
        """See Stream."""


class _ThreadEvent:
    """An event of a stream with a thread."""

    def __init__(self) -> None:
        self._completed = threading.Event()
        self._time_s = 0.0
        self._failure: Exception | None = None

    def set(self, failure: Exception | None) -> None:
        self._time_s, self._failure = time.monotonic(), failure
        self._completed.set()

    def is_over(self) -> bool:
        return self._completed.is_set() and self._failure is None

    def wait(self, deadline_s: float) -> None:
        if not self._completed.wait(deadline_s):
            raise TimeoutError(
                f"work queued on a device stream did not finish within {deadline_s:g} s; a copy is stuck, or the "
                "deadline is too short for this machine"
            )
        if self._failure is not None:
            raise self._failure

    def time_s(self) -> float:
        return self._time_s


class ThreadStream:
    """Runs work in a thread of its own. After a failure it discards all work, and its events raise the failure."""

    def __init__(self, deadline_s: float, start_threads: StartThreads) -> None:
        """`deadline_s`: timeout of waits for events of other streams."""
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._failure: Exception | None = None  # set after a failure or `close`: the stream accepts no more work
        self._tasks: queue.SimpleQueue[Callable[[], object] | _ThreadEvent | None] = queue.SimpleQueue()
        start_threads((self._run,))

    def run(self, work: Callable[[], object]) -> None:
        """See Stream."""
        self._submit(work)

    def wait(self, event: Event) -> None:
        """See Stream."""
        self._submit(lambda: event.wait(self._deadline_s))

    def record(self) -> Event:
        """See Stream."""
        event = _ThreadEvent()
        self._submit(event)
        return event

    def then(self, callback: Callable[[], None]) -> None:
        """See Stream."""
        self._submit(callback)

    def close(self) -> None:
        """See Stream."""
        with self._lock:
            self._failure = self._failure or InterruptedError("the stream was closed")
            self._tasks.put(None)

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
                while not self._tasks.empty():
                    if isinstance(task := self._tasks.get(), _ThreadEvent):
                        task.set(error)
            raise

    def _do_next(self) -> bool:
        """Waits for one task and runs it. Returns False when the stream is closed.

        It is a separate function so that no variable holds a task, and its memory, during the next wait.
        """
        task = self._tasks.get()
        if task is None:
            return False
        if isinstance(task, _ThreadEvent):
            task.set(None)
        else:
            task()
        return True


class CpuStreams:
    """The streams of a CPU. The three standard ones run work in the submitting thread."""

    def __init__(self, deadline_s: float, start_threads: StartThreads) -> None:
        self._deadline_s = deadline_s
        self._start_threads = start_threads
        self.compute: Stream = DirectStream(deadline_s)
        self.h2d: Stream = DirectStream(deadline_s)
        self.d2h: Stream = DirectStream(deadline_s)

    def open(self) -> Stream:
        """See Streams."""
        return ThreadStream(self._deadline_s, self._start_threads)

    def record_current(self) -> Event:
        """See Streams."""
        return self.compute.record()

    def close(self) -> None:
        """See Streams."""


def open_streams(device: torch.device, deadline_s: float, start_threads: StartThreads) -> Streams:
    """Opens the streams of a device. `deadline_s`: timeout of waits for events."""
    if device.type != "cuda":
        return CpuStreams(deadline_s, start_threads)
    # Imported here, because a machine without a GPU does not need it.
    from windlass.engine.device.cuda_streams import CudaStreams

    return CudaStreams(device, deadline_s, start_threads)
