"""The timeline of all actors: summarizes how a step's time was used, from the spans of the actors. No clock, no I/O.

A step's *period* is the time from the end of the previous backward pass to the end of its own. Periods follow each
other without gaps. In steady state, each therefore contains one step's amount of work of every actor, though some of it
belongs to other steps.

If the job has several GPU workers, the busy time of each is summarized. What compute waited for, and the dependency
bound, are those of the one that ended the period: it computes the last group of micro-batches, and ends last. A job
over several boxes has a summary of each box, too, and no bound.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

from windlass.actors.messages import SpanKind, WorkSpan
from windlass.actors.timeline.boxes import BoxTimes, told_stalls, without_other_workers
from windlass.actors.timeline.critical_path import dependency_bound_s
from windlass.actors.timeline.intervals import Interval, clip, length, subtract, union
from windlass.actors.timeline.recorder import in_order, resource_in_words
from windlass.actors.timeline.span_files import StepSpans
from windlass.actors.timeline.stalls import OPERATIONS, WAITS, stalls_of

# Largest number of spans that are held, for two periods. Further spans are dropped, and their number is reported.
MAX_SPANS = 200_000

# Spans during which their resource is not working.
_NOT_BUSY = frozenset((*WAITS, SpanKind.COMMIT))
_OF_PARAMS = frozenset((SpanKind.READ_PARAMS, SpanKind.COPY_PARAMS_IN))


class Timeline:
    """Collects spans and summarizes the time of one step after the other. Not thread-safe."""

    def __init__(
        self,
        num_blocks: int,
        *,
        keeps_grads: bool,
        overlaps_steps: bool,
        max_spans: int = MAX_SPANS,
        boxes: Sequence[str] = (),
    ) -> None:
        """`overlaps_steps`: a step's forward pass may begin before all updates of the step before are done.

        `max_spans` is the largest number of spans that are held at once. `boxes`: the names of the boxes of a job over
        several, in the order of their blocks. Summaries then have these names, and spans keep those of the actors.
        """
        self._boxes = BoxTimes(boxes) if len(boxes) > 1 else None
        self._box_names = boxes if len(boxes) > 1 else ()
        self._max_spans = max_spans
        self._num_blocks = num_blocks
        self._keeps_grads = keeps_grads
        self._overlaps_steps = overlaps_steps
        self._start_s = 0.0
        self._spans: list[WorkSpan] = []
        self._num_dropped = 0

    def begin(self, at_s: float) -> None:
        """Begins the first period."""
        self._start_s = at_s
        self._spans = [span for span in self._spans if span.end_s > at_s]

    def add(self, spans: Sequence[WorkSpan]) -> None:
        """Adds the spans that an actor has sent."""
        room = self._max_spans - len(self._spans)
        self._spans += spans[:room]
        self._num_dropped += max(0, len(spans) - room)

    def end_step(self, step: int) -> StepSpans | None:
        """Ends a step's period and returns its summary; None if there are no spans of its backward pass.

        It must be called for the steps in order, each when all its spans are known.
        """
        last = self._end_of_backward(step)
        if last is None:
            return None
        start_s, end_s, spans = self._start_s, last.end_s, self._spans
        kept = StepSpans(
            step=step,
            start_s=start_s,
            end_s=end_s,
            summary=self._summarize(step, spans, (start_s, end_s), last.resource),
            spans=tuple(span for span in spans if span.end_s > start_s and (span.start_s < end_s or span.step == step)),
        )
        # Params of the next step's first operations may have been fetched before its period began.
        self._spans = [
            span for span in spans if span.end_s > end_s or (span.kind in _OF_PARAMS and span.end_s > start_s)
        ]
        self._start_s = end_s
        self._num_dropped = 0
        return kept

    # --- inside -----------------------------------------------------------------------------------------------------

    def _end_of_backward(self, step: int) -> WorkSpan | None:
        """Returns the operation that ends a step's backward pass."""
        last = SpanKind.BACKWARD if self._num_blocks > 1 else SpanKind.HEAD
        ends = (
            span
            for span in self._spans
            if span.block == 0 and span.kind is last and span.step == step and span.end_s > self._start_s
        )
        return max(ends, key=attrgetter("end_s"), default=None)

    def _summarize(self, step: int, spans: Sequence[WorkSpan], period: Interval, compute: str) -> dict[str, Any]:
        """`compute` is the resource of the GPU worker whose stalls and bound are meant."""
        busy, period_s = _busy(spans, period), period[1] - period[0]
        bound_s, of_boxes = None, dict[str, Any]()
        if self._boxes is not None:
            of_boxes = self._boxes.summarize(step, spans, period, busy)
            stalls = of_boxes["boxes"][0]["stall_s"]  # the first box ends the period
        else:
            seen = without_other_workers(spans, compute)
            stalls = told_stalls(stalls_of(seen, period, busy.get(compute, [])).by_cause)
            bound_s = dependency_bound_s(
                step,
                seen,
                num_blocks=self._num_blocks,
                keeps_grads=self._keeps_grads,
                overlaps_steps=self._overlaps_steps,
            )
        busy_s = {resource: length(busy[resource]) for resource in in_order(busy)}
        moved = _moved(spans, period)
        busiest = max(busy_s, key=lambda resource: busy_s[resource])
        summary: dict[str, Any] = {
            "period_s": _rounded(period_s),
            "busy_s": {self._name(resource): _rounded(seconds) for resource, seconds in busy_s.items()},
            "moved_bytes": {self._name(resource): moved[resource] for resource in busy_s if resource in moved},
            "stall_s": stalls,
            "busiest": self._name(busiest),
            "overlap_efficiency": _rounded(busy_s[busiest] / period_s),
            "dependency_bound_s": None if bound_s is None else _rounded(bound_s),
            **of_boxes,
        }
        if self._num_dropped:
            summary["num_dropped_spans"] = self._num_dropped
        return summary

    def _name(self, resource: str) -> str:
        return resource_in_words(resource, self._box_names)


def _busy(spans: Iterable[WorkSpan], period: Interval) -> dict[str, list[Interval]]:
    """Returns the intervals in which each resource worked. Waits within an operation do not count."""
    busy: dict[str, list[Interval]] = defaultdict(list)
    operations: dict[str, list[Interval]] = defaultdict(list)
    waits: dict[str, list[Interval]] = defaultdict(list)
    for span in spans:
        if span.kind in OPERATIONS:
            operations[span.resource].append((span.start_s, span.end_s))
        elif span.kind is SpanKind.WAIT_ACTIVATIONS:
            waits[span.resource].append((span.start_s, span.end_s))
        elif span.kind not in _NOT_BUSY:
            busy[span.resource].append((span.start_s, span.end_s))
    for resource, intervals in operations.items():
        busy[resource] += subtract(union(intervals), union(waits[resource]))
    return {resource: clip(union(intervals), *period) for resource, intervals in busy.items()}


def _moved(spans: Iterable[WorkSpan], period: Interval) -> dict[str, int]:
    """Returns the bytes of each resource's transfers that ended in the period."""
    moved: dict[str, int] = defaultdict(int)
    for span in spans:
        if span.nbytes and period[0] < span.end_s <= period[1]:
            moved[span.resource] += span.nbytes
    return moved


def _rounded(number: float) -> float:
    return round(number, 6)
