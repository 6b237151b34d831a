"""A dispatcher's lease on its jobs: it proves that the dispatcher lives, and lets others claim the jobs of a dead one.

On PostgreSQL, a lease has a term by the database's clock. On SQLite, other dispatchers measure with their own monotonic
clocks how long its counter stands still. So a dispatcher cannot lose its jobs because a clock was set.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from sqlalchemy.exc import SQLAlchemyError

from windlass.service.installation import about
from windlass.storage.sql import Database, Job
from windlass.storage.sql.repositories import Holder, LeaseRepository

_LOG = logging.getLogger(__name__)

# Time without a sign of life after which others may claim a dispatcher's jobs.
LEASE_S = 30.0
# Interval between signs of life, and between checks of other dispatchers.
BEAT_S = 5.0
# A dispatcher that has not begun a pass for this time counts as hung, whatever its threads still do. Others may claim
# its jobs.
HANGS_S = 600.0


class Lease:
    """The lease of one dispatcher on all its jobs. Two threads may use it: one dispatches, the other only calls `beat`.

    `is_alone`: no other dispatcher of this home runs on this machine. Registered ones are then dead.
    """

    def __init__(
        self,
        database: Database,
        *,
        node: str,
        machine: str,
        is_alone: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.node = node
        self._database = database
        self._machine = machine
        self._is_alone = is_alone
        self._clock = clock
        self._lock = threading.Lock()
        self._holder: str | None = None
        self._is_lost = True  # the lease expired, or this dispatcher is not registered yet
        self._may_have_changed = False  # jobs may have another holder; reset when `renew` reports it
        self._beat_at = 0.0
        self._checked_at = 0.0
        self._renewed_at = clock()
        # of other dispatchers: the last counter, and the time of its first sight
        self._signs: dict[str, tuple[int, float]] = {}

    @property
    def holder(self) -> str:
        """This dispatcher's id until the next pass. It gets a new id after its lease was lost."""
        assert self._holder is not None, "not registered"
        return self._holder

    def renew(self) -> bool:
        """Renews the lease at the begin of a pass.

        Returns True if jobs may have changed holders, so that the caller must forget them.
        """
        self._renewed_at = self._clock()
        self.beat()
        if self._is_lost:
            self._register()
            self._may_have_changed = True
        if self._end_expired_leases():
            self._may_have_changed = True
        may_have_changed, self._may_have_changed = self._may_have_changed, False
        return may_have_changed

    def beat(self) -> None:
        """Gives a sign of life, if one is due."""
        now = self._clock()
        with self._lock:
            if (
                self._holder is None
                or self._is_lost
                or now - self._beat_at < BEAT_S
                or now - self._renewed_at > HANGS_S
            ):
                return
            with self._database.write() as session:
                is_alive = LeaseRepository(session).beat(self._holder, LEASE_S)
            self._beat_at = now
            if not is_alive:
                _LOG.warning(
                    "%s gave no sign of life for too long; other dispatchers may have claimed its jobs", self._holder
                )
                self._is_lost = True

    def beat_until(self, ended: threading.Event) -> None:
        """Gives signs of life in a thread, because a pass may take longer than the lease."""
        while not ended.wait(BEAT_S / 5):
            try:
                self.beat()
            except SQLAlchemyError as error:
                _LOG.warning("no sign of life could be given: %s", error)

    def claim(self) -> Sequence[Job]:
        """Claims jobs of this home that no living dispatcher holds. Returns them."""
        with self._database.read() as session:
            if not LeaseRepository(session).claimable(self.node):
                return []
        with self._database.write() as session:
            claimed = LeaseRepository(session).claim(self.holder, self.node)
        for job in claimed:
            _LOG.info("claimed", extra=about(job.id, job.attempt))
        return claimed

    def give_up(self) -> None:
        """Ends the lease so that others can claim the jobs at once.

        If the database is unavailable, the lease just expires.
        """
        with self._lock:
            if self._holder is not None and not self._is_lost:
                try:
                    with self._database.write() as session:
                        LeaseRepository(session).end(self._holder)
                except SQLAlchemyError as error:
                    _LOG.warning("the jobs could not be given up: %s", error)
            self._is_lost = True

    # --- private methods --------------------------------------------------------------------------------------------

    def _register(self) -> None:
        with self._lock, self._database.write() as session:
            self._holder = LeaseRepository(session).register(node=self.node, machine=self._machine, lasts_s=LEASE_S)
            self._is_lost = False
        self._beat_at, self._checked_at = self._clock(), float("-inf")

    def _end_expired_leases(self) -> bool:
        """Ends the leases of dead dispatchers. Returns whether one of them was of this node."""
        now = self._clock()
        if now - self._checked_at < BEAT_S:
            return False
        # A counter only counts as standing still while this process checked it regularly.
        counts = now - self._checked_at < 2 * BEAT_S
        self._checked_at = now
        with self._database.read() as session:
            others = [holder for holder in LeaseRepository(session).holders() if holder.id != self._holder]
        known, self._signs = self._signs, {}
        dead = [other for other in others if self._is_dead(other, known.get(other.id) if counts else None, now)]
        if not dead:
            return False
        with self._database.write() as session:
            leases = LeaseRepository(session)
            ended = [other for other in dead if leases.end(other.id, other.heartbeat)]
        for other in ended:
            _LOG.warning("%s of %s is considered dead; its jobs can be claimed", other.id, other.node)
        return any(other.node == self.node for other in ended)

    def _is_dead(self, other: Holder, known: tuple[int, float] | None, now: float) -> bool:
        if self._is_alone and (other.node, other.machine) == (self.node, self._machine):
            return True
        since = known[1] if known is not None and known[0] == other.heartbeat else now
        self._signs[other.id] = (other.heartbeat, since)
        return other.has_expired or (not other.has_term and now - since > LEASE_S)
