"""A stand-in for torch.cuda whose streams and events are followed. `CudaStreams` of the product works on it.

Work runs at once, so that values are right. Its place in the order is that of a device that runs behind: only events
order it. A thread that waits for an event goes on late, so that all other threads run ahead of it.
"""

import _thread
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.fake_cuda import CudaStatus, cuda_error_string
from tests.support.races.checker import RaceChecker, place_of, places
from tests.support.races.clocks import Clock
from tests.support.races.memory import Access, Region
from tests.support.races.sites import Site, caller_is
from windlass.engine.device import cuda_streams, registered_memory
from windlass.engine.device import device as device_module
from windlass.engine.device.cuda_streams import CudaClock, CudaEvent, CudaStream, CudaStreams
from windlass.engine.device.device import Device

# The devices of a run. Their numbers tell memory that is allocated for a device from other memory.
DEVICES = (torch.device("cpu", 0), torch.device("cpu", 1))
DEVICE = DEVICES[0]
# Limit of the time for which a thread that waits for the device is late, in times of the quiet that it waits for.
_MAX_LATE = 20


class RecordedCuda:
    """Replaces torch.cuda where the product uses streams and pinned memory."""

    def __init__(self, checker: RaceChecker, dropped: Site | None, *, quiet_s: float) -> None:
        """`dropped`: the site that is left out.

        `quiet_s`: seconds without new work until a stream's thread that waits for the device goes on.
        """
        self._quiet_s = quiet_s
        self.checker = checker
        self.dropped = dropped
        self.region_of: Callable[[torch.Tensor], Region | None] = lambda tensor: None
        self.region_at: Callable[[int], Region | None] = lambda address: None
        self.queued_s = 0.0
        self.is_fast = False  # events are over when a thread asks
        self._current = threading.local()
        self._defaults: dict[int, RecordedStream] = {}  # by device
        self._num_streams = 0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Lets devices from now on have these streams, and lets code run that only a GPU runs."""
        cuda = SimpleNamespace(
            Stream=self.make_stream,
            Event=lambda **_: RecordedEvent(self),
            stream=self.stream,
            default_stream=self.default_of,
            current_stream=lambda device: self._stream or self.default_of(device),
            cudart=lambda: SimpleNamespace(
                cudaHostRegister=lambda *_: CudaStatus(0),
                cudaHostUnregister=self._unregister,
                cudaGetErrorString=cuda_error_string,
            ),
        )
        patch.setattr(cuda_streams, "torch", SimpleNamespace(cuda=cuda))
        patch.setattr(registered_memory, "torch", _TorchWith(cuda))
        patch.setattr(device_module, "open_streams", CudaStreams)
        make = Device.__init__

        def make_gpu(device: Device, *args: Any, **kwargs: Any) -> None:
            make(device, *args, **kwargs)
            device.is_cuda = True
            self._name_streams(device)

        patch.setattr(Device, "__init__", make_gpu)
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self._record_stream(tensor, stream))
        self._follow_calls(patch)

    def default_of(self, device: torch.device) -> "RecordedStream":
        """Returns the default stream of a device."""
        with self.checker.lock:
            if device.index not in self._defaults:
                self._defaults[device.index] = RecordedStream(self, _name_on("compute", device))
            return self._defaults[device.index]

    def make_stream(self, device: torch.device) -> "RecordedStream":
        """Makes a stream."""
        self._num_streams += 1
        stream = RecordedStream(self, f"stream {self._num_streams}")
        stream.agent.default = self.default_of(device).agent
        return stream

    @property
    def _stream(self) -> "RecordedStream | None":
        """The calling thread's current stream; None: the default one of any device."""
        return getattr(self._current, "stream", None)

    @contextlib.contextmanager
    def stream(self, stream: "RecordedStream") -> Iterator[None]:
        """Makes a stream the current one; one thread at a time, because a GPU runs its work in order."""
        before = self._stream
        with stream.turn, self.checker.acting_as(stream.agent):
            self._current.stream = stream
            self.queued_s = time.monotonic()
            try:
                yield
            finally:
                self._current.stream = before

    def is_dropped(self, depth: int) -> bool:
        """Checks whether the call by which the product came here is left out."""
        if self.dropped is None:
            return False
        if self.checker.context.dropping is not None:
            return True
        frame: FrameType | None = sys._getframe(depth + 1)
        while not caller_is(self.dropped, frame):
            if frame is None or frame.f_code.co_name != "then":  # which hands a callback on
                return False
            frame = frame.f_back
        self.checker.num_dropped += 1
        return True

    @contextlib.contextmanager
    def dropping(self, depth: int) -> Iterator[bool]:
        """Leaves out what is called in the context, if it is the site to leave out."""
        context = self.checker.context
        # One for the context manager's own frame, and one for its generator.
        is_dropped = context.dropping is None and self.dropped is not None and self.is_dropped(depth + 2)
        if is_dropped:
            context.dropping = self.checker.dropped
        try:
            yield is_dropped
        finally:
            if is_dropped:
                context.dropping = None

    def await_quiet(self) -> None:
        """Returns when no thread has queued work for a moment."""
        until_s = time.monotonic() + _MAX_LATE * self._quiet_s
        while (now_s := time.monotonic()) < until_s and now_s - self.queued_s < self._quiet_s:
            time.sleep(self._quiet_s)

    def _name_streams(self, device: Device) -> None:
        for name in ("h2d", "d2h"):
            getattr(device, name)._stream.agent.name = _name_on(name, device.device)

    def _follow_calls(self, patch: pytest.MonkeyPatch) -> None:
        """Wraps what the product calls on streams, events and devices, so that a call at a site can be left out."""

        def wrap(owner: type, name: str) -> None:
            original = getattr(owner, name)

            def call(this: Any, *args: Any, **kwargs: Any) -> Any:
                with self.dropping(1):
                    return original(this, *args, **kwargs)

            patch.setattr(owner, name, call)

        for name in ("wait", "record"):
            wrap(CudaStream, name)
        wrap(CudaEvent, "is_over")
        for name in ("record_current", "synchronize"):
            wrap(Device, name)
        wrap(CudaStreams, "record_current")
        then = CudaStream.then

        def then_or_at_once(stream: Any, callback: Any) -> None:
            with self.dropping(1) as is_dropped:
                self.checker.context.dropping = None
                if not is_dropped:
                    then(stream, self._letting_go(callback))
                elif self.dropped is not None and self.dropped.is_hold:
                    then(stream, self._without_tensors(callback))
                else:
                    with self.checker.lock:
                        self.checker.learn(stream._stream.agent.clock, dropped=True)
                    callback()

        patch.setattr(CudaStream, "then", then_or_at_once)
        wait, see, time_s = CudaEvent.wait, CudaClock.see, CudaClock.time_s

        def wait_or_not(event: Any) -> None:
            with self.dropping(1):
                if self.checker.context.dropping is None:
                    wait(event)
                else:
                    self.checker.learn(event.event.clock, dropped=True)

        def see_noted(clock: CudaClock, event: Any) -> None:
            event.needs_end(sys._getframe(1))
            see(clock, event)

        patch.setattr(CudaEvent, "wait", wait_or_not)

        def time_s_noted(clock: CudaClock, event: Any) -> float:
            if not clock._bases or not clock._bases[0][0].is_earlier(event):
                self.checker.lacks_earlier_event(sys._getframe(1))
                return 0.0
            return time_s(clock, event)

        patch.setattr(CudaClock, "see", see_noted)
        patch.setattr(CudaClock, "time_s", time_s_noted)

    def _unregister(self, address: int) -> CudaStatus:
        if (region := self.region_at(address)) is not None:
            self.checker.unpinned(region)
        return CudaStatus(0)

    def _record_stream(self, tensor: torch.Tensor, stream: "RecordedStream") -> None:
        """Lets the allocator wait for the stream's work so far before it hands on the tensor's memory."""
        is_dropped = self.is_dropped(2)
        if (region := self.region_of(tensor)) is None:
            return
        if is_dropped:
            region.hold_dropped = self.checker.dropped
            return
        with self.checker.lock:
            region.let_go.join(stream.agent.clock)

    def _letting_go(self, callback: Any) -> Any:
        """Returns the callback; it tells that the memory of its tensors is no longer held."""
        tensors = [arg for arg in getattr(callback, "args", ()) if isinstance(arg, torch.Tensor)]
        regions = [region for tensor in tensors if (region := self.region_of(tensor)) is not None]
        if not regions:
            return callback

        def call() -> None:
            callback()
            for region in regions:
                self.checker.let_go(region)

        return call

    def _without_tensors(self, callback: Any) -> Any:
        """Returns the callback with tensors of the same size that hold no memory."""
        args = []
        for arg in callback.args:
            if isinstance(arg, torch.Tensor):
                if (region := self.region_of(arg)) is not None:
                    region.hold_dropped = self.checker.dropped
                arg = torch.empty(arg.shape, dtype=arg.dtype, device="meta")
            args.append(arg)
        return type(callback)(callback.func, *args, **callback.keywords)


