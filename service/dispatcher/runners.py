"""The interface through which the dispatcher starts and ends the runners of jobs."""

from typing import Protocol

from windlass.actors.job import JobSpec
from windlass.storage.ids import Attempt, JobId


class RunnerLostError(RuntimeError):
    """A runner died while it started, or was unreachable. The job did not cause it."""


class Runners(Protocol):
    """The runners of jobs: on Ray, or a substitute in tests."""

    def start(self, spec: JobSpec) -> None:
        """Launches a job. Returns once its runner has begun.

        Raises RunnerLostError, or the error that keeps the job from running.
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
