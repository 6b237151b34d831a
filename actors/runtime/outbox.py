"""An actor's messages on their way to other actors: what piles up while some are delivered goes out with the next."""

import logging
import threading
from collections.abc import Callable, Sequence

from windlass.actors.messages import Message
from windlass.storage.ids import ActorName

_logger = logging.getLogger(__name__)
_CLOSE_DEADLINE_S = 10.0

# Hands messages to an actor; may take as long as the other side cannot take them.
Deliver = Callable[[ActorName, Sequence[Message]], None]


class Outbox:
    """Any thread may send; messages from here to one actor arrive in the order in which they were sent.

    One thread delivers, so that nobody who sends ever waits for a receiver: two actors that are both busy taking
    messages could otherwise wait for each other. And a busy actor's batches grow larger instead of more.
    """

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._changed = threading.Condition()
        self._waiting: dict[ActorName, list[Message]] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def send(self, to: ActorName, message: Message) -> None:
        """Returns at once."""
        with self._changed:
            self._waiting.setdefault(to, []).append(message)
            self._changed.notify()

    def close(self) -> None:
        """Deliver what was sent, if that takes no longer than a receiver may be busy, and end."""
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
                except Exception:  # the scheduler's deadline names who waits in vain; the others must get theirs
                    _logger.exception("could not deliver %d messages to %s", len(messages), actor)
