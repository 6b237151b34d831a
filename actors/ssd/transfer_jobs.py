"""The jobs of an SSD server: chunks of model states and parts of offloaded activations, cut into transfers."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from windlass.actors.messages import (
    ActivationIoDone,
    ChunkIo,
    ChunkIoDone,
    Message,
    ReadActivations,
    ReadChunks,
    SpanKind,
    SsdRequest,
    WriteActivations,
    WriteChunks,
)
from windlass.actors.timeline import WHOLE_BLOCK, transfer_kind
from windlass.storage.ids import BlockIndex, Span
from windlass.storage.store import Region, Scratch, TensorStore


@dataclass(slots=True, eq=False)
class TransferJob(ABC):
    """Bytes that are reported as done together. A job is first planned, then cut into pieces that the threads share."""

    request: SsdRequest
    arrival: int
    late_at_s: float
    pieces: "deque[Piece] | None" = field(default=None, init=False)  # pieces without a thread yet; None: not planned
    num_unfinished: int = field(default=0, init=False)
    failed: bool = field(default=False, init=False)
    # The start of its first transfer, the end of its last one, and the bytes transferred.
    start_s: float | None = field(default=None, init=False)
    end_s: float = field(default=0.0, init=False)
    moved_nbytes: int = field(default=0, init=False)
    entry: "tuple[tuple[int, int], int, TransferJob]" = field(init=False)

    def __post_init__(self) -> None:
        self.entry = (self.request.priority, self.arrival, self)  # arrivals differ, so jobs are never compared

    @property
    def is_read(self) -> bool:
        """True for a read."""
        return isinstance(self.request, ReadChunks | ReadActivations)

    @property
    @abstractmethod
    def name(self) -> str:
        """The description of the job in error texts."""

    @abstractmethod
    def places(self, store: TensorStore, scratch: Scratch) -> list[tuple[Region, Span]]:
        """Returns the regions of the SSD and the spans of the arena to transfer. Raises the store's errors."""

    @abstractmethod
    def done(self) -> Message:
        """Returns the message that reports the job as done."""

    @abstractmethod
    def span(self, store: TensorStore) -> tuple[SpanKind, BlockIndex, int]:
        """Returns the kind, block and chunk of the job's span in the timeline."""


@dataclass(slots=True, eq=False)
class ChunkJob(TransferJob):
    """One chunk of a request."""

    request: ReadChunks | WriteChunks
    item: ChunkIo

    @property
    def name(self) -> str:
        key = self.item.key
        return f"block {key.block}, chunk {key.chunk}, step {self.request.step}"

    def places(self, store: TensorStore, scratch: Scratch) -> list[tuple[Region, Span]]:
        spans = [part.span for part in self.item.parts]
        sizes = [(part.kind, part.span.nbytes) for part in self.item.parts]
        locate = store.regions_to_read if self.is_read else store.regions_to_write
        return list(zip(locate(self.item.key, self.request.step, sizes), spans, strict=True))

    def done(self) -> Message:
        request = self.request
        return ChunkIoDone(job=request.job, step=request.step, correlation=request.correlation, key=self.item.key)

    def span(self, store: TensorStore) -> tuple[SpanKind, BlockIndex, int]:
        kind = transfer_kind(
            is_read=self.is_read,
            states=[part.kind for part in self.item.parts],
            param_kind=store.geometry.formats.param_kind,
        )
        return kind, self.item.key.block, self.item.key.chunk


@dataclass(slots=True, eq=False)
class ActivationsJob(TransferJob):
    """All activations of a request."""

    request: ReadActivations | WriteActivations

    @property
    def name(self) -> str:
        return f"activations of block {self.request.block}, step {self.request.step}"

    def places(self, store: TensorStore, scratch: Scratch) -> list[tuple[Region, Span]]:
        offset, places = self.request.span.offset, list[tuple[Region, Span]]()
        locate = scratch.regions_to_read if self.is_read else scratch.regions_to_write
        for region in locate(self.request.slots, self.request.span.nbytes):
            places.append((region, Span(offset, region.nbytes)))
            offset += region.nbytes
        return places

    def done(self) -> Message:
        request = self.request
        return ActivationIoDone(job=request.job, step=request.step, correlation=request.correlation)

    def span(self, store: TensorStore) -> tuple[SpanKind, BlockIndex, int]:
        kind = SpanKind.READ_ACTIVATIONS if self.is_read else SpanKind.WRITE_ACTIVATIONS
        return kind, self.request.block, WHOLE_BLOCK


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of one region. It starts at a multiple of the checksum granule."""

    region: Region
    start: int  # byte offset in the region
    span: Span  # in the arena

    @property
    def offset(self) -> int:
        """The byte offset of the segment on the SSD."""
        return self.region.offset + self.start


@dataclass(slots=True, eq=False)
class Piece:
    """The bytes of one transfer: segments that are contiguous on the SSD and in the arena."""

    job: TransferJob
    segments: list[Segment]
    nbytes: int

    def is_continued_by(self, segment: Segment) -> bool:
        """Returns whether a segment is contiguous with this piece, on the SSD and in the arena."""
        last = self.segments[-1]
        return (
            segment.offset == last.offset + last.span.nbytes
            and segment.span.offset == last.span.offset + last.span.nbytes
        )


def cut(job: TransferJob, places: Iterable[tuple[Region, Span]], piece_nbytes: int) -> deque[Piece]:
    """Cuts the bytes of a job into pieces of at most `piece_nbytes`, a multiple of the checksum granule."""
    pieces: deque[Piece] = deque()
    for region, span in places:
        for start in range(0, span.nbytes, piece_nbytes):
            nbytes = min(piece_nbytes, span.nbytes - start)
            segment = Segment(region, start, Span(span.offset + start, nbytes))
            if pieces and pieces[-1].nbytes + nbytes <= piece_nbytes and pieces[-1].is_continued_by(segment):
                pieces[-1].segments.append(segment)
                pieces[-1].nbytes += nbytes
            else:
                pieces.append(Piece(job, [segment], nbytes))
    return pieces
