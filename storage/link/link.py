"""The link of a box: it pulls bytes from other boxes of the job, lets them pull its own, and carries messages."""

import collections
import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any, Self

from windlass.storage.cancellation import CancelToken
from windlass.storage.ids import BoxName
from windlass.storage.io_scheduler import IoResult
from windlass.storage.link.admission import Admission
from windlass.storage.link.errors import LinkClosed, LinkError, PeerLost, ProtocolError, Refused
from windlass.storage.link.keys import LinkKey
from windlass.storage.link.peer import Peer
from windlass.storage.link.session import Connected, Session
from windlass.storage.link.settings import Certificates, Identity, LinkSettings
from windlass.storage.link.traffic import Traffic
from windlass.storage.link.transfers import Offer, Pull
from windlass.storage.link.wire import (
    HANDSHAKE_S,
    Codec,
    DamagedFrame,
    Keys,
    connect_control,
    connect_data,
    expect_welcome,
    make_hello,
    receive_handshake,
    send_handshake,
)
from windlass.storage.threads import GuardedThreads

_BACKLOG = 64
_RETRY_S = 0.2  # between attempts to connect
_MAX_DAMAGED = 3  # connections to one peer that end with a damaged frame
_CLOSE_S = 30.0  # for the threads, each of whose waits ends
_FLUSH_S = 5.0  # for the peers to confirm the last messages

_logger = logging.getLogger(__name__)


