"""The transfers of an I/O scheduler: chunks of model states and slots of scratch, cut into pieces."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from windlass.storage.ids import ChunkKey, Span, StateKind, Step
from windlass.storage.io_scheduler.requests import IoTerms
from windlass.storage.store import JobSpace, Region


@dataclass(slots=True, eq=False, kw_only=True)
class TransferJob(ABC):
    """Bytes that are reported as done together. A job is first planned, then cut into pieces that the threads share."""

    is_read: bool
    terms: IoTerms
    # Set when the job is queued.
    rank: tuple[int, ...] = field(default=(), init=False)
    since_s: float = field(default=0.0, init=False)
    pieces: "deque[Piece] | None" = field(default=None, init=False)  # pieces without a thread yet; None: not planned
    num_unfinished: int = field(default=0, init=False)
    failed: bool = field(default=False, init=False)
    # The start of its first transfer, the end of its last one, and the bytes transferred.
    start_s: float | None = field(default=None, init=False)
    end_s: float = field(default=0.0, init=False)
    moved_nbytes: int = field(default=0, init=False)

    @property
    def verb(self) -> str:
        """The direction, in error texts."""
        return "read" if self.is_read else "write"

    @property
    def on_failed(self) -> Callable[[Exception], None]:
        """The call that reports a failure."""
        return self.terms.on_failed

    @property
    def committed_in(self) -> Step | None:
        """The step whose commit, and those of later steps, must wait for this job; None if none must."""
        return None

    @abstractmethod
    def places(self, space: JobSpace) -> list[tuple[Region, Span]]:
        """Returns the regions of the SSD and the spans of the arena to transfer. Raises the store's errors."""


@dataclass(slots=True, eq=False, kw_only=True)
class ChunkJob(TransferJob):
    """States of one chunk."""

    key: ChunkKey
    step: Step
    parts: Sequence[tuple[StateKind, Span]]

    def __str__(self) -> str:
        return f"the {self.verb} of block {self.key.block}, chunk {self.key.chunk}, step {self.step}"

    @property
    def committed_in(self) -> Step | None:
        return None if self.is_read else self.step

    def places(self, space: JobSpace) -> list[tuple[Region, Span]]:
        sizes = [(kind, span.nbytes) for kind, span in self.parts]
        locate = space.store.regions_to_read if self.is_read else space.store.regions_to_write
        return list(zip(locate(self.key, self.step, sizes), (span for _, span in self.parts), strict=True))


@dataclass(slots=True, eq=False, kw_only=True)
class ScratchJob(TransferJob):
    """The bytes of some scratch slots."""

    slots: Sequence[int]
    span: Span

    def __str__(self) -> str:
        return f"the {self.verb} of scratch slots {', '.join(map(str, self.slots))}"

    def places(self, space: JobSpace) -> list[tuple[Region, Span]]:
        offset, places = self.span.offset, list[tuple[Region, Span]]()
        locate = space.scratch.regions_to_read if self.is_read else space.scratch.regions_to_write
        for region in locate(self.slots, self.span.nbytes):
            places.append((region, Span(offset, region.nbytes)))
            offset += region.nbytes
        return places


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
