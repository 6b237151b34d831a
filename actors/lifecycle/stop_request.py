"""Asks an attempt to end before the job is over: after the step that is being computed, with a commit."""

import threading


class StopRequest:
    """Made with the attempt, or before it. Safe from any thread; what was asked stays asked, and twice is once.

    Cancelled, the job is over and its states go. Paused, they stay, and another attempt goes on from the commit,
    wherever its plan has things rest; who is cancelled as well is cancelled.
    """

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._paused = threading.Event()

    def cancel(self) -> None:
        """The job ends."""
        self._cancelled.set()

    def pause(self) -> None:
        """The attempt ends, the job does not. A job whose last step has begun is finished instead."""
        self._paused.set()

    @property
    def is_cancelled(self) -> bool:
        """Whether the job is to end."""
        return self._cancelled.is_set()

    @property
    def is_paused(self) -> bool:
        """Whether the attempt is to end, and the job to go on."""
        return self._paused.is_set() and not self.is_cancelled
