"""How often one may ask. Each API process counts for itself."""

import math
import threading
import time
from collections.abc import Callable

_WINDOW_S = 60.0
_ROUNDING = 1e-6
# Of one address, with keys that are wrong: each costs a look into the database. No key is ever found by trying.
_FAILURES_PER_MINUTE = 60


class RateLimits:
    """Counts requests of keys, and failures of addresses, within the last minute."""

    def __init__(self, requests_per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests = SlidingCounts(requests_per_minute, clock)
        self._failures = SlidingCounts(_FAILURES_PER_MINUTE, clock)

    def asked(self, key_id: str) -> int | None:
        """Count a request of a key. None, or after how many seconds it may ask again."""
        return self._requests.hit(key_id)

    def failed(self, peer: str | None) -> int | None:
        """Count a request that named no key, or a wrong one. None, or after how many seconds to try again."""
        return self._failures.hit(peer or "")


class SlidingCounts:
    """At most so many hits of each name within any minute.

    Not by the package `limits`: its storage in memory starts a thread for each hit. Source of the algorithm: its
    sliding window counter. The minute before counts by the share of it that lies within the last 60 seconds.
    """

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._clock = clock
        self._lock = threading.Lock()
        self._minute = 0
        self._now: dict[str, int] = {}
        self._before: dict[str, int] = {}

    def hit(self, name: str) -> int | None:
        """Count one. None, or after how many seconds one more would be allowed; such are not counted."""
        with self._lock:
            minute, gone_s = divmod(self._clock(), _WINDOW_S)
            if minute != self._minute:
                self._before = self._now if minute == self._minute + 1 else {}
                self._now, self._minute = {}, int(minute)
            before, now = self._before.get(name, 0), self._now.get(name, 0)
            if before * (1 - gone_s / _WINDOW_S) + now + 1 <= self._limit + _ROUNDING:
                self._now[name] = now + 1
                return None
        if before and now + 1 <= self._limit:
            allowed_s = _WINDOW_S * (1 - (self._limit - now - 1) / before)
        else:  # in the next minute, when this one is the one before
            allowed_s = _WINDOW_S * (2 - (self._limit - 1) / now)
        return max(1, math.ceil(allowed_s - gone_s))
