import logging
import threading
from collections.abc import Sequence

import pytest

from windlass.actors.messages import LoadModel, Message
from windlass.actors.runtime.outbox import Outbox
from windlass.storage.ids import ActorName, JobId, Step

A, B = ActorName("ssd-0"), ActorName("scheduler")
WAIT_S = 30.0


def message(number: int) -> LoadModel:
    return LoadModel(job=JobId("ftjob-1"), step=Step(number))


class Gate:
    """A receiver that blocks until it is opened, and keeps all messages."""

    def __init__(self) -> None:
        self.calls: list[tuple[ActorName, list[int]]] = []
        self.entered, self.opened = threading.Event(), threading.Event()

    def deliver(self, to: ActorName, messages: Sequence[Message]) -> None:
        self.calls.append((to, [each.step for each in messages]))
        self.entered.set()
        assert self.opened.wait(WAIT_S)


def test_messages_sent_during_a_delivery_go_out_in_one_batch() -> None:
    gate = Gate()
    outbox = Outbox(gate.deliver)
    outbox.send(A, message(1))
    assert gate.entered.wait(WAIT_S)
    for number, to in ((2, A), (3, B), (4, A)):
        outbox.send(to, message(number))  # returns although the receiver blocks
    gate.opened.set()
    outbox.close()
    assert gate.calls == [(A, [1]), (A, [2, 4]), (B, [3])]


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
    outbox.close()
    assert sum(map(len, arrived.values())) == 2000
    for steps in arrived.values():
        for thread_number in range(4):
            mine = [step for step in steps if step // 1000 == thread_number]
            assert mine == sorted(mine)


def test_lost_receiver_does_not_delay_messages_to_others(caplog: pytest.LogCaptureFixture) -> None:
    arrived: list[ActorName] = []

    def deliver(to: ActorName, messages: Sequence[Message]) -> None:
        if to == A:
            raise BrokenPipeError("the process is gone")
        arrived.append(to)

    outbox = Outbox(deliver)
    with caplog.at_level(logging.ERROR):
        outbox.send(A, message(1))
        outbox.send(B, message(2))
        outbox.close()
    assert arrived == [B]
    assert "could not deliver 1 messages to ssd-0" in caplog.text
