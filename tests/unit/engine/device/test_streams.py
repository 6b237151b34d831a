import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from itertools import permutations

import pytest
import torch

from tests.support.fake_cuda import FakeCuda
from tests.support.late_streams import LateStreams
from windlass.engine.device import cuda_streams as streams_cuda
from windlass.engine.device.cuda_streams import CudaClock, CudaEvent, CudaStreams
from windlass.engine.device.device import Device, copy
from windlass.engine.device.streams import CpuStreams, DirectStream, Stream, Streams, ThreadStream, open_streams
from windlass.storage.cancellation import CancelToken

DEADLINE_S = 20.0
CPU = torch.device("cpu")


class Threads:
    """Starts threads, and records their errors."""

    def __init__(self) -> None:
        self.failures: list[Exception] = []
        self.started: list[threading.Thread] = []

    def start(self, targets: Iterable[Callable[[], None]]) -> None:
        for target in targets:
            self.started.append(threading.Thread(target=self._run, args=(target,), daemon=True))
            self.started[-1].start()

    def _run(self, target: Callable[[], None]) -> None:
        try:
            target()
        except Exception as error:  # noqa: BLE001 - kept
            self.failures.append(error)

    def join(self) -> None:
        for thread in self.started:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


@pytest.fixture
def threads() -> Threads:
    return Threads()


@pytest.fixture
def token() -> CancelToken:
    return CancelToken(DEADLINE_S)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    return cuda


def streams_of(kind: str, threads: Threads, token: CancelToken, monkeypatch: pytest.MonkeyPatch) -> Streams:
    if kind == "cpu":
        return CpuStreams(token, threads.start)
    if kind == "late":
        return LateStreams(threads.start, token=token, order=0)
    FakeCuda().install(monkeypatch)
    return CudaStreams(CPU, token, threads.start)


