"""The time in which a device computed nothing, by cause. No clock, no I/O."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from enum import StrEnum
from operator import attrgetter
from typing import NamedTuple

from windlass.actors.messages import Phase, SpanKind, WorkSpan
from windlass.actors.timeline.intervals import Interval, clip, intersect, length, subtract, union
from windlass.actors.timeline.recorder import NO_BOX

WAITS = (
    SpanKind.WAIT_OPERATION,
    SpanKind.WAIT_PARAMS,
    SpanKind.WAIT_GRAD_BUFFER,
    SpanKind.WAIT_BOX,
    SpanKind.WAIT_ACTIVATIONS,
)
OPERATIONS = frozenset(SpanKind(phase) for phase in Phase)
_EVALUATIONS = frozenset((SpanKind.EVALUATE, SpanKind.EVALUATE_HEAD))
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
    # Another box had not computed the operation's hidden states, or their gradient; or had not taken earlier results of
    # this box; or no operation was granted, because another box still computed the step before.
    OTHER_BOX = "other_box"
    ACTIVATIONS = "activations"  # within an operation, activations had not left the device or not come back
    BETWEEN = "between"  # the GPU worker's own time between operations


class Stalls(NamedTuple):
    """The time in which one GPU worker computed nothing, in seconds."""

    by_cause: dict[Stall, float]
    by_box: dict[int, float]  # of the cause OTHER_BOX, by the box that was waited for


class Elsewhere:
    """The operations of other boxes, in the order in which they ended."""

    def __init__(self, operations: Iterable[tuple[int, WorkSpan]] = ()) -> None:
        """`operations`: with the index of the box of each."""
        self._operations = sorted(operations, key=lambda pair: pair[1].end_s)
        self._ends = [operation.end_s for _, operation in self._operations]

    def last_before(self, wait: WorkSpan) -> tuple[int, float] | None:
        """Returns the last operation that ended during a wait and belongs to an earlier step, or is an evaluation.

        The operation that was waited for may need its results: their gradients decide whether the step before is
        clipped, and their losses whether the job goes on. Returns its box, and when it ended.
        """
        for index in range(bisect_right(self._ends, wait.end_s) - 1, -1, -1):
            box, operation = self._operations[index]
            if operation.end_s <= wait.start_s:
                return None
            if operation.step < wait.step or operation.kind in _EVALUATIONS:
                return box, operation.end_s
        return None


def stalls_of(
    spans: Sequence[WorkSpan], period: Interval, computing: list[Interval], elsewhere: Elsewhere | None = None
) -> Stalls:
    """Returns the time without compute of one GPU worker. `computing`: when it computed.

    There must be no waits of others in `spans`, and no work of other boxes but commits.
    """
    elsewhere = elsewhere or Elsewhere()
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
    by_box: dict[int, float] = defaultdict(float)
    idle_s = period[1] - period[0] - length(computing)
    for wait in (span for kind in WAITS for span in by_kind[kind]):
        left = subtract(clip([(wait.start_s, wait.end_s)], *period), computing)
        if not left:
            continue
        idle_s -= length(left)
        causes: list[tuple[Stall, list[Interval]]] = []
        awaited = wait.box
        match wait.kind:
            case SpanKind.WAIT_PARAMS:
                causes = [(cause, of_block.get(wait.block, [])) for cause, of_block in params.items()]
                rest = Stall.PARAMS_QUEUE
            case SpanKind.WAIT_OPERATION:
                causes = [(Stall.UPDATE, updates.get(wait.block, [])), (Stall.COMMIT, commits)]
                causes.append((Stall.UPDATE_QUEUE, all_updates))
                if (last := elsewhere.last_before(wait)) is not None:
                    awaited, until_s = last
                    causes.append((Stall.OTHER_BOX, [(wait.start_s, until_s)]))
                rest = Stall.NO_OPERATION
            case SpanKind.WAIT_GRAD_BUFFER:
                rest = Stall.GRAD_BUFFER
            case SpanKind.WAIT_BOX:
                rest = Stall.OTHER_BOX
            case _:
                rest = Stall.ACTIVATIONS
        shares = list[tuple[Stall, float]]()
        for cause, when in causes:
            if when and left:
                shares.append((cause, length(intersect(left, when))))
                left = subtract(left, when)
        for cause, seconds in (*shares, (rest, length(left))):
            stalls[cause] += seconds
            if cause is Stall.OTHER_BOX and awaited != NO_BOX:
                by_box[awaited] += seconds
    stalls[Stall.BETWEEN] = max(0.0, idle_s)
    return Stalls(stalls, dict(by_box))


def last_operation(spans: Iterable[WorkSpan], step: int) -> WorkSpan | None:
    """Returns the operation that ends a step's work on a device."""
    own = (span for span in spans if span.kind in OPERATIONS - _EVALUATIONS and span.step == step)
    return max(own, key=attrgetter("end_s"), default=None)


def _by_block(spans: Iterable[WorkSpan]) -> dict[int, list[Interval]]:
    by_block: dict[int, list[WorkSpan]] = defaultdict(list)
    for span in spans:
        by_block[span.block].append(span)
    return {block: _covered(block_spans) for block, block_spans in by_block.items()}


def _covered(spans: Iterable[WorkSpan]) -> list[Interval]:
    return union((span.start_s, span.end_s) for span in spans)
