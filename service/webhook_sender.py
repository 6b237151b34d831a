"""Delivers what webhook endpoints are to be told, again and again until it has arrived, for three days."""

import logging
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from windlass.service.sealed import Seal, SealError
from windlass.service.settings import Settings
from windlass.service.webhook_requests import DeliveryError, UrlRefusedError, send
from windlass.storage.sql.database import Database
from windlass.storage.sql.webhooks import Due, WebhookRepository

_LOG = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_NUM_AT_ONCE = 4
# Longer than a request may take: until then a delivery is the sender's that has claimed it.
_CLAIM_S = 60.0
_BACKOFF_S = (5.0, 30.0, 120.0, 600.0, 3600.0)  # the last one again and again
_MOST_JITTER = 1.2  # not all at the same moment
_LONGEST_S = _BACKOFF_S[-1] * _MOST_JITTER
_MOST_TRIES = 70  # three days of them; by no clock, which may be set
_MAX_ERROR_CHARS = 500

Send = Callable[..., int]


class WebhookSender:
    """Several may work on one database: each delivery is claimed first. It may arrive twice, never not at all."""

    def __init__(
        self, database: Database, settings: Settings, *, send: Send = send, clock: Callable[[], float] = time.time
    ) -> None:
        self._database = database
        self._seal = Seal(settings.home)
        self._allows_private = settings.webhook_private_addresses
        self._send = send
        self._clock = clock
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Deliver in a thread until `close`."""
        self._thread = threading.Thread(target=self._run, name="webhooks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End after the requests that are out; what they delivered and could not note is delivered again."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join()

    def send_due(self) -> int:
        """Try all deliveries whose turn has come, some at once; how many were tried."""
        num_tried = 0
        with ThreadPoolExecutor(_NUM_AT_ONCE, thread_name_prefix="webhook") as pool:
            while not self._ending.is_set():
                if not (due := self._claim()):
                    break
                list(pool.map(self._deliver, due))
                num_tried += len(due)
        return num_tried

    def _claim(self) -> list[Due]:
        now_s = self._clock()
        with self._database.read() as session:  # who only looks holds up no writer
            if not WebhookRepository(session).has_due(now_s, _LONGEST_S):
                return []
        with self._database.write() as session:
            return WebhookRepository(session).claim(
                now_s=now_s, until_s=now_s + _CLAIM_S, longest_s=_LONGEST_S, limit=_NUM_AT_ONCE
            )

    def _run(self) -> None:
        while not self._ending.wait(_INTERVAL_S):
            try:
                self.send_due()
            except Exception:  # noqa: BLE001  # the database may be gone for a while
                _LOG.exception("webhooks could not be delivered; they will be tried again")

    def _deliver(self, due: Due) -> None:
        error = self._try(due)
        now_s = self._clock()
        next_try_at: float | None = None
        if error is not None and due.num_tries < _MOST_TRIES:
            delay_s = _BACKOFF_S[min(due.num_tries, len(_BACKOFF_S)) - 1]
            next_try_at = now_s + delay_s * random.uniform(1.0, _MOST_JITTER)
        with self._database.write() as session:
            if error is None:
                WebhookRepository(session).delivered(due.ordinal)
            else:
                WebhookRepository(session).failed(due.ordinal, error[:_MAX_ERROR_CHARS], next_try_at=next_try_at)

    def _try(self, due: Due) -> str | None:
        """Why it did not arrive; None if it did."""
        try:
            status = self._send(
                due.url,
                event_id=due.event_id,
                body=due.body,
                signing_secrets=tuple(map(self._seal.open, due.secrets)),
                allows_private=self._allows_private,
            )
        except (DeliveryError, SealError, UrlRefusedError) as error:
            return str(error)
        return None if 200 <= status < 300 else f"it was answered with {status}"
