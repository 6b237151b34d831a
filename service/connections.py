"""Bounds on the connections of the API's clients: how many there are, and how long one may keep the service waiting.

Without them, whoever opens connections and sends nothing, or a byte now and then, holds them open for ever, until there
is none left for others.
"""

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from windlass.service.error_answers import error_response
from windlass.service.errors import ApiError
from windlass.service.loopback import address_of
from windlass.service.settings import Settings

_RETRY_AFTER_S = 5
# An address of IPv6 is a network of those that one client may choose from.
_IPV6_PREFIX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionBounds:
    """What clients may do."""

    most: int
    most_per_address: int
    unlimited: Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network] = ()  # addresses of proxies, for many clients
    head_s: float = 20.0  # for a request's head, from its first byte, or from the connection's start
    max_head_nbytes: int = 64 * 1024
    # Of a body so many bytes must come within so long, until all of it is there.
    body_s: float = 60.0
    min_body_nbytes: int = 4096

    @classmethod
    def of(cls, settings: Settings) -> "ConnectionBounds":
        """Those of an installation."""
        return cls(
            most=settings.max_connections,
            most_per_address=settings.max_connections_per_address,
            unlimited=tuple(ipaddress.ip_network(each) for each in settings.trusted_proxies),
        )


@dataclass(slots=True)
class OpenConnections:
    """Counts the connections that are open."""

    bounds: ConnectionBounds
    total: int = 0
    by_client: Counter[str] = field(default_factory=Counter)

    def admit(self, host: str) -> str | None:
        """Count one more of a client; why it is refused instead, where there are too many."""
        client = self.client_of(host)
        if self.total >= self.bounds.most:
            return f"the service has {self.total} connections open, and takes no more"
        if client is not None and self.by_client[client] >= self.bounds.most_per_address:
            return f"your address has {self.by_client[client]} connections open, and gets no more; close some"
        self.total += 1
        if client is not None:
            self.by_client[client] += 1
        return None

    def forget(self, host: str) -> None:
        """Count one less of a client that was admitted."""
        self.total -= 1
        if (client := self.client_of(host)) is not None:
            self.by_client[client] -= 1
            if not self.by_client[client]:
                del self.by_client[client]

    def client_of(self, host: str) -> str | None:
        """The address, or network, that connections are counted for; None for one that has no limit of its own."""
        address = address_of(host.partition("%")[0])
        if address is None or any(address in network for network in self.bounds.unlimited):
            return None
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None and not address.is_loopback:
            return str(ipaddress.ip_network((address, _IPV6_PREFIX), strict=False))
        return str(address)


def bounded_protocol(bounds: ConnectionBounds) -> type[HttpToolsProtocol]:
    """The protocol class that uvicorn is to serve connections with."""
    counts = OpenConnections(bounds)
    return cast(
        type[HttpToolsProtocol], type("BoundedConnection", (_Connection,), {"bounds": bounds, "counts": counts})
    )


class _Connection(HttpToolsProtocol):
    """A connection that ends where its client keeps the service waiting."""

    bounds: ConnectionBounds
    counts: OpenConnections

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._timer: asyncio.TimerHandle | None = None
        self._counted_for: str | None = None
        self._is_in_head = True  # or before one
        self._num_head_bytes = 0
        self._num_body_bytes = 0  # since the timer was set

    # --- what the transport tells ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        host = self.client[0] if self.client else ""
        if (why := self.counts.admit(host)) is not None:
            self._refuse(503, "too_many_connections", why)
            return
        self._counted_for = host
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._counted_for is not None:
            self.counts.forget(self._counted_for)
            self._counted_for = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return  # it was refused
        if self._is_in_head:
            if self._timer is None:  # the first bytes of a further request
                self._await_head()
            self._num_head_bytes += len(data)
        super().data_received(data)
        # What came is of the head only if that has not ended by now.
        if self._is_in_head and self._num_head_bytes > self.bounds.max_head_nbytes and not self.transport.is_closing():
            self._refuse(431, "head_too_large", f"a request's head has at most {self.bounds.max_head_nbytes} bytes")

    # --- what the parser tells ---

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._is_in_head = False
        self._await_body()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop_timer()
        self._is_in_head, self._num_head_bytes = True, 0
        super().on_message_complete()

    # --- time ---

    def _await_head(self) -> None:
        self._timer = self.loop.call_later(self.bounds.head_s, self._on_head_late)

    def _await_body(self) -> None:
        self._num_body_bytes = 0
        self._timer = self.loop.call_later(self.bounds.body_s, self._on_body_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_head_late(self) -> None:
        self._refuse(408, "request_timeout", f"no request came within {self.bounds.head_s:g} s")

    def _on_body_late(self) -> None:
        # Where nobody reads the body, it is not the client who is late.
        if self.flow.read_paused or self._num_body_bytes >= self.bounds.min_body_nbytes:
            self._await_body()
        else:
            self._refuse(408, "request_timeout", f"of the request's body nothing came for {self.bounds.body_s:g} s")

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer, unless an answer has begun, and close."""
        self._stop_timer()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            headers = {"Connection": "close"} | ({"Retry-After": str(_RETRY_AFTER_S)} if status == 503 else {})
            answer = error_response(ApiError(message, status=status, code=code), headers)
            lines = [b"HTTP/1.1 %d %s" % (status, code.replace("_", " ").encode())]
            lines += [name + b": " + value for name, value in answer.raw_headers]
            self.transport.write(b"\r\n".join((*lines, b"", bytes(answer.body))))
        self.transport.close()
