"""The link of a box: it pulls bytes from other boxes of the job, lets them pull its own, and carries messages."""

import contextlib
import functools
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
from windlass.storage.link.dialer import Dialer
from windlass.storage.link.errors import LinkClosed, PeerClosed, PeerLost
from windlass.storage.link.keeper import Keeper
from windlass.storage.link.keys import LinkKey
from windlass.storage.link.peer import Peer
from windlass.storage.link.session import Connected, Session
from windlass.storage.link.settings import Certificates, Identity, LinkSettings
from windlass.storage.link.transfers import Offer, Pull
from windlass.storage.link.wire import Codec
from windlass.storage.threads import GuardedThreads

_BACKLOG = 64
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
        self._settings = settings
        self._codec = codec
        self._on_lost = on_lost
        self._token = CancelToken()
        instance = secrets.token_bytes(16)
        self._dialer = Dialer(identity, settings, certificates, codec, instance)
        self._peers = {name: Peer(name, settings, codec, self._token, on_message, self._ended) for name in peers}
        self._keepers = {name: self._make_keeper(peer, peers[name]) for name, peer in self._peers.items()}
        self._changed = threading.Condition()
        self._next_watch_s = 0.0  # protected by `_changed`
        self._threads = GuardedThreads(f"link {identity.box}", identity.job, self._report)
        waiting = {name: keeper for name, keeper in self._keepers.items() if not self._dials(name)}
        self._admission = Admission(listener, identity, settings, certificates, codec, waiting, instance, self._token)

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

        `listener` is of `listen`, and belongs to the link from now on, also if this raises. `peers`: the addresses of
        the other boxes. `on_message` gets the messages of each peer in their order. It must be quick and must not
        raise, because heartbeats wait for it. `on_lost` is called once for each peer that is lost. It is not called
        for a peer that closes its link: what is open with that one fails with PeerClosed.

        Raises:
            ValueError: the box is its own peer.
            OSError: a certificate cannot be read.
        """
        with contextlib.ExitStack() as failed:
            failed.callback(listener.close)
            if identity.box in peers:
                raise ValueError(f"box {identity.box!r} is its own peer")
            link = cls(
                identity,
                listener,
                peers,
                certificates,
                settings or LinkSettings(),
                codec or Codec(),
                on_message,
                on_lost,
            )
            failed.callback(link.close, 0.0)
            runs = [link._make_run(keeper) for keeper in link._keepers.values()]
            link._threads.start([link._run_admission, link._run_watch, *runs])
            failed.pop_all()
        return link

    def offer(self, key: LinkKey, buffer: memoryview, to: Collection[BoxName]) -> "Future[IoResult]":
        """Keeps bytes until all the named boxes have pulled them; then the future gets its result.

        The buffer belongs to the link until then. If the future fails, with PeerLost, PeerClosed or LinkClosed, the
        buffer belongs to the link until `close` has returned.

        Raises:
            ValueError: the key is offered already, or the buffer is empty.
            PeerLost, PeerClosed: one of the boxes is lost, or has closed its link.
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

        The memory may be larger than what is offered, which goes to its beginning; the result has the number of bytes.

        The smallest priority goes first; ties go in order of arrival. Callbacks of the future run in a thread of the
        link, and must be quick. The buffer belongs to the link until then. If the future fails, with PullOverdue,
        PeerLost, PeerClosed or LinkClosed, it belongs to the link until `close` has returned.

        Raises:
            ValueError: the key is being pulled already, or the buffer is empty or read-only.
            LinkError: the box offers more bytes.
            PeerLost, PeerClosed: the box is lost, or has closed its link.
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
            PeerLost, PeerClosed: the box is lost, or has closed its link.
            ValueError: the type is not registered, or the message is too large.
            InterruptedError: the link was closed meanwhile.
        """
        self._peer(to).send(message, may_wait=not self._threads.include_caller)

    def describe(self) -> str:
        """Describes what this box waits for, by the oldest pull from each peer; "" if it waits for nothing."""
        return "; ".join(text for peer in self._peers.values() if (text := peer.describe()))

    def close(self, flush_s: float = _FLUSH_S) -> None:
        """Waits for the peers to confirm all messages, and ends the link. Pulls and offers that are open fail.

        The last message to each peer says that this link is closed. A peer that has not confirmed it within `flush_s`
        seconds may take this box for lost.

        Raises:
            TimeoutError: a thread hangs. Buffers may still be in use.
        """
        until_s = time.monotonic() + flush_s
        if not self._token.is_cancelled:
            # All peers are told before any is waited for, so that one that is silent takes no other's time.
            for peer in self._peers.values():
                peer.say_closing()
            for peer in self._peers.values():
                peer.await_confirmed(until_s)
        self._token.cancel()
        with contextlib.suppress(OSError):  # it was shut down before
            self._listener.shutdown(socket.SHUT_RDWR)
        with self._changed:
            self._changed.notify_all()
        for keeper in self._keepers.values():
            keeper.end(None)
        try:
            self._threads.join(_CLOSE_S)
            for keeper in self._keepers.values():
                keeper.join()
        finally:
            self._listener.close()
            for keeper in self._keepers.values():
                keeper.end(None)  # what was accepted meanwhile
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

    def _ended(self, name: BoxName, error: PeerLost | PeerClosed) -> None:
        self._keepers[name].end(error)
        if isinstance(error, PeerLost):
            self._on_lost(name, error)

    def _make_keeper(self, peer: Peer, address: tuple[str, int]) -> Keeper:
        dial = functools.partial(self._dialer.dial, peer, address) if self._dials(peer.name) else None
        return Keeper(peer, self._token, dial, functools.partial(self._make_session, peer))

    def _make_session(self, peer: Peer, connected: Connected) -> Session:
        return Session(peer, connected, self._settings, self._codec, f"link {self._identity.box}")

    def _make_run(self, keeper: Keeper) -> Callable[[], None]:
        def _run_keeper() -> None:  # the threads are called by the names of their functions
            keeper.run()

        return _run_keeper

    def _report(self, error: Exception, _: object) -> None:
        _logger.error("a thread of the link of box %s has died", self._identity.box, exc_info=error)


def _bytes_of(buffer: memoryview) -> memoryview:
    buffer = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
    if not buffer.nbytes:
        raise ValueError("a buffer of no bytes")
    return buffer
