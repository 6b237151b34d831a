"""Bounds on the connections of a server's clients: how many there are, and how long one may keep the service waiting.

Without them a client that opens connections, and sends or reads nothing, holds them open for ever. Then the service
can accept no other client. Where all places are taken, such connections make room, those of whoever has most first.
"""

import asyncio
import ipaddress
import logging
import ssl
import time
from asyncio.sslproto import SSLProtocol
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.utils import get_remote_addr, is_ssl

from windlass.amounts import bytes_text
from windlass.service.http.errors import error_response
from windlass.service.installation import Settings, address_of
from windlass.service.validation import ApiError

_LOG = logging.getLogger(__name__)

_RETRY_AFTER_S = 5
_LOG_INTERVAL_S = 60.0  # between two lines on connections that are refused or cut
# Refused connections whose TLS handshake is in progress. Without one the client cannot be told why it is refused.
_MOST_REFUSED_HANDSHAKES = 50
_ALERT_S = 0.05  # for the alert of a failed handshake to leave
# An address of IPv6 is a network of those that one client may choose from.
_IPV6_PREFIX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionBounds:
    """Limits on what clients may do."""

    most: int
    most_per_address: int
    unlimited: Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network] = ()  # addresses of proxies, for many clients
    head_s: float = 20.0  # for a request's head, from its first byte, or from the connection's start
    max_head_nbytes: int = 64 * 1024
    # Of a body so many bytes must come within so long, until all of it is there.
    body_s: float = 60.0
    min_body_nbytes: int = 4096
    write_s: float = 60.0  # for the client to read something of what waits to be sent
    # Of a body `min_body_nbytes`, or of an answer anything, must pass within so long, or the connection may make room.
    stall_s: float = 10.0

    @classmethod
    def of(cls, settings: Settings) -> "ConnectionBounds":
        """Returns the limits that an installation's settings say."""
        return cls(
            most=settings.max_connections,
            most_per_address=settings.max_connections_per_address,
            unlimited=tuple(ipaddress.ip_network(each) for each in settings.trusted_proxies),
        )


class Displaceable(Protocol):
    """A connection that may be closed for another one."""

    def may_be_cut(self) -> bool:
        """Tells whether the client keeps the service waiting."""

    def cut(self) -> None:
        """Close it now, and forget it."""


@dataclass(slots=True)
class OpenConnections:
    """Counts the connections that are open, and knows which of them may make room for others."""

    bounds: ConnectionBounds
    total: int = 0
    by_client: Counter[str] = field(default_factory=Counter)
    num_refused_handshakes: int = 0
    # By client, in the order in which they began to: those that wait for it, or may.
    _waiting: dict[str, dict[Displaceable, None]] = field(default_factory=dict)
    _logged_at_s: float = -_LOG_INTERVAL_S  # of the monotonic clock

    def admit(self, host: str) -> str | None:
        """Count one more of a client, if need be in the place of another; why it is refused instead."""
        client = self.client_of(host)
        if client is not None and self.by_client[client] >= self.bounds.most_per_address:
            self._log("connections are refused", host, "max_connections_per_address", self.bounds.most_per_address)
            return (
                f"your address has {self.by_client[client]} connections open, and gets no more; close some, or ask the "
                "administrator to raise max_connections_per_address"
            )
        if self.total >= self.bounds.most and not self._make_room():
            self._log("connections are refused", host, "max_connections", self.bounds.most)
            return (
                f"the service has {self.total} connections open, and takes no more; try again later, or ask the "
                "administrator to raise max_connections"
            )
        self.total += 1
        if client is not None:
            self.by_client[client] += 1
        return None

    def forget(self, host: str, connection: Displaceable | None = None) -> None:
        """Count one less of a client that was admitted."""
        self.total -= 1
        if connection is not None:
            self.no_longer_waits(host, connection)
        if (client := self.client_of(host)) is not None:
            self.by_client[client] -= 1
            if not self.by_client[client]:
                del self.by_client[client]

    def waits(self, host: str, connection: Displaceable) -> None:
        """Let one that was admitted make room from now on, whenever it may be cut."""
        self._waiting.setdefault(self.client_of(host) or host, {}).setdefault(connection)

    def no_longer_waits(self, host: str, connection: Displaceable) -> None:
        """Keep it."""
        client = self.client_of(host) or host
        if (of_client := self._waiting.get(client)) is not None:
            of_client.pop(connection, None)
            if not of_client:
                del self._waiting[client]

    def _make_room(self) -> bool:
        """Cut that which has waited longest, of the client for which most wait; False where none may be cut."""
        for client in sorted(self._waiting, key=self._num_waiting, reverse=True):
            for connection in self._waiting[client]:
                if connection.may_be_cut():
                    self._log("connections make room for others", client, "max_connections", self.bounds.most)
                    connection.cut()
                    return True
        return False

    def _num_waiting(self, client: str) -> int:
        return len(self._waiting[client])

    def _log(self, what: str, host: str, setting: str, limit: int) -> None:
        """Tell the administrator, but not once for each of thousands of connections."""
        if time.monotonic() - self._logged_at_s >= _LOG_INTERVAL_S:
            self._logged_at_s = time.monotonic()
            _LOG.warning("%s, of %s for example: %s is %d", what, host, setting, limit)

    def client_of(self, host: str) -> str | None:
        """The address, or network, that connections are counted for; None for one that has no limit of its own."""
        address = address_of(host.partition("%")[0])
        if address is None or any(address in network for network in self.bounds.unlimited):
            return None
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None and not address.is_loopback:
            return str(ipaddress.ip_network((address, _IPV6_PREFIX), strict=False))
        return str(address)


