"""Asking the SSD servers for chunks: who asks is told, chunk by chunk, when they have moved."""

import threading
from collections.abc import Callable, Mapping, Sequence

from windlass.actors.context import JobContext, aligned, ssd_name
from windlass.actors.messages import ChunkIo, ChunkIoDone, ChunkPart, Message, ReadChunks, WriteChunks
from windlass.storage.ids import ActorName, ChunkKey, CorrelationId, Span, SsdIndex, StateKind, Step

OnDone = Callable[[ChunkKey], None]


def chunk_io(
    key: ChunkKey, numel: int, offsets: Mapping[StateKind, int], itemsizes: Mapping[StateKind, int]
) -> ChunkIo:
    """What to ask for of a chunk of `numel` elements: each state of `offsets`, where it lies in the arena."""
    parts = (ChunkPart(kind, Span(offset, aligned(numel * itemsizes[kind]))) for kind, offset in offsets.items())
    return ChunkIo(key, tuple(parts))


class ChunkIoClient:
    """The requests of one actor that are on their way. Safe from many threads."""

    def __init__(self, name: ActorName, context: JobContext, send: Callable[[ActorName, Message], None]) -> None:
        self._name = name
        self._spec = context.spec
        self._geometry = context.geometry(0)
        self._send = send
        self._lock = threading.Lock()
        self._correlation = 0
        self._open: dict[CorrelationId, tuple[OnDone, int]] = {}  # and the chunks that are still missing

    def read(self, items: Sequence[ChunkIo], step: Step, priority: tuple[int, int], on_done: OnDone) -> None:
        """Ask for states of `step`; `on_done` is called for each chunk when it lies in its spans."""
        self._request(ReadChunks, items, step, priority, on_done)

    def write(self, items: Sequence[ChunkIo], step: Step, priority: tuple[int, int], on_done: OnDone) -> None:
        """Write states of `step`; `on_done` is called for each chunk when its spans may be used again."""
        self._request(WriteChunks, items, step, priority, on_done)

    def take(self, done: ChunkIoDone) -> None:
        """An SSD server's answer. Calls `on_done` in this thread."""
        with self._lock:
            on_done, num_missing = self._open.pop(done.correlation)
            if num_missing > 1:
                self._open[done.correlation] = (on_done, num_missing - 1)
        on_done(done.key)

    def _request(
        self,
        kind: type[ReadChunks] | type[WriteChunks],
        items: Sequence[ChunkIo],
        step: Step,
        priority: tuple[int, int],
        on_done: OnDone,
    ) -> None:
        by_ssd: dict[SsdIndex, list[ChunkIo]] = {}
        for item in items:
            by_ssd.setdefault(self._geometry.ssd_of(item.key), []).append(item)
        for ssd, its_items in by_ssd.items():
            with self._lock:
                self._correlation += 1
                correlation = CorrelationId(self._correlation)
                self._open[correlation] = (on_done, len(its_items))
            request = kind(
                job=self._spec.job,
                step=step,
                correlation=correlation,
                reply_to=self._name,
                priority=priority,
                deadline_s=self._spec.deadline_s,
                items=tuple(its_items),
            )
            self._send(ssd_name(ssd), request)
