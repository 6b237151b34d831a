"""The life cycle of a job: its states, and the table of allowed transitions."""

from collections.abc import Mapping
from enum import StrEnum


class JobStatus(StrEnum):
    """The status of a job."""

    VALIDATING_FILES = "validating_files"  # accepted; its model and data are being checked and prepared
    QUEUED = "queued"  # ready to train; waits for its turn and for resources
    RUNNING = "running"  # a runner trains it, in the attempt of the job's row
    PAUSING = "pausing"  # a pause was requested; the runner finishes and commits its step
    PAUSED = "paused"  # holds no GPU and no memory; its last commit stays on the SSDs
    SUCCEEDED = "succeeded"  # the fine-tuned model is in place
    FAILED = "failed"  # `error` has the reason
    CANCELLED = "cancelled"  # by its owner or an administrator


TERMINAL_STATUSES = frozenset({JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED})
ACTIVE_STATUSES = frozenset(JobStatus) - TERMINAL_STATUSES

TRANSITIONS: Mapping[JobStatus, frozenset[JobStatus]] = {
    JobStatus.VALIDATING_FILES: frozenset({JobStatus.QUEUED, JobStatus.PAUSED, JobStatus.FAILED, JobStatus.CANCELLED}),
    JobStatus.QUEUED: frozenset({JobStatus.RUNNING, JobStatus.PAUSED, JobStatus.FAILED, JobStatus.CANCELLED}),
    # Back to QUEUED if the runner was lost: another attempt continues from the last commit.
    # To PAUSED if an attempt could not start, and steps are committed that failing would lose.
    JobStatus.RUNNING: frozenset({JobStatus.QUEUED, JobStatus.PAUSING, JobStatus.PAUSED, *TERMINAL_STATUSES}),
    # A job may end or be resumed before it pauses. If its runner is lost meanwhile, it is paused at its last commit.
    JobStatus.PAUSING: frozenset({JobStatus.PAUSED, JobStatus.RUNNING, *TERMINAL_STATUSES}),
    # A job that was paused before its preparation is prepared when it is resumed.
    JobStatus.PAUSED: frozenset({JobStatus.VALIDATING_FILES, JobStatus.QUEUED, JobStatus.CANCELLED}),
    JobStatus.SUCCEEDED: frozenset(),
    JobStatus.FAILED: frozenset(),
    JobStatus.CANCELLED: frozenset(),
}


class IllegalTransition(Exception):
    """The table does not allow this transition between two statuses."""

    def __init__(self, job_id: str, source: JobStatus, target: JobStatus) -> None:
        super().__init__(job_id, source, target)
        self.job_id, self.source, self.target = job_id, source, target

    def __str__(self) -> str:
        refusal = f"job {self.job_id} is {self.source} and cannot become {self.target}"
        allowed = ", ".join(sorted(TRANSITIONS[self.source]))
        return f"{refusal}; it may become {allowed}" if allowed else f"{refusal}: it has ended"


def check_transition(job_id: str, source: JobStatus, target: JobStatus) -> None:
    """Raises IllegalTransition unless the table lists the pair."""
    if target not in TRANSITIONS[source]:
        raise IllegalTransition(job_id, source, target)
