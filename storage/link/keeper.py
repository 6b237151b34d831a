"""The upkeep of the connections to one peer: they are made, served, and made anew when they end."""

import contextlib
import logging
import threading
from collections.abc import Callable

from windlass.storage.cancellation import CancelToken
from windlass.storage.link.errors import LinkError, ProtocolError, Refused
from windlass.storage.link.peer import Peer
from windlass.storage.link.session import Connected, Session
from windlass.storage.link.wire import HANDSHAKE_S, DamagedFrame

_RETRY_S = 0.2  # between attempts to connect
# Connections in succession that may end with a damaged frame while no piece arrives whole. Damage that lets some pieces
# through costs new connections, but not the peer.
_MAX_DAMAGED = 3

_logger = logging.getLogger(__name__)


class Keeper:
    """Keeps the connections to one peer. It owns their sockets, and closes each whatever happens."""

    def __init__(
        self,
        peer: Peer,
        token: CancelToken,
        dial: Callable[[], Connected] | None,
        make_session: Callable[[Connected], Session],
    ) -> None:
        """`token`: of the link. `dial` connects to the peer; None: the peer connects, and `accept` is called."""
        self.peer = peer
        self._token = token
        self._dial = dial
        self._make_session = make_session
        self._changed = threading.Condition()
        # Protected by `_changed`.
        self._session: Session | None = None  # the last one
        self._accepted: Connected | None = None

    def run(self) -> None:
        """Makes and serves connections until the peer has ended or the link is closed."""
        while self._is_needed():
            try:
                error = self._connect_and_serve()
            except Exception as failure:  # noqa: BLE001  `_judge` decides what it means
                self.peer.note(failure)
                error = failure
            if error is not None and self._is_needed():
                self._judge(error)

    def accept(self, connected: Connected) -> None:
        """Gets connections that the peer has made, which take the place of others that are not served yet."""
        with self._changed:
            if self._is_needed():
                unused, self._accepted = self._accepted, connected
            else:
                unused = connected
            self._changed.notify_all()
        if unused is not None:
            unused.close()

    def replace(self) -> None:
        """Ends the present connections because the peer makes new ones. Raises TimeoutError if they do not end."""
        self.end(Refused("it has connected anew"))
        self.peer.await_disconnected(HANDSHAKE_S)

    def end(self, error: Exception | None) -> None:
        """Ends the present connections, for a reason, and wakes `run`."""
        with self._changed:
            session = self._session
            unused, self._accepted = self._accepted, None
            self._changed.notify_all()
        if unused is not None:
            unused.close()
        if session is not None:
            session.end(error)

    def join(self) -> None:
        """Waits for the threads of the last connections, after `run` has ended. Raises TimeoutError if one hangs."""
        if self._session is not None:
            self._session.join()

    def _is_needed(self) -> bool:
        return self.peer.ended is None and not self._token.is_cancelled

    def _connect_and_serve(self) -> Exception | None:
        """Returns why the connections ended; None if this box ended them."""
        connected = self._await_accepted() if self._dial is None else self._dial()
        if connected is None:
            return None
        with contextlib.closing(connected):
            session = self._make_session(connected)
            with self._changed:
                self._session = session
            if self._token.is_cancelled:  # `end` may have come before there was a session
                session.end(None)
            error: Exception | None = None
            try:
                error = session.serve()
            finally:
                self.peer.disconnected(error)
        return error

    def _await_accepted(self) -> Connected | None:
        with self._changed:
            self._token.wait_for_work(self._changed, lambda: self._accepted is not None or self.peer.ended is not None)
            accepted, self._accepted = self._accepted, None
        return accepted

    def _judge(self, error: Exception) -> None:
        """Decides what a failure means: connections that are made anew, or the loss of the peer."""
        _logger.info("box %s: %s", self.peer.name, error)
        if not isinstance(error, OSError | EOFError | LinkError):
            self.peer.lose(f"cannot be served: {error!r}")
        elif isinstance(error, ProtocolError):
            self.peer.lose(f"broke the protocol: {error}")
        elif isinstance(error, DamagedFrame) and self.peer.count_damaged() >= _MAX_DAMAGED:
            self.peer.lose(f"sent {_MAX_DAMAGED} damaged frames and nothing whole between them")
        elif self._dial is not None:
            self._token.pause(_RETRY_S)