@pytest.mark.parametrize("kind", ["cpu", "cuda", "late"])
def test_work_is_done_in_order_and_told_of(
    kind: str, threads: Threads, token: CancelToken, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = streams_of(kind, threads, token, monkeypatch)
    opened = streams.open()
    for stream in (streams.compute, streams.h2d, streams.d2h, opened):
        done: list[str] = []
        begun = stream.record()
        for i in range(3):
            stream.run(partial(done.append, f"work {i}"))
            stream.then(partial(done.append, f"told {i}"))
        ended = stream.record()
        last = threading.Event()
        stream.then(last.set)
        assert last.wait(DEADLINE_S)
        ended.wait()
        assert [each for each in done if each.startswith("work")] == ["work 0", "work 1", "work 2"]
        assert [each for each in done if each.startswith("told")] == ["told 0", "told 1", "told 2"]
        assert all(done.index(f"work {i}") < done.index(f"told {i}") for i in range(3))
        assert begun.time_s() <= ended.time_s() <= time.monotonic() + 1e-3
    token.cancel()
    threads.join()
    assert threads.failures == []


@pytest.mark.parametrize("kind", ["cpu", "late"])
def test_a_stream_waits_for_an_event_of_another(
    kind: str, threads: Threads, token: CancelToken, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = streams_of(kind, threads, token, monkeypatch)
    one, other = streams.open(), streams.open()
    gate, found = threading.Event(), []
    one.run(lambda: gate.wait(DEADLINE_S) and found.append("one"))
    other.wait(one.record())
    other.run(lambda: found.append("other"))
    gate.set()
    streams.compute.wait(other.record())
    streams.compute.run(lambda: found.append("compute"))
    streams.compute.record().wait()
    assert found == ["one", "other", "compute"]
    token.cancel()


def test_a_machine_without_a_gpu_has_no_threads_but_those_asked_for(threads: Threads, token: CancelToken) -> None:
    streams = open_streams(CPU, token, threads.start)
    for stream in (streams.compute, streams.h2d, streams.d2h):
        ran_in: list[threading.Thread] = []
        stream.run(lambda ran_in=ran_in: ran_in.append(threading.current_thread()))
        stream.then(lambda ran_in=ran_in: ran_in.append(threading.current_thread()))
        assert ran_in == [threading.current_thread()] * 2
    assert threads.started == []
    streams.open()
    token.cancel()
    threads.join()


class TestThreadStream:
    def test_submitting_work_does_not_wait(self, threads: Threads, token: CancelToken) -> None:
        stream, gate, done = ThreadStream(token, threads.start), threading.Event(), threading.Event()
        stream.run(lambda: gate.wait(DEADLINE_S))
        stream.then(done.set)
        assert not done.is_set()
        gate.set()
        assert done.wait(DEADLINE_S)
        token.cancel()

    def test_an_event_that_does_not_come_is_an_error(self, threads: Threads) -> None:
        stream, gate = ThreadStream(CancelToken(0.05), threads.start), threading.Event()
        stream.run(lambda: gate.wait(DEADLINE_S))
        with pytest.raises(TimeoutError, match=r"waited 0\.05 s for the end of work on a device stream"):
            stream.record().wait()
        gate.set()

    def test_after_a_failure_nothing_is_done_and_its_events_raise_it(
        self, threads: Threads, token: CancelToken
    ) -> None:
        stream, gate, done = ThreadStream(token, threads.start), threading.Event(), []
        before = stream.record()
        stream.run(lambda: gate.wait(DEADLINE_S))
        stream.run(lambda: 1 // 0)
        stream.run(lambda: done.append("work"))
        stream.then(lambda: done.append("told"))
        after = stream.record()
        before.wait()
        gate.set()
        with pytest.raises(ZeroDivisionError):
            after.wait()
        threads.join()
        with pytest.raises(ZeroDivisionError):
            stream.record().wait()
        assert done == []
        assert [type(failure) for failure in threads.failures] == [ZeroDivisionError]

    def test_a_failure_reaches_the_streams_that_wait(self, threads: Threads, token: CancelToken) -> None:
        one, other = (ThreadStream(token, threads.start) for _ in range(2))
        one.run(lambda: 1 // 0)
        other.wait(one.record())
        with pytest.raises(ZeroDivisionError):
            other.record().wait()

    def test_thread_ends_after_its_work_once_the_token_is_cancelled(self, threads: Threads, token: CancelToken) -> None:
        stream, gate, done = ThreadStream(token, threads.start), threading.Event(), []
        stream.run(lambda: gate.wait(DEADLINE_S))
        stream.run(lambda: done.append("before"))
        last = stream.record()
        token.cancel()
        with pytest.raises(InterruptedError, match="the job was stopped"):
            last.wait()
        gate.set()
        threads.join()
        assert done == ["before"]
        assert last.is_over()

    def test_cancel_ends_the_wait_of_a_stream_for_another(self, threads: Threads, token: CancelToken) -> None:
        one, other = (ThreadStream(token, threads.start) for _ in range(2))
        gate, done = threading.Event(), []
        one.run(lambda: gate.wait(DEADLINE_S))
        other.wait(one.record())
        other.run(lambda: done.append("after the wait"))
        token.cancel()
        threads.started[1].join(DEADLINE_S)
        assert not threads.started[1].is_alive()
        assert done == []
        gate.set()
        threads.join()

    def test_finished_work_is_not_held(self, threads: Threads, token: CancelToken) -> None:
        stream, tensor = ThreadStream(token, threads.start), torch.zeros(4)
        memory = weakref.ref(tensor)
        stream.run(tensor.zero_)
        stream.record().wait()
        del tensor
        gc.collect()
        assert memory() is None
        token.cancel()


class TestCuda:
    def test_work_runs_in_its_stream_at_once(self, cuda: FakeCuda, threads: Threads, token: CancelToken) -> None:
        streams = CudaStreams(CPU, token, threads.start)
        opened = streams.open()
        ran_in: list[str] = []
        for stream in (streams.compute, streams.h2d, streams.d2h, opened):
            stream.run(lambda: ran_in.append(cuda.current.name))
        assert ran_in == ["stream 0", "stream 1", "stream 2", "stream 3"]
        assert cuda.current is cuda.default  # where torch itself starts kernels

    def test_streams_wait_on_the_device(self, cuda: FakeCuda, threads: Threads, token: CancelToken) -> None:
        streams = CudaStreams(CPU, token, threads.start)
        cuda.may_synchronize.clear()
        streams.h2d.wait(streams.compute.record())
        streams.d2h.wait(streams.h2d.record())
        assert cuda.calls == ["stream 1 waits for stream 0", "stream 2 waits for stream 1"]

    def test_only_its_own_thread_waits_before_it_calls_back(
        self, cuda: FakeCuda, threads: Threads, token: CancelToken
    ) -> None:
        streams = CudaStreams(CPU, token, threads.start)
        cuda.may_synchronize.clear()
        cuda.synchronized.clear()
        told: list[int] = []
        for i in range(3):
            streams.compute.then(lambda i=i: told.append(i))
        assert (told, len(threads.started)) == ([], 1)
        cuda.may_synchronize.set()
        token.cancel()
        threads.join()
        assert told == [0, 1, 2]
        assert cuda.synchronized == [threads.started[0].name] * 3

    def test_error_in_stream_thread_is_raised_by_it(self, cuda: FakeCuda, threads: Threads, token: CancelToken) -> None:
        streams = CudaStreams(CPU, token, threads.start)
        streams.h2d.then(lambda: 1 // 0)
        threads.join()
        assert [type(failure) for failure in threads.failures] == [ZeroDivisionError]

    def test_a_callback_is_held_no_longer_than_it_takes(
        self, cuda: FakeCuda, threads: Threads, token: CancelToken
    ) -> None:
        streams, tensor, done = CudaStreams(CPU, token, threads.start), torch.zeros(4), threading.Event()
        memory = weakref.ref(tensor)
        streams.d2h.then(tensor.zero_)
        streams.d2h.then(done.set)
        assert done.wait(DEADLINE_S)
        del tensor
        gc.collect()
        assert memory() is None
        token.cancel()


class TestCudaClock:
    """A device's clock that differs from the machine's, and events that are noticed late."""

    @pytest.fixture
    def now_s(self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
        self.cuda, self.clock = cuda, CudaClock()

        def set_time(now_s: float) -> None:
            monkeypatch.setattr(streams_cuda.time, "monotonic", lambda: now_s)

        return set_time

    def event(self, at_s: float, *, drift: float = 0.0) -> torch.cuda.Event:
        self.cuda.now_s = lambda: 77.0 + at_s * (1 + drift)
        event = CudaEvent(self.cuda.default, self.clock)  # type: ignore[arg-type]
        return event.event

    def test_events_are_told_on_the_machines_clock(self, now_s: Callable[[float], None]) -> None:
        first, second, third = (self.event(at_s) for at_s in (100.0, 101.0, 101.5))
        now_s(100.0)
        self.clock.see(first)
        now_s(101.5)
        self.clock.see(third)
        assert [self.clock.time_s(each) for each in (first, second, third)] == pytest.approx([100.0, 101.0, 101.5])

    def test_event_noticed_late_is_corrected_by_event_noticed_soon(self, now_s: Callable[[float], None]) -> None:
        first, second = self.event(100.0), self.event(101.0)
        now_s(100.3)  # the thread slept
        self.clock.see(first)
        assert self.clock.time_s(second) == pytest.approx(101.3)
        now_s(101.001)
        self.clock.see(second)
        assert self.clock.time_s(second) == pytest.approx(101.001)
        assert self.clock.time_s(first) == pytest.approx(100.001)

    def test_clocks_that_drift_apart_stay_together(self, now_s: Callable[[float], None]) -> None:
        for at_s in range(0, 3600, 2):
            event = self.event(at_s, drift=-5e-5)
            now_s(at_s + (0.2 if at_s % 6 == 0 else 0.0005))
            self.clock.see(event)
            if at_s > 60:
                assert abs(self.clock.time_s(event) - at_s) < 0.003
                before = self.event(at_s - 1.5, drift=-5e-5)
                assert abs(self.clock.time_s(before) - (at_s - 1.5)) < 0.003


@pytest.mark.gpu
def test_gpu_streams_wait_for_each_other_and_host_does_not(threads: Threads) -> None:
    """Long kernels precede each piece of work, so work that misses a wait finds no data yet."""
    device = Device(torch.device("cuda"), token=CancelToken(DEADLINE_S), start_threads=threads.start)
    sources = torch.arange(16.0).pin_memory()
    results = torch.zeros(16).pin_memory()
    entering, leaving = (torch.full((1,), torch.nan, device="cuda") for _ in range(2))
    read, taken, told = device.compute.record(), device.compute.record(), []

    def late(work: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            torch.cuda._sleep(10_000_000)  # cycles
            work()

        return run

    torch.cuda.set_sync_debug_mode("error")
    try:
        for i, (source, result) in enumerate(zip(sources.split(1), results.split(1), strict=True)):
            device.h2d.wait(read)
            device.h2d.run(late(partial(copy, entering, source)))
            device.compute.wait(device.h2d.record())
            device.compute.wait(taken)
            device.compute.run(late(partial(torch.mul, entering, 2, out=leaving)))
            read = device.compute.record()
            device.d2h.wait(read)
            device.d2h.run(late(partial(copy, result, leaving)))
            taken = device.d2h.record()
            device.d2h.then(partial(told.append, i))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not taken.is_over()  # it still has long to run
    taken.wait()
    assert torch.equal(results, torch.arange(16.0) * 2)
    assert read.time_s() <= taken.time_s() <= time.monotonic() + 0.01
    device.token.cancel()
    threads.join()
    assert told == list(range(16))
    assert threads.failures == []


# --- the double that other tests use ------------------------------------------------------------------------------


PAIRS = [("compute", "h2d"), ("h2d", "compute"), ("d2h", "compute"), ("compute", "d2h")]


def doubles_numbers(streams: LateStreams) -> bool:
    """Copies numbers to the device, doubles them and copies them back.

    They go one after the other through the same two buffers.
    """
    sources, results = torch.arange(16.0), torch.zeros(16)
    entering, leaving = torch.full((1,), torch.nan), torch.full((1,), torch.nan)
    read, taken = streams.compute.record(), streams.compute.record()
    for source, result in zip(sources.split(1), results.split(1), strict=True):
        streams.h2d.wait(read)
        streams.h2d.run(partial(entering.copy_, source))
        streams.compute.wait(streams.h2d.record())
        streams.compute.wait(taken)
        streams.compute.run(partial(torch.mul, entering, 2, out=leaving))
        read = streams.compute.record()
        streams.d2h.wait(read)
        streams.d2h.run(partial(result.copy_, leaving))
        taken = streams.d2h.record()
    for stream in (streams.h2d, streams.compute, streams.d2h):
        stream.record().wait()
    streams.close()
    return torch.equal(results, sources * 2)


def test_late_streams_show_a_wait_that_is_missing(threads: Threads) -> None:
    found = dict.fromkeys(PAIRS, False)
    for order in [*permutations(("compute", "h2d", "d2h")), 1, 2]:
        assert doubles_numbers(LateStreams(threads.start, order=order))
        for pair in PAIRS:
            streams = LateStreams(threads.start, order=order, forgets=lambda *each, pair=pair: each == pair)
            found[pair] |= not doubles_numbers(streams)
    assert all(found.values()), found


def test_late_streams_run_no_work_at_once(threads: Threads) -> None:
    streams = LateStreams(threads.start, order=0)
    done: list[str] = []

    def give(stream: Stream, name: str) -> None:
        stream.run(lambda: done.append(name))

    give(streams.compute, "first")
    assert done == []  # before the quiet time was over
    streams.compute.run(lambda: give(streams.compute, "inside"))
    streams.compute.record().wait()
    assert done == ["first", "inside"]
    assert sum(streams.host_waits.values()) == 1
    streams.close()


def test_late_streams_count_synchronizing_operators(threads: Threads) -> None:
    streams = LateStreams(threads.start, order=0)
    tensor = torch.ones(3)
    streams.compute.run(lambda: tensor.add_(1).sum())
    streams.compute.record().wait()
    assert not streams.syncs
    streams.compute.run(lambda: float(tensor.sum()) and tensor.nonzero())
    streams.compute.record().wait()
    assert streams.syncs == {"aten._local_scalar_dense": 1, "aten.nonzero": 1}
    streams.close()


class TestTurns:
    """A CPU's compute stream: what several threads submit."""

    @staticmethod
    def _submit(threads: Threads, stream: DirectStream, work: Callable[[], object]) -> Callable[[], None]:
        """Submits work in a thread of its own, and returns once it waits there. What it returns waits for its end."""
        over, before = threading.Event(), len(stream._awaited)

        def target() -> None:
            try:
                stream.run(work)
            finally:
                over.set()

        threads.start([target])
        until_s = time.monotonic() + DEADLINE_S
        while len(stream._awaited) == before:
            assert time.monotonic() < until_s
            time.sleep(0.001)

        def wait() -> None:
            assert over.wait(DEADLINE_S)

        return wait

    def test_work_of_others_is_done_at_the_end_of_a_turn_by_its_thread(self, threads: Threads) -> None:
        stream, done = DirectStream(), list[tuple[str, int]]()

        def note(name: str) -> None:
            done.append((name, threading.get_ident()))

        with stream.turn():
            others = [self._submit(threads, stream, partial(note, f"other {i}")) for i in range(2)]
            stream.run(lambda: stream.run(partial(note, "own")))
            note("last")
        me = threading.get_ident()
        assert done == [("own", me), ("last", me), ("other 0", me), ("other 1", me)]
        for wait in others:
            wait()
        assert stream._owner is None

    def test_an_error_is_that_of_the_thread_that_submitted_the_work(self, threads: Threads) -> None:
        stream = DirectStream()

        def fail() -> None:
            raise ValueError("broken")

        def turn() -> None:
            with stream.turn():
                waits.append(self._submit(threads, stream, fail))
                raise KeyError("mine")

        waits: list[Callable[[], None]] = []
        with pytest.raises(KeyError, match="mine"):
            turn()
        (wait,) = waits
        wait()
        threads.join()
        assert [str(failure) for failure in threads.failures] == ["broken"]
        stream.run(lambda: None)

    def test_without_a_turn_each_thread_does_its_own_work_in_order(self, threads: Threads) -> None:
        stream, done, gate = DirectStream(), list[int](), threading.Event()
        waits = []

        def first() -> None:
            for _ in range(3):
                waits.append(self._submit(threads, stream, lambda: done.append(threading.get_ident())))
            assert gate.wait(DEADLINE_S)
            done.append(threading.get_ident())

        gate.set()
        stream.run(first)
        for wait in waits:
            wait()
        assert done == [threading.get_ident(), *(thread.ident for thread in threads.started)]

    def test_a_turn_waits_for_the_work_before_it(self, threads: Threads) -> None:
        stream, done, gate = DirectStream(), list[str](), threading.Event()
        begun = threading.Event()

        def long() -> None:
            begun.set()
            assert gate.wait(DEADLINE_S)
            done.append("work")

        threads.start([lambda: stream.run(long)])
        assert begun.wait(DEADLINE_S)
        threading.Timer(0.05, gate.set).start()
        with stream.turn(), stream.turn():
            done.append("turn")
        assert done == ["work", "turn"]
        threads.join()
        assert threads.failures == []

    def test_a_turn_keeps_no_memory_of_the_work_of_others(self, threads: Threads) -> None:
        stream, memory = DirectStream(), torch.ones(3)
        found = weakref.ref(memory)
        with stream.turn():
            wait = self._submit(threads, stream, partial(memory.add_, 1))
        wait()
        threads.join()
        threads.started.clear()
        del memory
        gc.collect()
        assert found() is None
