"""Clients that open connections and keep the service waiting are cut off, and do not delay other clients."""

import asyncio
import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from ipaddress import ip_network
from typing import Any

import pytest
import trustme
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from windlass.service.http.connections import ConnectionBounds, OpenConnections, bounded_protocol
from windlass.service.installation.settings import Settings

_HEAD = b"GET /quick HTTP/1.1\r\nHost: x\r\n"
_GET = _HEAD + b"\r\n"
# Bytes: more than the kernel buffers between two sockets with small buffers, and less than uvicorn's high-water mark.
_LARGE_NBYTES = 60_000
_BUFFER_NBYTES = 4096


def _app() -> FastAPI:
    app = FastAPI()

    @app.get("/quick")
    async def quick() -> str:
        return "done"

    @app.post("/upload")
    async def upload(request: Request) -> int:
        return len(await request.body())

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        async def lines() -> AsyncIterator[bytes]:
            for number in range(8):
                yield f"{number}\n".encode()
                await _pause()

        return StreamingResponse(lines())

    @app.get("/scheme")
    async def scheme(request: Request) -> str:
        return request.url.scheme

    @app.get("/large")
    async def large() -> Response:
        return Response(b"x" * _LARGE_NBYTES)

    @app.get("/endless")
    async def endless() -> StreamingResponse:
        async def pieces() -> AsyncIterator[bytes]:
            while True:
                yield b"x" * 4096
                await asyncio.sleep(0)

        return StreamingResponse(pieces())

    @app.post("/late")
    async def late(request: Request) -> int:
        await _pause(0.5)
        return len(await request.body())

    return app


async def _pause(duration_s: float = 0.1) -> None:
    await asyncio.sleep(duration_s)


class _Server(uvicorn.Server):
    def install_signal_handlers(self) -> None:
        """Installs none, because the server runs in a thread."""


@contextmanager
def _serving(
    *,
    tls: ssl.SSLContext | None = None,
    ws: Any = "auto",
    loop: Any = "auto",
    keep_alive_s: int = 75,
    **bounds: float,
) -> Iterator[int]:
    """Serves the app in a thread; yields its port."""
    given = {"most": 100, "most_per_address": 100, **bounds}
    config = uvicorn.Config(
        _app(),
        http=bounded_protocol(ConnectionBounds(**given), tls=tls),  # type: ignore[arg-type]
        ws=ws,
        loop=loop,
        log_level="error",
        timeout_keep_alive=keep_alive_s,
        lifespan="off",
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_NBYTES)
        server = _Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def _connected(port: int, *, source: str = "127.0.0.1", timeout_s: float = 30) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s, source_address=(source, 0)) as connection:
        yield connection


