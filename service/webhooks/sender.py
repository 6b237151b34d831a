"""Delivers events to webhook endpoints, with retries for three days."""

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from windlass.service.installation import Settings
from windlass.service.webhooks.delivery import TOTAL_TIMEOUT_S, DeliveryError, UrlRefusedError, send
from windlass.service.webhooks.secret_box import SealError, SecretBox
from windlass.storage.sql import Database
from windlass.storage.sql.repositories import Due, WebhookRepository

_LOG = logging.getLogger(__name__)

_INTERVAL_S = 1.0
# Limits of deliveries in flight. An endpoint has one, and an owner a few, so that an owner's slow endpoints delay no
# other owner. If several owners have taken all places, the next place goes to the owner with the fewest.
_NUM_AT_ONCE = 16  # in all
_MOST_OF_OWNER = 4
# Seconds for which a delivery stays claimed by its sender. Longer than a delivery may take.
_CLAIM_S = 4 * TOTAL_TIMEOUT_S
_BACKOFF_S = (5.0, 30.0, 120.0, 600.0, 3600.0)  # the last one repeats
_MOST_JITTER = 1.2  # so that retries do not all come at the same moment
_LONGEST_S = _BACKOFF_S[-1] * _MOST_JITTER
_MOST_TRIES = 70  # about three days; a count, because a clock may be set
_MAX_ERROR_CHARS = 500

Send = Callable[..., int]


class WebhookSender:
    """Delivers webhooks. Several senders may share a database, because each claims a delivery first.

    A delivery may arrive twice but is never lost. If this home's key cannot decrypt an endpoint's signing secret,
    another home with the right key delivers. Without such a home, the deliveries wait.
    """

    def __init__(
        self, database: Database, settings: Settings, *, send: Send = send, clock: Callable[[], float] = time.time
    ) -> None:
        self._database = database
        self._seal = SecretBox(settings.home)
        self._allows_private = settings.webhook_private_addresses
        self._send = send
        self._clock = clock
        self._told_of: set[str] = set()  # encrypted secrets whose failure was logged
        self._under_way: dict[int, Due] = {}  # by ordinal
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_NUM_AT_ONCE, thread_name_prefix="webhook")
        self._has_room = threading.Event()  # set when a delivery has ended
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Delivers in a thread until `close`."""
        self._thread = threading.Thread(target=self._run, name="webhooks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends after the requests in flight. If one was delivered but not recorded, it is delivered again."""
        self._ending.set()
        self._has_room.set()
        if self._thread is not None:
            self._thread.join()
        self._pool.shutdown()

    def send_due(self) -> int:
        """Tries all due deliveries and waits for them. Returns the number of tries."""
        num_tried = 0
        while not self._ending.is_set():
            begun = self._begin_due()
            num_tried += len(begun)
            with self._lock:
                is_idle = not self._under_way
            if not begun and is_idle:
                break
            self._has_room.wait()
            self._has_room.clear()
        return num_tried

    def _begin_due(self) -> Sequence[Due]:
        """Begins as many due deliveries as the limits allow."""
        begun = list[Due]()
        while not self._ending.is_set() and (due := self._claim()) is not None:
            with self._lock:
                self._under_way[due.ordinal] = due
            self._pool.submit(self._deliver, due)
            begun.append(due)
        return begun

    def _claim(self) -> Due | None:
        """Claims the next due delivery that the limits allow. Returns None if there is none."""
        now_s = self._clock()
        with self._lock:
            under_way = list(self._under_way.values())
        if len(under_way) >= _NUM_AT_ONCE:
            return None
        busy = frozenset(due.endpoint_id for due in under_way)
        owners = Counter(due.owner for due in under_way)
        full = frozenset(owner for owner, number in owners.items() if number >= _MOST_OF_OWNER)
        with self._database.read() as session:  # a read transaction first, because it blocks no writer
            if not self._open(WebhookRepository(session).due_secrets(now_s, _LONGEST_S, busy=busy, full=full)):
                return None
        with self._database.write() as session:
            webhooks = WebhookRepository(session)
            return webhooks.claim(
                # read again within the write transaction
                self._open(webhooks.due_secrets(now_s, _LONGEST_S, busy=busy, full=full)),
                now_s=now_s,
                until_s=now_s + _CLAIM_S,
                longest_s=_LONGEST_S,
                in_flight=owners,
            )

    def _open(self, sealed: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        """Decrypts signing secrets by endpoint.

        Leaves out endpoints whose newest secret fails, and older secrets that fail.
        """
        opened = {}
        for endpoint_id, (newest, *older) in sealed.items():
            if (secret := self._open_one(endpoint_id, newest)) is not None:
                others = [self._open_one(endpoint_id, each) for each in older]
                opened[endpoint_id] = (secret, *(each for each in others if each is not None))
        return opened

    def _open_one(self, endpoint_id: str, sealed: str) -> str | None:
        try:
            secret = self._seal.open(sealed)
        except SealError as error:
            if sealed not in self._told_of:
                self._told_of.add(sealed)
                _LOG.warning("webhook endpoint %s: nothing can be signed with a secret of it: %s", endpoint_id, error)
            return None
        self._told_of.discard(sealed)
        return secret

    def _run(self) -> None:
        while not self._ending.is_set():
            self._has_room.wait(_INTERVAL_S)
            self._has_room.clear()
            try:
                self._begin_due()
            except Exception:  # noqa: BLE001  # the database may be unavailable for a while
                _LOG.exception("webhooks could not be delivered; they will be tried again")

    def _deliver(self, due: Due) -> None:
        try:
            self._note(due, self._try(due))
        except Exception:  # noqa: BLE001  # the database may be unavailable for a while; it is then delivered again
            _LOG.exception("a webhook's delivery could not be noted; it will be tried again")
        finally:
            with self._lock:
                del self._under_way[due.ordinal]
            self._has_room.set()

    def _note(self, due: Due, error: str | None) -> None:
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
        """Sends a delivery. Returns why it failed, or None if it arrived."""
        try:
            status = self._send(
                due.url,
                event_id=due.event_id,
                body=due.body,
                signing_secrets=due.signing_secrets,
                allows_private=self._allows_private,
            )
        except (DeliveryError, UrlRefusedError) as error:
            return str(error)
        return None if 200 <= status < 300 else f"it was answered with {status}"
