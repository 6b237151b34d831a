"""A GPU's streams on a CPU: work runs as late as possible, in the worst order for code that forgot a wait.

One thread, the "GPU", does the work of all streams, one task at a time, after no thread has submitted work for a
moment. It continues with the stream that is first in `order`, or draws one with a seed.

So work that misses a wait for another stream finds buffers that are not filled yet, or hold later data. Tests fill
released buffers with NaN, and compare results with those of streams that run everything at once.
"""

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.host_waits import host_wait_of
from windlass.engine.device.streams import Event, StartThreads, Stream
from windlass.storage.cancellation import CancelToken

_DEADLINE_S = 30.0  # timeout of a host's wait
# Seconds without new work until a task runs: by then every thread that could run ahead has done so.
_QUIET_S = 0.0005


class LateEvent:
    """A point in a late stream."""

    def __init__(self, gpu: "LateStreams", stream: str) -> None:
        self._gpu = gpu
        self.stream = stream
        self.came_s: float | None = None

    def is_over(self) -> bool:
        return self.came_s is not None

    def wait(self) -> None:
        self._gpu.host_waits[threading.current_thread().name] += 1
        with self._gpu.changed:
            if not self._gpu.changed.wait_for(lambda: self.came_s is not None or self._gpu.is_over, _DEADLINE_S):
                raise TimeoutError(f"what a stream was given was not done within {_DEADLINE_S:g} s")
            if self.came_s is None:
                raise InterruptedError("the streams were closed")

    def time_s(self) -> float:
        assert self.came_s is not None, "the event is not reached yet"
        return self.came_s


class LateStream:
    """One queue of work. Work submitted from inside the stream's own work runs at once, because it is its turn."""

    def __init__(self, gpu: "LateStreams", name: str) -> None:
        self.name = name
        self._gpu = gpu
        self._tasks: deque[Callable[[], None] | LateEvent] = deque()  # an event here is one to wait for
        self._callbacks: deque[Callable[[], None]] = deque()
        self._has_thread = False

    def run(self, work: Callable[[], object]) -> None:
        if self._gpu.works_for(self):
            work()
        else:
            self._give(lambda: self._gpu.work(self, work))

    def wait(self, event: Event) -> None:
        assert isinstance(event, LateEvent)
        if self._gpu.forgets(self.name, event.stream):
            return
        if self._gpu.works_for(self):
            self._gpu.work_until(event, self)
        else:
            self._give(event)

    def record(self) -> Event:
        event = LateEvent(self._gpu, self.name)
        if self._gpu.works_for(self) or (self._gpu.is_over and not self._tasks):
            event.came_s = time.monotonic()
        else:
            self._give(lambda: self._gpu.come(event))
        return event

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext()

    def then(self, callback: Callable[[], None]) -> None:
        with self._gpu.changed:
            if not self._has_thread:
                self._has_thread = True
                self._gpu.start_threads((self._run_callbacks,))
        if self._gpu.works_for(self):
            self._call_back(callback)
        else:
            self._give(lambda: self._call_back(callback))

    def next_task(self) -> Callable[[], None] | None:
        """The task that the stream can run next; None if it waits or is empty."""
        while self._tasks and isinstance(event := self._tasks[0], LateEvent) and event.came_s is not None:
            self._tasks.popleft()
        task = self._tasks[0] if self._tasks else None
        return None if isinstance(task, LateEvent) else task

    def done(self) -> None:
        """Removes the task that has just run."""
        self._tasks.popleft()

    def _give(self, task: Callable[[], None] | LateEvent) -> None:
        with self._gpu.changed:
            self._gpu.given_s = time.monotonic()
            self._tasks.append(task)
            self._gpu.changed.notify_all()

    def _call_back(self, callback: Callable[[], None]) -> None:
        with self._gpu.changed:
            self._callbacks.append(callback)
            self._gpu.changed.notify_all()

    def _run_callbacks(self) -> None:
        while True:
            with self._gpu.changed:
                self._gpu.changed.wait_for(lambda: self._callbacks or self._gpu.is_over)
                if not self._callbacks:
                    return
                callback = self._callbacks.popleft()
            callback()
            self._gpu.given_s = time.monotonic()


