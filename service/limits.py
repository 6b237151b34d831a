"""How often one may ask. Each API process counts for itself."""

import math
import time

from limits import RateLimitItem, RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import SlidingWindowCounterRateLimiter

# Of one address, with keys that are wrong: each costs a look into the database. No key is ever found by trying.
_FAILURES_PER_MINUTE = 60


class RateLimits:
    """Counts requests of keys, and failures of addresses, within the last minute."""

    def __init__(self, requests_per_minute: int) -> None:
        self._limiter = SlidingWindowCounterRateLimiter(MemoryStorage())
        self._requests = RateLimitItemPerMinute(requests_per_minute)
        self._failures = RateLimitItemPerMinute(_FAILURES_PER_MINUTE)

    def asked(self, key_id: str) -> int | None:
        """Count a request of a key. None, or after how many seconds it may ask again."""
        return self._hit(self._requests, "key", key_id)

    def failed(self, peer: str | None) -> int | None:
        """Count a request that named no key, or a wrong one. None, or after how many seconds to try again."""
        return self._hit(self._failures, "peer", peer or "")

    def _hit(self, limit: RateLimitItem, *who: str) -> int | None:
        if self._limiter.hit(limit, *who):
            return None
        reset_s = self._limiter.get_window_stats(limit, *who).reset_time
        return max(1, math.ceil(reset_s - time.time()))
