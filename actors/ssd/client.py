"""Asking the SSD servers for chunks: who asks is told, chunk by chunk, when they have moved."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from windlass.actors.job import JobContext, aligned, ssd_name
from windlass.actors.messages import ChunkIo, ChunkIoDone, ChunkPart, Message, ReadChunks, WriteChunks
from windlass.storage.ids import ActorName, ChunkKey, CorrelationId, Span, SsdIndex, StateKind, Step

OnDone = Callable[[ChunkKey], None]

# How often what is owed is looked at.
_TICK_S = 1.0
# A server tells of a late chunk by itself, and knows more of it: only one that cannot even do that is told of here.
_PATIENCE_TICKS = 2


def chunk_io(
    key: ChunkKey, numel: int, offsets: Mapping[StateKind, int], itemsizes: Mapping[StateKind, int]
) -> ChunkIo:
    """What to ask for of a chunk of `numel` elements: each state of `offsets`, where it lies in the arena."""
    parts = (ChunkPart(kind, Span(offset, aligned(numel * itemsizes[kind]))) for kind, offset in offsets.items())
    return ChunkIo(key, tuple(parts))


@dataclass(frozen=True, slots=True)
class _Open:
    """A request that is not answered in full."""

    since_s: float
    to: ActorName
    request: ReadChunks | WriteChunks
    on_done: OnDone
    missing: set[ChunkKey]


def _debt_in_words(entry: _Open) -> str:
    verb, key = "read" if isinstance(entry.request, ReadChunks) else "write", min(entry.missing)
    what = f"a {verb} of block {key.block}, chunk {key.chunk}, step {entry.request.step}"
    return f"{entry.to} has owed {what} for {time.monotonic() - entry.since_s:.1f} s: check its SSD"


class ChunkClient:
    """The requests of one actor that are on their way. Safe from many threads."""

    def __init__(self, name: ActorName, context: JobContext, send: Callable[[ActorName, Message], None]) -> None:
        self._name = name
        self._spec = context.spec
        self._geometry = context.geometry(0) if context.ssds else None
        self._send = send
        self._lock = threading.Lock()
        self._correlation = 0
        self._open: dict[CorrelationId, _Open] = {}  # in the order in which they were sent
        self._stopping = threading.Event()

    def read(self, items: Sequence[ChunkIo], step: Step, priority: tuple[int, int], on_done: OnDone) -> None:
        """Ask for states of `step`; `on_done` is called for each chunk when it lies in its spans."""
        self._request(ReadChunks, items, step, priority, on_done)

    def write(self, items: Sequence[ChunkIo], step: Step, priority: tuple[int, int], on_done: OnDone) -> None:
        """Write states of `step`; `on_done` is called for each chunk when its spans may be used again."""
        self._request(WriteChunks, items, step, priority, on_done)

    def take(self, done: ChunkIoDone) -> None:
        """An SSD server's answer. Calls `on_done` in this thread."""
        with self._lock:
            entry = self._open[done.correlation]
            entry.missing.remove(done.key)
            if not entry.missing:
                del self._open[done.correlation]
        entry.on_done(done.key)

    def watch(self) -> None:
        """What a thread of the asker runs until `stop`.

        Raises:
            TimeoutError: an SSD server has owed a chunk for longer than the job's deadline, and has not said why.
        """
        limit_s = self._spec.deadline_s + _PATIENCE_TICKS * _TICK_S
        while not self._stopping.wait(_TICK_S):
            oldest = self._oldest()
            if oldest is not None and time.monotonic() - oldest.since_s > limit_s:
                raise TimeoutError(f"nothing came from {oldest.to} within {self._spec.deadline_s:g} s; see its log")

    def stop(self) -> None:
        """Ends `watch`."""
        self._stopping.set()

    def describe_overdue(self) -> str:
        """What each SSD server has owed for longest, the longest first; empty where none owes a chunk.

        Of all of them, as one may hang and another, asked a moment before, only be slow.
        """
        oldest: dict[ActorName, str] = {}
        with self._lock:
            for entry in self._open.values():
                oldest.setdefault(entry.to, _debt_in_words(entry))
        return "; ".join(oldest.values())

    # --- inside -----------------------------------------------------------------------------------------------------

    def _oldest(self) -> _Open | None:
        with self._lock:
            return next(iter(self._open.values()), None)

    def _request(
        self,
        kind: type[ReadChunks] | type[WriteChunks],
        items: Sequence[ChunkIo],
        step: Step,
        priority: tuple[int, int],
        on_done: OnDone,
    ) -> None:
        assert self._geometry is not None, "a job without SSDs has nothing to ask for"
        by_ssd: dict[SsdIndex, list[ChunkIo]] = {}
        for item in items:
            by_ssd.setdefault(self._geometry.ssd_of(item.key), []).append(item)
        for ssd, its_items in by_ssd.items():
            with self._lock:
                self._correlation += 1
                request = kind(
                    job=self._spec.job,
                    step=step,
                    correlation=CorrelationId(self._correlation),
                    reply_to=self._name,
                    priority=priority,
                    deadline_s=self._spec.deadline_s,
                    items=tuple(its_items),
                )
                entry = _Open(time.monotonic(), ssd_name(ssd), request, on_done, {item.key for item in its_items})
                self._open[request.correlation] = entry
            self._send(entry.to, request)
