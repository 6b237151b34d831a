"""The runners of jobs: the interface to them, and the end of their attempts, until no process and no state is left."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from windlass.actors.job import JobSpec
from windlass.actors.lifecycle import close_attempt, kill_attempt
from windlass.actors.runtime.boxes import LinkConfig
from windlass.actors.runtime.moving import MoveSpec
from windlass.service.data import free_space, remove_arenas, remove_states
from windlass.service.dispatcher.job_watch import AttemptPhase, AttemptWatch, JobWatches
from windlass.service.installation import Settings, about
from windlass.service.jobs import job_dir
from windlass.storage.ids import Attempt, JobId
from windlass.storage.sql import TERMINAL_STATUSES, Database
from windlass.storage.sql.repositories import DeletionRepository, JobRepository

_LOG = logging.getLogger(__name__)

# Seconds for a runner whose attempt is over to close its files and end its other actors.
_KILL_AFTER_S = 180.0
# Seconds for the other actors to outlive their runner; Ray ends them with it.
_KILL_ORPHANS_AFTER_S = 5.0


class RunnerLostError(RuntimeError):
    """A runner died while it started, or was unreachable. The job did not cause it."""


class Runners(Protocol):
    """The runners of jobs: on Ray, or a substitute in tests."""

    def start(self, spec: JobSpec) -> None:
        """Launches a job. Returns once its runner has begun.

        Raises RunnerLostError, or the error that keeps the job from running.
        """

    def start_first_part(self, specs: Sequence[JobSpec], config: LinkConfig) -> None:
        """Launches the first box's part of a job over several boxes, as `start` does.

        `specs`: those of all boxes, in their order.
        """

    def start_part(self, spec: JobSpec, config: LinkConfig) -> None:
        """Launches another box's part, as `start` does. It ends by itself when the first box has ended, or is lost."""

    def start_move(self, move: MoveSpec, config: LinkConfig) -> None:
        """Launches one box's part of an attempt that moves a job's states, as `start` does.

        That of another box than the first ends by itself when the first one has ended, or is lost.
        """

    def is_alive(self, job: JobId, attempt: Attempt) -> bool:
        """Returns whether the runner exists."""

    def cancel(self, job: JobId, attempt: Attempt) -> None:
        """Requests the runner to end the job after its step; does nothing without a runner."""

    def pause(self, job: JobId, attempt: Attempt) -> None:
        """Requests the runner to end the attempt after its step, so that another one can resume.

        Does nothing without a runner.
        """

    def kill(self, job: JobId, attempt: Attempt) -> None:
        """Kills the runner; does nothing without one."""


def have_exited(runners: Runners, settings: Settings, job_id: str, attempt: AttemptWatch, now: float) -> bool:
    """Returns whether all processes of an attempt are gone, so that none can write.

    Kills those that stay too long. `now`: by the clock of `attempt.kill_at`.
    """
    if runners.is_alive(JobId(job_id), attempt.attempt):
        if now >= attempt.kill_at:
            runners.kill(JobId(job_id), attempt.attempt)
        return False
    folder = job_dir(settings, job_id)
    if close_attempt(folder, attempt.attempt):
        return True
    attempt.kill_at = min(attempt.kill_at, now + _KILL_ORPHANS_AFTER_S)
    if now >= attempt.kill_at and (killed := kill_attempt(folder, attempt.attempt)):
        _LOG.warning("processes %s outlived their runner and were killed", killed, extra=about(job_id, attempt.attempt))
    return False


class EndedAttempts:
    """The ended attempts whose processes or states remain. The watches of their jobs hold them."""

    def __init__(
        self,
        database: Database,
        settings: Settings,
        runners: Runners,
        watches: JobWatches,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._settings = settings
        self._runners = runners
        self._watches = watches
        self._clock = clock

    def attempts(self) -> Mapping[str, AttemptWatch]:
        """Returns the ended attempts by job."""
        watches = self._watches.items()
        return {job_id: last for job_id, watch in watches if (last := watch.attempt) is not None and last.is_over}

    def await_exit(self, job_id: str, number: int, *, is_hung: bool = False) -> None:
        """Watches the processes of an ended attempt, until they exit or are killed; at once if its runner is hung."""
        watch = self._watches[job_id]
        if watch.attempt is None or watch.attempt.attempt != number or watch.attempt.is_over:
            watch.attempt = AttemptWatch(attempt=Attempt(number))
        watch.attempt.enter(AttemptPhase.EXITING)
        watch.attempt.kill_at = self._clock() + (0.0 if is_hung else _KILL_AFTER_S)

    def clean_up(self, job_id: str, attempt: AttemptWatch) -> None:
        """Frees the memory and SSD space of an ended attempt once its processes are gone."""
        if attempt.phase is AttemptPhase.EXITING:
            if not have_exited(self._runners, self._settings, job_id, attempt, self._clock()):
                return
            attempt.enter(AttemptPhase.EXITED)
            remove_arenas()
        with self._database.read() as session:
            job = JobRepository(session).find(job_id)
            deleted = DeletionRepository(session).deleted_job(job_id)
        if job is None:
            if deleted is not None:
                free_space(self._settings, JobId(job_id), self._settings.fine_tuned_dir / deleted.model)
            del self._watches[job_id]
        elif job.status in TERMINAL_STATUSES:  # else the next attempt needs the states
            remove_states(self._settings, job)
            del self._watches[job_id]
