"""The connections to a peer: one for control messages, some for data frames, and the threads that serve them."""

import contextlib
import logging
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from windlass.storage.link.errors import LinkError
from windlass.storage.link.peer import Peer
from windlass.storage.link.settings import LinkSettings, Protection
from windlass.storage.link.wire import Codec, FrameReader, FrameWriter, Keys
from windlass.storage.threads import GuardedThreads

_RECEIVE_NBYTES = 64 << 10
_JOIN_S = 10.0
# Bytes that may wait unsent in the kernel, for each connection. They go out before any more urgent piece.
_UNSENT_NBYTES = 256 << 10

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """The sockets of a session, both ends of which have proved who they are."""

    control: ssl.SSLSocket
    data: Sequence[socket.socket]
    keys: Keys
    is_dialer: bool
    received: int  # the ordinal of the last message that the peer has

    def close(self) -> None:
        """Closes the sockets, each of them even if another cannot be closed."""
        with contextlib.ExitStack() as stack:
            for each in (self.control, *self.data):
                stack.callback(each.close)


class Session:
    """Serves the connections to one peer until one of them ends. The caller closes their sockets."""

    def __init__(self, peer: Peer, connected: Connected, settings: LinkSettings, codec: Codec, owner: str) -> None:
        self._peer = peer
        self._connected = connected
        self._settings = settings
        self._codec = codec
        self._error: Exception | None = None
        self._is_broken = threading.Event()
        self._woken, self._waker = socket.socketpair()
        self._is_woken = False
        for each in (self._woken, self._waker):
            each.setblocking(False)
        # A thread that uses a socket of another one holds it: once closed, its number may be that of a new socket.
        self._lock = threading.Lock()
        self._threads = GuardedThreads(owner, str(peer.name), lambda error, _: self.end(error))

    @property
    def is_broken(self) -> bool:
        """Returns whether the connections have ended."""
        return self._is_broken.is_set()

    def wake(self) -> None:
        """Makes the control thread look for messages to send."""
        if not self._is_woken:
            self._is_woken = True
            with self._lock, contextlib.suppress(OSError):  # it is full, or closed
                self._waker.send(b"\0")

    def end(self, error: Exception | None) -> None:
        """Ends the connections, for a reason. Any thread may call it; only the first call has an effect."""
        with self._lock:
            if self._is_broken.is_set():
                return
            if error is not None and not isinstance(error, OSError | EOFError | LinkError):
                _logger.error("a defect ends the connections to box %s", self._peer.name, exc_info=error)
            # A traceback holds the frames that it names, and with them views of buffers that the callers get back.
            self._error = None if error is None else error.with_traceback(None)
            self._is_broken.set()
            for each in self._connected.data:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        self._peer.stop_senders()
        self._is_woken = False
        self.wake()

    def serve(self) -> Exception | None:
        """Serves the connections in this thread and in others. Returns why they ended, after all others have ended.

        The reason is a RuntimeError if a thread hangs. It may still use the memory of a piece.
        """
        try:
            self._set_options()
            self._peer.connected(self, self._connected.received)
            streams = range(len(self._connected.data))
            self._threads.start([self._make_receiver(stream) for stream in streams])
            self._threads.start([self._make_sender(stream) for stream in streams])
            self._run_control()
        except Exception as error:  # noqa: BLE001  the caller decides what it means
            self.end(error)
        finally:
            self.end(None)
            with self._lock:
                self._woken.close()
                self._waker.close()
        try:
            self.join()
        except TimeoutError as error:
            return RuntimeError(str(error))
        return self._error

    def join(self) -> None:
        """Waits for the threads. Raises TimeoutError if one hangs."""
        self._threads.join(_JOIN_S)

    def _set_options(self) -> None:
        for each in (self._connected.control, *self._connected.data):
            timeout_ms = int(self._settings.stall_s * 1000)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for each in self._connected.data:
            each.settimeout(None)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_NBYTES)

    def _run_control(self) -> None:
        control = self._connected.control
        control.setblocking(False)
        received, unsent, has_more = bytearray(), bytearray(), False
        with selectors.DefaultSelector() as selector:
            selector.register(control, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            is_over = False
            while not is_over:
                self._is_woken = False
                if not unsent:
                    unsent += self._peer.control_bytes(time.monotonic())
                _send(control, unsent)
                ways = selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent else 0)
                selector.modify(control, ways)
                selector.select(0 if has_more else self._settings.heartbeat_s)
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
                # Before the last read: data connections may end before this one, with the peer's last message in it.
                is_over = self.is_broken or self._peer.ended is not None
                try:
                    has_more = _receive(control, received)
                finally:  # also if the connection ends behind them
                    for ordinal, message in self._codec.take(received):
                        self._peer.take(ordinal, message)
                if (silent_s := time.monotonic() - self._peer.heard_s()) > self._settings.stall_s:
                    raise LinkError(f"no sign of life for {silent_s:.1f} s")
        # The last confirmation, for which a peer that closes waits, or the message that this box closes its link.
        unsent += self._peer.control_bytes(time.monotonic())
        _send(control, unsent)

    def _make_sender(self, stream: int) -> Callable[[], None]:
        writer = FrameWriter(self._connected.data[stream], self._key(stream, is_out=True), self._settings.piece_nbytes)

        def _run_sender() -> None:
            while (work := self._peer.next_piece(self)) is not None:
                number, piece = work
                writer.send(number, piece)

        return _run_sender

    def _make_receiver(self, stream: int) -> Callable[[], None]:
        reader = FrameReader(self._connected.data[stream], self._key(stream, is_out=False), self._settings.piece_nbytes)

        def _run_receiver() -> None:
            while True:
                self._peer.arrived(reader.receive(self._peer.place))

        return _run_receiver

    def _key(self, stream: int, *, is_out: bool) -> bytes | None:
        if self._settings.protection is Protection.PLAIN:
            return None
        return self._connected.keys.of_stream(stream, from_dialer=is_out == self._connected.is_dialer)


def _send(control: ssl.SSLSocket, unsent: bytearray) -> None:
    while unsent:
        try:
            sent = control.send(bytes(unsent[:_RECEIVE_NBYTES]))
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return
        del unsent[:sent]


def _receive(control: ssl.SSLSocket, received: bytearray) -> bool:
    """Appends what has arrived, some megabytes at most. Returns whether there may be more."""
    for _ in range(64):
        try:
            part = control.recv(_RECEIVE_NBYTES)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        if not part:
            raise EOFError("the peer ended the control connection")
        received += part
    return True
