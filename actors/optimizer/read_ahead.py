"""How many chunks are on their way to their update, which cannot be overtaken any more."""

import threading
from dataclasses import dataclass


@dataclass(slots=True)
class Ahead:
    """How far an optimizer is ahead of its updates, and so whether one chunk more may begin."""

    num_ahead: int = 0  # chunks that have begun, and whose update has not
    num_at_hand: int = 0  # chunks whose states are there, until they are updated

    @property
    def may_begin(self) -> bool:
        """One chunk may be ahead, or, while there is nothing to update, as many as have slots."""
        return not self.num_ahead or not self.num_at_hand


class ReadAhead:
    """Chunks begin in the order of their urgency, take slots for their states, and are updated as they began.

    While the optimizer has something to update, one chunk beyond that has begun: by the time it is wanted its states
    are there, and what turns out to be more urgent waits for no more than that one. While it has nothing, the SSDs are
    what is slow, and all slots may be read into. Thread-safe.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ahead = Ahead()
        self._closed = False

    def begin(self, deadline_s: float) -> None:
        """Waits until one chunk more may begin.

        Raises:
            TimeoutError: it might not within `deadline_s`.
            InterruptedError: `close` was called.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or self._ahead.may_begin, deadline_s):
                raise TimeoutError(f"no chunk was updated for {deadline_s:g} s: the optimizer is stuck")
            if self._closed:
                raise InterruptedError("the job was stopped")
            self._ahead.num_ahead += 1

    def arrived(self) -> None:
        """The states of a chunk are there."""
        with self._changed:
            self._ahead.num_at_hand += 1

    def updating(self) -> None:
        """The update of a chunk begins."""
        with self._changed:
            self._ahead.num_ahead -= 1
            self._changed.notify_all()

    def updated(self) -> None:
        """The update of a chunk is over."""
        with self._changed:
            self._ahead.num_at_hand -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
