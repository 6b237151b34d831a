"""A GPU's streams on a CPU: work is done as late as can be, in an order that is the worst for who forgot to wait.

One thread, the "GPU", does the work of all streams, one piece at a time, once nobody has given any for a moment. Of the
streams that may go on, the first in `order` does, or one that a seed draws. So work that was to wait for another stream
and did not finds buffers that are not filled yet, or filled already with what comes next; tests fill released buffers
with NaN, and compare numbers with those of streams that do everything at once.
"""

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from windlass.engine.device.streams import Event, StartThreads, Stream

# Nobody has given work for so long: whoever could run ahead has done so.
_QUIET_S = 0.0005
# What a GPU's host would wait for: a number, or a tensor whose shape depends on numbers.
_SYNCHRONIZING = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal", "aten._unique2")


class LateEvent:
    """A point in a late stream."""

    def __init__(self, gpu: "LateStreams", stream: str) -> None:
        self._gpu = gpu
        self.stream = stream
        self.came_s: float | None = None

    def is_over(self) -> bool:
        return self.came_s is not None

    def wait(self, deadline_s: float) -> None:
        self._gpu.host_waits[threading.current_thread().name] += 1
        with self._gpu.changed:
            if not self._gpu.changed.wait_for(lambda: self.came_s is not None or self._gpu.is_over, deadline_s):
                raise TimeoutError(f"what a stream was given was not done within {deadline_s:g} s")
            if self.came_s is None:
                raise InterruptedError("the streams were closed")

    def time_s(self) -> float:
        assert self.came_s is not None, "nobody knows yet when it comes"
        return self.came_s


class LateStream:
    """One queue of work. What is given from inside its own work is done at once, being in its turn."""

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
        if self._gpu.works_for(self):
            event.came_s = time.monotonic()
        else:
            self._give(lambda: self._gpu.come(event))
        return event

    def then(self, callback: Callable[[], None]) -> None:
        with self._gpu.changed:
            if not self._has_thread:
                self._has_thread = True
                self._gpu.start_threads((self._run_callbacks,))
        if self._gpu.works_for(self):
            self._call_back(callback)
        else:
            self._give(lambda: self._call_back(callback))

    def close(self) -> None:
        pass

    def next_task(self) -> Callable[[], None] | None:
        """What it may go on with."""
        while self._tasks and isinstance(event := self._tasks[0], LateEvent) and event.came_s is not None:
            self._tasks.popleft()
        task = self._tasks[0] if self._tasks else None
        return None if isinstance(task, LateEvent) else task

    def done(self) -> None:
        """Its next task is."""
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
        order: Sequence[str] | int,
        forgets: Callable[[str, str], bool] = lambda waits, on: False,
        quiet_s: float = _QUIET_S,
    ) -> None:
        """`order`: names of streams ("compute", "h2d", "d2h"), the first to go on first; or a seed to draw by.

        `forgets` tells which waits of a stream on another are left out, to see that they matter. `quiet_s`: how long
        nobody has given any work before some is done.
        """
        self.changed = threading.Condition()
        self.start_threads = start_threads
        self.host_waits: Counter[str] = Counter()  # by the thread that waited
        self.syncs: Counter[str] = Counter()  # operators of the compute stream that a GPU's host would wait for
        self.is_held_up = False  # nothing is done, whoever waits
        self.given_s = 0.0
        self.is_over = False
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

    def close(self) -> None:
        with self.changed:
            self.is_over = True
            self.changed.notify_all()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What is done on a CPU only."""
        self.counts = False
        try:
            yield
        finally:
            self.counts = True

    # --- what streams call ------------------------------------------------------------------------------------------

    def works_for(self, stream: LateStream) -> bool:
        """Whether this is the GPU's thread, at this stream's work."""
        return threading.current_thread() is self._thread and self._working[-1:] == [stream]

    def work(self, stream: LateStream, work: Callable[[], object]) -> None:
        """Does a stream's work."""
        self._working.append(stream)
        try:
            with _SyncCounter(self):
                work()
        finally:
            self._working.pop()

    def work_until(self, event: LateEvent, stream: LateStream) -> None:
        """In the middle of a stream's work, the others go on until an event comes."""
        while event.came_s is None:
            self._do_next(busy=stream)

    def come(self, event: LateEvent) -> None:
        """An event comes."""
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
            # A stream that is in the middle of its work does not begin with what follows.
            ready = [each for each in self._all if each not in self._working and each.next_task() is not None]
            quiet_s = time.monotonic() - self.given_s
            if self.is_over and busy is not None:
                raise InterruptedError("the streams were closed")
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
        name = str(getattr(func, "overloadpacket", func))
        if name in _SYNCHRONIZING and self._gpu.counts:
            self._gpu.syncs[name] += 1
        return func(*args, **(kwargs or {}))
