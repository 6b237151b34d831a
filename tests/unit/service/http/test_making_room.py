"""Connections that keep the service waiting make room for other clients when all places are taken."""

import contextlib
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import trustme

from tests.unit.service.http.bounded_server import (
    GET,
    HEAD,
    LIMIT_S,
    BoundedServer,
    ask,
    connected,
    connected_by_tls,
    connected_with_small_buffer,
    error_of,
    is_answered,
    read_all,
    read_answer,
    read_num,
    read_until,
    serving,
)

_OTHERS = [f"127.0.0.{number}" for number in range(2, 7)]
_EACH = 8  # connections
_NUM = _EACH * len(_OTHERS)
_FULL = {"most": _NUM, "most_per_address": _EACH}
_BODY_HEAD = b"POST /upload HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n"


@contextmanager
def _full(server: BoundedServer, sent: bytes = b"", answer: bytes = b"") -> Iterator[list[socket.socket]]:
    """Fills all places from five addresses, which have sent `sent` and read an answer that ends with `answer`."""
    with contextlib.ExitStack() as opened:
        held = []
        for source in _OTHERS * _EACH:
            held.append(opened.enter_context(connected(server, source=source)))
            held[-1].sendall(sent)
            if answer:
                read_until(held[-1], answer)
        server.await_connections(_NUM)
        server.await_received(_NUM * len(sent))
        yield held


def _closed(connections: list[socket.socket]) -> list[int]:
    """The indexes of the connections that the service has closed. They have nothing left to read."""
    found = []
    for number, each in enumerate(connections):
        each.setblocking(False)
        with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError):
            assert not read_all(each)
            found.append(number)
    return found


@pytest.mark.parametrize("loop", [pytest.param("asyncio", marks=pytest.mark.long), "uvloop"])
@pytest.mark.parametrize(
    ("sent", "answer"),
    [(b"", b""), (HEAD, b""), (GET, b'"done"'), (GET + HEAD, b'"done"'), (_BODY_HEAD + b"x" * 50, b"")],
    ids=["silent", "in the head", "idle", "in the next head", "in the body"],
)
def test_new_client_gets_a_place_when_five_addresses_fill_all(loop: str, sent: bytes, answer: bytes) -> None:
    with (
        serving(loop=loop, stall_s=0, **_FULL) as server,
        _full(server, sent, answer) as held,
        connected(server) as first,
        connected(server) as second,
    ):
        for each in (first, second):
            assert ask(each).startswith(b"HTTP/1.1 200 OK")
        assert _closed(held) == [0, 1], "the oldest of one address, then of another, which has more by then"


def test_oldest_of_the_address_that_has_most_makes_room() -> None:
    with serving(most=6) as server, contextlib.ExitStack() as opened:
        sources = ("127.0.0.3", "127.0.0.2", "127.0.0.2", "127.0.0.3", "127.0.0.2", "127.0.0.2")
        held = [opened.enter_context(connected(server, source=source)) for source in sources]
        for each in (*held, held[1]):  # so that the second has been idle for less time than all others
            assert ask(each).startswith(b"HTTP/1.1 200 OK")
        for _ in range(2):
            assert ask(opened.enter_context(connected(server))).startswith(b"HTTP/1.1 200 OK")
        assert _closed(held) == [2, 4]


def test_address_at_its_limit_evicts_no_connection() -> None:
    with (
        serving(most=2, most_per_address=1) as server,
        connected(server, source="127.0.0.2") as other,
        connected(server) as held,
        connected(server) as one_more,
    ):
        assert error_of(read_all(one_more)) == (503, "too_many_connections")
        assert _closed([other, held]) == []


@pytest.mark.parametrize(
    "sent",
    [b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n", b"POST /late HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbody"],
)
def test_connection_whose_request_is_being_answered_is_never_cut(sent: bytes) -> None:
    with serving(most=1, stall_s=0) as server, connected(server) as held:
        held.sendall(sent)
        server.await_received(len(sent))
        with connected(server, source="127.0.0.2") as other:
            assert error_of(read_all(other)) == (503, "too_many_connections")
        server.open_gate()
        answer = read_until(held, b"0\r\n\r\n" if b"stream" in sent else b"4")
        assert answer.startswith(b"HTTP/1.1 200 OK")


def test_body_that_moves_or_is_held_up_by_the_service_makes_no_room() -> None:
    with serving(most=1, min_body_nbytes=100, body_s=1e6) as server:
        with connected(server) as held:
            held.sendall(_BODY_HEAD)
            for number in range(10):
                server.await_received(len(_BODY_HEAD) + 500 * number)
                server.skip(0.5 * LIMIT_S)
                assert not is_answered(server)
                held.sendall(b"x" * 500)
            assert read_answer(held).endswith(b"5000")
        server.await_room()
        head = b"POST /late HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n"
        num_received = server.num_received
        with connected(server) as held:
            held.sendall(head)
            server.await_received(num_received + len(head))
            server.skip(2 * LIMIT_S)
            assert not is_answered(server)
            server.open_gate()
            assert held.recv(65536).startswith(b"HTTP/1.1 100 Continue")
            held.sendall(b"body")
            assert read_answer(held).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("path", [b"/large", b"/endless"])
def test_client_that_reads_nothing_of_its_answer_makes_room_and_one_that_reads_does_not(path: bytes) -> None:
    with serving(most=1, write_s=1e6) as server, connected_with_small_buffer(server) as held:
        held.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        assert held.recv(1)
        assert not is_answered(server)
        for _ in range(3):
            read_num(held, 10_000)  # twice so much is more than the kernel holds, so that the server has sent some
            server.skip(0.8 * LIMIT_S)
            assert not is_answered(server)
        server.await_room(skip_s=LIMIT_S)


@pytest.mark.parametrize(
    ("loop", "has_shaken_hands"),
    [
        pytest.param("asyncio", False, marks=pytest.mark.long),
        ("asyncio", True),
        ("uvloop", False),
        pytest.param("uvloop", True, marks=pytest.mark.long),
    ],
)
def test_new_tls_client_gets_a_place_when_five_addresses_fill_all(
    authority: trustme.CA, tls: ssl.SSLContext, loop: str, has_shaken_hands: bool
) -> None:
    with serving(tls=tls, loop=loop, **_FULL) as server, contextlib.ExitStack() as opened:
        connect = partial(connected_by_tls, authority=authority) if has_shaken_hands else connected
        held = [opened.enter_context(connect(server, source=source)) for source in _OTHERS * _EACH]
        server.await_connections(_NUM)
        for _ in range(2):
            connection = opened.enter_context(connected_by_tls(server, authority))
            assert ask(connection).startswith(b"HTTP/1.1 200 OK")
        assert _closed(held) == [0, 1]
