"""Removal of deleted data and deletion of old data, a little in each pass of the dispatcher."""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor

from sqlalchemy.orm import Session

from windlass.service.auth import are_stored_bytes_limited
from windlass.service.data import deletion, measure_stored
from windlass.service.installation import BOX_FILE, Settings, about
from windlass.service.machine.fleet import note_written
from windlass.service.validation import ApiError
from windlass.storage.sql import Database, DeletedJob, NotFound, Removal, StatusConflict
from windlass.storage.sql.repositories import AuditRepository, DeletionRepository, JobRepository, RetentionRepository

_LOG = logging.getLogger(__name__)

_DAY_S = 86400.0
_CHECK_INTERVAL_S = 1.0
_RETRY_S = 30.0  # after a failed removal
# Interval between deletions of old data, and the maximum of each. A pass over the jobs must not wait longer.
_DELETE_OLD_INTERVAL_S = 600.0
_MAX_DELETED_AT_ONCE = 20
# Interval between measurements of what users' jobs leave, and the largest share of time that they may take.
_MEASURE_INTERVAL_S = 60.0
_MEASURE_SHARE = 0.02
# Interval between notes of what jobs have written to SSDs.
_NOTE_INTERVAL_S = 60.0
# A clock set ahead by more than this makes everything look old. Nothing old is then deleted for a day, so that the
# administrator can notice.
_JUMP_S = 3600.0
_DISTRUST_S = _DAY_S
_PEER = "retention"  # the origin of a deletion in the audit


