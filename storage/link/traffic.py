"""The account of a peer's traffic: bytes, and the spans of time in which bytes moved."""

from collections import deque
from dataclasses import dataclass, field, replace

_MAX_SPANS = 4096
# Pieces of one direction that follow each other within this time form one span, because a timeline shows no less.
_JOINED_S = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class BusySpan:
    """A time span, by time.monotonic, in which data moved one way."""

    is_incoming: bool
    start_s: float
    end_s: float
    nbytes: int


@dataclass(slots=True, kw_only=True)
class Traffic:
    """The traffic with one peer since the start. Not thread-safe."""

    nbytes_in: int = 0  # data that arrived, without headers
    nbytes_out: int = 0
    num_messages_in: int = 0
    num_messages_out: int = 0
    num_connections: int = 0  # that were made, the first included
    _spans: dict[bool, deque[BusySpan]] = field(
        default_factory=lambda: {way: deque(maxlen=_MAX_SPANS) for way in (True, False)}
    )

    def add(self, *, is_incoming: bool, start_s: float, end_s: float, nbytes: int) -> None:
        """Counts a data frame."""
        if is_incoming:
            self.nbytes_in += nbytes
        else:
            self.nbytes_out += nbytes
        spans = self._spans[is_incoming]
        if spans and start_s <= spans[-1].end_s + _JOINED_S:
            last = spans.pop()
            start_s, end_s, nbytes = min(start_s, last.start_s), max(end_s, last.end_s), nbytes + last.nbytes
        spans.append(BusySpan(is_incoming=is_incoming, start_s=start_s, end_s=end_s, nbytes=nbytes))

    def taken(self) -> "Traffic":
        """Returns a copy, which gets the spans; they are removed here."""
        spans = {way: deque(found, maxlen=_MAX_SPANS) for way, found in self._spans.items()}
        for found in self._spans.values():
            found.clear()
        return replace(self, _spans=spans)

    @property
    def spans(self) -> list[BusySpan]:
        """The spans in order of their start. The oldest were dropped if there were too many."""
        return sorted((*self._spans[True], *self._spans[False]), key=lambda span: span.start_s)
