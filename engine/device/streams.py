"""Work that is given to a device and done later, in order: streams, and events, which are points in them.

Streams wait for each other's events, and the thread that gives work goes on. On a GPU they are CUDA's
(`streams_cuda`). On a CPU there are two kinds: one whose work is done by the thread that gives it, before the call
returns, and one with a thread of its own.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

# Starts a thread for each function; what one raises is the starter's to tell.
StartThreads = Callable[[Iterable[Callable[[], None]]], None]


class Event(Protocol):
    """A point in a stream."""

    def is_over(self) -> bool:
        """Whether the stream has come there; false where something failed before."""

    def wait(self, deadline_s: float) -> None:
        """The calling thread waits until the stream has come there.

        Raises:
            TimeoutError: it did not within `deadline_s`. What failed in the stream before raises its own error.
        """

    def time_s(self) -> float:
        """When the stream came there, in seconds of CLOCK_MONOTONIC; it must have."""


class Stream(Protocol):
    """A queue of work. Safe from many threads; the work of each is done in the order in which it gave it."""

    def run(self, work: Callable[[], object]) -> None:
        """Gives work. On a GPU `work` is called at once and only starts kernels and copies: the memory that they use
        must stay as it is until the stream is through with them."""

    def wait(self, event: Event) -> None:
        """What the stream is given from now on is done after the event."""

    def record(self) -> Event:
        """The point that comes after all the work given so far."""

    def then(self, callback: Callable[[], None]) -> None:
        """Calls back once the work given so far is done, from a thread of the device; in the order of the calls."""

    def close(self) -> None:
        """Ends the stream's thread, after what it was given; what it is given later is not done."""


class Streams(Protocol):
    """The streams of a device."""

    compute: Stream  # where kernels run
    h2d: Stream  # copies from host memory
    d2h: Stream  # and to it

    def open(self) -> Stream:
        """A further stream, which its caller closes; on a CPU, one with a thread."""

    def close(self) -> None:
        """Closes the three."""


class _Past:
    """An event that came as it was recorded."""

    def __init__(self) -> None:
        self._time_s = time.monotonic()

    def is_over(self) -> bool:
        return True

    def wait(self, deadline_s: float) -> None:
        pass

    def time_s(self) -> float:
        return self._time_s


class DirectStream:
    """Does work in the thread that gives it: at once, but for what other threads are doing in it.

    What computes in parallel would wait for its own threads, were two of them to compute on the same cores: updates of
    states on the device took seven times as long beside a forward pass (measured on two cores).
    """

    def __init__(self, deadline_s: float) -> None:
        """`deadline_s`: of waits for events of streams with a thread."""
        self._deadline_s = deadline_s
        self._turn = threading.RLock()  # work may give work

    def run(self, work: Callable[[], object]) -> None:
        """See Stream."""
        with self._turn:
            work()

    def wait(self, event: Event) -> None:
        """See Stream. Raises as the event's own `wait`."""
        event.wait(self._deadline_s)

    def record(self) -> Event:
        """See Stream."""
        return _Past()

    def then(self, callback: Callable[[], None]) -> None:
        """See Stream."""
        callback()

    def close(self) -> None:
        """See Stream."""


class _Mark:
    """An event of a stream with a thread."""

    def __init__(self) -> None:
        self._came = threading.Event()
        self._time_s = 0.0
        self._failure: Exception | None = None

    def come(self, failure: Exception | None) -> None:
        self._time_s, self._failure = time.monotonic(), failure
        self._came.set()

    def is_over(self) -> bool:
        return self._came.is_set() and self._failure is None

    def wait(self, deadline_s: float) -> None:
        if not self._came.wait(deadline_s):
            raise TimeoutError(
                f"what a stream of the device was given was not done within {deadline_s:g} s; a copy is stuck, or the "
                "deadline is too short for this machine"
            )
        if self._failure is not None:
            raise self._failure

    def time_s(self) -> float:
        return self._time_s


class ThreadStream:
    """Does work in a thread of its own. After a failure it does nothing more, and its events raise what failed."""

    def __init__(self, deadline_s: float, start_threads: StartThreads) -> None:
        """`deadline_s`: of waits for events of other streams."""
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._failure: Exception | None = None  # or that it was closed: nothing is taken any more
        self._tasks: queue.SimpleQueue[Callable[[], object] | _Mark | None] = queue.SimpleQueue()
        start_threads((self._run,))

    def run(self, work: Callable[[], object]) -> None:
        """See Stream."""
        self._give(work)

    def wait(self, event: Event) -> None:
        """See Stream."""
        self._give(lambda: event.wait(self._deadline_s))

    def record(self) -> Event:
        """See Stream."""
        mark = _Mark()
        self._give(mark)
        return mark

    def then(self, callback: Callable[[], None]) -> None:
        """See Stream."""
        self._give(callback)

    def close(self) -> None:
        """See Stream."""
        with self._lock:
            self._failure = self._failure or InterruptedError("the stream was closed")
            self._tasks.put(None)

    def _give(self, task: Callable[[], object] | _Mark) -> None:
        with self._lock:
            if self._failure is None:
                self._tasks.put(task)
            elif isinstance(task, _Mark):
                task.come(self._failure)

    def _run(self) -> None:
        try:
            while self._do_next():
                pass
        except Exception as error:
            with self._lock:
                self._failure = error
                while not self._tasks.empty():
                    if isinstance(task := self._tasks.get(), _Mark):
                        task.come(error)
            raise

    def _do_next(self) -> bool:
        """A function of its own: no variable holds a task, and memory with it, while the next is awaited."""
        task = self._tasks.get()
        if task is None:
            return False
        if isinstance(task, _Mark):
            task.come(None)
        else:
            task()
        return True


class CpuStreams:
    """The three do their work in the thread that gives it."""

    def __init__(self, deadline_s: float, start_threads: StartThreads) -> None:
        self._deadline_s = deadline_s
        self._start_threads = start_threads
        self.compute: Stream = DirectStream(deadline_s)
        self.h2d: Stream = DirectStream(deadline_s)
        self.d2h: Stream = DirectStream(deadline_s)

    def open(self) -> Stream:
        """See Streams."""
        return ThreadStream(self._deadline_s, self._start_threads)

    def close(self) -> None:
        """See Streams."""


def open_streams(device: torch.device, deadline_s: float, start_threads: StartThreads) -> Streams:
    """The streams of a device. `deadline_s`: of a thread's waits for events."""
    if device.type != "cuda":
        return CpuStreams(deadline_s, start_threads)
    # Imported here: a machine without a GPU needs none of it.
    from windlass.engine.device.cuda_streams import CudaStreams

    return CudaStreams(device, deadline_s, start_threads)
