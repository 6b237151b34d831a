"""The order of commits and writes. No I/O, no threads."""

from collections import Counter, deque

from windlass.storage.ids import Step
from windlass.storage.io_scheduler.requests import CommitRequest


class CommitGate:
    """Holds each commit back until the writes of its step and of earlier ones have ended. Not thread-safe.

    Writes and commits of later steps than the last commit also wait until that is decided. The caller holds the writes.
    """

    def __init__(self) -> None:
        self._num_open_writes: Counter[Step] = Counter()
        self._waiting: list[CommitRequest] = []  # for writes
        self._ready: deque[CommitRequest] = deque()
        self._failed_step: Step | None = None
        self._undecided: Step | None = None

    @property
    def failed_step(self) -> Step | None:
        """The first step with a failed write. It and later ones cannot be committed."""
        return self._failed_step

    @property
    def num_waiting(self) -> int:
        """The number of commits that wait for a write, and not for a decision."""
        return sum(not self.waits_for_decision(commit.step) for commit in self._waiting)

    @property
    def num_ready(self) -> int:
        """The number of commits that can run now."""
        return len(self._ready)

    def begin_write(self, step: Step) -> None:
        """Counts a write of a step."""
        self._num_open_writes[step] += 1

    def fail_write(self, step: Step) -> None:
        """Records that a write of a step has failed. `end_write` must follow, once it moves no more bytes."""
        self._failed_step = step if self._failed_step is None else min(step, self._failed_step)

    def end_write(self, step: Step) -> None:
        """Counts the end of a write, and releases the commits that waited for it."""
        self._num_open_writes[step] -= 1
        if self._num_open_writes[step] == 0:
            del self._num_open_writes[step]
            self._release()

    @property
    def undecided_step(self) -> Step | None:
        """The last committed step, until all SSDs of the job have it."""
        return self._undecided

    def waits_for_decision(self, step: Step) -> bool:
        """Returns whether a write or a commit of a step must wait for the decision on the last commit."""
        return self._undecided is not None and step > self._undecided

    def commit_ended(self, step: Step) -> None:
        """Records that a step is committed on this SSD."""
        self._undecided = step
        self._waiting = [*self._ready, *self._waiting]
        self._ready.clear()
        self._release()

    def decide(self, step: Step) -> None:
        """Records that all SSDs of the job have committed a step. It may come twice or late."""
        if self._undecided is not None and step >= self._undecided:
            self._undecided = None
            self._release()

    def drain(self) -> list[CommitRequest]:
        """Removes and returns the commits that wait."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def add(self, commit: CommitRequest) -> None:
        """Adds a commit."""
        self._waiting.append(commit)
        self._release()

    def take(self) -> CommitRequest | None:
        """Removes and returns the next commit that can run; None if there is none."""
        return self._ready.popleft() if self._ready else None

    def _release(self) -> None:
        oldest = min(self._num_open_writes, default=None)
        waiting, self._waiting = self._waiting, []
        for commit in waiting:
            is_held = self.waits_for_decision(commit.step) or (oldest is not None and oldest <= commit.step)
            (self._waiting if is_held else self._ready).append(commit)