class Housekeeping:
    """Removes data of one home.

    `tick` returns soon, because a thread removes data from the disks, one item at a time.
    """

    def __init__(
        self,
        database: Database,
        settings: Settings,
        *,
        node: str,
        executor: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Uses `clock` for intervals and `wall_clock` for ages."""
        self._database = database
        self._settings = settings
        self._node = node
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix="removal")
        self._clock = clock
        self._wall_clock = wall_clock
        self._removal: Future[bool] | None = None
        self._measurement: Future[float] | None = None
        self._check_at = self._delete_old_at = self._trust_clock_at = self._measure_at = clock()
        self._note_at = self._check_at + _NOTE_INTERVAL_S
        self._offset_s = wall_clock() - self._check_at

    def tick(self, busy: Collection[str] = ()) -> None:
        """Continues the removal. `busy`: jobs that may still have processes, or whose processes are being ended."""
        now = self._clock()
        if now >= self._delete_old_at and self._trusts_clock(now):
            is_done = self._delete_old()
            self._delete_old_at = now + _DELETE_OLD_INTERVAL_S if is_done else now
        if self._removal is not None and self._removal.done():
            self._check_at = now + (0.0 if self._removal.result() else _RETRY_S)
            self._removal = None
        if self._removal is None and now >= self._check_at:
            self._check_at = now + _CHECK_INTERVAL_S
            jobs, removals = self._deleted()
            jobs = [job for job in jobs if job.id not in busy]
            if jobs or removals:
                self._removal = self._executor.submit(self._remove, jobs, removals)
        self._measure_sometimes(now)
        if now >= self._note_at:
            self._note_at = now + _NOTE_INTERVAL_S
            self._executor.submit(self._note_written)

    def close(self) -> None:
        """Finishes the current removal and leaves the rest to the next dispatcher."""
        self._executor.shutdown(cancel_futures=True)

    # --- removal of deleted data --------------------------------------------------------------------------------------

    def _deleted(self) -> tuple[Sequence[DeletedJob], Sequence[Removal]]:
        with self._database.read() as session:
            deletions = DeletionRepository(session)
            return deletions.jobs_to_remove(self._node), deletions.to_remove(self._node)

    def _remove(self, jobs: Sequence[DeletedJob], removals: Sequence[Removal]) -> bool:
        """Removes deleted jobs, files and models from the disks. Returns whether all were removed."""
        done = [self._guarded(("job", job.id), deletion.remove_deleted_job, job) for job in jobs]
        done += [self._guarded((removal.kind, removal.name), deletion.carry_out, removal) for removal in removals]
        return all(done)

    def _guarded(self, what: tuple[str, str], remove: Callable[..., bool], of: object) -> bool:
        try:
            return remove(self._database, self._settings, of)
        except Exception:  # noqa: BLE001  # the database or a disk may be unavailable for a while
            tried_again = "%s %s is deleted but could not be removed; it will be tried again"
            _LOG.exception(tried_again, *what, extra=_about(*what))
            return False

    # --- what is stored -----------------------------------------------------------------------------------------------

    def _measure_sometimes(self, now: float) -> None:
        """Measures the stored bytes of users' jobs at intervals, if any user's stored bytes are limited."""
        if self._measurement is not None and self._measurement.done():
            self._measure_at = now + max(_MEASURE_INTERVAL_S, self._measurement.result() / _MEASURE_SHARE)
            self._measurement = None
        if self._measurement is not None or now < self._measure_at:
            return
        self._measure_at = now + _MEASURE_INTERVAL_S
        with self._database.read() as session:
            is_limited = are_stored_bytes_limited(session, self._settings)
        if is_limited:
            self._measurement = self._executor.submit(self._measure)

    def _measure(self) -> float:
        """Returns the seconds that it took."""
        began_s = self._clock()
        try:
            measure_stored(self._database, self._settings)
        except Exception:  # noqa: BLE001  # the database or a disk may be unavailable for a while
            _LOG.exception("what jobs have left on disks could not be measured; it will be tried again")
        return self._clock() - began_s

    def _note_written(self) -> None:
        try:
            note_written(self._database, self._settings, self._node, clock=self._wall_clock)
        except Exception:  # noqa: BLE001  # the database or the disk may be unavailable for a while
            _LOG.exception("what jobs have written to SSDs could not be noted; it will be tried again")

    # --- deletion of old data -----------------------------------------------------------------------------------------

    def _trusts_clock(self, now: float) -> bool:
        offset_s = self._wall_clock() - now
        if offset_s - self._offset_s > _JUMP_S:
            self._trust_clock_at = now + _DISTRUST_S
            _LOG.warning(
                "the clock is %.1f h ahead of where it was: for a day, nothing is deleted because it is old",
                (offset_s - self._offset_s) / 3600,
            )
        self._offset_s = offset_s
        return now >= self._trust_clock_at

    def _delete_old(self) -> bool:
        """Deletes old jobs, checkpoints and files. Returns False if there may be more.

        On a box that works for a head, nothing is old: the head says what is to be removed, once it has it.
        """
        settings = self._settings
        if (settings.home / BOX_FILE).exists():
            return True
        kinds: tuple[tuple[str, float | None, Callable[..., Sequence[str]], Callable[..., Removal | None]], ...] = (
            ("job", settings.keep_jobs_days, self._old_jobs, self._delete_job),
            ("checkpoint", settings.keep_checkpoints_days, self._old_checkpoints, deletion.delete_model),
            ("file", settings.keep_files_days, self._old_files, deletion.delete_file),
        )
        num_left = _MAX_DELETED_AT_ONCE
        for kind, days, find, delete in kinds:
            if days is None:
                continue
            with self._database.read() as session:
                old = find(session, self._wall_clock() - days * _DAY_S)
            for name in old:
                num_left -= self._delete(kind, name, days, delete)
                if not num_left:
                    return False
        return True

    def _old_jobs(self, session: Session, before_s: float) -> Sequence[str]:
        return RetentionRepository(session).jobs(before_s=before_s, node=self._node)

    def _old_checkpoints(self, session: Session, before_s: float) -> Sequence[str]:
        return RetentionRepository(session).checkpoints(before_s=before_s, node=self._node)

    def _old_files(self, session: Session, before_s: float) -> Sequence[str]:
        """Lists old files in this home. Homes that share a database have separate files."""
        old = RetentionRepository(session).files(before_s=before_s)
        return [file_id for file_id in old if (self._settings.files_dir / file_id).exists()]

    def _delete_job(self, session: Session, settings: Settings, job_id: str) -> None:
        deletion.delete_job(session, settings, JobRepository(session).get(job_id))

    def _delete(self, kind: str, what: str, days: float, delete: Callable[..., Removal | None]) -> bool:
        try:
            with self._database.write() as session:
                delete(session, self._settings, what)
                AuditRepository(session).add(f"delete_{kind}", what, key_id=None, user=None, peer=_PEER)
        except (ApiError, NotFound, StatusConflict) as reason:
            _LOG.debug("%s %s stays: %s", kind, what, reason, extra=_about(kind, what))
            return False
        _LOG.info("%s %s was deleted: keep_%ss_days is %g", kind, what, kind, days, extra=_about(kind, what))
        return True


def _about(kind: str, what: str) -> dict[str, object]:
    return about(what) if kind == "job" else {}
