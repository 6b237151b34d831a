"""The dispatcher's memory of jobs beside their rows. It may be lost at any time: a new dispatcher starts without it."""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from windlass.actors.job import JournalReader
from windlass.service.dispatcher.placement import PlannedDemands
from windlass.service.jobs import BoxKind
from windlass.service.preparation import Preparation
from windlass.storage.ids import Attempt

# Seconds after which a runner is requested again to end.
_STOP_RETRY_S = 10.0
# Seconds without a sign of life after which a runner counts as hung. It gives a sign every second.
SILENT_S = 60.0


class AttemptPhase(StrEnum):
    """The phase of a job's last attempt, as the dispatcher sees it."""

    RUNNING = "running"  # its runner starts or lives, or the dispatcher has not noticed its end yet
    STOPPING = "stopping"  # its runner was requested to end
    EXITING = "exiting"  # the attempt is over; its processes may still live, and hold memory
    EXITED = "exited"  # its processes are gone; its states wait for the next attempt, or for the job's end


_TRANSITIONS: Mapping[AttemptPhase, frozenset[AttemptPhase]] = {
    AttemptPhase.RUNNING: frozenset({AttemptPhase.STOPPING, AttemptPhase.EXITING}),
    AttemptPhase.STOPPING: frozenset({AttemptPhase.EXITING}),
    AttemptPhase.EXITING: frozenset({AttemptPhase.EXITED}),
    AttemptPhase.EXITED: frozenset(),
}


class AttemptPhaseError(RuntimeError):
    """An attempt cannot change between these phases."""


class StopKind(StrEnum):
    """The requests to end that a runner may get."""

    CANCEL = "cancel"  # end the job after its step
    PAUSE = "pause"  # end the attempt after its step
    PREEMPT = "preempt"  # end an attempt without a step at once, for a job of higher priority


@dataclass(slots=True, kw_only=True)
class AttemptWatch:
    """The dispatcher's view of one attempt."""

    attempt: Attempt
    phase: AttemptPhase = AttemptPhase.RUNNING
    # Reads on from the last imported record; None: it must be opened.
    reader: JournalReader | None = None
    last_stop_request: tuple[StopKind, float] | None = None  # with its time
    last_sign: tuple[int | None, float] | None = None  # the runner's last sign of life, and the time of its first sight
    kill_at: float = math.inf  # when the processes of an exiting attempt are killed

    def enter(self, phase: AttemptPhase) -> None:
        """Changes the phase. Raises AttemptPhaseError for a change that no table entry lists."""
        if phase not in _TRANSITIONS[self.phase]:
            raise AttemptPhaseError(f"attempt {self.attempt} is {self.phase} and cannot become {phase}")
        self.phase = phase

    def is_silent(self, sign: int | None, now_s: float) -> bool:
        """Returns whether the runner gave no sign of life for too long. `sign`: its last one, None before the first.

        The time of the sign's file is not used, because the wall clock may be set and the machine may sleep.
        """
        known, since_s = self.last_sign or (None, now_s)
        self.last_sign = (sign, now_s if sign != known else since_s)
        return sign is not None and now_s - self.last_sign[1] > SILENT_S

    def requests(self, kind: StopKind, now_s: float) -> tuple[bool, bool]:
        """Notes a request to end. Returns whether it is a new one, and whether it is to be sent now."""
        last_kind, last_at = self.last_stop_request or (None, -math.inf)
        is_new = kind is not last_kind
        is_due = is_new or now_s - last_at >= _STOP_RETRY_S
        if is_due:
            self.last_stop_request = (kind, now_s)
            if self.phase is AttemptPhase.RUNNING:
                self.enter(AttemptPhase.STOPPING)
        return is_new, is_due

    @property
    def is_over(self) -> bool:
        """Returns whether the attempt has ended, though its processes may still live."""
        return self.phase in (AttemptPhase.EXITING, AttemptPhase.EXITED)


@dataclass(slots=True, kw_only=True)
class PreparationWatch:
    """The preparation of a job whose files are to be validated."""

    preparation: Preparation | None = None  # None: it has not begun
    computed_s: float = 0.0  # its computing time at the last check
    began_at: float = 0.0
    kinds: Mapping[str, BoxKind] = field(default_factory=dict)  # that it is planned for, each with a box's name
    files_nbytes: int | None = None  # None: not measured yet
    reported_at: float | None = None  # when its progress or its reason for waiting was last written


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """The time of a lost job's next attempt."""

    after: Attempt
    pause_s: float
    at: float


@dataclass(slots=True, kw_only=True)
class QueueWatch:
    """A job's time in the queue. It begins anew each time that the job is queued."""

    retry: Retry | None = None  # of a lost job
    reason_written_at: float | None = None  # when its reason for waiting was last written
    required_space: tuple[Path, int] | None = None  # the disk on which its last attempt found too little, and the bytes
    # Seconds that it waited while jobs of higher priority were prepared, and since when it does so now.
    yielded_s: float = 0.0
    yields_since: float | None = None
    waits_for: str | None = None  # the box for which it waits
    passed_since: float | None = None  # when it might have begun, but waited for a box on which it ends sooner


@dataclass(slots=True, kw_only=True)
class JobWatch:
    """All that a dispatcher remembers of one job."""

    preparing: PreparationWatch = field(default_factory=PreparationWatch)
    queued: QueueWatch = field(default_factory=QueueWatch)
    attempt: AttemptWatch | None = None  # the last attempt, if it has begun; None: there is none, or its space is freed
    # With the number of its plan, and its GPUs and boxes as its request has them.
    demands: tuple[tuple[int, object], PlannedDemands] | None = None
    # Of the plan with this number: the seconds of a step here, if known, and whether it fits this box.
    here: tuple[int, float | None, bool] | None = None


JobWatches = defaultdict[str, JobWatch]  # by the job's id
