"""Clients that open connections and keep the service waiting are cut off, and do not delay other clients."""

import asyncio
import contextlib
import ssl
from ipaddress import ip_network

import pytest
import trustme

from tests.unit.service.http.bounded_server import (
    GET,
    HEAD,
    LARGE_NBYTES,
    LIMIT_S,
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
from windlass.service.http.connections import ConnectionBounds, OpenConnections
from windlass.service.installation.settings import Settings


@pytest.mark.parametrize("sent", [b"", b"GET", HEAD, GET + HEAD, GET + b"\r\n"])
def test_a_head_that_does_not_come_ends_the_connection(sent: bytes) -> None:
    with serving() as server, connected(server) as connection:
        connection.sendall(sent)
        server.await_received(len(sent))
        answer = read_answer(connection) if sent.startswith(GET) else b""
        assert is_answered(server), "others are served meanwhile"
        server.skip(LIMIT_S)
        answer += read_all(connection)
        if sent.startswith(GET):  # after an answered request the connection counts as idle
            assert answer.startswith(b"HTTP/1.1 200 OK")
        else:
            assert error_of(answer) == (408, "request_timeout")


def test_a_head_that_trickles_ends_too() -> None:
    with serving() as server, connected(server) as connection:
        num_sent = 0
        for sent in (b"GET ", b"/quick ", b"HTTP/1.1\r\n"):
            connection.sendall(sent)
            num_sent += len(sent)
            server.await_received(num_sent)
            server.skip(0.4 * LIMIT_S)
        assert error_of(read_all(connection)) == (408, "request_timeout")


def test_a_connection_that_is_used_again_and_again_stays() -> None:
    with serving() as server, connected(server) as connection:
        for _ in range(5):
            assert ask(connection).startswith(b"HTTP/1.1 200 OK")
            server.skip(0.5 * LIMIT_S)


def test_a_head_without_end_is_refused() -> None:
    with serving(max_head_nbytes=1000) as server, connected(server) as connection:
        connection.sendall(HEAD + b"A: " + b"x" * 2000)
        assert error_of(read_all(connection)) == (431, "head_too_large")


def test_a_body_that_stops_ends_the_connection_and_a_slow_one_comes_through() -> None:
    head = b"POST /upload HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n"
    with serving(min_body_nbytes=100) as server:
        with connected(server) as connection:
            connection.sendall(head + b"x" * 50)
            server.await_received(len(head) + 50)
            server.skip(LIMIT_S)
            assert error_of(read_all(connection)) == (408, "request_timeout")
        num_received = server.num_received + len(head)
        with connected(server) as connection:
            connection.sendall(head)
            for number in range(10):
                server.await_received(num_received + 500 * number)
                server.skip(0.5 * LIMIT_S)
                connection.sendall(b"x" * 500)
            assert read_answer(connection).endswith(b"5000")


def test_a_stream_stays_open_beyond_all_limits() -> None:
    with serving() as server, connected(server) as connection:
        connection.sendall(b"GET /stream HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        read_until(connection, b"first\n\r\n")
        server.skip(2 * LIMIT_S)
        assert is_answered(server), "all that was due has happened"
        server.open_gate()
        assert b"last\n" in read_all(connection)


def test_so_many_connections_an_address_has_at_once_and_a_closed_one_makes_room() -> None:
    with serving(most_per_address=3) as server, contextlib.ExitStack() as opened:
        held = [opened.enter_context(connected(server)) for _ in range(3)]
        for each in held:
            assert ask(each).startswith(b"HTTP/1.1 200 OK")
        with connected(server) as one_more:
            one_more.sendall(GET)
            answer = read_all(one_more)
            assert error_of(answer) == (503, "too_many_connections")
            assert b"retry-after: 5" in answer.lower()
        with connected(server, source="127.0.0.2") as other:
            assert ask(other).startswith(b"HTTP/1.1 200 OK")
        held[0].close()
        server.await_room()


@pytest.mark.parametrize("path", [b"/large", b"/endless"])
@pytest.mark.parametrize("connection_header", [b"close", b"keep-alive"])
def test_client_that_does_not_read_its_answer_is_cut_off(path: bytes, connection_header: bytes) -> None:
    with serving(most=1, stall_s=1e6) as server, connected_with_small_buffer(server) as stalled:
        stalled.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\nConnection: " + connection_header + b"\r\n\r\n")
        assert stalled.recv(1)
        assert not is_answered(server)
        server.await_room(skip_s=LIMIT_S)


def test_client_that_reads_slowly_gets_the_whole_answer() -> None:
    with serving() as server, connected_with_small_buffer(server) as slow:
        slow.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer, num_unsent = b"", LARGE_NBYTES
        for _ in range(3):
            answer += read_num(slow, 15_000)
            server.await_sent(num_unsent)
            num_unsent = server.num_unsent()
            server.skip(0.8 * LIMIT_S)
        answer += read_all(slow)
    assert answer.endswith(b"x" * LARGE_NBYTES)


def test_body_that_waits_for_the_service_to_ask_for_it_is_not_late() -> None:
    head = b"POST /late HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n"
    with serving() as server, connected(server) as connection:
        connection.sendall(head)
        server.await_received(len(head))
        server.skip(2 * LIMIT_S)
        assert is_answered(server), "all that was due has happened"
        server.open_gate()
        assert connection.recv(65536).startswith(b"HTTP/1.1 100 Continue")
        connection.sendall(b"body")
        assert read_answer(connection).startswith(b"HTTP/1.1 200 OK")


def test_request_for_a_websocket_is_answered_as_any_other_and_its_connection_is_forgotten() -> None:
    """The service has no websockets. uvicorn would pass the connection to another protocol, which counts nothing."""
    with serving(most=1, ws=_Websocket) as server:
        with connected(server) as connection:
            connection.sendall(HEAD + b"Connection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK")
        server.await_room()


class _Websocket(asyncio.Protocol):
    """Stands for the protocol that uvicorn uses if a websockets package is installed."""

    def __init__(self, **_: object) -> None:
        """Accepts all arguments of uvicorn."""


# --- TLS -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_connections_by_tls_are_served_one_after_the_other(
    authority: trustme.CA, tls: ssl.SSLContext, loop: str
) -> None:
    with serving(tls=tls, most=2, loop=loop) as server:
        for _ in range(5):
            with connected_by_tls(server, authority) as connection:
                for _ in range(2):
                    assert ask(connection).startswith(b"HTTP/1.1 200 OK")
                connection.sendall(b"GET /scheme HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                assert read_all(connection).endswith(b'"https"')


def test_client_by_tls_that_does_not_read_its_answer_is_cut_off(authority: trustme.CA, tls: ssl.SSLContext) -> None:
    with serving(tls=tls, write_s=0.2) as server, connected_by_tls(server, authority) as stalled:
        stalled.sendall(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        assert stalled.recv(1)
        server.await_connections(0)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_handshake_that_does_not_come_counts_as_a_connection(
    authority: trustme.CA, tls: ssl.SSLContext, loop: str
) -> None:
    with serving(tls=tls, most_per_address=1, loop=loop) as server:
        with connected(server), connected_by_tls(server, authority) as connection:
            assert error_of(read_all(connection)) == (503, "too_many_connections")
        server.await_connections(0)
        with connected_by_tls(server, authority) as connection:
            assert ask(connection).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_handshake_that_does_not_come_ends(tls: ssl.SSLContext, loop: str) -> None:
    with serving(tls=tls, head_s=0.2, loop=loop) as server, connected(server) as silent:
        assert read_all(silent) == b""
        server.await_connections(0)


# --- counts and settings -------------------------------------------------------------------------------------------


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
