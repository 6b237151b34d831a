"""The targets that webhooks may and may not have."""

import contextlib
import socket
import ssl
import threading
import time
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpcore
import pytest
import trustme

from tests.support.service.webhook_receiver import Receiver, receiving
from windlass.service.webhooks import delivery as webhook_requests
from windlass.service.webhooks.delivery import DeliveryError, UrlRefusedError, check_url, new_signing_secret, send

EVENT: Any = {"event_id": "evt_1", "body": "{}", "signing_secrets": (new_signing_secret(),)}


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com",
        "https://example.com:8443/a/b?c=d",
        "https://8.8.8.8/hook",
        "https://[2606:4700::1111]/hook",
    ],
)
def test_public_hosts_by_https_are_taken(url: str) -> None:
    check_url(url, allows_private=False)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://example.com", "must begin with https://"),
        ("ftp://example.com", "must begin with https://"),
        ("file:///etc/passwd", "must begin with https://"),
        ("https://", "must name a host"),
        ("https://user:word@example.com", "neither user nor password"),
        ("https://example.com:99999", "not a URL"),
        ("https://example.com:0", "must name a host"),
        ("https://exa mple.com", "no spaces"),
        ("https://example.com/\r\nX: y", "no spaces"),
        ("https://ex\u00e4mple.com", "of ASCII"),
        ("https://example.com/" + "a" * 3000, "at most 2000"),
        ("https://127.0.0.1/hook", "not a public address"),
        ("https://10.1.2.3/hook", "not a public address"),
        ("https://192.168.1.1", "not a public address"),
        ("https://169.254.169.254/latest/meta-data", "not a public address"),
        ("https://100.64.0.1", "not a public address"),
        ("https://0.0.0.0", "not a public address"),
        ("https://224.0.0.1", "not a public address"),
        ("https://[::1]", "not a public address"),
        ("https://[fd00::1]", "not a public address"),
        ("https://[fe80::1]", "not a public address"),
        ("https://[::ffff:10.0.0.1]", "not a public address"),
        ("https://[64:ff9b::a00:1]", "not a public address"),
        ("https://[2002:a00:1::1]", "not a public address"),
    ],
)
def test_other_urls_are_refused(url: str, reason: str) -> None:
    with pytest.raises(UrlRefusedError, match=reason):
        check_url(url, allows_private=False)


def test_private_addresses_are_taken_where_they_are_allowed() -> None:
    check_url("http://10.1.2.3:8080/hook", allows_private=True)
    with pytest.raises(UrlRefusedError, match="not a public address"):
        check_url("http://0.0.0.0/hook", allows_private=True)


def resolving(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> list[str]:
    """Gives every name these addresses. Returns the names that were looked up."""
    asked: list[str] = []

    def getaddrinfo(host: str, port: int, *_: object, **__: object) -> list[Any]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(webhook_requests.socket, "getaddrinfo", getaddrinfo)
    return asked


def test_a_name_with_one_private_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch, "8.8.8.8", "127.0.0.1")
    with pytest.raises(UrlRefusedError, match=r"127\.0\.0\.1 is not a public address"):
        send("https://inside.example", **EVENT, allows_private=False)


