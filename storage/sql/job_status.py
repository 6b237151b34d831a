"""The life cycle of a job: its states, and the only table that says which may follow which."""

from collections.abc import Mapping
from enum import StrEnum


class JobStatus(StrEnum):
    """Where a job is in its life."""

    VALIDATING_FILES = "validating_files"  # accepted; its model and data are being checked and prepared
    QUEUED = "queued"  # ready to train; waits for its turn and for resources
    RUNNING = "running"  # a runner trains it, under the attempt that the row names
    PAUSING = "pausing"  # asked to pause; the runner finishes and commits its step
    PAUSED = "paused"  # holds no GPU and no memory; its last commit waits on the SSDs
    SUCCEEDED = "succeeded"  # the fine-tuned model is in place
    FAILED = "failed"  # `error` says why
    CANCELLED = "cancelled"  # by its owner


TERMINAL_STATUSES = frozenset({JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED})
ACTIVE_STATUSES = frozenset(JobStatus) - TERMINAL_STATUSES

TRANSITIONS: Mapping[JobStatus, frozenset[JobStatus]] = {
    JobStatus.VALIDATING_FILES: frozenset({JobStatus.QUEUED, JobStatus.PAUSED, JobStatus.FAILED, JobStatus.CANCELLED}),
    JobStatus.QUEUED: frozenset({JobStatus.RUNNING, JobStatus.PAUSED, JobStatus.FAILED, JobStatus.CANCELLED}),
    # Back to the queue: the runner was lost, and another attempt will go on from the last commit.
    JobStatus.RUNNING: frozenset({JobStatus.QUEUED, JobStatus.PAUSING, *TERMINAL_STATUSES}),
    # A job may end, or be resumed, before it gets to pause. One whose runner is lost then is paused at its last commit.
    JobStatus.PAUSING: frozenset({JobStatus.PAUSED, JobStatus.RUNNING, *TERMINAL_STATUSES}),
    # One that was paused before it was prepared is prepared when it is resumed.
    JobStatus.PAUSED: frozenset({JobStatus.VALIDATING_FILES, JobStatus.QUEUED, JobStatus.CANCELLED}),
    JobStatus.SUCCEEDED: frozenset(),
    JobStatus.FAILED: frozenset(),
    JobStatus.CANCELLED: frozenset(),
}


class IllegalTransition(Exception):
    """The table does not let a job go from one status to the other."""

    def __init__(self, job_id: str, source: JobStatus, target: JobStatus) -> None:
        super().__init__(job_id, source, target)
        self.job_id, self.source, self.target = job_id, source, target

    def __str__(self) -> str:
        refusal = f"job {self.job_id} is {self.source} and cannot become {self.target}"
        allowed = ", ".join(sorted(TRANSITIONS[self.source]))
        return f"{refusal}; it may become {allowed}" if allowed else f"{refusal} any more: it has ended"


def check_transition(job_id: str, source: JobStatus, target: JobStatus) -> None:
    """Raise IllegalTransition unless the table lists the pair."""
    if target not in TRANSITIONS[source]:
        raise IllegalTransition(job_id, source, target)
