"""Limits of the rate of requests and of slow operations at once. Each API process counts for itself."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_WINDOW_S = 60.0
_ROUNDING = 1e-6
# Requests of one address with wrong keys. Each takes a database query. The limit also makes it impossible to guess a
# key.
_FAILURES_PER_MINUTE = 60


# Plans made over HTTP at the same time. One process makes them, because it knows the models of the last ones.
_PLANS_AT_ONCE = 1
# Measurements for plans at the same time. Each takes all cores, so two would measure each other.
_MEASUREMENTS_AT_ONCE = 1
# Other slow operations at the same time, such as a call of a webhook's receiver. Each holds one of the API's 40 threads
# for seconds.
_OTHERS_AT_ONCE = 8


class BusyError(Exception):
    """A user, or all users together, have reached the limit of such operations at once."""


class RateLimits:
    """Counts requests of keys and failures of addresses within the last minute, and limits slow operations at once."""

    def __init__(self, requests_per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.plans = Turnstile(_PLANS_AT_ONCE)
        self.measurements = Turnstile(_MEASUREMENTS_AT_ONCE)
        self.webhook_samples = Turnstile(_OTHERS_AT_ONCE)
        self.upload_checks = Turnstile(_OTHERS_AT_ONCE)
        self._requests = SlidingCounts(requests_per_minute, clock)
        self._failures = SlidingCounts(_FAILURES_PER_MINUTE, clock)

    def count_request(self, key_id: str) -> int | None:
        """Counts a request of a key. Returns None if it is allowed, else the seconds until the next one is."""
        return self._requests.hit(key_id)

    def failed(self, peer: str | None) -> int | None:
        """Counts a request with a missing or wrong key.

        Returns None if it is allowed, else the seconds until the next one is.
        """
        return self._failures.hit(peer or "")


class Turnstile:
    """Admits one operation of each user at once, and `num_at_once` in all."""

    def __init__(self, num_at_once: int) -> None:
        self._free = threading.BoundedSemaphore(num_at_once)
        self._users: set[str | None] = set()
        self._lock = threading.Lock()

    @contextmanager
    def entered(self, user: str | None) -> Iterator[None]:
        """Holds a place while the `with` block runs. `user`: None stands for all callers without keys.

        Raises:
            BusyError: the user has a place already, or none is free.
        """
        with self._lock:
            if user in self._users:
                if user is None:  # whose request that is, is not known
                    raise BusyError("another one is not done yet; try again in a minute")
                raise BusyError("one of your requests is not done yet; wait for its answer")
            if not self._free.acquire(blocking=False):
                raise BusyError("too many are running for other users; try again in a minute")
            self._users.add(user)
        try:
            yield
        finally:
            with self._lock:
                self._users.discard(user)
                self._free.release()


class SlidingCounts:
    """Allows each name at most `limit` hits within any minute.

    The package `limits` is not used because its storage in memory starts a thread for each hit. Source of the
    algorithm: its sliding window counter. The previous minute counts by the share of it that lies within the last 60
    seconds.
    """

    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._clock = clock
        self._lock = threading.Lock()
        self._minute = 0
        self._now: dict[str, int] = {}
        self._before: dict[str, int] = {}

    def hit(self, name: str) -> int | None:
        """Counts a hit.

        Returns None if it is allowed, else the seconds until the next one would be. A refused hit does not count.
        """
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
        else:  # in the next minute, when this minute's hits count as the previous one's
            allowed_s = _WINDOW_S * (2 - (self._limit - 1) / now)
        return max(1, math.ceil(allowed_s - gone_s))
