"""A cancelled token ends every kind of wait, and a wait that takes too long names what it is for."""

import re
import threading
from collections.abc import Callable

import pytest

from windlass.storage.cancellation import CancelToken, Permits, Signal, TaskQueue

WAIT_S = 30.0


class Waiting:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.result: object = None
        self.error: Exception | None = None
        self._call = call
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except Exception as error:  # noqa: BLE001 - kept
            self.error = error

    def is_waiting(self) -> bool:
        self.thread.join(0.05)
        return self.thread.is_alive()

    def end(self) -> None:
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()


def wait_for(token: CancelToken, is_done: Callable[[], bool]) -> None:
    condition = threading.Condition()
    with condition:
        token.wait_for(condition, is_done, "a sign")


def no_permit(token: CancelToken) -> Permits:
    permits = Permits(token, 1)
    permits.acquire("a permit")
    return permits


def wait_for_permit(token: CancelToken) -> Callable[[], None]:
    permits = no_permit(token)
    return lambda: permits.acquire("a sign")


# Each makes a call that waits, and raises InterruptedError after a cancel.
WAITS: dict[str, Callable[[CancelToken], Callable[[], object]]] = {
    "condition": lambda token: lambda: wait_for(token, lambda: False),
    "permit": wait_for_permit,
    "signal": lambda token: lambda: Signal(token).wait("a sign"),
}


@pytest.mark.parametrize("kind", WAITS)
def test_cancel_ends_waits_that_have_begun_and_later_ones(kind: str) -> None:
    token = CancelToken()
    wait = WAITS[kind](token)
    waiting = [Waiting(wait) for _ in range(2)]
    assert all(each.is_waiting() for each in waiting)
    token.cancel()
    token.cancel()
    assert token.is_cancelled
    waiting.append(Waiting(wait))
    for each in waiting:
        each.end()
        assert isinstance(each.error, InterruptedError)
        assert str(each.error) == "the job was stopped"


@pytest.mark.parametrize("kind", WAITS)
def test_wait_that_takes_too_long_names_what_it_is_for(kind: str) -> None:
    with pytest.raises(TimeoutError, match=r"^waited 0\.01 s for a sign$"):
        WAITS[kind](CancelToken(0.01))()


def test_text_of_a_wait_is_made_only_when_it_is_needed() -> None:
    token, condition = CancelToken(0.01), threading.Condition()
    with condition:
        token.wait_for(condition, lambda: True, lambda: pytest.fail("nothing is late"))
        with pytest.raises(TimeoutError, match="2 of 3"):
            token.wait_for(condition, lambda: False, lambda: "2 of 3")


def test_wait_ends_when_the_condition_is_true() -> None:
    token, condition, found = CancelToken(), threading.Condition(), list[int]()

    def wait() -> None:
        with condition:
            token.wait_for(condition, lambda: bool(found), "a number")

    waiting = Waiting(wait)
    assert waiting.is_waiting()
    with condition:
        found.append(1)
        condition.notify_all()
    waiting.end()
    assert waiting.error is None


def test_cancelled_token_raises_although_the_condition_is_true() -> None:
    token = CancelToken()
    token.check()
    token.cancel()
    with pytest.raises(InterruptedError):
        token.check()
    with pytest.raises(InterruptedError):
        wait_for(token, lambda: True)


def test_queue_gives_its_tasks_in_order_and_after_a_cancel_those_that_are_left() -> None:
    token = CancelToken(0.01)  # a wait for work has no timeout
    tasks: TaskQueue[int] = TaskQueue(token)
    waiting = Waiting(tasks.take)
    assert waiting.is_waiting()
    for task in range(3):
        tasks.put(task)
    waiting.end()
    assert waiting.result == 0
    token.cancel()
    assert [tasks.take(), tasks.take(), tasks.take()] == [1, 2, None]


def test_queue_gives_several_tasks_at_once_as_counted_and_none_after_a_cancel() -> None:
    token = CancelToken(0.01)
    tasks: TaskQueue[int] = TaskQueue(token)
    waiting = Waiting(lambda: tasks.take_some(lambda ready: sum(1 for task in ready if task < 3)))
    assert waiting.is_waiting()
    tasks.put(1, 2, 3)
    waiting.end()
    assert waiting.result == [1, 2]
    token.cancel()
    assert tasks.take_some(lambda ready: len(list(ready))) == [3]
    assert tasks.take_some(lambda ready: len(list(ready))) == []


def test_cancel_ends_the_wait_for_a_task() -> None:
    token = CancelToken()
    waiting = Waiting(TaskQueue[int](token).take)
    assert waiting.is_waiting()
    token.cancel()
    waiting.end()
    assert (waiting.result, waiting.error) == (None, None)


def test_dropped_tasks_are_not_given() -> None:
    tasks: TaskQueue[int] = TaskQueue(CancelToken())
    tasks.put(1)
    tasks.put(2)
    assert tasks.drop_all() == [1, 2]
    tasks.put(3)
    assert tasks.take() == 3


def test_pause_ends_after_its_time_or_at_a_cancel() -> None:
    token = CancelToken()
    assert not token.pause(0.01)
    waiting = Waiting(lambda: token.pause(WAIT_S))
    assert waiting.is_waiting()
    token.cancel()
    waiting.end()
    assert waiting.result is True


def test_released_permit_can_be_acquired() -> None:
    permits = no_permit(CancelToken())
    waiting = Waiting(lambda: permits.acquire("a permit"))
    assert waiting.is_waiting()
    permits.release()
    waiting.end()
    assert waiting.error is None


def test_signal_lets_present_and_later_waits_continue() -> None:
    signal = Signal(CancelToken())
    waiting = Waiting(lambda: signal.wait("a sign"))
    assert waiting.is_waiting()
    assert not signal.is_set
    signal.set()
    waiting.end()
    assert waiting.error is None
    signal.wait("a sign")
    assert signal.is_set


def test_waits_are_described_by_thread() -> None:
    token = CancelToken()
    waiting, idle = Waiting(lambda: Signal(token).wait(lambda: "a sign")), Waiting(TaskQueue[int](token).take)
    assert waiting.is_waiting()
    assert idle.is_waiting()
    waits = token.describe_waits()
    assert re.fullmatch(r"has waited \d\.\d s for a sign", waits.pop(waiting.thread))
    assert waits == {idle.thread: ""}
    token.cancel()
    waiting.end()
    idle.end()
    assert token.describe_waits() == {}