def _name_on(name: str, device: torch.device) -> str:
    return name if device == DEVICE else f"{name} of device {device.index}"


class RecordedStream:
    """One stream."""

    def __init__(self, cuda: RecordedCuda, name: str) -> None:
        self.agent = cuda.checker.new_agent(name, is_stream=True)
        self.turn = _thread.RLock()
        self._cuda = cuda

    def wait_event(self, event: "RecordedEvent") -> None:
        """Lets all later work come after the event."""
        checker, is_dropped = self._cuda.checker, self._cuda.is_dropped(1)
        with checker.lock:
            self.agent.clock.join(checker.host.clock)
            self.agent.clock.join(event.clock, dropped=is_dropped)


class RecordedEvent:
    """One event."""

    def __init__(self, cuda: RecordedCuda) -> None:
        self._cuda = cuda
        self.clock = Clock()
        self._time_s = 0.0
        self._end: Access | None = None
        self._is_dropped = False

    def record(self, stream: RecordedStream) -> None:
        """Records the stream's work so far, and what its calling thread has done."""
        checker, self._is_dropped = self._cuda.checker, self._cuda.is_dropped(1)
        place, _ = place_of(sys._getframe(1), ("engine/device/cuda_streams.py",))
        with checker.lock:
            stream.agent.clock.join(checker.host.clock)
            self._end = Access.now(stream.agent, "its record", place)
            clock = stream.agent.hand_on(place)
            self.clock = clock.forgotten() if self._is_dropped else clock
        self._cuda.queued_s = self._time_s = time.monotonic()

    def query(self) -> bool:
        """Says that the event is over on a fast device, or where the question is left out; else that it is ahead."""
        is_dropped = self._cuda.is_dropped(1)
        if is_dropped or self._cuda.is_fast:
            self._cuda.checker.learn(self.clock, dropped=is_dropped)
        return is_dropped or self._cuda.is_fast

    def synchronize(self) -> None:
        """Waits for the event."""
        is_dropped = self._cuda.is_dropped(1)
        if not is_dropped:
            self._cuda.checker.host_waits(sys._getframe(1), "a wait for an event")
        if any(function == "CudaStream._call_next" for _, function in places(sys._getframe(1))):
            self._cuda.await_quiet()
        self._cuda.checker.learn(self.clock, dropped=is_dropped)

    def elapsed_time(self, later: "RecordedEvent") -> float:
        """Returns milliseconds. The product has waited for the earlier event, see CudaClock."""
        later.needs_end(sys._getframe(1))
        return (later._time_s - self._time_s) * 1e3

    def is_earlier(self, other: "RecordedEvent") -> bool:
        """Checks whether the event was recorded before another one."""
        return self._time_s <= other._time_s

    def needs_end(self, frame: FrameType | None) -> None:
        """Tells the checker that the caller relies on the event's being over."""
        assert self._end is not None, "it was recorded"
        self._cuda.checker.needs_end_of(self._end, frame, self._is_dropped)


class _TorchWith:
    """The module torch, with another `cuda`."""

    def __init__(self, cuda: object) -> None:
        self.cuda = cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
