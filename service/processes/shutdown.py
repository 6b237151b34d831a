"""Shutdown of a home's processes and jobs, as `windlass down` does it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy.orm import Session

from windlass.service.auth import record_command
from windlass.service.data import remove_arenas, remove_states
from windlass.service.dispatcher import cancel_job, fail_job, handle_loss, import_records, open_journal
from windlass.service.installation import Serving, Settings, end_processes, find_serving, forget_killed, node_of
from windlass.service.machine import RayCluster
from windlass.service.validation import ReportedError, report_database_errors, told_jobs
from windlass.storage.sql import TERMINAL_STATUSES, Database, Job, JobStatus
from windlass.storage.sql.repositories import JobRepository, PartRepository, PartState


class JobsRunningError(ReportedError):
    """Ending the service now would end jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The processes and jobs that `down` ended."""

    supervisor: Serving | None
    num_ray_processes: int
    failed_jobs: tuple[str, ...]


def shut_down(settings: Settings, *, force: bool) -> Ended:
    """Ends the supervisor, its children and the Ray daemon.

    Raises JobsRunningError if jobs run and `force` is not set. Raises DatabaseUnavailableError; with `force` only after
    everything has ended.
    """
    serving = find_serving(settings.home)
    cluster = RayCluster(settings.home)
    if serving is None and not cluster.pids:
        cluster.stop()  # removes the files of a daemon that was killed
        forget_killed(settings.home)
        return Ended(supervisor=None, num_ray_processes=0, failed_jobs=())
    if not force and (jobs := running_jobs(settings)):
        raise JobsRunningError(
            f"still running: {told_jobs(jobs)}; wait, or use `windlass cancel`, or let what runs fail with "
            "`windlass down --force`"
        )
    if serving is not None:
        end_processes([serving.process], grace_s=20.0)
    num_ray_processes = len(cluster.stop())
    forget_killed(settings.home)
    failed = _fail_jobs_left(settings)
    return Ended(supervisor=serving, num_ray_processes=num_ray_processes, failed_jobs=failed)


def running_jobs(settings: Settings) -> tuple[str, ...]:
    """Returns the ids of the jobs that have a runner, also of those of which this box has a part."""
    with _database(settings) as database:
        with database.read() as session:
            parts = PartRepository(session).on(node_of(settings.home))
        parts_here = (part.job_id for part in parts if part.state == PartState.RUNNING.value)
        return (*(job.id for job in _jobs_here(database, settings)), *parts_here)


def jobs_with_parts(settings: Settings) -> tuple[str, ...]:
    """Returns the ids of the jobs over several boxes that have states on this box."""
    with _database(settings) as database, database.read() as session:
        return tuple(part.job_id for part in PartRepository(session).on(node_of(settings.home)) if part.served)


def is_box_free(settings: Settings) -> bool:
    """Returns whether no job trains in this home."""
    return not (RayCluster(settings.home).pids and running_jobs(settings))


def _fail_jobs_left(settings: Settings) -> tuple[str, ...]:
    """Ends the jobs whose runners ended with Ray, unless they have an outcome in their journals.

    Returns the failed jobs.
    """
    lost = "`windlass down --force` ended the service while this job ran; submit it again"

    def end(session: Session, job: Job, _reason: str) -> None:
        record_command(session, "shut_down", job.id)
        if job.cancel_requested:
            cancel_job(session, job)
        elif job.status is JobStatus.PAUSING:
            handle_loss(settings, session, job, "the service was ended")
        else:
            fail_job(session, job, "service_stopped", lost)

    with _database(settings) as database:
        left = _jobs_here(database, settings)
        for job in left:
            import_records(database, settings, job, open_journal(settings, job).read_new(), lost=lost, when_lost=end)
        with database.read() as session:
            statuses = {job.id: JobRepository(session).get(job.id).status for job in left}
        for job in left:
            # A job that paused or yielded to another one continues when the service is back.
            if statuses[job.id] in TERMINAL_STATUSES:
                remove_states(settings, job)
        remove_arenas()
    return tuple(job.id for job in left if statuses[job.id] is JobStatus.FAILED)


@contextmanager
def _database(settings: Settings) -> Iterator[Database]:
    database = Database(settings.database_url)
    try:
        with report_database_errors():
            yield database
    finally:
        database.close()


def _jobs_here(database: Database, settings: Settings) -> Sequence[Job]:
    """Returns the jobs of this home that have a runner."""
    with database.read() as session:
        return JobRepository(session).with_status(JobStatus.RUNNING, JobStatus.PAUSING, node=node_of(settings.home))
