"""The clock of another box, whose times are not those of this one: both count from their own start."""

# Seconds after which an old estimate is forgotten. Clocks drift apart by up to 50 us a second, so by 6 ms in two such
# times.
_WINDOW_S = 60.0


class PeerClock:
    """Estimates the difference of a box's monotonic clock to this one's, from the messages that come from it.

    Each tells when it was sent. Of those of the last minute or two, the fastest gives the estimate. So the error is the
    time of a fast message on its way, which is less than a millisecond where boxes are near. Not thread-safe.
    """

    def __init__(self) -> None:
        self._least_s: float | None = None  # of this window
        self._before_s: float | None = None  # of the window before
        self._until_s = 0.0

    def heard(self, sent_s: float, now_s: float) -> None:
        """Records a message. `sent_s`: by the box's clock. `now_s`: by this one's."""
        if now_s >= self._until_s:
            is_recent = now_s < self._until_s + _WINDOW_S
            self._before_s, self._least_s = self._least_s if is_recent else None, None
            self._until_s = now_s + _WINDOW_S
        behind_s = now_s - sent_s
        self._least_s = behind_s if self._least_s is None else min(self._least_s, behind_s)

    @property
    def behind_s(self) -> float:
        """The seconds by which the box's clock is behind this one. There must have been a message."""
        return min(each for each in (self._least_s, self._before_s) if each is not None)
