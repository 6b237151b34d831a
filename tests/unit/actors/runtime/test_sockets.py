import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

import pytest

from windlass.actors.messages import LoadModel, Message
from windlass.actors.messages.codec import encode
from windlass.actors.runtime import sockets as mail
from windlass.actors.runtime.sockets import MessageClient, MessageServer
from windlass.storage.ids import ActorName, JobId, Step

TO = ActorName("optimizer-0")
WAIT_S = 30.0


def message(number: int) -> LoadModel:
    return LoadModel(job=JobId("ftjob-1"), step=Step(number))


class Receiver:
    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.num_inside = 0
        self._changed = threading.Condition()

    def post(self, messages: Sequence[Message]) -> None:
        self.num_inside += 1
        assert self.num_inside == 1
        with self._changed:
            self.batches.append([each.step for each in messages])
            self._changed.notify()
        self.num_inside -= 1

    def wait_for(self, num_messages: int) -> list[int]:
        with self._changed:
            assert self._changed.wait_for(lambda: sum(map(len, self.batches)) >= num_messages, WAIT_S)
        return [step for batch in self.batches for step in batch]


@pytest.fixture
def receiver() -> Receiver:
    return Receiver()


@pytest.fixture
def mailbox(receiver: Receiver) -> Iterator[MessageServer]:
    mailbox = MessageServer(receiver.post)
    yield mailbox
    mailbox.close()


def test_batches_arrive_whole_and_in_order(receiver: Receiver, mailbox: MessageServer) -> None:
    courier = MessageClient({TO: mailbox.address})
    courier.deliver(TO, [message(1), message(2)])
    courier.deliver(TO, [message(3)])
    receiver.wait_for(3)
    assert receiver.batches == [[1, 2], [3]]


def test_more_than_a_socket_holds_arrives(receiver: Receiver, mailbox: MessageServer) -> None:
    numbers = list(range(50_000))
    MessageClient({TO: mailbox.address}).deliver(TO, [message(number) for number in numbers])
    assert receiver.wait_for(len(numbers)) == numbers


def test_several_senders_are_received_one_batch_at_a_time(receiver: Receiver, mailbox: MessageServer) -> None:
    def send(first: int) -> None:
        courier = MessageClient({TO: mailbox.address})
        for number in range(first, first + 200):
            courier.deliver(TO, [message(number)])

    threads = [threading.Thread(target=send, args=(1000 * i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    got = receiver.wait_for(600)  # `post` asserts that it runs in one thread at a time
    for thread in threads:
        thread.join(WAIT_S)
    for i in range(3):
        mine = [number for number in got if number // 1000 == i]
        assert mine == list(range(1000 * i, 1000 * i + 200))


def test_a_sender_learns_that_the_mailbox_is_gone(receiver: Receiver) -> None:
    mailbox = MessageServer(receiver.post)
    mailbox.close()
    with pytest.raises(ConnectionRefusedError):
        MessageClient({TO: mailbox.address}).deliver(TO, [message(1)])


def test_the_address_is_free_once_its_process_was_killed() -> None:
    code = (
        "import sys, time; from windlass.actors.runtime.sockets import MessageServer; "
        "print(MessageServer(print).address[1:], flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = "\0" + process.stdout.readline().strip()
    courier = MessageClient({TO: address})
    courier.deliver(TO, [message(1)])
    process.kill()
    process.wait(WAIT_S)
    process.stdout.close()
    with pytest.raises(ConnectionRefusedError):
        MessageClient({TO: address}).deliver(TO, [message(1)])


def test_another_users_messages_are_not_read(
    receiver: Receiver, mailbox: MessageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = os.getuid()
    monkeypatch.setattr(mail.os, "getuid", lambda: me + 1)  # the connecting process then belongs to another user
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as intruder:
        intruder.settimeout(WAIT_S)
        intruder.connect(mailbox.address)
        assert intruder.recv(1) == b""  # the server has closed the connection
    monkeypatch.undo()
    MessageClient({TO: mailbox.address}).deliver(TO, [message(2)])
    assert receiver.wait_for(1) == [2]


def test_sender_that_dies_within_a_message_affects_no_other(receiver: Receiver, mailbox: MessageServer) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dying:
        dying.connect(mailbox.address)
        raw = encode([message(1)])
        dying.sendall(len(raw).to_bytes(4, "big") + raw[: len(raw) // 2])  # with the framing of Connection
    MessageClient({TO: mailbox.address}).deliver(TO, [message(2)])
    assert receiver.wait_for(1) == [2]


def test_bytes_that_are_no_messages_close_their_connection_only(
    receiver: Receiver, mailbox: MessageServer, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as confused:
        confused.settimeout(WAIT_S)
        confused.connect(mailbox.address)
        raw = b"no messages"
        confused.sendall(len(raw).to_bytes(4, "big") + raw)
        assert confused.recv(1) == b""
    assert "could not be decoded" in caplog.text
    MessageClient({TO: mailbox.address}).deliver(TO, [message(2)])
    assert receiver.wait_for(1) == [2]
