"""Records an actor's time spans and sends them to the scheduler, for the job's timeline.

Recording a span appends one tuple to a queue; the few thousand spans of a step are sent in one message. All processes
of a machine use the same clock, CLOCK_MONOTONIC, which is Python's `time.monotonic`.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from windlass.actors.job import GPU_WORKER, SCHEDULER, ActorKind, box_of, kind_of
from windlass.actors.messages import Message, Phase, SpanKind, SpanPulled, SpansReported, WorkSpan
from windlass.storage.ids import ActorName, ChunkKey, JobId, StateKind, Step

# Resources of the first GPU worker: the device's compute, and the copies to it and from it.
COMPUTE = f"{GPU_WORKER}/compute"
TO_DEVICE = f"{GPU_WORKER}/h2d"
FROM_DEVICE = f"{GPU_WORKER}/d2h"

# The chunk number of spans about a whole block, the block number of spans about no block, and the box number of spans
# about one box.
WHOLE_BLOCK = -1
NO_BLOCK = -1
NO_BOX = -1

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
        box: int = NO_BOX,
    ) -> None:
        """Records one span; see `WorkSpan`."""
        resource = self._names.get(resource, resource)
        self._spans.append(WorkSpan(resource, kind, step, block, chunk, start_s, end_s, nbytes, box))
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

    def note_pulled(self, pulled: SpanPulled) -> None:
        """Records a transfer from another box to the actor's own."""
        crossing = pulled.crossing
        kind = SpanKind.PULL_HIDDEN
        if crossing.is_export:
            kind = SpanKind.PULL_EXPORTED
        elif crossing.is_shared:
            kind = SpanKind.PULL_SHARED
        elif crossing.phase is Phase.BACKWARD:
            kind = SpanKind.PULL_GRADS
        link, place = link_resource(pulled.box, box_of(self._actor)), (crossing.block, crossing.part)
        self.note(link, kind, pulled.step, *place, pulled.start_s, pulled.end_s, pulled.nbytes, pulled.box)

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


def link_resource(source: int, target: int) -> str:
    """Returns the resource for transfers from one box to another."""
    return f"{ActorKind.LINK}-{source}-{target}"


def box_of_resource(resource: str) -> int | None:
    """Returns the index of a resource's box; None if it is a link between two boxes."""
    if resource.startswith(f"{ActorKind.LINK}-"):
        return None
    return box_of(ActorName(worker_of(resource) or resource))


def in_order(resources: Iterable[str]) -> list[str]:
    """Returns resources by box, the links last."""

    def place(resource: str) -> tuple[float, str]:
        box = box_of_resource(resource)
        return (math.inf if box is None else box, resource)

    return sorted(resources, key=place)


def resource_in_words(resource: str, boxes: Sequence[str]) -> str:
    """Returns a resource's name for users. `boxes`: the names of a job's boxes, in order; empty if there is one."""
    if not boxes:
        return resource
    box = box_of_resource(resource)
    if box is None:
        source, target = (boxes[int(index)] for index in resource.split("-")[1:])
        return f"link {source} to {target}"
    return f"{boxes[box]}/{resource.removeprefix(f'b{box}/')}"


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