class LateStreams:
    """The streams of one device."""

    def __init__(
        self,
        start_threads: StartThreads,
        *,
        token: CancelToken | None = None,
        order: Sequence[str] | int,
        forgets: Callable[[str, str], bool] = lambda waits, on: False,
        quiet_s: float = _QUIET_S,
    ) -> None:
        """Starts the streams and their thread, which ends at `close`, or after its work once `token` is cancelled.

        `order`: names of streams ("compute", "h2d", "d2h"), highest priority first; or a seed to draw with.

        `forgets`: decides which waits of a stream on another are left out, to show that they matter.

        `quiet_s`: seconds without new work until a task runs.
        """
        self.changed = threading.Condition()
        self.start_threads = start_threads
        self.host_waits: Counter[str] = Counter()  # by the waiting thread
        self.syncs: Counter[str] = Counter()  # operators of the compute stream for which a GPU's host would wait
        self.is_held_up = False  # no task runs, even if a thread waits for it
        self.given_s = 0.0
        self.is_over = False
        self._token = token or CancelToken()
        self.forgets = forgets
        self._order = order
        self._quiet_s = quiet_s
        self._random = random.Random(order if isinstance(order, int) else 0)
        self._working: list[LateStream] = []
        self._thread: threading.Thread | None = None
        self.counts = True
        self._all: list[LateStream] = []
        self.compute: Stream = self._make("compute")
        self.h2d: Stream = self._make("h2d")
        self.d2h: Stream = self._make("d2h")
        start_threads((self._run,))

    def open(self) -> Stream:
        return self._make("d2h" if len(self._all) % 2 else "h2d")

    def record_current(self) -> Event:
        return self.compute.record()

    def close(self) -> None:
        with self.changed:
            self.is_over = True
            self.changed.notify_all()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Does not count synchronizing operators inside, because they run only on a CPU."""
        self.counts = False
        try:
            yield
        finally:
            self.counts = True

    # --- what streams call ------------------------------------------------------------------------------------------

    def works_for(self, stream: LateStream) -> bool:
        """Returns whether the calling thread is the GPU's, at this stream's work."""
        return threading.current_thread() is self._thread and self._working[-1:] == [stream]

    def work(self, stream: LateStream, work: Callable[[], object]) -> None:
        """Runs a task of a stream."""
        self._working.append(stream)
        try:
            with _SyncCounter(self):
                work()
        finally:
            self._working.pop()

    def work_until(self, event: LateEvent, stream: LateStream) -> None:
        """Runs the other streams, in the middle of a stream's work, until an event is reached."""
        while event.came_s is None:
            self._do_next(busy=stream)

    def come(self, event: LateEvent) -> None:
        """Marks an event as reached."""
        with self.changed:
            event.came_s = time.monotonic()
            self.changed.notify_all()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _make(self, name: str) -> LateStream:
        stream = LateStream(self, name)
        self._all.append(stream)
        return stream

    def _run(self) -> None:
        self._thread = threading.current_thread()
        try:
            while not self.is_over:
                self._do_next(busy=None)
        finally:
            self.close()

    def _do_next(self, busy: LateStream | None) -> None:
        with self.changed:
            # A stream in the middle of its work does not begin its next task.
            ready = [each for each in self._all if each not in self._working and each.next_task() is not None]
            quiet_s = time.monotonic() - self.given_s
            if self.is_over and busy is not None:
                raise InterruptedError("the streams were closed")
            if not ready and self._token.is_cancelled:
                self.close()
                return
            if not ready or quiet_s < self._quiet_s or self.is_held_up:
                self.changed.wait(self._quiet_s if ready else 0.05)
                return
            stream = self._choose(ready)
            task = stream.next_task()
        assert task is not None
        task()
        with self.changed:
            stream.done()

    def _choose(self, ready: list[LateStream]) -> LateStream:
        if isinstance(self._order, int):
            return self._random.choice(ready)
        return min(ready, key=lambda stream: self._order.index(stream.name))


class _SyncCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, gpu: LateStreams) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._gpu.counts and (name := host_wait_of(func, args, kwargs)) is not None:
            self._gpu.syncs[name] += 1
        return func(*args, **(kwargs or {}))
