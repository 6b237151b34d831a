"""An actor's messages on their way to other actors: what piles up while one call is made goes out with the next."""

import threading
from collections.abc import Callable, Sequence

from windlass.actors.messages import Message
from windlass.storage.ids import ActorName

# Hands messages to an actor; returns before it has dealt with them.
Deliver = Callable[[ActorName, Sequence[Message]], None]


class Outbox:
    """Any thread may send; messages from here to one actor arrive in the order in which they were sent.

    There is no thread of its own: who finds nobody delivering delivers, for the others too. A call between actors costs
    far more than a message, so a busy actor's calls grow larger instead of more.
    """

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._lock = threading.Lock()
        self._waiting: dict[ActorName, list[Message]] = {}
        self._is_delivering = False

    def send(self, to: ActorName, message: Message) -> None:
        """Deliver a message, or leave it to the thread that is delivering now."""
        with self._lock:
            self._waiting.setdefault(to, []).append(message)
            if self._is_delivering:
                return
            self._is_delivering = True
        while batch := self._next_batch():
            for actor, messages in batch.items():
                try:
                    self._deliver(actor, messages)
                except BaseException:
                    with self._lock:
                        self._is_delivering = False
                    raise

    def _next_batch(self) -> dict[ActorName, list[Message]]:
        with self._lock:
            batch, self._waiting = self._waiting, {}
            self._is_delivering = bool(batch)
            return batch
