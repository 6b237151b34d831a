"""The listening side: it admits connections of peers, and reads little from those that are not known yet."""

import contextlib
import errno
import hmac
import logging
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from windlass.storage.cancellation import CancelToken, Permits
from windlass.storage.ids import BoxName
from windlass.storage.link.errors import LinkClosed, LinkError, ProtocolError, Refused
from windlass.storage.link.keeper import Keeper
from windlass.storage.link.session import Connected
from windlass.storage.link.settings import Certificates, Identity, LinkSettings
from windlass.storage.link.wire import (
    HANDSHAKE_S,
    Codec,
    Hello,
    Keys,
    Refusal,
    Welcome,
    is_control,
    reason_to_refuse,
    receive_data_hello,
    receive_handshake,
    require_certificate_of,
    send_all,
    send_handshake,
)

MAX_HALF_OPEN = 16  # connections of boxes that are not known yet; more wait in the kernel's queue
_SESSION_NBYTES = 16
# Errors of one connection, or of a shortage that passes. All others mean that the listener is closed.
_PASSING_ERRORS = {
    errno.ECONNABORTED,
    errno.EINTR,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOBUFS,
    errno.ENOMEM,
    errno.EPERM,
    errno.EPROTO,
}
_PAUSE_S = 0.1  # after such an error

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Gathering:
    """A session whose data connections arrive."""

    keys: Keys
    data: dict[int, socket.socket] = field(default_factory=dict)


