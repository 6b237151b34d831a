"""Asks an attempt to end before the job is over: after the current step, with a commit."""

import threading


class StopRequest:
    """A request to cancel the job or to pause it, safe to use from any thread.

    A request cannot be withdrawn, and repeating it has no effect. After a cancel, the job is over and its states are
    deleted. After a pause, the states stay, and another attempt resumes from the commit, even with another placement.
    If both are requested, the cancel wins.
    """

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._paused = threading.Event()

    def cancel(self) -> None:
        """Requests the end of the job."""
        self._cancelled.set()

    def pause(self) -> None:
        """Requests the end of the attempt, but not of the job. A job whose last step has begun is finished instead."""
        self._paused.set()

    @property
    def is_made(self) -> bool:
        """True if the attempt is to end, whether the job is over then or not."""
        return self._cancelled.is_set() or self._paused.is_set()

    @property
    def is_cancelled(self) -> bool:
        """True if the job is to end."""
        return self._cancelled.is_set()

    @property
    def is_paused(self) -> bool:
        """True if the attempt is to end and the job to be resumed later."""
        return self._paused.is_set() and not self.is_cancelled
