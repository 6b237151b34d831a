"""The timeline of all actors: summarizes how a step's time was used, from the spans of the actors. No clock, no I/O.

A step's *period* is the time from the end of the previous backward pass to the end of its own. Periods follow each
other without gaps. In steady state, each therefore contains one step's amount of work of every actor, though some of it
belongs to other steps.

If the job has several GPU workers, the busy time of each is summarized. What compute waited for, and the dependency
bound, are those of the one that ended the period: it computes the last group of micro-batches, and ends last.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from enum import StrEnum
from operator import attrgetter
from typing import Any

from windlass.actors.messages import Phase, SpanKind, WorkSpan
from windlass.actors.timeline.critical_path import dependency_bound_s
from windlass.actors.timeline.intervals import Interval, clip, intersect, length, subtract, union
from windlass.actors.timeline.recorder import worker_of
from windlass.actors.timeline.span_files import StepSpans

# Largest number of spans that are held, for two periods. Further spans are dropped, and their number is reported.
MAX_SPANS = 200_000

_WAITS = (
    SpanKind.WAIT_OPERATION,
    SpanKind.WAIT_PARAMS,
    SpanKind.WAIT_GRAD_BUFFER,
    SpanKind.WAIT_BOX,
    SpanKind.WAIT_ACTIVATIONS,
)
_OPERATIONS = frozenset(SpanKind(phase) for phase in Phase)
# Spans during which their resource is not working.
_NOT_BUSY = frozenset((*_WAITS, SpanKind.COMMIT))
_OF_PARAMS = frozenset((SpanKind.READ_PARAMS, SpanKind.COPY_PARAMS_IN))
# The work from a block's gradient to its new states.
_UPDATES = frozenset(
    (
        SpanKind.COPY_GRAD_OUT,
        SpanKind.WRITE_GRAD,
        SpanKind.READ_GRAD,
        SpanKind.READ_STATES,
        SpanKind.UPDATE,
        SpanKind.WRITE_STATES,
    )
)


class Stall(StrEnum):
    """The causes for which the device computed nothing. If several apply, the first one here is reported."""

    COPY_PARAMS = "copy_params"  # the operation's params were being copied to the device
    READ_PARAMS = "read_params"  # ... were being read from an SSD
    PARAMS_QUEUE = "params_queue"  # ... were in a queue: for a slot, for the SSD, or for the copies
    UPDATE = "update"  # no operation was granted, because the block's own update was in flight
    COMMIT = "commit"  # ... because a commit had to finish before updates or the next operation
    UPDATE_QUEUE = "update_queue"  # ... because updates of other blocks went first
    NO_OPERATION = "no_operation"  # ... for another reason: an export, or the scheduler's own time
    GRAD_BUFFER = "grad_buffer"  # earlier gradients had not left the device
    OTHER_BOX = "other_box"  # another box had not computed the operation's hidden states, or their gradient
    ACTIVATIONS = "activations"  # within an operation, activations had not left the device or not come back
    BETWEEN = "between"  # the GPU worker's own time between operations


class Timeline:
    """Collects spans and summarizes the time of one step after the other. Not thread-safe."""

    def __init__(self, num_blocks: int, *, keeps_grads: bool, overlaps_steps: bool, max_spans: int = MAX_SPANS) -> None:
        """`overlaps_steps`: a step's forward pass may begin before all updates of the step before are done.

        `max_spans` is the largest number of spans that are held at once.
        """
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
        busy = _busy(spans, period)
        busy_s = {resource: length(intervals) for resource, intervals in sorted(busy.items())}
        period_s = period[1] - period[0]
        seen = _without_other_workers(spans, compute)
        stalls = _stalls(seen, period, busy.get(compute, []))
        bound_s = dependency_bound_s(
            step,
            seen,
            num_blocks=self._num_blocks,
            keeps_grads=self._keeps_grads,
            overlaps_steps=self._overlaps_steps,
        )
        busiest = max(busy_s, key=lambda resource: busy_s[resource])
        summary: dict[str, Any] = {
            "period_s": _rounded(period_s),
            "busy_s": {resource: _rounded(seconds) for resource, seconds in busy_s.items()},
            "moved_bytes": _moved(spans, period),
            "stall_s": {str(cause): _rounded(seconds) for cause, seconds in stalls.items() if seconds > 0},
            "busiest": busiest,
            "overlap_efficiency": _rounded(busy_s[busiest] / period_s),
            "dependency_bound_s": None if bound_s is None else _rounded(bound_s),
        }
        if self._num_dropped:
            summary["num_dropped_spans"] = self._num_dropped
        return summary


def _busy(spans: Iterable[WorkSpan], period: Interval) -> dict[str, list[Interval]]:
    """Returns the intervals in which each resource worked. Waits within an operation do not count."""
    busy: dict[str, list[Interval]] = defaultdict(list)
    operations: dict[str, list[Interval]] = defaultdict(list)
    waits: dict[str, list[Interval]] = defaultdict(list)
    for span in spans:
        if span.kind in _OPERATIONS:
            operations[span.resource].append((span.start_s, span.end_s))
        elif span.kind is SpanKind.WAIT_ACTIVATIONS:
            waits[span.resource].append((span.start_s, span.end_s))
        elif span.kind not in _NOT_BUSY:
            busy[span.resource].append((span.start_s, span.end_s))
    for resource, intervals in operations.items():
        busy[resource] += subtract(union(intervals), union(waits[resource]))
    return {resource: clip(union(intervals), *period) for resource, intervals in busy.items()}


def _without_other_workers(spans: Iterable[WorkSpan], compute: str) -> list[WorkSpan]:
    """Returns the spans without those of other GPU workers than the one that computes with the resource `compute`."""
    own = f"{worker_of(compute)}/"
    return [span for span in spans if worker_of(span.resource) is None or span.resource.startswith(own)]


def _moved(spans: Iterable[WorkSpan], period: Interval) -> dict[str, int]:
    """Returns the bytes of each resource's transfers that ended in the period."""
    moved: dict[str, int] = defaultdict(int)
    for span in spans:
        if span.nbytes and period[0] < span.end_s <= period[1]:
            moved[span.resource] += span.nbytes
    return dict(sorted(moved.items()))


