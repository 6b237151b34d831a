"""The threads of an actor: the report when one of them fails or hangs."""

import queue
import re
import threading
import time
from collections.abc import Callable

import pytest

from windlass.actors.job.context import GPU_WORKER, SCHEDULER
from windlass.actors.lifecycle.threads import ActorThreads, working_at, works_at
from windlass.actors.messages import ActorFailed, ComputeBlock, FailureKind, LoadModel, Message, Phase, StatusDescribed
from windlass.storage.cancellation import CancelToken, Signal, TaskQueue
from windlass.storage.ids import ActorName, BlockIndex, JobId, Step
from windlass.storage.integrity.errors import StoreCorrupt
from windlass.storage.memory.capacity import InsufficientSpaceError

JOB = JobId("ftjob-1")
COMPUTE = ComputeBlock(
    job=JOB, step=Step(3), op=7, phase=Phase.BACKWARD, block=BlockIndex(2), params=(), group=0, loss_scale=1.0
)
LOAD = LoadModel(job=JOB, step=Step(0))


class Bench:
    def __init__(self, under_way: Message | None = None) -> None:
        self.told: queue.SimpleQueue[tuple[ActorName, Message]] = queue.SimpleQueue()
        self.token = CancelToken()
        self.threads = ActorThreads(
            GPU_WORKER,
            JOB,
            self.token,
            lambda to, message: self.told.put((to, message)),
            deadline_s=30.0,
            under_way=lambda: under_way,
        )

    def failure_of(self, target: Callable[[], None]) -> ActorFailed:
        self.threads.start([target])
        self.threads.join(30.0)
        to, failed = self.told.get(timeout=30.0)
        assert to == SCHEDULER
        assert isinstance(failed, ActorFailed)
        return failed


def raising(error: Exception, at: Message | None = None) -> Callable[[], None]:
    def run() -> None:
        if at is not None:
            works_at(at)
        raise error

    return run


def test_error_report_names_actor_and_its_task() -> None:
    failed = Bench().failure_of(raising(RuntimeError("no more memory"), COMPUTE))
    assert (failed.job, failed.step, failed.actor) == (JOB, 3, GPU_WORKER)
    assert failed.error == "RuntimeError: no more memory (at compute block, backward, of step 3, block 2)"
    assert failed.detail.startswith("Traceback")
    assert "raise error" in failed.detail


def test_thread_before_first_task_has_no_task() -> None:
    assert Bench().failure_of(raising(RuntimeError("no device"))).error == "RuntimeError: no device"


def test_thread_without_task_reports_task_of_its_actor() -> None:
    failed = Bench(under_way=COMPUTE).failure_of(raising(RuntimeError("CUDA error")))
    assert (failed.error, failed.step) == (
        "RuntimeError: CUDA error (at compute block, backward, of step 3, block 2)",
        3,
    )
    assert "(at load model of step 0)" in Bench(under_way=COMPUTE).failure_of(raising(RuntimeError(), LOAD)).error


@pytest.mark.parametrize("before", [None, LOAD])
def test_callback_has_its_message_as_task_only_while_it_runs(before: Message | None) -> None:
    def calls(*errors: Exception) -> Callable[[], None]:
        def run() -> None:
            if before is not None:
                works_at(before)
            working_at(COMPUTE, raising(errors[0]) if errors else lambda: None)()
            raise RuntimeError("later")

        return run

    assert (
        "broken (at compute block, backward, of step 3, block 2)"
        in Bench().failure_of(calls(RuntimeError("broken"))).error
    )
    later = Bench().failure_of(calls()).error
    assert later == "RuntimeError: later" + ("" if before is None else " (at load model of step 0)")


def test_status_tells_what_threads_wait_for_and_work_at() -> None:
    bench, begun, released = Bench(), threading.Barrier(4), threading.Event()
    signal, tasks = Signal(bench.token), TaskQueue[int](bench.token)

    def waits() -> None:
        works_at(COMPUTE)
        begun.wait(30.0)
        signal.wait("the params of block 2")

    def works() -> None:
        works_at(LOAD)
        begun.wait(30.0)
        released.wait(30.0)

    def idles() -> None:
        works_at(LOAD)  # is over
        begun.wait(30.0)
        tasks.take()

    bench.threads.start([waits, works, idles])
    begun.wait(30.0)
    while len(bench.token.describe_waits()) < 2:
        time.sleep(0.001)
    bench.threads.report_status("ssd-1 owes a read")
    to, status = bench.told.get(timeout=30.0)
    assert to == SCHEDULER
    assert isinstance(status, StatusDescribed)
    name = "test_status_tells_what_threads_wait_for_and_work_at.<locals>"
    waited = r"has waited 0\.\d s for the params of block 2 \(at compute block, backward, of step 3, block 2\)"
    expected = rf"{name}\.waits {waited}; {name}\.works is busy \(at load model of step 0\); ssd-1 owes a read"
    assert re.fullmatch(expected, status.text)
    released.set()
    bench.threads.stop()
    bench.threads.report_status("")
    assert bench.told.get(timeout=30.0)[1].text == ""  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TimeoutError("late"), FailureKind.STALLED),
        (StoreCorrupt("other bytes"), FailureKind.LASTING),
        (OSError(5, "Input/output error"), FailureKind.LASTING),
        (OSError(28, "No space left on device"), FailureKind.NO_ROOM),
        (InsufficientSpaceError("the exported model", "/models", 2, 1, "delete files there"), FailureKind.NO_ROOM),
        (ValueError("no such file format"), FailureKind.LASTING),
        (RuntimeError("CUDA error"), FailureKind.UNFORESEEN),
        (AssertionError("a defect"), FailureKind.UNFORESEEN),
    ],
    ids=lambda each: type(each).__name__,
)
def test_permanent_errors_are_reported_as_permanent(error: Exception, kind: FailureKind) -> None:
    assert Bench().failure_of(raising(error, COMPUTE)).kind is kind


def test_error_during_stop_is_not_reported() -> None:
    bench = Bench()
    bench.token.cancel()
    bench.threads.start([raising(RuntimeError("closed"))])
    bench.threads.join(30.0)
    assert bench.told.empty()


def test_threads_that_hang_are_named_within_one_deadline() -> None:
    bench, released, hang = Bench(), threading.Event(), threading.Barrier(3)

    def hangs() -> None:
        works_at(COMPUTE)
        hang.wait(30.0)
        released.wait(30.0)

    bench.threads.start([hangs, hangs, lambda: None])
    hang.wait(30.0)
    with pytest.raises(TimeoutError, match=r"did not end within 0\.1 s: ") as late:
        bench.threads.join(0.1)
    assert str(late.value).count("hangs (at compute block, backward, of step 3, block 2)") == 2
    assert "lambda" not in str(late.value)
    released.set()
    bench.threads.join(30.0)