def listen(host: str, port: int = 0) -> socket.socket:
    """Returns a socket that listens at one address of this box. Port 0: any that is free.

    Raises:
        ValueError: the address stands for all addresses of this box.
        OSError: the address is not one of this box, or the port is in use.
    """
    if host in ("", "0.0.0.0", "::"):
        raise ValueError(f"a link must listen at one address of this box, not at {host!r}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


class Link:
    """The connections of this box to the others of a job. All methods but `close` may be called by any thread.

    No box ever sends data that the other has not asked for, into memory that it has reserved. Of two boxes, the one
    whose name comes first connects. Lost connections are made anew, and all transfers go on, for `silence_s` seconds.
    """

    def __init__(
        self,
        identity: Identity,
        listener: socket.socket,
        peers: Mapping[BoxName, tuple[str, int]],
        certificates: Certificates,
        settings: LinkSettings,
        codec: Codec,
        on_message: Callable[[BoxName, Any], None],
        on_lost: Callable[[BoxName, PeerLost], None],
    ) -> None:
        """Internal: use `start`."""
        self._identity = identity
        self._listener = listener
        self._addresses = peers
        self._certificates = certificates
        self._settings = settings
        self._codec = codec
        self._on_lost = on_lost
        self._token = CancelToken()
        self._instance = secrets.token_bytes(16)
        self._peers = {name: Peer(name, settings, codec, self._token, on_message, self._lost) for name in peers}
        self._changed = threading.Condition()
        # Protected by `_changed`.
        self._sessions: dict[BoxName, Session] = {}
        self._accepted: dict[BoxName, Connected] = {}
        self._next_watch_s = 0.0
        self._threads = GuardedThreads(f"link {identity.box}", identity.job, self._report)
        waiting = {name: peer for name, peer in self._peers.items() if not self._dials(name)}
        self._admission = Admission(
            listener,
            identity,
            settings,
            certificates,
            codec,
            waiting,
            self._instance,
            replace=self._end_session,
            on_connected=self._accept,
        )

    @classmethod
    def start(
        cls,
        identity: Identity,
        listener: socket.socket,
        peers: Mapping[BoxName, tuple[str, int]],
        certificates: Certificates,
        *,
        settings: LinkSettings | None = None,
        codec: Codec | None = None,
        on_message: Callable[[BoxName, Any], None] = lambda box, message: None,
        on_lost: Callable[[BoxName, PeerLost], None] = lambda box, error: None,
    ) -> Self:
        """Starts to listen and to connect, and returns at once.

        `listener` is of `listen`, and belongs to the link from now on. `peers`: the addresses of the other boxes.
        `on_message` gets the messages of each peer in their order. It must be quick and must not raise, because
        heartbeats wait for it. `on_lost` is called once for each peer that does not come back.
        """
        if identity.box in peers:
            raise ValueError(f"box {identity.box!r} is its own peer")
        link = cls(
            identity, listener, peers, certificates, settings or LinkSettings(), codec or Codec(), on_message, on_lost
        )
        keepers = [link._make_keeper(peer) for peer in link._peers.values()]
        link._threads.start([link._run_admission, link._run_watch, *keepers])
        return link

    def offer(self, key: LinkKey, buffer: memoryview, to: Collection[BoxName]) -> "Future[IoResult]":
        """Keeps bytes until all the named boxes have pulled them; then the future gets its result.

        The buffer belongs to the link until then. If the future fails, with PeerLost or LinkClosed, the buffer belongs
        to the link until `close` has returned.

        Raises:
            ValueError: the key is offered already, or the buffer is empty.
            PeerLost: one of the boxes is lost.
        """
        buffer = _bytes_of(buffer)
        offer = Offer(key=key, buffer=buffer, readers=set(to))
        for name in to:
            self._peer(name).offer(offer)
        return offer.future

    def pull(
        self,
        key: LinkKey,
        into: memoryview,
        *,
        source: BoxName,
        priority: tuple[int, int] = (0, 0),
        deadline_s: float | None = None,
    ) -> "Future[IoResult]":
        """Fills memory with the bytes of a key as soon as `source` offers them; then the future gets its result.

        The smallest priority goes first; ties go in order of arrival. Callbacks of the future run in a thread of the
        link, and must be quick. The buffer belongs to the link until then. If
        the future fails, with PullOverdue, PeerLost or LinkClosed, it belongs to the link until `close` has returned.

        Raises:
            ValueError: the key is being pulled already, or the buffer is empty or read-only.
            LinkError: the box offers another number of bytes.
            PeerLost: the box is lost.
        """
        into = _bytes_of(into)
        if into.readonly:
            raise ValueError(f"the buffer for {key} is read-only")
        now_s = time.monotonic()
        until_s = None if deadline_s is None else now_s + deadline_s
        pull = Pull(key=key, into=into, priority=priority, since_s=now_s, until_s=until_s)
        self._peer(source).pull(pull)
        if until_s is not None:
            with self._changed:
                if until_s < self._next_watch_s:
                    self._changed.notify_all()
        return pull.future

    def send(self, to: BoxName, message: object) -> None:
        """Sends a message of a registered type. It arrives once, and after those sent before to the same box.

        Waits while the box has too many to confirm, but not if the caller is `on_message`.

        Raises:
            PeerLost: the box is lost.
            ValueError: the type is not registered, or the message is too large.
            InterruptedError: the link was closed meanwhile.
        """
        self._peer(to).send(message, may_wait=not self._threads.include_caller)

    def traffic(self) -> dict[BoxName, Traffic]:
        """Returns the traffic with each peer since the start, with the busy spans since the last call."""
        return {name: peer.traffic() for name, peer in self._peers.items()}

    def describe(self) -> str:
        """Describes what this box waits for, by the oldest pull from each peer; "" if it waits for nothing."""
        return "; ".join(text for peer in self._peers.values() if (text := peer.describe()))

    def close(self, flush_s: float = _FLUSH_S) -> None:
        """Waits for the peers to confirm all messages, and ends the link. Pulls and offers that are open fail.

        Raises:
            TimeoutError: a thread hangs. Buffers may still be in use.
        """
        until_s = time.monotonic() + flush_s
        if not self._token.is_cancelled:
            for peer in self._peers.values():
                peer.finish(until_s)
        self._token.cancel()
        with contextlib.suppress(OSError):  # it was shut down before
            self._listener.shutdown(socket.SHUT_RDWR)
        with self._changed:
            sessions = list(self._sessions.values())
            self._changed.notify_all()
        for session in sessions:
            session.end(None)
        self._threads.join(_CLOSE_S)
        self._listener.close()
        for connected in self._accepted.values():
            connected.close()
        for peer in self._peers.values():
            peer.close()

    # --- inside ---

    def _peer(self, name: BoxName) -> Peer:
        if self._token.is_cancelled:
            raise LinkClosed("the link was closed")
        peer = self._peers.get(name)
        if peer is None:
            raise ValueError(f"box {name!r} is no peer of box {self._identity.box!r}")
        return peer

    def _dials(self, name: BoxName) -> bool:
        return self._identity.box < name

    def _run_admission(self) -> None:
        self._admission.run()

    def _run_watch(self) -> None:
        while not self._token.is_cancelled:
            now_s = time.monotonic()
            for peer in self._peers.values():
                peer.watch(now_s)
            deadlines = (peer.next_deadline_s() for peer in self._peers.values())
            now_s = time.monotonic()
            with self._changed:
                self._next_watch_s = min((each for each in deadlines if each), default=now_s + 3600)
                self._next_watch_s = min(self._next_watch_s, now_s + self._settings.heartbeat_s)
                if not self._token.is_cancelled:
                    self._changed.wait(max(0.0, self._next_watch_s - now_s))

    def _lost(self, name: BoxName, error: PeerLost) -> None:
        with self._changed:
            session = self._sessions.get(name)
            self._changed.notify_all()
        if session is not None:
            session.end(error)
        self._on_lost(name, error)

    def _make_keeper(self, peer: Peer) -> Callable[[], None]:
        def _run_keeper() -> None:
            self._keep(peer)

        return _run_keeper

    def _keep(self, peer: Peer) -> None:
        """Connects to a peer, and serves the connections, until it is lost or the link is closed."""
        failures: collections.Counter[type] = collections.Counter()
        while peer.lost is None and not self._token.is_cancelled:
            error: Exception | None = None
            try:
                connected = self._dial(peer) if self._dials(peer.name) else self._await_accepted(peer)
                if connected is None:
                    continue
                session = Session(peer, connected, self._settings, self._codec, f"link {self._identity.box}")
                with self._changed:
                    self._sessions[peer.name] = session
                try:
                    if self._token.is_cancelled:
                        session.end(None)
                    error = session.serve()
                finally:
                    with self._changed:
                        del self._sessions[peer.name]
                peer.disconnected(error)
            except (OSError, EOFError, LinkError) as failure:
                error = failure
                peer.note(failure)
            if error is None or self._token.is_cancelled:
                continue
            _logger.info("box %s: %s", peer.name, error)
            failures[type(error)] += 1
            if not isinstance(error, OSError | EOFError | LinkError):
                peer.lose(f"sent what could not be carried out: {error!r}")
            elif isinstance(error, ProtocolError):
                peer.lose(f"broke the protocol: {error}")
            elif failures[DamagedFrame] >= _MAX_DAMAGED:
                peer.lose(f"sent {_MAX_DAMAGED} damaged frames")
            elif self._dials(peer.name):
                self._token.pause(_RETRY_S)

    def _dial(self, peer: Peer) -> Connected:
        address = self._addresses[peer.name]
        control = connect_control(address, peer.name, self._certificates)
        data: list[socket.socket] = []
        try:
            hello = make_hello(
                self._identity,
                self._settings,
                self._codec,
                to=peer.name,
                instance=self._instance,
                received=peer.received,
            )
            send_handshake(control, hello)
            answer = receive_handshake(control, time.monotonic() + 2 * HANDSHAKE_S)
            welcome = expect_welcome(answer)
            if not peer.is_instance(welcome.instance):
                raise ProtocolError("it was started anew within the attempt, so its state is lost")
            keys = Keys.agreed(self._identity, hello, welcome)
            for stream in range(self._settings.num_streams):
                data.append(connect_data(address, keys, stream))
        except BaseException:
            for each in (control, *data):
                each.close()
            raise
        return Connected(control=control, data=data, keys=keys, is_dialer=True, received=welcome.received)

    def _await_accepted(self, peer: Peer) -> Connected | None:
        with self._changed:
            self._changed.wait_for(
                lambda: peer.name in self._accepted or peer.lost is not None or self._token.is_cancelled
            )
            return self._accepted.pop(peer.name, None)

    def _accept(self, peer: Peer, connected: Connected) -> None:
        with self._changed:
            if self._token.is_cancelled:
                unused: Connected | None = connected
            else:
                unused = self._accepted.pop(peer.name, None)
                self._accepted[peer.name] = connected
            self._changed.notify_all()
        if unused is not None:
            unused.close()

    def _end_session(self, peer: Peer) -> None:
        """Ends the connections that a peer has now, because it has made new ones."""
        with self._changed:
            session = self._sessions.get(peer.name)
            older = self._accepted.pop(peer.name, None)
        if older is not None:
            older.close()
        if session is not None:
            session.end(Refused("it has connected anew"))
        peer.await_disconnected(HANDSHAKE_S)

    def _report(self, error: Exception, _: object) -> None:
        _logger.error("a thread of the link of box %s has died", self._identity.box, exc_info=error)


def _bytes_of(buffer: memoryview) -> memoryview:
    buffer = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
    if not buffer.nbytes:
        raise ValueError("a buffer of no bytes")
    return buffer
