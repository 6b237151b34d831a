"""Message channels between the processes of a job on one machine: Unix sockets, one direction each.

Ray starts and places the processes and reports their deaths. Messages do not use Ray, because an actor call costs both
sides ten times the processor time of a socket message (`docs/decisions/0006-messages-over-sockets.md`).
"""

import logging
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection

import msgspec

from windlass.actors.messages import Message, decode, encode
from windlass.storage.ids import ActorName

_logger = logging.getLogger(__name__)
_UCRED = struct.Struct("3i")  # pid, uid, gid; see unix(7)


class MessageServer:
    """Receives an actor's messages and passes them on, one batch at a time and in order from each sender."""

    def __init__(self, post: Callable[[Sequence[Message]], None]) -> None:
        """Starts listening at once. Senders connect to `address`."""
        self._post = post
        self._one_at_a_time = threading.Lock()
        # In the abstract namespace: the name disappears with the process, even after a crash.
        self.address = f"\0windlass-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.address)
        self._socket.listen()
        threading.Thread(target=self._accept, name="mailbox", daemon=True).start()

    def close(self) -> None:
        """Stops accepting new senders."""
        # `close` alone would leave the thread blocked in `accept`.
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                sender, _ = self._socket.accept()
            except OSError:
                return
            # Any user of this machine can connect.
            if _user_of(sender) != os.getuid():
                sender.close()
                continue
            connection = Connection(sender.detach())
            threading.Thread(target=self._receive, args=(connection,), name="mail", daemon=True).start()

    def _receive(self, connection: Connection) -> None:
        with connection:
            while True:
                try:
                    raw = connection.recv_bytes()
                except (EOFError, OSError):
                    return  # the sender has ended: Ray reports its death, and the scheduler notices who waits for it
                try:
                    messages = decode(raw)
                except (msgspec.DecodeError, KeyError):
                    _logger.exception("a batch of messages could not be decoded; its connection is closed")
                    return
                with self._one_at_a_time:
                    self._post(messages)


class MessageClient:
    """Sends messages to the MessageServers of other actors. Not thread-safe."""

    def __init__(self, addresses: Mapping[ActorName, str]) -> None:
        self._addresses = addresses
        self._connections: dict[ActorName, Connection] = {}

    def deliver(self, to: ActorName, messages: Sequence[Message]) -> None:
        """Sends messages; blocks while the receiver's socket buffer is full. Raises OSError if the receiver is gone."""
        if to not in self._connections:
            self._connections[to] = _connect(self._addresses[to])
        self._connections[to].send_bytes(encode(messages))


def _connect(address: str) -> Connection:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as mine:
        mine.connect(address)
        return Connection(mine.detach())


def _user_of(sender: socket.socket) -> int:
    credentials = sender.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return int(_UCRED.unpack(credentials)[1])
