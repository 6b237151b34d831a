"""How fast a step could be at most, as one thing must follow another: its dependency bound, from measured spans.

In steady state each block goes round a cycle once a step, and every part of it waits for the one before:

1. its params come: read from an SSD, unless they lie in host memory; copied to the device
2. compute, from its own forward operation on to the one after which its update may begin: its own backward operation
   or, where gradients are kept until all are known, the last one of the step. Where steps do not overlap, every cycle
   begins with the params and the forward operation of the first block. A step of several groups of micro-batches goes
   through all blocks several times, so that nothing that a group brings or leaves has to wait for its neighbours
3. its gradient is copied out; if it waits on an SSD, it is written and read there
4. its states are read from an SSD, updated, and written; those that rest in memory are only updated

A cycle is as long as the sum of its parts, without the time in which they wait for their turn. Of a block's chunks,
which move side by side, the slowest counts. The bound is the longest cycle: no order of work makes a step shorter while
each part takes as long as it did. Parts count as they were beside all others: a transfer that shares its SSD is slower.
Source: such a system's period is the maximum cycle mean of its graph; Baccelli, Cohen, Olsder, Quadrat, Synchronization
and Linearity (1992), chapter 3.
"""

from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter

from windlass.actors.messages import SpanKind, WorkSpan
from windlass.actors.timeline.recorder import WHOLE_BLOCK

_Chunks = dict[int, dict[SpanKind, list[WorkSpan]]]  # of a block: by chunk and kind, in order of time
_OPERATIONS = frozenset((SpanKind.FORWARD, SpanKind.HEAD, SpanKind.BACKWARD))


def dependency_bound_s(
    step: int, spans: Sequence[WorkSpan], *, num_blocks: int, keeps_grads: bool, overlaps_steps: bool
) -> float | None:
    """Seconds; None where the spans of an operation are missing. `spans`: of the step and of what came before it."""
    operations: list[WorkSpan] = []  # of the step, in order of time
    waits: dict[int, list[WorkSpan]] = defaultdict(list)  # within operations, by block
    blocks: dict[int, _Chunks] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for span in sorted(spans, key=attrgetter("start_s")):
        if span.kind in _OPERATIONS:
            if span.step == step:
                operations.append(span)
        elif span.kind is SpanKind.WAIT_ACTIVATIONS:
            waits[span.block].append(span)
        elif span.nbytes or span.kind is SpanKind.UPDATE:
            blocks[span.block][span.chunk][span.kind].append(span)
    head = num_blocks - 1
    order = [(SpanKind.FORWARD, block) for block in range(head)]
    order += [(SpanKind.HEAD, head), *((SpanKind.BACKWARD, block) for block in reversed(range(head)))]
    num_groups = sum(operation.kind is SpanKind.HEAD for operation in operations)
    if not operations or [(operation.kind, operation.block) for operation in operations] != order * num_groups:
        return None
    ends = [0.0]  # of the operations, if they followed each other without a pause
    for operation in operations:
        ends.append(ends[-1] + _computing_s(operation, waits[operation.block]))
    longest_s = 0.0
    for block in range(num_blocks):
        own = len(operations) - 1 - block
        first, last = block if overlaps_steps else 0, len(operations) - 1 if keeps_grads else own
        cycle_s = ends[last + 1] - ends[first]
        first_s = operations[first].start_s
        cycle_s += max((_params_s(chunk, first_s) for chunk in blocks[first].values()), default=0.0)
        cycle_s += _update_s(step, blocks[block], operations[own].end_s)
        longest_s = max(longest_s, cycle_s)
    return longest_s


def _computing_s(operation: WorkSpan, waits: Sequence[WorkSpan]) -> float:
    """An operation's time, but for that in which it waited for activations; `waits`: those of its block."""
    inside = (wait for wait in waits if operation.start_s <= wait.start_s and wait.end_s <= operation.end_s)
    return _duration_s(operation) - sum(map(_duration_s, inside))


def _params_s(chunk: dict[SpanKind, list[WorkSpan]], until_s: float) -> float:
    """What it took to bring a chunk's params for an operation that began then; part 1 of a cycle."""
    copies = [copy for copy in chunk[SpanKind.COPY_PARAMS_IN] if copy.end_s <= until_s]
    if not copies:
        return 0.0
    before_s = copies[-2].end_s if len(copies) > 1 else float("-inf")
    # What was read for an earlier copy was in host memory since.
    reads = [read for read in chunk[SpanKind.READ_PARAMS] if before_s < read.end_s <= copies[-1].start_s]
    return _duration_s(copies[-1]) + _last_s(reads)


def _update_s(step: int, chunks: _Chunks, from_s: float) -> float:
    """From a block's gradient, which was there then, to its new states; parts 3 and 4 of a cycle."""
    whole_s = sum(_duration_s(each) for each in chunks[WHOLE_BLOCK][SpanKind.UPDATE] if each.step == step)
    return whole_s + max((_chunk_s(step, chunk, from_s) for chunk in chunks.values()), default=0.0)


def _chunk_s(step: int, chunk: dict[SpanKind, list[WorkSpan]], from_s: float) -> float:
    def of_step(kind: SpanKind) -> list[WorkSpan]:
        return [span for span in chunk[kind] if span.step == step and span.start_s >= from_s]

    updates = [each for each in of_step(SpanKind.UPDATE) if each.chunk != WHOLE_BLOCK]
    found_s = _last_s(of_step(SpanKind.COPY_GRAD_OUT)) + _last_s(of_step(SpanKind.WRITE_GRAD))
    if not updates:
        return found_s  # of a skipped step
    # Requests to read carry the step whose states they are; what was read for this update came right before it.
    reads = {
        kind: [span for span in chunk[kind] if from_s <= span.start_s and span.end_s <= updates[-1].start_s]
        for kind in (SpanKind.READ_STATES, SpanKind.READ_GRAD)
    }
    found_s += max(map(_last_s, reads.values())) + _duration_s(updates[-1])
    # What rests in memory is written too, now and then, but nothing waits for that.
    return found_s + (_last_s(of_step(SpanKind.WRITE_STATES)) if reads[SpanKind.READ_STATES] else 0.0)


def _last_s(spans: Sequence[WorkSpan]) -> float:
    return _duration_s(spans[-1]) if spans else 0.0


def _duration_s(span: WorkSpan) -> float:
    return span.end_s - span.start_s
