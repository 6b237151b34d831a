"""Delivery of one webhook: signed, without redirects, to an address that was checked.

The signature follows the Standard Webhooks specification (https://www.standardwebhooks.com), which the official
`openai` client verifies.
"""

import base64
import hashlib
import hmac
import ipaddress
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

import httpcore
import httpx

_SECRET_PREFIX = "whsec_"
_SECRET_NBYTES = 32
# Seconds for a whole delivery: the name's look-up, the connection, the request, and the head of the answer.
TOTAL_TIMEOUT_S = 15.0
_MAX_URL_CHARS = 2000
# Prefixes of IPv6 that contain IPv4 addresses: NAT64, 6to4.
_NAT64, _6TO4 = ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("2002::/16")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class UrlRefusedError(ValueError):
    """This URL is not allowed. The text says why."""


class DeliveryError(RuntimeError):
    """The request did not arrive, or was not answered with 2xx. The text says why."""


def new_signing_secret() -> str:
    """Makes a signing secret in the format for receivers."""
    return _SECRET_PREFIX + base64.b64encode(secrets.token_bytes(_SECRET_NBYTES)).decode()


def signature(secret: str, *, event_id: str, timestamp: int, body: str) -> str:
    """Returns one entry of the signature header."""
    key = base64.b64decode(secret.removeprefix(_SECRET_PREFIX))
    digest = hmac.new(key, f"{event_id}.{timestamp}.{body}".encode(), hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


def check_url(url: str, *, allows_private: bool) -> None:
    """Raises UrlRefusedError if the URL alone, without a look-up of its name, shows that it is not allowed."""
    if len(url) > _MAX_URL_CHARS or not url.isascii() or any(char <= " " for char in url):
        raise UrlRefusedError(f"a URL has at most {_MAX_URL_CHARS} characters, all of them of ASCII, and no spaces")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UrlRefusedError(f"not a URL: {error}") from None
    allowed = ("https", "http") if allows_private else ("https",)
    if parts.scheme not in allowed:
        raise UrlRefusedError(f"must begin with {' or '.join(f'{each}://' for each in allowed)}")
    if not parts.hostname or parts.username is not None or parts.password is not None or port == 0:
        raise UrlRefusedError("must name a host, and neither user nor password")
    try:
        address = ipaddress.ip_address(parts.hostname)
    except ValueError:
        return  # a name, which is looked up before each request
    _check_address(address, allows_private=allows_private)


def send(url: str, *, event_id: str, body: str, signing_secrets: Sequence[str], allows_private: bool) -> int:
    """Delivers an event. Returns the status code of the answer, whatever it is.

    It takes at most TOTAL_TIMEOUT_S, however slowly the receiver answers. Raises UrlRefusedError, or DeliveryError
    without an answer.
    """
    until_s = time.monotonic() + TOTAL_TIMEOUT_S
    check_url(url, allows_private=allows_private)
    parts = urlsplit(url)
    host = parts.hostname
    assert host is not None, "it was checked"
    port = parts.port or (443 if parts.scheme == "https" else 80)
    address = _resolve(host, port, allows_private=allows_private, until_s=until_s)
    # The connection goes to the checked address, because a second look-up could return another one.
    target = httpx.URL(url).copy_with(host=str(address))
    timestamp = int(time.time())
    headers = {
        "Host": parts.netloc,
        "Content-Type": "application/json",
        "User-Agent": "windlass",
        "webhook-id": event_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(
            signature(secret, event_id=event_id, timestamp=timestamp, body=body) for secret in signing_secrets
        ),
    }
    try:
        # Not by httpx, whose timeouts are for each part of a request. No proxy is used, because it would look up the
        # name itself.
        with (
            httpcore.ConnectionPool(network_backend=_Backend(until_s)) as pool,
            pool.stream(
                "POST",
                str(target),
                content=body.encode(),
                headers=list(headers.items()),
                extensions={"sni_hostname": host},
            ) as response,
        ):
            return response.status  # the body is not read, because it may be long
    except httpcore.TimeoutException:
        raise DeliveryError(f"it was not answered within {TOTAL_TIMEOUT_S:g} s") from None
    except (httpcore.NetworkError, httpcore.ProtocolError) as error:
        raise DeliveryError(f"{type(error).__name__}: {error}") from error


class _Backend(httpcore.SyncBackend):
    """Connections whose operations all end by one deadline on the monotonic clock."""

    def __init__(self, until_s: float) -> None:
        self._until_s = until_s

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        left_s = _left_s(self._until_s, httpcore.ConnectTimeout)
        return _Stream(super().connect_tcp(host, port, left_s, local_address, socket_options), self._until_s)


class _Stream(httpcore.NetworkStream):
    """A connection of `_Backend`."""

    def __init__(self, stream: httpcore.NetworkStream, until_s: float) -> None:
        self._stream = stream
        self._until_s = until_s

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left_s(self._until_s, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _left_s(self._until_s, httpcore.WriteTimeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        left_s = _left_s(self._until_s, httpcore.ConnectTimeout)
        return _Stream(self._stream.start_tls(ssl_context, server_hostname, left_s), self._until_s)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _left_s(until_s: float, error: type[httpcore.TimeoutException]) -> float:
    if (left_s := until_s - time.monotonic()) <= 0:
        raise error
    return left_s


def _resolve(host: str, port: int, *, allows_private: bool, until_s: float) -> Address:
    found: Future[Sequence[tuple[Any, ...]]] = Future()

    def look_up() -> None:
        try:
            found.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            found.set_exception(error)

    # A daemon thread, because a look-up cannot be cancelled. The caller waits only until the deadline.
    threading.Thread(target=look_up, name="webhook-name", daemon=True).start()
    try:
        entries = found.result(max(0.0, until_s - time.monotonic()))
    except TimeoutError:
        raise DeliveryError(f"{host} was not found within {TOTAL_TIMEOUT_S:g} s") from None
    except (OSError, UnicodeError) as error:
        raise DeliveryError(f"{host} was not found: {error}") from error
    addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in entries]
    for address in addresses:
        _check_address(address, allows_private=allows_private)
    return addresses[0]


def _check_address(address: Address, *, allows_private: bool) -> None:
    for each in _behind(address):
        if each.is_multicast or each.is_unspecified or not (allows_private or each.is_global):
            raise UrlRefusedError(
                f"{address} is not a public address; the setting webhook_private_addresses allows such for all webhooks"
            )


def _behind(address: Address) -> list[Address]:
    """Returns the address, or the IPv4 address mapped into it; for NAT64 and 6to4 both."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    if address in _NAT64:
        return [address, ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)]
    if address in _6TO4 and address.sixtofour is not None:
        return [address, address.sixtofour]
    return [address]