def bounded_protocol(
    bounds: ConnectionBounds,
    *,
    tls: ssl.SSLContext | None = None,
    base: "type[BoundedConnection] | None" = None,
) -> type[HttpToolsProtocol]:
    """The protocol class that uvicorn is to serve connections with. `base`: a subclass of `BoundedConnection`.

    With `tls` the protocol itself does the handshake. Left to uvicorn's sockets, a connection would be counted only
    after its handshake. uvicorn must be given no certificate then.
    """
    members = {"bounds": bounds, "counts": OpenConnections(bounds), "tls": tls}
    return cast(type[HttpToolsProtocol], type("BoundedProtocol", (base or BoundedConnection,), members))


class BoundedConnection(HttpToolsProtocol):
    """A connection that ends where its client keeps the service waiting."""

    bounds: ConnectionBounds
    counts: OpenConnections
    tls: ssl.SSLContext | None

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        # The service has no websockets. A protocol for them would take the connection over, and never uncount it.
        self.ws_protocol_class = None
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._num_unsent_bytes = 0  # when the write timer was set
        self._unread_since_s = 0.0  # of the loop's clock: when it was
        self._socket: asyncio.Transport | None = None  # below TLS, if there is any
        self._counted_for: str | None = None
        self._refusal: str | None = None
        self._is_refused_handshake = False
        self._is_in_head = True  # or before one
        self._num_head_bytes = 0
        self._num_body_bytes = 0  # since the timer was set
        # When the last so many bytes of a body were there that make no stall, and how many came since then.
        self._body_moved_s = 0.0
        self._num_bytes_since = 0
        self._is_body_held_up = False  # by the service

    # --- what the transport tells ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called for the socket, and with TLS once more, after the handshake."""
        if not is_ssl(transport):
            client = get_remote_addr(transport)
            host = client[0] if client else ""
            self._refusal = self.counts.admit(host)
            self._socket = transport
            if self._refusal is None:
                self._counted_for = host
                self.counts.waits(host, self)
            if self.tls is not None:
                self._shake_hands(transport, self.tls)
                return
        self._end_refused_handshake()
        super().connection_made(transport)
        if self._refusal is None:
            self._await_head()
        else:
            self._refuse(503, "too_many_connections", self._refusal)

    def _shake_hands(self, transport: asyncio.Transport, tls: ssl.SSLContext) -> None:
        if self._refusal is not None:
            if self.counts.num_refused_handshakes >= _MOST_REFUSED_HANDSHAKES:
                transport.abort()
                return
            self.counts.num_refused_handshakes += 1
            self._is_refused_handshake = True
        # At once, and not by the loop's `start_tls`: uvloop would hand what comes until then to this protocol.
        protocol = _Tls(self, tls)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)

    def socket_lost(self) -> None:
        """Count the connection no more; also called where its handshake failed, so that it never was one to uvicorn."""
        self._end_refused_handshake()
        if self._counted_for is not None:
            self.counts.forget(self._counted_for, self)
            self._counted_for = None

    def may_be_cut(self) -> bool:
        """Tells whether it waits for its client while no request of it is being answered."""
        if self.transport is None:
            return True  # its handshake is not done
        num_unsent = self._count_unsent()
        if num_unsent:
            if num_unsent < self._num_unsent_bytes:
                self._await_reader()
            return self.loop.time() - self._unread_since_s >= self.bounds.stall_s
        return not self._is_being_asked() or self._body_stalls()

    def cut(self) -> None:
        """Close it with what waits to be sent, as its client takes nothing of that."""
        self.socket_lost()
        if self._socket is not None:
            self._socket.abort()

    def _is_being_asked(self) -> bool:
        """Tells whether a request is not answered in full."""
        return self.cycle is not None and not self.cycle.response_complete

    def _body_stalls(self) -> bool:
        if self._is_in_head:
            return False  # all of it is there
        is_held_up = self.flow.read_paused or self.cycle.waiting_for_100_continue
        if is_held_up or self._is_body_held_up:
            self._is_body_held_up, self._body_moved_s = is_held_up, self.loop.time()
        return self.loop.time() - self._body_moved_s >= self.bounds.stall_s

    def _count_unsent(self) -> int:
        num_unsent = self.transport.get_write_buffer_size()
        if self.tls is not None and self._socket is not None:
            num_unsent += self._socket.get_write_buffer_size()  # encrypted
        return num_unsent

    def _tell_who_waits(self) -> None:
        """Tell whether the service waits for the client, or may soon."""
        if self._counted_for is None:
            return
        if not self._is_being_asked() or not self._is_in_head or self.flow.write_paused:
            self.counts.waits(self._counted_for, self)
        else:
            self.counts.no_longer_waits(self._counted_for, self)

    def _end_refused_handshake(self) -> None:
        self.counts.num_refused_handshakes -= self._is_refused_handshake
        self._is_refused_handshake = False

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_write_timer()
        if self.tls is None:
            self.socket_lost()
        if self.transport is not None:  # else it was refused before its handshake
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
            limit = bytes_text(self.bounds.max_head_nbytes)
            self._refuse(431, "head_too_large", f"a request's head has at most {limit}; send fewer headers")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()
        self._tell_who_waits()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()
        if self.cycle is not None and self.cycle.response_complete:
            self._await_reader()
        self._tell_who_waits()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # What is left of the answer keeps the connection open, also where uvicorn has closed it.
        self._await_reader()
        self._tell_who_waits()

    # --- what the parser tells ---

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._is_in_head = False
        self._await_body()
        super().on_headers_complete()
        self._body_moved_s, self._num_bytes_since = self.loop.time(), 0
        self._is_body_held_up = self.cycle.waiting_for_100_continue

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        self._num_bytes_since += len(body)
        if self._num_bytes_since >= self.bounds.min_body_nbytes:
            self._body_moved_s, self._num_bytes_since = self.loop.time(), 0
        super().on_body(body)
        self._is_body_held_up |= self.flow.read_paused

    def on_message_complete(self) -> None:
        self._stop_timer()
        self._is_in_head, self._num_head_bytes = True, 0
        super().on_message_complete()
        self._tell_who_waits()

    # --- time ---

    def _await_head(self) -> None:
        self._timer = self.loop.call_later(self.bounds.head_s, self._on_head_late)

    def _await_body(self) -> None:
        self._num_body_bytes = 0
        self._timer = self.loop.call_later(self.bounds.body_s, self._on_body_late)

    def _await_reader(self) -> None:
        self._stop_write_timer()
        self._num_unsent_bytes, self._unread_since_s = self._count_unsent(), self.loop.time()
        if self._num_unsent_bytes:
            self._write_timer = self.loop.call_later(self.bounds.write_s, self._on_reader_late)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_head_late(self) -> None:
        message = f"no whole head of a request came within {self.bounds.head_s:g} s; send the request again, at once"
        self._refuse(408, "request_timeout", message)

    def _on_body_late(self) -> None:
        # The client is not late where the app does not read the body, or has yet to ask for it (100 Continue).
        is_held_up = self.flow.read_paused or self.cycle.waiting_for_100_continue
        if is_held_up or self._num_body_bytes >= self.bounds.min_body_nbytes:
            self._await_body()
            return
        message = (
            f"of the request's body {bytes_text(self._num_body_bytes)} came in {self.bounds.body_s:g} s, and it takes "
            f"{bytes_text(self.bounds.min_body_nbytes)}; send the request again, faster"
        )
        self._refuse(408, "request_timeout", message)

    def _on_reader_late(self) -> None:
        # Only the app, which waits while writing is paused, and a further answer make the buffer longer.
        if self._count_unsent() < self._num_unsent_bytes:
            self._await_reader()
        else:
            self.transport.abort()  # to close would wait until all is sent

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
        self._await_reader()


class _Tls(SSLProtocol):
    """The TLS of a connection, between its socket and the protocol of HTTP."""

    def __init__(self, connection: BoundedConnection, context: ssl.SSLContext) -> None:
        super().__init__(
            connection.loop,
            connection,
            context,
            None,  # type: ignore[arg-type]  # no future: `socket_lost` tells of a handshake that failed
            server_side=True,
            ssl_handshake_timeout=connection.bounds.head_s,  # type: ignore[arg-type]  # any number of seconds
        )
        self._connection = connection
        self._has_failed = False

    def _on_handshake_complete(self, handshake_exc: BaseException | None) -> None:
        """Called by `SSLProtocol`. The client of a failed handshake is told why, by an alert, before the socket closes.

        `SSLProtocol` alone would close it with the alert unsent.
        """
        if handshake_exc is None:
            super()._on_handshake_complete(None)
        elif not self._has_failed:
            self._has_failed = True
            self._process_outgoing()  # type: ignore[attr-defined]
            end = super()._on_handshake_complete
            self._connection.loop.call_later(_ALERT_S, end, handshake_exc)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._connection.socket_lost()
