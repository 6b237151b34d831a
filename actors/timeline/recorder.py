"""Records an actor's time spans and sends them to the scheduler, for the job's timeline.

Recording a span appends one tuple to a queue; the few thousand spans of a step are sent in one message. All processes
of a machine use the same clock, CLOCK_MONOTONIC, which is Python's `time.monotonic`.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping

from windlass.actors.job import GPU_WORKER, SCHEDULER, ActorKind, kind_of
from windlass.actors.messages import Message, SpanKind, SpansReported, WorkSpan
from windlass.storage.ids import ActorName, ChunkKey, JobId, StateKind, Step

# Resources of the first GPU worker: the device's compute, and the copies to it and from it.
COMPUTE = f"{GPU_WORKER}/compute"
TO_DEVICE = f"{GPU_WORKER}/h2d"
FROM_DEVICE = f"{GPU_WORKER}/d2h"

# The chunk number of spans about a whole block, and the block number of spans about no block.
WHOLE_BLOCK = -1
NO_BLOCK = -1

# Largest number of unsent spans. It matters while `tell` is not called, as when a model is loaded or exported.
_MAX_HELD = 4096


class SpanRecorder:
    """The recorded spans of one actor that are not sent yet. Thread-safe: each span is sent exactly once."""

    def __init__(self, actor: ActorName, job: JobId, send: Callable[[ActorName, Message], None]) -> None:
        """A GPU worker names its own resources as those of the first one."""
        self._actor = actor
        self._job = job
        self._names: dict[str, str] = {}
        if kind_of(actor) is ActorKind.GPU_WORKER:
            self._names = {name: own_resource(name, actor) for name in (COMPUTE, TO_DEVICE, FROM_DEVICE)}
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
        """Records one span; see `WorkSpan`."""
        resource = self._names.get(resource, resource)
        self._spans.append(WorkSpan(resource, kind, step, block, chunk, start_s, end_s, nbytes))
        if len(self._spans) >= _MAX_HELD:
            self.tell(step)

    def note_batch(
        self,
        resource: str,
        kind: SpanKind,
        step: int,
        nbytes: Mapping[ChunkKey, int],
        start_s: float,
        end_s: float,
    ) -> None:
        """Records the spans of chunks that were copied one after the other, without a pause between them.

        `nbytes` has the bytes of each chunk. Only the time of all is known, so each has a share of it by its bytes.
        """
        begun_s, done, total = start_s, 0, sum(nbytes.values())
        for key, chunk_nbytes in nbytes.items():
            done += chunk_nbytes
            over_s = end_s if done == total else start_s + (end_s - start_s) * done / total
            self.note(resource, kind, step, key.block, key.chunk, begun_s, over_s, chunk_nbytes)
            begun_s = over_s

    def tell(self, step: int) -> None:
        """Sends the recorded spans, if there are any. `step` is the current step."""
        spans: list[WorkSpan] = []
        try:
            while True:
                spans.append(self._spans.popleft())
        except IndexError:
            pass
        if spans:
            self._send(SCHEDULER, SpansReported(job=self._job, step=Step(step), actor=self._actor, spans=tuple(spans)))


def own_resource(resource: str, actor: ActorName) -> str:
    """Returns the resource of a GPU worker that corresponds to one of the first one's."""
    return f"{actor}{resource.removeprefix(GPU_WORKER)}"


def worker_of(resource: str) -> str | None:
    """Returns the GPU worker that a resource is a part of; None if it is no part of one."""
    worker, slash, part = resource.rpartition("/")
    return worker if slash and "-" not in part else None  # "b1/optimizer-0" is an actor of another box


def transfer_kind(*, is_read: bool, states: Collection[StateKind], param_kind: StateKind) -> SpanKind:
    """Returns the kind of a chunk's transfer to or from an SSD, by the states that are transferred."""
    if all(state is StateKind.GRAD for state in states):
        return SpanKind.READ_GRAD if is_read else SpanKind.WRITE_GRAD
    if not is_read:
        return SpanKind.WRITE_STATES
    return SpanKind.READ_PARAMS if all(state is param_kind for state in states) else SpanKind.READ_STATES
