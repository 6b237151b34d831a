"""A dispatcher's hold on its jobs: it shows that it lives, and takes over from one that does not.

On PostgreSQL a dispatcher has a term by the database's clock. On SQLite others count, on monotonic clocks of their own,
for how long its counter stands still: so nobody loses a job because a clock was set.
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

# For how long a dispatcher may give no sign of life before its jobs are others'.
LEASE_S = 30.0
# Between its signs of life, and between two looks at those of others.
BEAT_S = 5.0
# A dispatcher that has not begun a pass for so long hangs, whatever its threads still do: another one may try.
HANGS_S = 600.0


class Lease:
    """Of one dispatcher, for all its jobs. Safe from two threads: one that dispatches, one that only calls `beat`.

    `is_alone`: whether no other dispatcher of this home runs on this machine, so that those that have are dead.
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
        self._is_lost = True  # taken for dead, or not registered yet
        self._may_have_changed = False  # jobs, hands; until a pass was told
        self._beat_at = 0.0
        self._looked_at = 0.0
        self._renewed_at = clock()
        self._signs: dict[str, tuple[int, float]] = {}  # of other dispatchers: the last one, and since when

    @property
    def holder(self) -> str:
        """This dispatcher's id until the next pass; another one once it was taken for dead."""
        assert self._holder is not None, "not registered"
        return self._holder

    def renew(self) -> bool:
        """What a pass begins with. True if jobs may have changed hands: what is remembered of any must be forgotten."""
        self._renewed_at = self._clock()
        self.beat()
        if self._is_lost:
            self._register()
            self._may_have_changed = True
        if self._end_the_dead():
            self._may_have_changed = True
        may_have_changed, self._may_have_changed = self._may_have_changed, False
        return may_have_changed

    def beat(self) -> None:
        """A sign of life, if it is time for one."""
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
                _LOG.warning("%s gave no sign of life for too long, and its jobs are others' by now", self._holder)
                self._is_lost = True

    def beat_until(self, ended: threading.Event) -> None:
        """What a thread of its own does: a pass may take longer than the lease."""
        while not ended.wait(BEAT_S / 5):
            try:
                self.beat()
            except SQLAlchemyError as error:
                _LOG.warning("no sign of life could be given: %s", error)

    def claim(self) -> Sequence[Job]:
        """Jobs that are this dispatcher's from now on."""
        with self._database.read() as session:
            if not LeaseRepository(session).claimable(self.node):
                return []
        with self._database.write() as session:
            claimed = LeaseRepository(session).claim(self.holder, self.node)
        for job in claimed:
            _LOG.info("claimed", extra=about(job.id, job.attempt))
        return claimed

    def give_up(self) -> None:
        """Let others claim the jobs at once; where the database cannot be used, when the lease has run out."""
        with self._lock:
            if self._holder is not None and not self._is_lost:
                try:
                    with self._database.write() as session:
                        LeaseRepository(session).end(self._holder)
                except SQLAlchemyError as error:
                    _LOG.warning("the jobs could not be given up: %s", error)
            self._is_lost = True

    # --- inside -----------------------------------------------------------------------------------------------------

    def _register(self) -> None:
        with self._lock, self._database.write() as session:
            self._holder = LeaseRepository(session).register(node=self.node, machine=self._machine, lasts_s=LEASE_S)
            self._is_lost = False
        self._beat_at, self._looked_at = self._clock(), float("-inf")

    def _end_the_dead(self) -> bool:
        """Whether there were dispatchers of this node that are dead."""
        now = self._clock()
        if now - self._looked_at < BEAT_S:
            return False
        # Time in which nobody looked is no time in which a counter was seen to stand still.
        counts = now - self._looked_at < 2 * BEAT_S
        self._looked_at = now
        with self._database.read() as session:
            others = [each for each in LeaseRepository(session).holders() if each.id != self._holder]
        known, self._signs = self._signs, {}
        dead = [each for each in others if self._is_dead(each, known.get(each.id) if counts else None, now)]
        if not dead:
            return False
        with self._database.write() as session:
            leases = LeaseRepository(session)
            ended = [each for each in dead if leases.end(each.id, each.heartbeat)]
        for each in ended:
            _LOG.warning("%s of %s is taken for dead; its jobs can be claimed", each.id, each.node)
        return any(each.node == self.node for each in ended)

    def _is_dead(self, other: Holder, known: tuple[int, float] | None, now: float) -> bool:
        if self._is_alone and (other.node, other.machine) == (self.node, self._machine):
            return True
        since = known[1] if known is not None and known[0] == other.heartbeat else now
        self._signs[other.id] = (other.heartbeat, since)
        return other.has_expired or (not other.has_term and now - since > LEASE_S)