@pytest.mark.parametrize(
    "address",
    [
        *("10.0.0.1", "169.254.169.254", "::1", "fd00::1", "fe80::1", "fe80::1%eth0", "ff02::1", "::"),
        *("::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::1"),
    ],
)
def test_a_name_of_an_address_that_is_not_public_is_refused_wherever_it_stands(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    for addresses in ([address], ["2606:4700::1111", address], [address, "8.8.8.8"]):
        resolving(monkeypatch, *addresses)
        with pytest.raises(UrlRefusedError, match="is not a public address"):
            send("https://inside.example", **EVENT, allows_private=False)


def test_webhook_goes_to_the_checked_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with receiving() as receiver:
        port = urlsplit(receiver.url).port
        asked = resolving(monkeypatch, "127.0.0.1")
        assert send(f"http://hook.example:{port}", **EVENT, allows_private=True) == 200
    assert asked[0] == "hook.example"
    assert "hook.example" not in asked[1:]  # the connection asks only for the address
    assert receiver.received[0][0]["host"].startswith("hook.example:")


def test_redirects_are_not_followed() -> None:
    with receiving() as target, receiving() as receiver:
        receiver.statuses.append(307)
        receiver.redirects_to = target.url
        assert send(receiver.url, **EVENT, allows_private=True) == 307
    assert (len(receiver.received), len(target.received)) == (1, 0)


def test_a_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as proxy, receiving() as receiver:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        monkeypatch.setenv("ALL_PROXY", proxy.url)
        send(receiver.url, **EVENT, allows_private=True)
    assert (len(receiver.received), len(proxy.received)) == (1, 0)


def test_receiver_without_answer_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as receiver:
        url = receiver.url
    with pytest.raises(DeliveryError, match="ConnectError"):
        send(url, **EVENT, allows_private=True)
    monkeypatch.setattr(webhook_requests, "TOTAL_TIMEOUT_S", 0.05)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(DeliveryError, match=r"not answered within 0\.05 s"),
    ):
        send(f"http://127.0.0.1:{silent.getsockname()[1]}", **EVENT, allows_private=True)


@pytest.mark.parametrize("is_tls", [False, True])
def test_receiver_that_trickles_its_answer_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, authority: trustme.CA, *, is_tls: bool
) -> None:
    """A byte now and then, which no timeout of a single read notices."""
    monkeypatch.setattr(webhook_requests, "TOTAL_TIMEOUT_S", 0.5)
    ending = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def trickle() -> None:
            connection, _ = server.accept()
            with connection:
                if is_tls:  # a handshake that never ends
                    connection.sendall(b"\x16\x03\x03\x40\x00")
                for byte in b"HTTP/1.1 200 OK\r\nX: " + b"x" * 1000:
                    if ending.wait(0.02):
                        return
                    with contextlib.suppress(OSError):
                        connection.sendall(bytes([byte]))

        thread = threading.Thread(target=trickle)
        thread.start()
        if is_tls:
            trusting(monkeypatch, authority)
        url = f"{'https' if is_tls else 'http'}://127.0.0.1:{server.getsockname()[1]}"
        began_s = time.monotonic()
        with pytest.raises(DeliveryError, match=r"not answered within 0\.5 s"):
            send(url, **EVENT, allows_private=True)
        took_s = time.monotonic() - began_s
        ending.set()
        thread.join()
    assert took_s < 10, "it would take 20 s to its end"


def test_name_lookup_timeout_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook_requests, "TOTAL_TIMEOUT_S", 0.05)
    ending = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: ending.wait(60) and [])
    with pytest.raises(DeliveryError, match=r"slow\.example was not found within 0\.05 s"):
        send("http://slow.example/", **EVENT, allows_private=True)
    ending.set()


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


def served(authority: trustme.CA, name: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name).configure_cert(context)
    return context


def trusting(monkeypatch: pytest.MonkeyPatch, authority: trustme.CA) -> None:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    monkeypatch.setattr(webhook_requests.httpcore, "ConnectionPool", partial(httpcore.ConnectionPool, context))


def test_the_certificate_must_be_of_the_name_not_of_the_address(
    authority: trustme.CA, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusting(monkeypatch, authority)
    receiver: Receiver
    with receiving(tls=served(authority, "localhost")) as receiver:
        assert send(receiver.url, **EVENT, allows_private=True) == 200
    with (
        receiving(tls=served(authority, "another.example")) as receiver,
        pytest.raises(DeliveryError, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        send(receiver.url, **EVENT, allows_private=True)


def test_certificate_of_unknown_authority_is_refused(authority: trustme.CA) -> None:
    with (
        receiving(tls=served(authority, "localhost")) as receiver,
        pytest.raises(DeliveryError, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        send(receiver.url, **EVENT, allows_private=True)
    assert receiver.received == []
