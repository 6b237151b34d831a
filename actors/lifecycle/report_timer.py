"""The times of an actor's progress reports, which are also its signs of life."""

import math
import threading
import time
from collections.abc import Callable

# Seconds between two reports of a long task. They are far fewer than the timeout of an actor that is silent.
PROGRESS_EVERY_S = 5.0
# Seconds between two reports that a starting attempt still waits for the same.
_AGAIN_S = 30.0


class ReportTimer:
    """Decides when a report of a long task is due: at once, and then every few seconds. The caller passes the time."""

    def __init__(self, last_s: float = -math.inf) -> None:
        """`last_s` is the time of the last report; without it, the first one is due at once."""
        self._last_s = last_s

    def restart_if_due(self, now_s: float) -> bool:
        """Returns whether a report is due. The caller makes it then, because the next one is due only later."""
        if now_s - self._last_s < PROGRESS_EVERY_S:
            return False
        self._last_s = now_s
        return True


class StartReport:
    """Says what a starting attempt waits for, once it has been silent for some seconds. Any thread may call it."""

    def __init__(self, tell: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        """`tell` gets the texts. `clock` returns seconds. The attempt starts now."""
        self._tell, self._clock = tell, clock
        self._lock = threading.Lock()
        self._told, self._told_s = "", clock()
        self._what, self._since_s = "", 0.0

    def note(self, what: str) -> None:
        """Takes note of what the attempt waits for right now, in words for its user."""
        with self._lock:
            now_s = self._clock()
            if what != self._what:
                self._what, self._since_s = what, now_s
            is_told = what == self._told
            if now_s - self._told_s >= (_AGAIN_S if is_told else PROGRESS_EVERY_S):
                self._told, self._told_s = what, now_s
                self._tell(f"{what} (for {now_s - self._since_s:.0f} s)" if is_told else what)
