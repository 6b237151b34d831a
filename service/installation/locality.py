"""The location of jobs' data if several homes share a database."""

from windlass.service.installation.home import node_of
from windlass.service.installation.settings import Settings
from windlass.service.validation import ApiError
from windlass.storage.sql import Job


def is_local(settings: Settings, job: Job) -> bool:
    """Returns whether a job's data lies in this home. A job without a node counts as local."""
    return job.node in (None, node_of(settings.home))


def check_is_here(settings: Settings, job: Job) -> None:
    """Raises ApiError for a job whose data lies in another home."""
    if not is_local(settings, job):
        raise ApiError(
            f"the data of job {job.id} lies with the service that it was sent to; ask there",
            status=404,
            code="job_elsewhere",
        )