class Admission:
    """Accepts connections, and passes whole sessions on to the keepers of their peers."""

    def __init__(
        self,
        listener: socket.socket,
        identity: Identity,
        settings: LinkSettings,
        certificates: Certificates,
        codec: Codec,
        keepers: Mapping[BoxName, Keeper],
        instance: bytes,
        token: CancelToken,
    ) -> None:
        """`keepers`: those of the peers that connect to this box. `token`: of the link."""
        self._listener = listener
        self._identity = identity
        self._settings = settings
        self._context = certificates.context(is_server=True)
        self._codec = codec
        self._keepers = keepers
        self._instance = instance
        self._token = token
        self._half_open = Permits(token, MAX_HALF_OPEN)
        self._changed = threading.Condition()
        # Protected by `_changed`.
        self._gatherings: dict[bytes, _Gathering] = {}
        # Each thread that admits a connection, and that connection until it is passed on. Whoever closes it holds
        # `_changed`, because `run` may shut it down.
        self._admitting: dict[threading.Thread, socket.socket | None] = {}
        self._is_closed = False

    def run(self) -> None:
        """Accepts connections until the listener is shut down. Then ends those that are not passed on yet."""
        try:
            with contextlib.suppress(InterruptedError):  # the link was closed
                while self._accept_one():
                    pass
        finally:
            with self._changed:
                self._is_closed = True
                for connection in self._admitting.values():
                    if connection is not None:
                        with contextlib.suppress(OSError):
                            # That of SSLSocket would end TLS first, so that the rest was sent as plain text.
                            socket.socket.shutdown(connection, socket.SHUT_RDWR)
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._admitting)

    def _accept_one(self) -> bool:
        """Accepts a connection in a thread of its own. Returns False if the listener is shut down."""
        self._half_open.acquire("an unknown connection to become known")
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            self._half_open.release()
            if error.errno not in _PASSING_ERRORS:
                return False
            self._pause_after(error)
            return True
        thread = threading.Thread(target=self._admit, args=(connection,), name="link admission", daemon=True)
        with self._changed:
            self._admitting[thread] = connection
        try:
            thread.start()
        except RuntimeError as error:  # the system has no thread to give at present
            with self._changed:
                del self._admitting[thread]
            connection.close()
            self._half_open.release()
            self._pause_after(error)
        return True

    def _pause_after(self, error: Exception) -> None:
        _logger.warning("a connection was not accepted: %s", error)
        self._token.pause(_PAUSE_S)

    def _admit(self, connection: socket.socket) -> None:
        """Makes out which box has connected, and why."""
        with contextlib.ExitStack() as half_open:
            half_open.callback(self._half_open.release)
            until_s = time.monotonic() + HANDSHAKE_S
            try:
                connection.settimeout(HANDSHAKE_S)
                if is_control(connection):
                    self._admit_control(connection, until_s, half_open)
                else:
                    self._admit_data(connection, until_s)
            except (OSError, EOFError, LinkError) as error:
                _logger.info("a connection was not admitted: %s", error)
                self._close(connection)
            except BaseException:
                self._close(connection)
                raise
            finally:
                with self._changed:
                    del self._admitting[threading.current_thread()]
                    self._changed.notify_all()

    def _admit_control(self, raw: socket.socket, until_s: float, half_open: contextlib.ExitStack) -> None:
        raw.settimeout(max(0.001, until_s - time.monotonic()))
        control = self._context.wrap_socket(raw, server_side=True, do_handshake_on_connect=False)
        gathering: _Gathering | None = None
        try:
            with self._changed:
                if self._is_closed:
                    raise LinkClosed("the link was closed")
                self._admitting[threading.current_thread()] = control
            control.do_handshake()
            keeper, hello = self._expect_peer(control, until_s)
            half_open.close()  # from here on the box is known
            keeper.replace()
            welcome = Welcome(
                instance=self._instance,
                session=secrets.token_bytes(_SESSION_NBYTES),
                data_secret=secrets.token_bytes(32),
                received=keeper.peer.received,
            )
            gathering = _Gathering(Keys.agreed(self._identity, hello, welcome))
            with self._changed:
                self._gatherings[welcome.session] = gathering
            send_handshake(control, welcome)
            data = self._gather(gathering)
        except BaseException:
            with self._changed:
                if gathering is not None:
                    del self._gatherings[gathering.keys.session]  # from here on no data connection joins it
                self._close(control, *(gathering.data.values() if gathering is not None else ()))
            raise
        keeper.accept(
            Connected(control=control, data=data, keys=gathering.keys, is_dialer=False, received=hello.received)
        )

    def _expect_peer(self, control: ssl.SSLSocket, until_s: float) -> tuple[Keeper, Hello]:
        """Receives the first message of a peer. Raises Refused, after an answer, if it may not connect."""
        hello = receive_handshake(control, until_s)
        if not isinstance(hello, Hello):
            raise ProtocolError("the first message is no hello")
        require_certificate_of(control, hello.box)
        keeper = self._keepers.get(BoxName(hello.box))
        reason, received = reason_to_refuse(hello, self._identity, self._settings, self._codec), 0
        if keeper is None:
            reason = reason or f"box {hello.box!r} does not connect to this box in this job"
        elif not reason and not keeper.peer.is_instance(hello.instance):
            reason = "it was started anew within the attempt, so its state is lost"
        elif not reason and keeper.peer.ended is not None:
            reason, received = f"it was given up here: {keeper.peer.ended}", keeper.peer.received
        if keeper is None or reason:
            send_handshake(control, Refusal(reason, received))
            raise Refused(f"box {hello.box!r}: {reason}")
        return keeper, hello

    def _gather(self, gathering: _Gathering) -> list[socket.socket]:
        """Waits for the data connections of a session, and returns them in order. Its sockets may be passed on then."""
        number = self._settings.num_streams
        with self._changed:
            self._changed.wait_for(lambda: len(gathering.data) == number or self._is_closed, HANDSHAKE_S)
            if len(gathering.data) < number:
                raise TimeoutError(f"{len(gathering.data)} of {number} data connections came in time")
            del self._gatherings[gathering.keys.session]
            self._admitting[threading.current_thread()] = None
        return [gathering.data[stream] for stream in range(number)]

    def _admit_data(self, connection: socket.socket, until_s: float) -> None:
        session, stream, proof = receive_data_hello(connection, until_s)
        with self._changed:
            gathering = self._gatherings.get(session)
        if gathering is None or stream >= self._settings.num_streams:
            raise ProtocolError("a data connection of no session")
        if not hmac.compare_digest(proof, gathering.keys.proof(stream, from_dialer=True)):
            raise ProtocolError("a data connection that does not know the keys of its session")
        send_all(connection, [memoryview(gathering.keys.proof(stream, from_dialer=False))])
        with self._changed:
            if session not in self._gatherings or stream in gathering.data:
                raise ProtocolError("a data connection that comes too late")
            gathering.data[stream] = connection
            self._admitting[threading.current_thread()] = None
            self._changed.notify_all()

    def _close(self, *connections: socket.socket) -> None:
        with self._changed:
            for each in connections:
                each.close()
