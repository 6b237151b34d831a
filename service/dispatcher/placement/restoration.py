"""Tells for how long the dispatcher of a home that was restored from a backup waits for boxes.

A job that never began by the restored database may run on a box, which tells so with its first call.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from windlass.service.installation import forget_restored, was_restored
from windlass.storage.sql import Box
from windlass.storage.sql.repositories import told_lease_s


class Restoration:
    """Waits, after a restore, until each box has called or a lease is over, by which no box trains any more."""

    def __init__(self, home: Path, *, lease_s: float, clock: Callable[[], float]) -> None:
        self._home = home
        self._lease_s = lease_s
        self._clock = clock
        self._waits = was_restored(home)
        self._until: float | None = None
        self._seen_at: dict[str, float] = {}  # the last call of each box when this process first read it

    def silent(self, boxes: Sequence[Box]) -> Sequence[str]:
        """Returns the names of the boxes that are waited for. Without any, the mark is removed.

        `boxes`: all that were not removed.
        """
        if not self._waits:
            return ()
        now = self._clock()
        if self._until is None:
            self._until = now + max([self._lease_s, *map(told_lease_s, boxes)])
        # Compared with the first one read, because the wall clock may have been set back.
        names = [box.name for box in boxes if self._seen_at.setdefault(box.id, box.seen_at) == box.seen_at]
        if names and now < self._until:
            return names
        self._waits = False
        with suppress(OSError):  # the next start then waits again
            forget_restored(self._home)
        return ()
