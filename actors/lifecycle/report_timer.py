"""The times of an actor's progress reports, which are also its signs of life."""

import math

# Seconds between two reports of a long task. They are far fewer than the timeout of an actor that is silent.
PROGRESS_EVERY_S = 5.0


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
