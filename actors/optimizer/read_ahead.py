"""Limits the number of chunks that an optimizer reads ahead, because these can no longer be overtaken."""

import threading
from dataclasses import dataclass


@dataclass(slots=True)
class Ahead:
    """The counts that decide whether one more chunk may begin."""

    num_ahead: int = 0  # chunks that have begun, but whose update has not
    num_ready: int = 0  # chunks whose states have arrived and that are not updated yet

    @property
    def may_begin(self) -> bool:
        """True if another chunk may begin: none is ahead, or there is nothing to update."""
        return not self.num_ahead or not self.num_ready


class ReadAhead:
    """Decides when the next chunk may begin. Chunks begin in order of priority and are updated in order of arrival.

    While the optimizer has chunks to update, one further chunk is read ahead. This hides the read latency and delays a
    more urgent chunk by at most one update. While it has none, the SSDs are the bottleneck, and chunks may be read into
    all slots. Thread-safe.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ahead = Ahead()
        self._closed = False

    def begin(self, deadline_s: float) -> None:
        """Waits until another chunk may begin.

        Raises:
            TimeoutError: none may begin within `deadline_s` seconds.
            InterruptedError: `close` was called.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or self._ahead.may_begin, deadline_s):
                raise TimeoutError(f"no chunk was updated for {deadline_s:g} s: the optimizer is stuck")
            if self._closed:
                raise InterruptedError("the job was stopped")
            self._ahead.num_ahead += 1

    def arrived(self) -> None:
        """Records that the states of a chunk have arrived."""
        with self._changed:
            self._ahead.num_ready += 1

    def updating(self) -> None:
        """Records that the update of a chunk begins."""
        with self._changed:
            self._ahead.num_ahead -= 1
            self._changed.notify_all()

    def updated(self) -> None:
        """Records that the update of a chunk is done."""
        with self._changed:
            self._ahead.num_ready -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Interrupts waiting callers."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
