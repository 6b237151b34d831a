"""Watches the host while a job trains: its waits for the GPU, by source line, and a trace of all that ran.

Two kinds of waits are seen: those of which torch warns, and windlass's own waits for events outside of the places that
may wait. Torch does not warn of waits for events, of calls that allocate memory (cudaMalloc, cudaHostAlloc), and of the
allocator's retries.
"""

import contextlib
import sys
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tests.support.races.checker import places
from tests.support.races.sites import HOST_WAITS
from windlass.engine.device.cuda_streams import CudaEvent

_ROOT = Path(__file__).parents[2]
_ROOMS = frozenset({"actors", "benchmarks", "engine", "planner", "storage", "tests"})  # folders of windlass
_START_DEADLINE_S = 30.0
_STOP_DEADLINE_S = 120.0


class HostWaits:
    """Counts how often the host waits for the GPU while counting is on, by source line."""

    def __init__(self) -> None:
        self.by_line: Counter[str] = Counter()
        self._is_on = False

    def turn(self, *, on: bool) -> None:
        """Starts or ends counting."""
        if on != self._is_on:
            self._is_on = on
            torch.cuda.set_sync_debug_mode("warn" if on else "default")

    @property
    def number(self) -> int:
        """The number of waits so far."""
        return self.by_line.total()

    def see(self, message: Warning | str, *_args: Any, **_options: Any) -> None:
        """Handles a warning in the thread that caused it: a hook for `warnings.showwarning`."""
        if "synchronizing CUDA operation" in str(message):
            self.by_line[_source_line()] += 1

    def see_event(self, frame: FrameType | None) -> None:
        """Handles a wait for an event, in the thread that waits. Streams' own threads may wait, and a job's end."""
        if self._is_on and not any(function in HOST_WAITS for _, function in places(frame)):
            self.by_line[_source_line()] += 1


@contextlib.contextmanager
def host_waits(device: str) -> Iterator[HostWaits]:
    """Lets the waits be counted in its context. On a CPU there are none, and the hook is not used."""
    waits = HostWaits()
    if device == "cpu":
        waits.turn = lambda *, on: None  # type: ignore[method-assign]
        yield waits
        return
    with warnings.catch_warnings(), _seen_events(waits):
        warnings.simplefilter("always")
        warnings.showwarning = waits.see
        try:
            yield waits
        finally:
            waits.turn(on=False)


@contextlib.contextmanager
def _seen_events(waits: HostWaits) -> Iterator[None]:
    """Shows `waits` each wait for an event in its context."""
    wait = CudaEvent.wait

    def seen(self: CudaEvent) -> None:
        waits.see_event(sys._getframe(1))
        wait(self)

    CudaEvent.wait = seen  # type: ignore[method-assign]
    try:
        yield
    finally:
        CudaEvent.wait = wait  # type: ignore[method-assign]


def _source_line() -> str:
    """Returns the innermost line of windlass that is being executed: "engine/device/device.py:90"."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename).resolve()
        if path == Path(__file__).resolve() or not path.is_relative_to(_ROOT):
            continue
        if (relative := path.relative_to(_ROOT)).parts[0] in _ROOMS:  # torch may be installed below the root too
            return f"{relative}:{frame.lineno}"
    return "outside of windlass"


class Tracer:
    """Traces the process in a thread of its own, because a profiler must start and stop in one thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = threading.Thread(target=self._trace, name="tracer", daemon=True)
        self._is_started, self._is_over = threading.Event(), threading.Event()
        # The first profile of a process must be made in the main thread. Without CUDA it costs the timed steps nothing.
        with profile(activities=[ProfilerActivity.CPU], acc_events=True):
            pass

    def start(self) -> None:
        """Begins, once."""
        if self._thread.ident is None:
            self._thread.start()
            self._is_started.wait(_START_DEADLINE_S)

    def stop(self) -> Path | None:
        """Ends, and returns the trace's path; None if there is none."""
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join(_STOP_DEADLINE_S)
        return self._path if self._path.exists() else None

    def _trace(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(activities=activities, acc_events=True)
        profiler.start()
        self._is_started.set()
        self._is_over.wait()
        profiler.stop()
        profiler.export_chrome_trace(str(self._path))
