"""Threads with an owner: their names, their errors, and their end."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from windlass.storage.cancellation import CancelToken, Signal
from windlass.storage.threads import CancellableThreads, GuardedThreads, works_at


class Bench:
    def __init__(self) -> None:
        self.errors: list[tuple[Exception, object]] = []
        self.threads = GuardedThreads("ssd-0", "ftjob-1", lambda error, at: self.errors.append((error, at)))

    def run(self, target: Callable[[], None], niceness: int = 0) -> None:
        self.threads.start([target], niceness=niceness)
        self.threads.join(30.0)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_error_is_passed_on_with_the_work_of_its_thread(bench: Bench) -> None:
    def run() -> None:
        works_at("the write")
        raise RuntimeError("no more memory")

    bench.run(run)
    ((error, at),) = bench.errors
    assert (str(error), at) == ("no more memory", "the write")


def test_work_of_a_foreign_thread_is_not_recorded() -> None:
    works_at("the write")
    assert not hasattr(threading.current_thread(), "at")


def test_the_kernel_knows_a_threads_name(bench: Bench) -> None:
    found: list[str] = []

    class Feed:
        def _run_requests(self) -> None:
            found.append(Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text().strip())

    Feed._run_requests.__qualname__ = "Feed._run_requests"
    bench.run(Feed()._run_requests)
    assert found == ["Feed_requests"]


def test_threads_may_yield_to_others_of_their_process(bench: Bench) -> None:
    found: list[int] = []

    def look() -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    bench.run(look, niceness=3)
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert found == [min(own + 3, 19)]


def test_threads_that_hang_are_named_within_one_deadline(bench: Bench) -> None:
    released, hang = threading.Event(), threading.Barrier(3)

    def hangs() -> None:
        works_at("the write")
        hang.wait(30.0)
        released.wait(30.0)

    bench.threads.start([hangs, hangs, lambda: None])
    hang.wait(30.0)
    with pytest.raises(TimeoutError, match=r"threads of job ftjob-1 did not end within 0\.1 s: ssd-0 ") as late:
        bench.threads.join(0.1)
    assert str(late.value).count("hangs (at the write)") == 2
    assert "lambda" not in str(late.value)
    released.set()
    bench.threads.join(30.0)


def test_own_threads_are_known(bench: Bench) -> None:
    started, found = threading.Event(), list[bool]()

    def look() -> None:
        assert started.wait(30.0)
        found.append(bench.threads.include_caller)

    bench.threads.start([look])
    started.set()
    bench.threads.join(30.0)
    assert found == [True]
    assert not bench.threads.include_caller


class Owner:
    """Threads that can be cancelled, with two resources."""

    def __init__(self, deadline_s: float = 30.0) -> None:
        self.token = CancelToken()
        self.errors: list[Exception] = []
        self.closed: list[str] = []
        self.threads = CancellableThreads(
            "gpu-0", "ftjob-1", self.token, lambda error, _: self.errors.append(error), deadline_s=deadline_s
        )
        for name in ("first", "second"):
            self.threads.resources.callback(self.closed.append, name)


def test_stop_ends_waiting_threads_and_closes_resources_the_last_one_first() -> None:
    owner = Owner()
    owner.threads.start([lambda: Signal(owner.token).wait("a sign")])
    owner.threads.stop()
    assert owner.closed == ["second", "first"]
    assert owner.errors == []  # an error after a cancel is no failure
    owner.threads.stop()
    assert owner.closed == ["second", "first"]


def test_error_before_a_cancel_is_reported() -> None:
    owner = Owner()
    owner.threads.start([lambda: 1 // 0])
    owner.threads.join(30.0)
    assert [type(error) for error in owner.errors] == [ZeroDivisionError]
    owner.threads.stop()


def test_resources_stay_open_while_a_thread_hangs() -> None:
    owner, released = Owner(deadline_s=0.05), threading.Event()
    owner.threads.start([lambda: released.wait(30.0)])
    with pytest.raises(TimeoutError, match="did not end within"):
        owner.threads.stop()
    assert owner.closed == []
    released.set()
    owner.threads.join(30.0)
    owner.threads.stop()
    assert owner.closed == ["second", "first"]


def test_start_that_fails_stops_threads_and_closes_resources() -> None:
    owner = Owner()

    def start() -> None:
        with owner.threads.stopped_on_error():
            owner.threads.start([lambda: Signal(owner.token).wait("a sign")])
            raise ValueError("no such file")

    with pytest.raises(ValueError, match="no such file"):
        start()
    assert owner.closed == ["second", "first"]
    with Owner().threads.stopped_on_error():
        pass
