"""A queue of an actor's outgoing messages. Messages queued during a delivery are sent together in the next one."""

import logging
import threading
from collections.abc import Callable, Sequence

from windlass.actors.messages import Message
from windlass.storage.ids import ActorName

_logger = logging.getLogger(__name__)
_CLOSE_DEADLINE_S = 10.0  # seconds that `close` waits for the delivery of queued messages

# Sends messages to an actor; blocks for as long as the receiver cannot accept them.
Deliver = Callable[[ActorName, Sequence[Message]], None]


class Outbox:
    """Sends messages from any thread; messages to one receiver arrive in the order in which they were sent.

    One thread delivers, so that senders never wait for a receiver. Otherwise two actors that both process messages
    could wait for each other. A busy receiver gets fewer but larger batches.
    """

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._changed = threading.Condition()
        self._waiting: dict[ActorName, list[Message]] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def send(self, to: ActorName, message: Message) -> None:
        """Queues a message and returns at once."""
        with self._changed:
            self._waiting.setdefault(to, []).append(message)
            self._changed.notify()

    def close(self) -> None:
        """Delivers the queued messages, waiting `_CLOSE_DEADLINE_S` at most, and ends the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(_CLOSE_DEADLINE_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._closed:
                        return
                    self._changed.wait()
                batch, self._waiting = self._waiting, {}
            for actor, messages in batch.items():
                try:
                    self._deliver(actor, messages)
                except Exception:  # other receivers still get theirs; the scheduler's timeout reports the lost messages
                    _logger.exception("could not deliver %d messages to %s", len(messages), actor)
