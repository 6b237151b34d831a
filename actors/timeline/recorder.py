"""How an actor notes what it did and when, and tells the scheduler of it: the rows of a job's timeline.

A note is one tuple appended to a queue; a few thousand a step go out in one message. All processes of a machine read
one clock, CLOCK_MONOTONIC, which is Python's `time.monotonic`.
"""

from collections import deque
from collections.abc import Callable, Collection

from windlass.actors.job import GPU_WORKER, SCHEDULER
from windlass.actors.messages import Message, SpanKind, SpansReported, WorkSpan
from windlass.storage.ids import ActorName, JobId, StateKind, Step

# What the GPU worker has beside its name: the device itself, and the two ways to it and from it.
COMPUTE = f"{GPU_WORKER}/compute"
TO_DEVICE = f"{GPU_WORKER}/h2d"
FROM_DEVICE = f"{GPU_WORKER}/d2h"

# A span that is about a whole block, or about none.
WHOLE_BLOCK = -1
NO_BLOCK = -1

# What is held while nothing asks to tell, as when a model is loaded or exported.
_MAX_HELD = 4096


class SpanRecorder:
    """What one actor has done and not told yet. Safe from many threads: no span is lost or told twice."""

    def __init__(self, actor: ActorName, job: JobId, send: Callable[[ActorName, Message], None]) -> None:
        self._actor = actor
        self._job = job
        self._send = send
        self._spans: deque[WorkSpan] = deque()

    def note(
        self,
        resource: str,
        kind: SpanKind,
        step: int,
        block: int,
        chunk: int,
        start_s: float,
        end_s: float,
        nbytes: int = 0,
    ) -> None:
        """One stretch of work; see `WorkSpan`."""
        self._spans.append(WorkSpan(resource, kind, step, block, chunk, start_s, end_s, nbytes))
        if len(self._spans) >= _MAX_HELD:
            self.tell(step)

    def tell(self, step: int) -> None:
        """Send what was noted, if anything; `step` is the one that was worked on."""
        spans: list[WorkSpan] = []
        try:
            while True:
                spans.append(self._spans.popleft())
        except IndexError:
            pass
        if spans:
            self._send(SCHEDULER, SpansReported(job=self._job, step=Step(step), actor=self._actor, spans=tuple(spans)))


def transfer_kind(*, is_read: bool, states: Collection[StateKind], param_kind: StateKind) -> SpanKind:
    """What a chunk's way to or from an SSD is for, by the states that move."""
    if all(state is StateKind.GRAD for state in states):
        return SpanKind.READ_GRAD if is_read else SpanKind.WRITE_GRAD
    if not is_read:
        return SpanKind.WRITE_STATES
    return SpanKind.READ_PARAMS if all(state is param_kind for state in states) else SpanKind.READ_STATES
