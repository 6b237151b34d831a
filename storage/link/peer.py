"""The state of one peer, which outlives its connections: pulls, offers, and messages that it has not confirmed."""

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, Protocol

from windlass.storage.cancellation import CancelToken
from windlass.storage.ids import BoxName
from windlass.storage.io_scheduler import IoResult
from windlass.storage.link.errors import LinkClosed, LinkError, PeerClosed, PeerLost, ProtocolError, PullOverdue
from windlass.storage.link.keys import LinkKey
from windlass.storage.link.messages import MessageStream
from windlass.storage.link.settings import LinkSettings
from windlass.storage.link.transfers import IncomingTransfers, Offer, OutgoingTransfers, Pull
from windlass.storage.link.wire import Closing, Codec, Heartbeat, Offered, Pulled, Want


class Connections(Protocol):
    """The connections to a peer, as its state sees them."""

    @property
    def is_broken(self) -> bool:
        """Returns whether they have ended."""

    def wake(self) -> None:
        """Makes the control thread look for messages to send."""


class Peer:
    """One peer. All methods may be called by any thread. Callbacks and futures run without its lock."""

    def __init__(
        self,
        name: BoxName,
        settings: LinkSettings,
        codec: Codec,
        token: CancelToken,
        on_message: Callable[[BoxName, Any], None],
        on_end: Callable[[BoxName, PeerLost | PeerClosed], None],
    ) -> None:
        """`token` ends the waits of `send`. `on_end` is called once, by the thread that finds out."""
        self.name = name
        self._settings = settings
        self._codec = codec
        self._token = token
        self._on_message = on_message
        self._on_end = on_end
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._to_send = threading.Condition(self._lock)  # senders of data frames wait here
        # All attributes below are protected by `_lock`.
        piece_nbytes = settings.piece_nbytes
        self._incoming = IncomingTransfers(window_nbytes=settings.window_nbytes, piece_nbytes=piece_nbytes)
        self._outgoing = OutgoingTransfers(piece_nbytes=piece_nbytes)
        self._connections: Connections | None = None
        self._messages = MessageStream(codec)
        self._instance: bytes | None = None
        self._ended: PeerLost | PeerClosed | None = None
        self._num_damaged = 0  # frames since the last piece that arrived whole
        self._last_heard_s = time.monotonic()
        self._last_error = "it was never reached"
        self._last_heartbeat_s = 0.0

    # --- the caller's side ---

    def pull(self, pull: Pull) -> None:
        """Adds a pull. Raises PeerLost, PeerClosed, or the errors of `IncomingTransfers.add`."""
        with self._lock:
            self._require(str(pull.key))
            self._incoming.add(pull)
            self._wake()

    def offer(self, offer: Offer) -> None:
        """Adds an offer and tells the peer. Raises PeerLost, PeerClosed, or ValueError if it is there already."""
        with self._lock:
            self._require(str(offer.key))
            self._outgoing.add(offer)
            self._post(Offered(key=offer.key, nbytes=offer.buffer.nbytes))

    def send(self, message: object, *, may_wait: bool = True) -> None:
        """Sends a message, which arrives once and in order. Waits while too many are unconfirmed.

        Raises:
            PeerLost, PeerClosed: the peer has ended.
            ValueError: the message is of no registered type, or too large.
        """
        with self._changed:
            if may_wait and not self._has_room():
                self._token.wait_for(self._changed, self._has_room, lambda: f"box {self.name!r} to confirm messages")
            self._require("a message")
            self._post(message)

    @property
    def ended(self) -> PeerLost | PeerClosed | None:
        """The error that ended the peer."""
        return self._ended

    def say_closing(self) -> None:
        """Tells the peer, as the last message, that this box closes its link."""
        with self._lock:
            # One that was never reached, and to which nothing was said, is not waited for.
            if self._ended is None and (self._instance is not None or self._messages.num_unconfirmed):
                self._post(Closing())

    def await_confirmed(self, until_s: float) -> None:
        """Waits until the peer has confirmed all messages, also over new connections, or has ended."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended is not None or not self._messages.num_unconfirmed,
                max(0.0, until_s - time.monotonic()),
            )

    # --- connections ---

    @property
    def received(self) -> int:
        """The ordinal of the last message that has arrived."""
        with self._lock:
            return self._messages.received

    def confirm(self, received: int) -> None:
        """Forgets the messages up to an ordinal, which the peer has received. Raises ProtocolError."""
        with self._changed:
            self._messages.confirmed(received)
            self._changed.notify_all()

    def is_instance(self, instance: bytes) -> bool:
        """Returns whether the peer's link is the same object as before. If not, it has lost its state.

        The first one is recorded.
        """
        with self._lock:
            if self._instance is None:
                self._instance = instance
            return self._instance == instance

    def connected(self, connections: Connections, received: int) -> None:
        """Goes on over new connections. `received`: the ordinal that the peer has received."""
        with self._lock:
            self.confirm(received)
            self._messages.reconnected()
            self._connections = connections
            self._last_error = "its connection ended"
            self._heard()
            self._wake()

    def disconnected(self, error: Exception | None) -> None:
        """Forgets the connections, whose threads have ended."""
        with self._changed:
            self._connections = None
            self._incoming.ask_again()
            self._outgoing.forget_wants()
            if error is not None:
                self.note(error)
            self._changed.notify_all()

    def await_disconnected(self, timeout_s: float) -> None:
        """Waits until there are no connections. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._connections is None, timeout_s):
                raise TimeoutError(f"the connections to box {self.name!r} do not end")

    def stop_senders(self) -> None:
        """Ends the waits of `next_piece` of connections that are broken."""
        with self._lock:
            self._to_send.notify_all()

    def note(self, error: Exception) -> None:
        """Records why there is no connection, for the text of a later loss."""
        with self._lock:
            self._last_error = str(error) or type(error).__name__

    def heard_s(self) -> float:
        """The moment of the last sign of life."""
        return self._last_heard_s

    # --- the control thread ---

    def control_bytes(self, now_s: float) -> bytes:
        """Returns what the control connection must send now, "" if nothing."""
        with self._lock:
            parts = [self._codec.encode(want) for want in self._incoming.take_wants()]
            parts += self._messages.take_unsent()
            is_due = now_s - self._last_heartbeat_s >= self._settings.heartbeat_s
            if is_due or self._messages.owes_confirmation:
                self._last_heartbeat_s = now_s
                parts.append(self._codec.encode(Heartbeat(received=self._messages.take_confirmation())))
        return b"".join(parts)

    def take(self, ordinal: int, message: Any) -> None:
        """Carries out a message of the control connection. Raises ProtocolError."""
        finished: Offer | None = None
        failed: tuple[Pull, Exception] | None = None
        with self._changed:
            self._heard()
            if isinstance(message, Want | Heartbeat) == bool(ordinal):
                raise ProtocolError(f"a {type(message).__name__} with ordinal {ordinal}")
            if ordinal and not self._messages.arrived(ordinal):
                return
            match message:
                case Want():
                    self._outgoing.wanted(message)
                    self._to_send.notify()
                case Heartbeat(received=received):
                    self.confirm(received)
                case Offered(key=key, nbytes=nbytes):
                    failed = self._offered(key, nbytes)
                    self._wake()
                case Pulled(key=key):
                    finished = self._outgoing.pulled(key)
                    finished.readers.discard(self.name)
                    if finished.readers:
                        finished = None
        if finished is not None:
            _settle(finished.future, _result(finished.start_s, finished.buffer.nbytes))
        if failed is not None:
            _fail(failed[0].future, failed[1])
        if isinstance(message, Closing):
            self._end(PeerClosed(f"box {self.name!r} closed its link"))
        elif not isinstance(message, Want | Heartbeat | Offered | Pulled):
            self._on_message(self.name, message)

    # --- threads of data connections ---

    def next_piece(self, connections: Connections) -> tuple[int, memoryview] | None:
        """Waits for a piece that the peer wants. Returns its number and its bytes; None if the connections ended."""
        with self._to_send:
            while not connections.is_broken:
                if (taken := self._outgoing.take()) is not None:
                    want, offer, piece = taken
                    if offer.start_s is None:
                        offer.start_s = time.monotonic()
                    return want.number, piece
                self._to_send.wait()
        return None

    def place(self, number: int, nbytes: int) -> memoryview:
        """Returns the memory for a piece that arrives. Raises ProtocolError if it was not asked for."""
        with self._lock:
            piece = self._incoming.expected(number, nbytes)
            if piece.pull.start_s is None:
                piece.pull.start_s = time.monotonic()
            return piece.into

    def arrived(self, number: int) -> None:
        """Records that a piece has arrived whole."""
        with self._lock:
            self._num_damaged = 0
            pull = self._incoming.arrived(number)
            if pull is not None:
                self._post(Pulled(key=pull.key))
            elif self._incoming.has_wants:
                self._wake()
        if pull is not None:
            _settle(pull.future, _result(pull.start_s, pull.nbytes))

    def count_damaged(self) -> int:
        """Counts a damaged frame. Returns how many there were since the last piece that arrived whole."""
        with self._lock:
            self._num_damaged += 1
            return self._num_damaged

    # --- the watch ---

    def watch(self, now_s: float) -> None:
        """Fails overdue pulls, and loses a silent peer."""
        with self._lock:
            overdue = [(pull, self._overdue_text(pull, now_s)) for pull in self._incoming.take_overdue(now_s)]
            silent_s = now_s - self._last_heard_s
            limit_s = self._settings.silence_s if self._instance else self._settings.connect_s
        for pull, text in overdue:
            _fail(pull.future, PullOverdue(text))
        if silent_s > limit_s:
            self.lose(f"was silent for {silent_s:.1f} s (last: {self._last_error})")

    def next_deadline_s(self) -> float | None:
        """Returns the earliest deadline of a pull."""
        with self._lock:
            return self._incoming.next_deadline_s()

    def lose(self, why: str) -> None:
        """Ends the peer: all its pulls and offers fail. It has no effect on a peer that has ended."""
        self._end(PeerLost(f"box {self.name!r} {why}"))

    def close(self) -> None:
        """Fails all pulls and offers, because this box's link was closed and its threads have ended."""
        self._fail_all(LinkClosed, "the link was closed")

    def _fail_all(self, kind: type[LinkError], told: str) -> None:
        with self._changed:
            pulls, offers = self._incoming.take_all(), self._outgoing.take_all()
            self._wake()
            self._to_send.notify_all()
            self._changed.notify_all()
        for pull in pulls:
            _fail(pull.future, kind(f"{told}: {pull.key} did not come from box {self.name!r}"))
        for offer in offers:
            _fail(offer.future, kind(f"{told}: box {self.name!r} has not pulled {offer.key}"))

    def describe(self) -> str:
        """Describes the oldest pull that waits for this peer; "" if there is none."""
        now_s = time.monotonic()
        with self._lock:
            oldest = min(self._incoming.pulls.values(), key=lambda pull: pull.since_s, default=None)
            return (
                ""
                if oldest is None
                else f"{self._state_of(oldest, now_s)}, the first of {len(self._incoming.pulls)} pulls"
            )

    # --- inside ---

    def _end(self, error: PeerLost | PeerClosed) -> None:
        with self._lock:
            if self._ended is not None:
                return
            self._ended = error
        self._fail_all(type(error), str(error))
        self._on_end(self.name, error)

    def _offered(self, key: LinkKey, nbytes: int) -> tuple[Pull, Exception] | None:
        try:
            self._incoming.offered(key, nbytes)
        except ProtocolError:
            raise
        except LinkError as error:
            return self._incoming.pulls.pop(key), error
        return None

    def _post(self, message: object) -> None:
        self._messages.post(message)
        self._wake()

    def _has_room(self) -> bool:
        return self._ended is not None or self._messages.num_unconfirmed < self._settings.max_messages

    def _require(self, what: str) -> None:
        if self._ended is not None:
            raise type(self._ended)(f"{self._ended}: {what} cannot be exchanged with it")

    def _heard(self) -> None:
        self._last_heard_s = time.monotonic()

    def _wake(self) -> None:
        if self._connections is not None:
            self._connections.wake()

    def _overdue_text(self, pull: Pull, now_s: float) -> str:
        return f"{self._state_of(pull, now_s)}; its deadline is over"

    def _state_of(self, pull: Pull, now_s: float) -> str:
        pieces = -(-pull.nbytes // self._settings.piece_nbytes)
        if pull.start_s is not None:
            state = f"{pieces - pull.num_missing} of {pieces} pieces have come"
        else:
            state = "it is offered" if self._incoming.is_offered(pull.key) else "it is not offered"
        if self._connections is None:
            state += f", and there is no connection ({self._last_error})"
        return (
            f"{pull.key} has not come from box {self.name!r} after {now_s - pull.since_s:.1f} s: {state}, last heard "
            f"{now_s - self._last_heard_s:.1f} s ago"
        )


def _result(start_s: float | None, nbytes: int) -> IoResult:
    end_s = time.monotonic()
    return IoResult(start_s=end_s if start_s is None else start_s, end_s=end_s, nbytes=nbytes)


def _settle(future: "Future[IoResult]", result: IoResult) -> None:
    with contextlib.suppress(InvalidStateError):  # the caller has cancelled it
        future.set_result(result)


def _fail(future: "Future[IoResult]", error: Exception) -> None:
    with contextlib.suppress(InvalidStateError):  # also if it failed before: an offer has several readers
        future.set_exception(error)
