import threading
from collections.abc import Sequence

import pytest

from windlass.actors.messages import LoadModel, Message
from windlass.actors.outbox import Outbox
from windlass.storage.ids import ActorName, JobId, Step

A, B = ActorName("ssd-0"), ActorName("scheduler")
WAIT_S = 30.0


def message(number: int) -> LoadModel:
    return LoadModel(job=JobId("ftjob-1"), step=Step(number))


def test_alone_each_message_is_delivered_at_once() -> None:
    calls: list[tuple[ActorName, list[Message]]] = []
    outbox = Outbox(lambda to, messages: calls.append((to, list(messages))))
    outbox.send(A, message(1))
    assert calls == [(A, [message(1)])]
    outbox.send(B, message(2))
    assert calls[1:] == [(B, [message(2)])]


def test_what_comes_during_a_call_goes_out_together_with_the_next() -> None:
    entered, released = threading.Event(), threading.Event()
    calls: list[tuple[ActorName, list[int]]] = []

    def deliver(to: ActorName, messages: Sequence[Message]) -> None:
        calls.append((to, [each.step for each in messages]))
        entered.set()
        assert released.wait(WAIT_S)

    outbox = Outbox(deliver)
    first = threading.Thread(target=outbox.send, args=(A, message(1)))
    first.start()
    assert entered.wait(WAIT_S)
    for number, to in ((2, A), (3, B), (4, A)):
        outbox.send(to, message(number))  # returns, though the first call still runs
    released.set()
    first.join(WAIT_S)
    assert calls == [(A, [1]), (A, [2, 4]), (B, [3])]


def test_many_threads_lose_nothing_and_keep_each_ones_order() -> None:
    arrived: dict[ActorName, list[int]] = {A: [], B: []}
    outbox = Outbox(lambda to, messages: arrived[to].extend(each.step for each in messages))

    def work(thread: int) -> None:
        for number in range(500):
            outbox.send(A if number % 3 else B, message(thread * 1000 + number))

    threads = [threading.Thread(target=work, args=(each,)) for each in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert sum(map(len, arrived.values())) == 2000
    for steps in arrived.values():
        for thread_number in range(4):
            mine = [step for step in steps if step // 1000 == thread_number]
            assert mine == sorted(mine)


def test_a_failed_call_does_not_stop_the_next() -> None:
    calls: list[int] = []

    def deliver(to: ActorName, messages: Sequence[Message]) -> None:
        calls.append(len(messages))
        if len(calls) == 1:
            raise ConnectionError("the actor is gone")

    outbox = Outbox(deliver)
    with pytest.raises(ConnectionError):
        outbox.send(A, message(1))
    outbox.send(A, message(2))
    assert calls == [1, 1]
