"""A stand-in for torch.cuda's streams and events on a CPU, with a clock of its own. Work runs at once.

`calls` records the waits of streams. `synchronize` can be blocked, or fail.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from windlass.engine.device import cuda_streams as streams_cuda

# A GPU's clock starts at any value and cannot be compared with the host's.
_CLOCK_OFFSET_S = 1234.5


class CudaStatus:
    """The result of a call of CUDA's runtime, as torch binds it: an enum, which is no int and is true also if it is 0.

    Source: PyTorch, torch/csrc/cuda/shared/cudart.cpp.
    """

    def __init__(self, code: int) -> None:
        self._code = code

    def __int__(self) -> int:
        return self._code


def cuda_error_string(status: object) -> str:
    """The text of a result. Like torch's binding, it accepts no int."""
    if not isinstance(status, CudaStatus):
        raise TypeError(f"cudaGetErrorString(): incompatible function arguments: {status!r}")
    return "out of memory" if int(status) else "no error"


class FakeCuda:
    """Replaces torch.cuda. `calls`: the waits between streams, by name."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.synchronized: list[str] = []  # threads that waited for an event
        self.may_synchronize = threading.Event()
        self.may_synchronize.set()
        self.failure: Exception | None = None  # of a kernel: if set, every wait for an event raises it
        self.now_s = lambda: time.monotonic() + _CLOCK_OFFSET_S
        self._current = threading.local()
        self._num_streams = 0
        self.default = self.make_stream()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Patches `streams_cuda` only, because other modules use the real torch.cuda."""
        cuda = SimpleNamespace(
            Stream=self.make_stream,
            Event=self.make_event,
            stream=self.stream,
            default_stream=lambda device: self.default,
        )
        monkeypatch.setattr(streams_cuda, "torch", SimpleNamespace(cuda=cuda))

    @property
    def current(self) -> "FakeCudaStream":
        return getattr(self._current, "stream", self.default)

    def make_stream(self, device: torch.device | None = None) -> "FakeCudaStream":
        self._num_streams += 1
        return FakeCudaStream(self, f"stream {self._num_streams - 1}")

    def make_event(self, *, enable_timing: bool, blocking: bool) -> "FakeCudaEvent":
        assert enable_timing
        assert blocking  # otherwise a CPU core spins while it waits
        return FakeCudaEvent(self)

    @contextmanager
    def stream(self, stream: "FakeCudaStream") -> Iterator[None]:
        before = self.current
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before


class FakeCudaStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.name = name
        self._cuda = cuda

    def wait_event(self, event: "FakeCudaEvent") -> None:
        assert event.stream is not None, "it was recorded"
        self._cuda.calls.append(f"{self.name} waits for {event.stream.name}")


class FakeCudaEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.stream: FakeCudaStream | None = None
        self._cuda = cuda
        self.time_s = 0.0

    def record(self, stream: FakeCudaStream) -> None:
        self.stream, self.time_s = stream, self._cuda.now_s()

    def query(self) -> bool:
        return self._cuda.may_synchronize.is_set()

    def synchronize(self) -> None:
        self._cuda.synchronized.append(threading.current_thread().name)
        assert self._cuda.may_synchronize.wait(30)
        if self._cuda.failure is not None:
            raise self._cuda.failure

    def elapsed_time(self, later: "FakeCudaEvent") -> float:
        return (later.time_s - self.time_s) * 1e3
