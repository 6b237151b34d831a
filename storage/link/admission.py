"""The listening side: it admits connections of peers, and reads little from those that are not known yet."""

import contextlib
import errno
import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from windlass.storage.ids import BoxName
from windlass.storage.link.errors import LinkError, ProtocolError, Refused
from windlass.storage.link.peer import Peer
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
    """Accepts connections, and passes whole sessions on."""

    def __init__(
        self,
        listener: socket.socket,
        identity: Identity,
        settings: LinkSettings,
        certificates: Certificates,
        codec: Codec,
        peers: Mapping[BoxName, Peer],
        instance: bytes,
        *,
        replace: Callable[[Peer], None],
        on_connected: Callable[[Peer, Connected], None],
    ) -> None:
        """`peers`: those that connect to this box. `replace` ends the connections that a peer has now."""
        self._listener = listener
        self._identity = identity
        self._settings = settings
        self._context = certificates.context(is_server=True)
        self._codec = codec
        self._peers = peers
        self._instance = instance
        self._replace = replace
        self._on_connected = on_connected
        self._half_open = threading.Semaphore(MAX_HALF_OPEN)
        self._changed = threading.Condition()
        self._gatherings: dict[bytes, _Gathering] = {}  # protected by `_changed`

    def run(self) -> None:
        """Accepts connections until the listener is shut down."""
        while True:
            self._half_open.acquire()
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                self._half_open.release()
                if error.errno not in _PASSING_ERRORS:
                    return
                _logger.warning("a connection was not accepted: %s", error)
                time.sleep(_PAUSE_S)
                continue
            threading.Thread(target=self._admit, args=(connection,), name="link admission", daemon=True).start()

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
                connection.close()
            except BaseException:
                connection.close()
                raise

    def _admit_control(self, raw: socket.socket, until_s: float, half_open: contextlib.ExitStack) -> None:
        raw.settimeout(max(0.001, until_s - time.monotonic()))
        control = self._context.wrap_socket(raw, server_side=True)
        gathering: _Gathering | None = None
        try:
            hello = receive_handshake(control, until_s)
            if not isinstance(hello, Hello):
                raise ProtocolError("the first message is no hello")
            require_certificate_of(control, hello.box)
            peer = self._peers.get(BoxName(hello.box))
            reason = reason_to_refuse(hello, self._identity, self._settings, self._codec)
            if peer is None:
                reason = reason or f"box {hello.box!r} does not connect to this box in this job"
            elif not reason and peer.lost is not None:
                reason = f"it was given up here: {peer.lost}"
            elif not reason and not peer.is_instance(hello.instance):
                reason = "it was started anew within the attempt, so its state is lost"
            if peer is None or reason:
                send_handshake(control, Refusal(reason))
                raise Refused(f"box {hello.box!r}: {reason}")
            half_open.close()  # from here on the box is known
            self._replace(peer)
            welcome = Welcome(
                instance=self._instance,
                session=secrets.token_bytes(_SESSION_NBYTES),
                data_secret=secrets.token_bytes(32),
                received=peer.received,
            )
            gathering = _Gathering(Keys.agreed(self._identity, hello, welcome))
            with self._changed:
                self._gatherings[welcome.session] = gathering
            send_handshake(control, welcome)
            data = self._gathered(gathering)
        except BaseException:
            control.close()
            for each in gathering.data.values() if gathering is not None else ():
                each.close()
            raise
        connected = Connected(control=control, data=data, keys=gathering.keys, is_dialer=False, received=hello.received)
        self._on_connected(peer, connected)

    def _gathered(self, gathering: _Gathering) -> list[socket.socket]:
        """Waits for the data connections of a session, and returns them in order."""
        number = self._settings.num_streams
        with self._changed:
            try:
                if not self._changed.wait_for(lambda: len(gathering.data) == number, HANDSHAKE_S):
                    raise TimeoutError(f"{len(gathering.data)} of {number} data connections came in time")
            finally:
                del self._gatherings[gathering.keys.session]
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
            self._changed.notify_all()
