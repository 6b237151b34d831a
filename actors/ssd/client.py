"""A client of the SSD servers. It calls back for each chunk or activation that was transferred."""

import functools
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from windlass.actors.job import JobContext, aligned
from windlass.actors.messages import (
    ActivationIoDone,
    ChunkIo,
    ChunkIoDone,
    ChunkPart,
    Message,
    ReadActivations,
    ReadChunks,
    SsdRequest,
    WriteActivations,
    WriteChunks,
)
from windlass.storage.ids import ActorName, BlockIndex, ChunkKey, CorrelationId, Span, SsdIndex, StateKind, Step

OnDone = Callable[[ChunkKey], None]


def chunk_io(
    key: ChunkKey, numel: int, offsets: Mapping[StateKind, int], itemsizes: Mapping[StateKind, int]
) -> ChunkIo:
    """Returns the request item for a chunk of `numel` elements. `offsets` has the arena offset of each state."""
    parts = (ChunkPart(kind, Span(offset, aligned(numel * itemsizes[kind]))) for kind, offset in offsets.items())
    return ChunkIo(key, tuple(parts))


@dataclass(frozen=True, slots=True)
class _Open:
    """A request with missing answers."""

    since_s: float
    to: ActorName
    request: SsdRequest
    missing: dict[ChunkKey | None, Callable[[], None]]  # the callback of each answer; activations have a single one

    def __str__(self) -> str:
        request, late_s = self.request, time.monotonic() - self.since_s
        verb = "read" if isinstance(request, ReadChunks | ReadActivations) else "write"
        if isinstance(request, ReadActivations | WriteActivations):
            what = f"activations of block {request.block}"
        else:
            key = min(key for key in self.missing if key is not None)
            what = f"block {key.block}, chunk {key.chunk}"
        return f"{self.to} has not finished a {verb} of {what}, step {request.step} after {late_s:.1f} s: check its SSD"


class SsdClient:
    """Sends an actor's requests to the SSD servers and tracks their answers. Thread-safe."""

    def __init__(self, name: ActorName, context: JobContext, send: Callable[[ActorName, Message], None]) -> None:
        self._name = name
        self._spec = context.spec
        self._server_of = context.ssd_server
        self._geometry = context.geometry(0) if context.ssds else None
        self._send = send
        self._lock = threading.Lock()
        self._correlations = itertools.count()
        self._open: dict[CorrelationId, _Open] = {}  # in the order in which they were sent

    def read(self, items: Sequence[ChunkIo], step: Step, priority: tuple[int, int], on_done: OnDone) -> None:
        """Requests states of `step`. `on_done` is called for each chunk once its bytes are in its spans."""
        self._request_chunks(ReadChunks, items, step, priority, on_done)

    def write(self, items: Sequence[ChunkIo], step: Step, priority: tuple[int, int], on_done: OnDone) -> None:
        """Requests the write of states of `step`. `on_done` is called for each chunk once its spans may be reused."""
        self._request_chunks(WriteChunks, items, step, priority, on_done)

    def move_activations(
        self,
        kind: type[ReadActivations] | type[WriteActivations],
        ssd: int,
        *,
        step: Step,
        block: BlockIndex,
        slots: tuple[int, ...],
        span: Span,
        priority: tuple[int, int],
        on_done: Callable[[], None],
    ) -> None:
        """Requests the read or write of a block's activations in scratch slots of one SSD.

        `on_done` is called once they are in the span, or once the span may be reused.
        """
        request = kind(
            job=self._spec.job,
            step=step,
            correlation=self._next_correlation(),
            reply_to=self._name,
            priority=priority,
            block=block,
            slots=slots,
            span=span,
        )
        self._request(ssd, request, {None: on_done})

    def take(self, done: ChunkIoDone | ActivationIoDone) -> None:
        """Processes an SSD server's answer. Calls `on_done` in this thread."""
        key = done.key if isinstance(done, ChunkIoDone) else None
        with self._lock:
            entry = self._open[done.correlation]
            on_done = entry.missing.pop(key)
            if not entry.missing:
                del self._open[done.correlation]
        on_done()

    def describe_pending(self) -> str:
        """Describes the oldest pending request to each SSD server, oldest first; empty if there is none.

        All servers are listed, because one may hang while another, asked a moment earlier, is only slow.
        """
        oldest: dict[ActorName, str] = {}
        with self._lock:
            for entry in self._open.values():
                oldest.setdefault(entry.to, str(entry))
        return "; ".join(oldest.values())

    # --- inside -----------------------------------------------------------------------------------------------------

    def _request_chunks(
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
            request = kind(
                job=self._spec.job,
                step=step,
                correlation=self._next_correlation(),
                reply_to=self._name,
                priority=priority,
                items=tuple(its_items),
            )
            self._request(ssd, request, {item.key: functools.partial(on_done, item.key) for item in its_items})

    def _next_correlation(self) -> CorrelationId:
        return CorrelationId(next(self._correlations))

    def _request(self, ssd: int, request: SsdRequest, missing: dict[ChunkKey | None, Callable[[], None]]) -> None:
        entry = _Open(time.monotonic(), self._server_of(ssd), request, missing)
        with self._lock:  # the answer may arrive before `send` returns
            self._open[request.correlation] = entry
        self._send(entry.to, request)
