"""The threads of an actor: the report when one of them fails or hangs."""

import queue
import threading
from collections.abc import Callable

import pytest

from windlass.actors.job.context import GPU_WORKER, SCHEDULER
from windlass.actors.lifecycle.threads import ActorThreads, working_at, works_at
from windlass.actors.messages import ActorFailed, ComputeBlock, FailureKind, LoadModel, Message, Phase
from windlass.storage.cancellation import CancelToken
from windlass.storage.ids import ActorName, BlockIndex, JobId, Step
from windlass.storage.integrity.errors import StoreCorrupt
from windlass.storage.io_scheduler.errors import IoOverdueError
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
            describe_pending=lambda: "ssd-1 owes a read",
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


def test_timeout_report_names_the_overdue_actor() -> None:
    failed = Bench().failure_of(raising(TimeoutError("no slots"), LoadModel(job=JOB, step=Step(0))))
    assert failed.error == "TimeoutError: no slots; ssd-1 owes a read (at load model of step 0)"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TimeoutError("late"), FailureKind.STALLED),
        (IoOverdueError("late"), FailureKind.STALLED),
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