def _stalls(spans: Sequence[WorkSpan], period: Interval, computing: list[Interval]) -> dict[Stall, float]:
    """Returns the time without compute of one GPU worker, by cause. There must be no waits of others in `spans`."""
    by_kind: dict[SpanKind, list[WorkSpan]] = defaultdict(list)
    for span in spans:
        by_kind[span.kind].append(span)
    params = {
        Stall.COPY_PARAMS: _by_block(by_kind[SpanKind.COPY_PARAMS_IN]),
        Stall.READ_PARAMS: _by_block(by_kind[SpanKind.READ_PARAMS]),
    }
    of_updates = [span for kind in _UPDATES for span in by_kind[kind]]
    updates, all_updates = _by_block(of_updates), _covered(of_updates)
    commits = _covered(by_kind[SpanKind.COMMIT])
    stalls: dict[Stall, float] = dict.fromkeys(Stall, 0.0)
    idle_s = period[1] - period[0] - length(computing)
    for wait in (span for kind in _WAITS for span in by_kind[kind]):
        left = subtract(clip([(wait.start_s, wait.end_s)], *period), computing)
        if not left:
            continue
        idle_s -= length(left)
        causes: list[tuple[Stall, list[Interval]]] = []
        match wait.kind:
            case SpanKind.WAIT_PARAMS:
                causes = [(cause, of_block.get(wait.block, [])) for cause, of_block in params.items()]
                rest = Stall.PARAMS_QUEUE
            case SpanKind.WAIT_OPERATION:
                causes = [(Stall.UPDATE, updates.get(wait.block, [])), (Stall.COMMIT, commits)]
                causes.append((Stall.UPDATE_QUEUE, all_updates))
                rest = Stall.NO_OPERATION
            case SpanKind.WAIT_GRAD_BUFFER:
                rest = Stall.GRAD_BUFFER
            case SpanKind.WAIT_BOX:
                rest = Stall.OTHER_BOX
            case _:
                rest = Stall.ACTIVATIONS
        for cause, when in causes:
            stalls[cause] += length(intersect(left, when))
            left = subtract(left, when)
        stalls[rest] += length(left)
    stalls[Stall.BETWEEN] = max(0.0, idle_s)
    return stalls


def _by_block(spans: Iterable[WorkSpan]) -> dict[int, list[Interval]]:
    by_block: dict[int, list[WorkSpan]] = defaultdict(list)
    for span in spans:
        by_block[span.block].append(span)
    return {block: _covered(block_spans) for block, block_spans in by_block.items()}


def _covered(spans: Iterable[WorkSpan]) -> list[Interval]:
    return union((span.start_s, span.end_s) for span in spans)


def _rounded(number: float) -> float:
    return round(number, 6)
