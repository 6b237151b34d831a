"""The messages to and from one peer: each arrives once and in order, over all connections. No I/O, no threads."""

import itertools
from collections import deque

from windlass.storage.link.errors import ProtocolError
from windlass.storage.link.wire import Codec


class MessageStream:
    """Numbers the messages to a peer and keeps them until it confirms them, and checks the numbers of its own."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._unconfirmed: deque[tuple[int, bytes]] = deque()
        self._num_taken = 0  # of these, over the present connections
        self._ordinal = 0  # of the last message to the peer
        self.received = 0  # the ordinal of the last message of the peer
        self._told = 0  # of the received ones, confirmed to the peer

    @property
    def num_unconfirmed(self) -> int:
        """The number of messages that the peer has not confirmed."""
        return len(self._unconfirmed)

    @property
    def owes_confirmation(self) -> bool:
        """Returns whether the peer should be told what has arrived."""
        return self._told < self.received

    def post(self, message: object) -> None:
        """Adds a message to the peer. Raises ValueError if its type is not registered, or if it is too large."""
        self._unconfirmed.append((self._ordinal + 1, self._codec.encode(message, self._ordinal + 1)))
        self._ordinal += 1

    def take_unsent(self) -> list[bytes]:
        """Returns the messages that were not taken yet over the present connections."""
        unsent = [encoded for _, encoded in itertools.islice(self._unconfirmed, self._num_taken, None)]
        self._num_taken = len(self._unconfirmed)
        return unsent

    def take_confirmation(self) -> int:
        """Returns the ordinal to confirm to the peer."""
        self._told = self.received
        return self.received

    def reconnected(self) -> None:
        """Begins to send anew what the peer has not confirmed, over new connections."""
        self._num_taken = 0

    def confirmed(self, ordinal: int) -> None:
        """Forgets the messages up to an ordinal, which the peer has. Raises ProtocolError if none has that ordinal."""
        if ordinal > self._ordinal:
            raise ProtocolError(f"a confirmation of message {ordinal}, but {self._ordinal} were sent")
        while self._unconfirmed and self._unconfirmed[0][0] <= ordinal:
            self._unconfirmed.popleft()
            self._num_taken = max(0, self._num_taken - 1)

    def arrived(self, ordinal: int) -> bool:
        """Records a message of the peer. Returns whether it is new. Raises ProtocolError if one is missing before."""
        if ordinal <= self.received:
            return False
        if ordinal != self.received + 1:
            raise ProtocolError(f"message {ordinal} after message {self.received}")
        self.received = ordinal
        return True
