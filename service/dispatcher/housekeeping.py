"""What the dispatcher does about old and deleted data: one piece after the other, beside its passes over the jobs."""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor

from sqlalchemy.orm import Session

from windlass.service.data import deletion
from windlass.service.installation import Settings, about
from windlass.service.validation import ApiError
from windlass.storage.sql import Database, DeletedJob, NotFound, Removal, StatusConflict
from windlass.storage.sql.repositories import AuditRepository, DeletionRepository, JobRepository, RetentionRepository

_LOG = logging.getLogger(__name__)

_DAY_S = 86400.0
_LOOK_S = 1.0
_RETRY_S = 30.0  # after something could not be removed
# Between two looks for what is old, and how much of it goes at each: a pass over the jobs shall not wait for more.
_RETENTION_S = 600.0
_MOST_AT_ONCE = 20
# A clock that was set ahead makes everything look old. Whoever set it wrongly has a day to notice.
_JUMP_S = 3600.0
_DOUBT_S = _DAY_S
_PEER = "retention"  # who deletes, in the audit


class Housekeeping:
    """Of one home. `tick` returns soon: removing from disks goes on in a thread, one thing at a time."""

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
        """`clock` for intervals, `wall_clock` for how old something is."""
        self._database = database
        self._settings = settings
        self._node = node
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix="removal")
        self._clock = clock
        self._wall_clock = wall_clock
        self._removal: Future[bool] | None = None
        self._look_at = self._retain_at = self._believe_at = clock()
        self._offset_s = wall_clock() - self._look_at

    def tick(self, busy: Collection[str] = ()) -> None:
        """Go on with what is to be done. `busy`: jobs whose processes may still be there, or are just being ended."""
        now = self._clock()
        if now >= self._retain_at and self._believes_clock(now):
            is_done = self._delete_what_is_old()
            self._retain_at = now + _RETENTION_S if is_done else now
        if self._removal is not None and self._removal.done():
            self._look_at = now + (0.0 if self._removal.result() else _RETRY_S)
            self._removal = None
        if self._removal is None and now >= self._look_at:
            self._look_at = now + _LOOK_S
            jobs, removals = self._deleted()
            jobs = [job for job in jobs if job.id not in busy]
            if jobs or removals:
                self._removal = self._executor.submit(self._remove, jobs, removals)

    def close(self) -> None:
        """What is being removed is removed; the rest is for the next one."""
        self._executor.shutdown(cancel_futures=True)

    # --- what is deleted ----------------------------------------------------------------------------------------------

    def _deleted(self) -> tuple[Sequence[DeletedJob], Sequence[Removal]]:
        with self._database.read() as session:
            found = DeletionRepository(session)
            return found.jobs_to_remove(self._node), found.to_remove(self._node)

    def _remove(self, jobs: Sequence[DeletedJob], removals: Sequence[Removal]) -> bool:
        """Whether all of it could be removed."""
        done = [self._guarded(("job", job.id), deletion.remove_deleted_job, job) for job in jobs]
        done += [self._guarded((each.kind, each.name), deletion.carry_out, each) for each in removals]
        return all(done)

    def _guarded(self, what: tuple[str, str], remove: Callable[..., bool], of: object) -> bool:
        try:
            return remove(self._database, self._settings, of)
        except Exception:  # noqa: BLE001  # the database may be gone for a while, or a disk
            tried_again = "%s %s is deleted but could not be removed; it will be tried again"
            _LOG.exception(tried_again, *what, extra=_about(*what))
            return False

    # --- what is old --------------------------------------------------------------------------------------------------

    def _believes_clock(self, now: float) -> bool:
        offset_s = self._wall_clock() - now
        if offset_s - self._offset_s > _JUMP_S:
            self._believe_at = now + _DOUBT_S
            _LOG.warning(
                "the clock is %.1f h ahead of where it was: for a day, nothing is deleted because it is old",
                (offset_s - self._offset_s) / 3600,
            )
        self._offset_s = offset_s
        return now >= self._believe_at

    def _delete_what_is_old(self) -> bool:
        """False if there may be more."""
        settings = self._settings
        kinds: tuple[tuple[str, float | None, Callable[..., Sequence[str]], Callable[..., Removal | None]], ...] = (
            ("job", settings.keep_jobs_days, self._old_jobs, self._delete_job),
            ("checkpoint", settings.keep_checkpoints_days, self._old_checkpoints, deletion.delete_model),
            ("file", settings.keep_files_days, self._old_files, deletion.delete_file),
        )
        num_left = _MOST_AT_ONCE
        for kind, days, find, delete in kinds:
            if days is None:
                continue
            with self._database.read() as session:
                found = find(session, self._wall_clock() - days * _DAY_S)
            for each in found:
                num_left -= self._delete(kind, each, days, delete)
                if not num_left:
                    return False
        return True

    def _old_jobs(self, session: Session, before_s: float) -> Sequence[str]:
        return RetentionRepository(session).jobs(before_s=before_s, node=self._node)

    def _old_checkpoints(self, session: Session, before_s: float) -> Sequence[str]:
        return RetentionRepository(session).checkpoints(before_s=before_s, node=self._node)

    def _old_files(self, session: Session, before_s: float) -> Sequence[str]:
        """Of those that share a database, each home has files of its own."""
        found = RetentionRepository(session).files(before_s=before_s)
        return [each for each in found if (self._settings.files_dir / each).exists()]

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
