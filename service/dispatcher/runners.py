"""What starts and ends the runners of jobs, as the dispatcher knows it."""

from typing import Protocol

from windlass.actors.job import JobSpec
from windlass.storage.ids import Attempt, JobId


class RunnerLostError(RuntimeError):
    """A runner died while it started, or could not be reached; that is no fault of the job's."""


class Runners(Protocol):
    """Where jobs run: on Ray, or in a test's stand-in."""

    def start(self, spec: JobSpec) -> None:
        """Launch a job; returns once its runner has begun.

        Raises RunnerLostError, or what keeps the job from running.
        """

    def is_alive(self, job: JobId, attempt: Attempt) -> bool:
        """Whether the runner is there."""

    def cancel(self, job: JobId, attempt: Attempt) -> None:
        """Ask the runner to end the job after its step; nothing happens if there is none."""

    def pause(self, job: JobId, attempt: Attempt) -> None:
        """Ask the runner to end the attempt after its step, so that another can go on; as `cancel`."""

    def kill(self, job: JobId, attempt: Attempt) -> None:
        """End the runner at once; nothing happens if there is none."""
