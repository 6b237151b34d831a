"""Limits the number of chunks that an optimizer reads ahead, because these can no longer be overtaken."""

import threading
from dataclasses import dataclass

from windlass.storage.cancellation import CancelToken


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

    def __init__(self, token: CancelToken) -> None:
        self._token = token
        self._changed = threading.Condition()
        self._ahead = Ahead()

    def begin(self) -> None:
        """Waits until another chunk may begin. Raises the errors of `CancelToken.wait_for`."""
        with self._changed:
            self._token.wait_for(
                self._changed, lambda: self._ahead.may_begin, "the update of a chunk: the optimizer is stuck"
            )
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
