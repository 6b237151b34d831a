"""Implements the interface of `streams` by CUDA streams and events, as a thin layer over torch.cuda.

One thread for each stream waits for events and runs callbacks. The wait blocks in the driver, without the GIL.
"""

import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from windlass.engine.device.streams import Event, StartThreads, Stream
from windlass.storage.cancellation import CancelToken, TaskQueue

# Seconds between two base events. CUDA returns milliseconds as 32-bit floats, and its clock drifts from the machine's.
_REBASE_S = 10.0
# Seconds per second: upper limit of the drift between the two clocks.
_MAX_DRIFT = 1e-4


class CudaClock:
    """Converts the times of CUDA events to the machine's clock. The result may be a little late, never early."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Base events with the earliest known time of each. The first one also serves for events before the second.
        self._bases: deque[tuple[torch.cuda.Event, float]] = deque(maxlen=2)

    def see(self, event: torch.cuda.Event) -> None:
        """Learns from an event that has just ended."""
        with self._lock:
            now_s = time.monotonic()
            if not self._bases:
                self._bases.append((event, now_s))
                return
            base, base_s = self._bases[-1]
            since_s = base.elapsed_time(event) / 1e3
            # The observation with the smallest delay is the most accurate.
            base_s = min(base_s, now_s - since_s)
            self._bases[-1] = (base, base_s)
            if since_s > _REBASE_S:
                self._bases.append((event, min(now_s, base_s + since_s * (1 + _MAX_DRIFT))))

    def time_s(self, event: torch.cuda.Event) -> float:
        """Returns the time of an ended event in seconds of CLOCK_MONOTONIC. `see` must have seen an earlier event."""
        with self._lock:
            base, base_s = self._bases[0]
        return float(base_s + base.elapsed_time(event) / 1e3)


class CudaEvent:
    """A point in a CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream, clock: CudaClock) -> None:
        self.event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)
        self._clock = clock

    def is_over(self) -> bool:
        """See Event."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """See Event. Nothing ends CUDA's wait early; the scheduler watches for timeouts."""
        self.event.synchronize()
        self._clock.see(self.event)

    def time_s(self) -> float:
        """See Event."""
        return self._clock.time_s(self.event)


class CudaStream:
    """A CUDA stream, with a thread for its callbacks that the first `then` starts."""

    def __init__(
        self, stream: torch.cuda.Stream, *, clock: CudaClock, token: CancelToken, start_threads: StartThreads
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._start_threads = start_threads
        # All callbacks are called, also after a cancel. So a stream's copies have ended when its thread ends.
        self._callbacks: TaskQueue[tuple[CudaEvent, Callable[[], None]]] = TaskQueue(token)
        self._lock = threading.Lock()
        self._has_thread = False

    def run(self, work: Callable[[], object]) -> None:
        """See Stream."""
        with torch.cuda.stream(self._stream):
            work()

    def wait(self, event: Event) -> None:
        """See Stream."""
        assert isinstance(event, CudaEvent), "streams of one device wait for each other"
        self._stream.wait_event(event.event)

    def record(self) -> Event:
        """See Stream."""
        return CudaEvent(self._stream, self._clock)

    def turn(self) -> contextlib.AbstractContextManager[None]:
        """See Stream."""
        return contextlib.nullcontext()

    def then(self, callback: Callable[[], None]) -> None:
        """See Stream."""
        with self._lock:
            if not self._has_thread:
                self._has_thread = True
                self._start_threads((self._run,))
            self._callbacks.put((CudaEvent(self._stream, self._clock), callback))

    def _run(self) -> None:
        while self._call_next():
            pass

    def _call_next(self) -> bool:
        """Waits for one event and runs its callback. Returns False if there will be no more.

        It is a separate function so that no variable holds a callback, and its memory, during the next wait.
        """
        item = self._callbacks.take()
        if item is None:
            return False
        event, callback = item
        event.wait()
        callback()
        return True


class CudaStreams:
    """The streams of one CUDA device. `compute` is the default stream, in which torch starts kernels."""

    def __init__(self, device: torch.device, token: CancelToken, start_threads: StartThreads) -> None:
        self._device = device
        self._clock = clock = CudaClock()
        self._make = functools.partial(CudaStream, clock=clock, token=token, start_threads=start_threads)
        self.compute: Stream = self._make(torch.cuda.default_stream(device))
        self.compute.record().wait()  # gives the clock its first base event
        self.h2d: Stream = self.open()
        self.d2h: Stream = self.open()

    def open(self) -> Stream:
        """See Streams."""
        return self._make(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]

    def record_current(self) -> Event:
        """See Streams."""
        return CudaEvent(torch.cuda.current_stream(self._device), self._clock)
