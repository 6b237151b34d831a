"""Clients that open connections and keep the service waiting are cut off, and hold up nobody else."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from ipaddress import ip_network

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from windlass.service.connections import ConnectionBounds, OpenConnections, bounded_protocol
from windlass.service.settings import Settings

_HEAD = b"GET /quick HTTP/1.1\r\nHost: x\r\n"
_GET = _HEAD + b"\r\n"


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

    return app


async def _pause() -> None:
    import asyncio

    await asyncio.sleep(0.1)


class _Server(uvicorn.Server):
    def install_signal_handlers(self) -> None:
        """None: it runs in a thread."""


@contextmanager
def _serving(**bounds: float) -> Iterator[int]:
    """Its port."""
    given = {"most": 100, "most_per_address": 100, **bounds}
    config = uvicorn.Config(
        _app(),
        http=bounded_protocol(ConnectionBounds(**given)),  # type: ignore[arg-type]
        log_level="error",
        timeout_keep_alive=1,
        lifespan="off",
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = _Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def _connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        yield connection


def _read_all(connection: socket.socket) -> bytes:
    """Until the service closes."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def _is_answered(port: int) -> bool:
    with _connected(port) as connection:
        connection.sendall(_GET)
        return b"200 OK" in connection.recv(65536)


def _error(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    assert f"content-length: {len(body)}".encode() in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize("sent", [b"", b"GET", _HEAD, _GET + _HEAD, _GET + b"\r\n"])
def test_a_head_that_does_not_come_ends_the_connection(sent: bytes) -> None:
    with _serving(head_s=0.3) as port, _connected(port) as connection:
        connection.sendall(sent)
        assert _is_answered(port), "others are served meanwhile"
        answer = _read_all(connection)
        if sent.startswith(_GET):  # what follows an answered request is as an idle connection
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


@pytest.mark.parametrize("bound", ["most", "most_per_address"])
def test_so_many_connections_are_open_at_once_and_a_closed_one_makes_room(bound: str) -> None:
    with _serving(**{bound: 3}) as port, contextlib.ExitStack() as opened:
        held = [opened.enter_context(_connected(port)) for _ in range(3)]
        for each in held:
            each.sendall(_GET)
            assert b"200 OK" in each.recv(65536)
        with _connected(port) as one_more:
            one_more.sendall(_GET)
            answer = _read_all(one_more)
            assert _error(answer) == (503, "too_many_connections")
            assert b"retry-after: 5" in answer.lower()
        held[0].close()
        until_s = time.monotonic() + 30
        while not _is_answered(port):
            assert time.monotonic() < until_s, "there is no room"


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