def _read_all(connection: socket.socket) -> bytes:
    """Reads until the service closes the connection."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def _read_until(connection: socket.socket, end: bytes) -> bytes:
    """Reads an answer that arrives in parts, such as TLS records."""
    answer = b""
    while not answer.endswith(end):
        part = connection.recv(65536)
        assert part, answer
        answer += part
    return answer


def _is_answered(port: int) -> bool:
    with _connected(port) as connection:
        connection.sendall(_GET)
        return b"200 OK" in connection.recv(65536)


def _await_room(port: int) -> None:
    until_s = time.monotonic() + 30
    while not _is_answered(port):
        assert time.monotonic() < until_s, "there is no room"
        time.sleep(0.02)


def _error(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    assert f"content-length: {len(body)}".encode() in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize("sent", [b"", b"GET", _HEAD, _GET + _HEAD, _GET + b"\r\n"])
def test_a_head_that_does_not_come_ends_the_connection(sent: bytes) -> None:
    with _serving(head_s=0.3, keep_alive_s=1) as port, _connected(port) as connection:
        connection.sendall(sent)
        assert _is_answered(port), "others are served meanwhile"
        answer = _read_all(connection)
        if sent.startswith(_GET):  # after an answered request the connection counts as idle
            assert answer.startswith(b"HTTP/1.1 200 OK")
        else:
            assert _error(answer) == (408, "request_timeout")


def test_a_head_that_trickles_ends_too() -> None:
    with _serving(head_s=0.3) as port, _connected(port) as connection:
        began_s = time.monotonic()
        with contextlib.suppress(OSError):
            for _ in range(1000):
                connection.sendall(b"x")
                time.sleep(0.02)
        assert time.monotonic() - began_s < 15, "and not after the 20 s that it would take"


def test_a_connection_that_is_used_again_and_again_stays() -> None:
    with _serving(head_s=0.3) as port, _connected(port) as connection:
        for _ in range(5):
            connection.sendall(_GET)
            assert b"200 OK" in connection.recv(65536)
            time.sleep(0.15)


def test_a_head_without_end_is_refused() -> None:
    with _serving(max_head_nbytes=1000) as port, _connected(port) as connection:
        connection.sendall(_HEAD + b"A: " + b"x" * 2000)
        assert _error(_read_all(connection)) == (431, "head_too_large")


def test_a_body_that_stops_ends_the_connection_and_a_slow_one_comes_through() -> None:
    head = b"POST /upload HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n"
    with _serving(body_s=0.4, min_body_nbytes=100) as port:
        with _connected(port) as connection:
            connection.sendall(head + b"x" * 50)
            assert _error(_read_all(connection)) == (408, "request_timeout")
        with _connected(port) as connection:
            connection.sendall(head)
            for _ in range(10):
                connection.sendall(b"x" * 500)
                time.sleep(0.1)
            assert b"5000" in connection.recv(65536)


def test_a_stream_stays_open_beyond_all_limits() -> None:
    with _serving(head_s=0.2, body_s=0.2) as port, _connected(port) as connection:
        connection.sendall(b"GET /stream HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert b"7\n" in _read_all(connection)


def test_so_many_connections_an_address_has_at_once_and_a_closed_one_makes_room() -> None:
    with _serving(most_per_address=3) as port, contextlib.ExitStack() as opened:
        held = [opened.enter_context(_connected(port)) for _ in range(3)]
        for each in held:
            each.sendall(_GET)
            assert b"200 OK" in each.recv(65536)
        with _connected(port) as one_more:
            one_more.sendall(_GET)
            answer = _read_all(one_more)
            assert _error(answer) == (503, "too_many_connections")
            assert b"retry-after: 5" in answer.lower()
        with _connected(port, source="127.0.0.2") as other:
            other.sendall(_GET)
            assert b"200 OK" in other.recv(65536)
        held[0].close()
        _await_room(port)


@pytest.mark.parametrize("path", [b"/large", b"/endless"])
@pytest.mark.parametrize("connection_header", [b"close", b"keep-alive"])
def test_client_that_does_not_read_its_answer_is_cut_off(path: bytes, connection_header: bytes) -> None:
    with _serving(most=1, write_s=0.2) as port, socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_NBYTES)
        stalled.connect(("127.0.0.1", port))
        stalled.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\nConnection: " + connection_header + b"\r\n\r\n")
        assert stalled.recv(1)
        assert not _is_answered(port)
        _await_room(port)


def test_client_that_reads_slowly_gets_the_whole_answer() -> None:
    with _serving(write_s=0.4) as port, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_NBYTES)
        slow.connect(("127.0.0.1", port))
        slow.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = b""
        while part := slow.recv(4000):
            answer += part
            time.sleep(0.05)
    assert answer.endswith(b"x" * _LARGE_NBYTES)


def test_body_that_waits_for_the_service_to_ask_for_it_is_not_late() -> None:
    head = b"POST /late HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n"
    with _serving(body_s=0.2) as port, _connected(port) as connection:
        connection.sendall(head)
        assert connection.recv(65536).startswith(b"HTTP/1.1 100 Continue")
        connection.sendall(b"body")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK")


def test_request_for_a_websocket_is_answered_as_any_other_and_its_connection_is_forgotten() -> None:
    """The service has no websockets. uvicorn would pass the connection to another protocol, which counts nothing."""
    with _serving(most=1, ws=_Websocket) as port:
        with _connected(port) as connection:
            connection.sendall(_HEAD + b"Connection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK")
        _await_room(port)


class _Websocket(asyncio.Protocol):
    """Stands for the protocol that uvicorn uses if a websockets package is installed."""

    def __init__(self, **_: object) -> None:
        """Accepts all arguments of uvicorn."""


# --- TLS -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def tls(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)
    return context


@contextmanager
def _connected_by_tls(port: int, authority: trustme.CA, *, source: str = "127.0.0.1") -> Iterator[ssl.SSLSocket]:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with (
        _connected(port, source=source) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        yield connection


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_connections_by_tls_are_served_one_after_the_other(
    authority: trustme.CA, tls: ssl.SSLContext, loop: str
) -> None:
    with _serving(tls=tls, most=2, loop=loop) as port:
        for _ in range(5):
            with _connected_by_tls(port, authority) as connection:
                for _ in range(2):
                    connection.sendall(_GET)
                    assert _read_until(connection, b'"done"').startswith(b"HTTP/1.1 200 OK")
                connection.sendall(b"GET /scheme HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                assert _read_all(connection).endswith(b'"https"')


def test_client_by_tls_that_does_not_read_its_answer_is_cut_off(authority: trustme.CA, tls: ssl.SSLContext) -> None:
    with _serving(tls=tls, most=1, write_s=0.2) as port, _connected_by_tls(port, authority) as stalled:
        stalled.sendall(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        assert stalled.recv(1)
        until_s = time.monotonic() + 30
        while True:
            assert time.monotonic() < until_s, "there is no room"
            with _connected_by_tls(port, authority) as connection:
                connection.sendall(_GET)
                if connection.recv(65536).startswith(b"HTTP/1.1 200 OK"):
                    break
            time.sleep(0.05)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_handshake_that_does_not_come_counts_as_a_connection_and_ends(
    authority: trustme.CA, tls: ssl.SSLContext, loop: str
) -> None:
    with _serving(tls=tls, most_per_address=1, head_s=0.5, loop=loop) as port, _connected(port) as silent:
        with _connected_by_tls(port, authority) as connection:
            assert _error(_read_all(connection)) == (503, "too_many_connections")
        assert _read_all(silent) == b""
        with _connected_by_tls(port, authority) as connection:
            connection.sendall(_GET)
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK")


# --- space for other clients ---------------------------------------------------------------------------------------

_OTHERS = [f"127.0.0.{number}" for number in range(2, 7)]
_EACH = 8  # connections
_FULL = {"most": _EACH * len(_OTHERS), "most_per_address": _EACH}
_BODY_HEAD = b"POST /upload HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n"


@contextmanager
def _full(port: int, sent: bytes = b"", answer: bytes = b"") -> Iterator[list[socket.socket]]:
    """Fills all places from five addresses, which have sent `sent` and read an answer that ends with `answer`."""
    with contextlib.ExitStack() as opened:
        held = []
        for source in _OTHERS * _EACH:
            held.append(opened.enter_context(_connected(port, source=source)))
            held[-1].sendall(sent)
            if answer:
                _read_until(held[-1], answer)
        time.sleep(0.3)  # until the service has read all of it
        yield held


def _closed(connections: list[socket.socket]) -> list[int]:
    """The indexes of the connections that the service closes. They have nothing left to read."""
    found = []
    for number, each in enumerate(connections):
        each.settimeout(0.02)
        with contextlib.suppress(TimeoutError):
            assert not _read_all(each)
            found.append(number)
    return found


def _ask(connection: socket.socket) -> bytes:
    connection.sendall(_GET)
    return connection.recv(65536)


@pytest.mark.parametrize("loop", [pytest.param("asyncio", marks=pytest.mark.long), "uvloop"])
@pytest.mark.parametrize(
    ("sent", "answer"),
    [(b"", b""), (_HEAD, b""), (_GET, b'"done"'), (_GET + _HEAD, b'"done"'), (_BODY_HEAD + b"x" * 50, b"")],
    ids=["silent", "in the head", "idle", "in the next head", "in the body"],
)
def test_new_client_gets_a_place_when_five_addresses_fill_all(loop: str, sent: bytes, answer: bytes) -> None:
    with (
        _serving(loop=loop, stall_s=0.1, **_FULL) as port,
        _full(port, sent, answer) as held,
        _connected(port, timeout_s=5) as first,
        _connected(port, timeout_s=5) as second,
    ):
        for each in (first, second):
            assert _ask(each).startswith(b"HTTP/1.1 200 OK")
        assert _closed(held) == [0, 1], "the oldest of one address, then of another, which has more by then"


def test_oldest_of_the_address_that_has_most_makes_room() -> None:
    with _serving(most=6) as port, contextlib.ExitStack() as opened:
        sources = ("127.0.0.3", "127.0.0.2", "127.0.0.2", "127.0.0.3", "127.0.0.2", "127.0.0.2")
        held = [opened.enter_context(_connected(port, source=source)) for source in sources]
        for each in (*held, held[1]):  # so that the second has been idle for less time than all others
            assert _ask(each).startswith(b"HTTP/1.1 200 OK")
        for _ in range(2):
            assert _ask(opened.enter_context(_connected(port))).startswith(b"HTTP/1.1 200 OK")
        assert _closed(held) == [2, 4]


def test_address_at_its_limit_evicts_no_connection() -> None:
    with (
        _serving(most=2, most_per_address=1) as port,
        _connected(port, source="127.0.0.2") as other,
        _connected(port) as held,
        _connected(port) as one_more,
    ):
        assert _error(_read_all(one_more)) == (503, "too_many_connections")
        assert _closed([other, held]) == []


@pytest.mark.parametrize(
    "sent",
    [b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n", b"POST /late HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbody"],
)
def test_connection_whose_request_is_being_answered_is_never_cut(sent: bytes) -> None:
    with _serving(most=1, stall_s=0) as port, _connected(port) as held:
        held.sendall(sent)
        time.sleep(0.2)
        with _connected(port, source="127.0.0.2") as other:
            assert _error(_read_all(other)) == (503, "too_many_connections")
        answer = _read_until(held, b"0\r\n\r\n" if b"stream" in sent else b"4")
        assert answer.startswith(b"HTTP/1.1 200 OK")


def test_body_that_moves_or_is_held_up_by_the_service_makes_no_room() -> None:
    with _serving(most=1, stall_s=0.3, min_body_nbytes=100) as port:
        with _connected(port) as held:
            held.sendall(_BODY_HEAD)
            for _ in range(10):
                assert not _is_answered(port)
                held.sendall(b"x" * 500)
                time.sleep(0.1)
            assert b"5000" in held.recv(65536)
        _await_room(port)
        with _connected(port) as held:
            held.sendall(b"POST /late HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n")
            time.sleep(0.4)
            assert not _is_answered(port)
            assert held.recv(65536).startswith(b"HTTP/1.1 100 Continue")
            held.sendall(b"body")
            assert held.recv(65536).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("path", [b"/large", b"/endless"])
def test_client_that_reads_nothing_of_its_answer_makes_room_and_one_that_reads_does_not(path: bytes) -> None:
    with _serving(most=1, stall_s=0.5) as port, socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_NBYTES)
        held.connect(("127.0.0.1", port))
        held.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        for _ in range(10):
            assert held.recv(2000)
            assert not _is_answered(port)
            time.sleep(0.1)
        _await_room(port)


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
    with _serving(tls=tls, loop=loop, **_FULL) as port, contextlib.ExitStack() as opened:
        connect = partial(_connected_by_tls, authority=authority) if has_shaken_hands else _connected
        held = [opened.enter_context(connect(port, source=source)) for source in _OTHERS * _EACH]
        time.sleep(0.3)
        for _ in range(2):
            connection = opened.enter_context(_connected_by_tls(port, authority))
            assert _ask(connection).startswith(b"HTTP/1.1 200 OK")
        assert _closed(held) == [0, 1]


def test_clients_are_addresses_networks_of_ipv6_and_no_proxies() -> None:
    counts = OpenConnections(ConnectionBounds(most=9, most_per_address=1, unlimited=(ip_network("10.0.0.0/8"),)))
    assert counts.client_of("192.0.2.1") == "192.0.2.1"
    assert counts.client_of("2001:db8::1") == counts.client_of("2001:db8::2:3") == "2001:db8::/64"
    assert counts.client_of("2001:db8:0:1::1") == "2001:db8:0:1::/64"
    assert counts.client_of("10.1.2.3") is None
    assert [counts.admit("10.1.2.3") for _ in range(3)] == [None] * 3
    assert counts.admit("192.0.2.1") is None
    assert "your address has 1 connections open" in str(counts.admit("192.0.2.1"))
    counts.forget("192.0.2.1")
    assert counts.admit("192.0.2.1") is None
    assert (counts.total, dict(counts.by_client)) == (4, {"192.0.2.1": 1})


def test_bounds_are_those_of_the_settings() -> None:
    settings = Settings.model_construct(
        max_connections=7, max_connections_per_address=3, trusted_proxies=("10.0.0.1", "10.1.0.0/16")
    )
    bounds = ConnectionBounds.of(settings)
    assert (bounds.most, bounds.most_per_address) == (7, 3)
    assert [str(each) for each in bounds.unlimited] == ["10.0.0.1/32", "10.1.0.0/16"]
