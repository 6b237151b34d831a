"""The dependency bound of a step: the shortest time that its dependencies allow, from measured spans.

In steady state, each block passes through a cycle once per step. Every part of the cycle waits for the one before:

1. The block's params are read from an SSD, unless they are in host memory, and copied to the device.
2. Compute runs from the block's own forward operation to the operation after which its update may begin. This is its
   own backward operation or, if gradients are kept until all are known, the last operation of the step. If steps do not
   overlap, every cycle begins with the params and the forward operation of the first block. A step of several groups of
   micro-batches passes through all blocks several times. Transfers between two groups are not counted, because they
   can overlap with the operations of other blocks.
3. The block's gradient is copied out. If it is spilled, it is written to an SSD and read back.
4. Its states are read from an SSD, updated, and written. Resident states are only updated.

The length of a cycle is the sum of its parts, without the time in queues. A block's chunks are transferred in parallel,
so the slowest counts. The bound is the longest cycle. No order of work makes a step shorter, as long as each part takes
the measured time. That time includes slowdowns by parallel work, for example of transfers that share an SSD.
Source: such a system's period is the maximum cycle mean of its graph; Baccelli, Cohen, Olsder, Quadrat, Synchronization
and Linearity (1992), chapter 3.
"""

from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter

from windlass.actors.messages import SpanKind, WorkSpan
from windlass.actors.timeline.recorder import WHOLE_BLOCK

_Chunks = dict[int, dict[SpanKind, list[WorkSpan]]]  # a block's spans by chunk and kind, in order of time
_OPERATIONS = frozenset((SpanKind.FORWARD, SpanKind.HEAD, SpanKind.BACKWARD))


def dependency_bound_s(
    step: int, spans: Sequence[WorkSpan], *, num_blocks: int, keeps_grads: bool, overlaps_steps: bool
) -> float | None:
    """Returns the bound in seconds; None if the spans of an operation are missing.

    `spans` has the spans of the step, and earlier ones that prefetched its params. Of several GPU workers, it has those
    of one only.
    """
    operations: list[WorkSpan] = []  # of the step, in order of time
    waits: dict[int, list[WorkSpan]] = defaultdict(list)  # waits for activations within operations, by block
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
    ends = [0.0]  # the end times of the operations if there were no pauses between them
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
    """Returns an operation's time without its waits for activations. `waits` are the waits of its block."""
    inside = (wait for wait in waits if operation.start_s <= wait.start_s and wait.end_s <= operation.end_s)
    return _duration_s(operation) - sum(map(_duration_s, inside))


def _params_s(chunk: dict[SpanKind, list[WorkSpan]], until_s: float) -> float:
    """Returns the time to fetch a chunk's params for an operation that began at `until_s`; part 1 of a cycle."""
    copies = [copy for copy in chunk[SpanKind.COPY_PARAMS_IN] if copy.end_s <= until_s]
    if not copies:
        return 0.0
    before_s = copies[-2].end_s if len(copies) > 1 else float("-inf")
    # Reads before an earlier copy do not count, because the params were in host memory after it.
    reads = [read for read in chunk[SpanKind.READ_PARAMS] if before_s < read.end_s <= copies[-1].start_s]
    return _duration_s(copies[-1]) + _last_s(reads)


def _update_s(step: int, chunks: _Chunks, from_s: float) -> float:
    """Returns the time from a block's gradient, complete at `from_s`, to its new states; parts 3 and 4 of a cycle."""
    whole_s = sum(_duration_s(span) for span in chunks[WHOLE_BLOCK][SpanKind.UPDATE] if span.step == step)
    return whole_s + max((_chunk_s(step, chunk, from_s) for chunk in chunks.values()), default=0.0)


def _chunk_s(step: int, chunk: dict[SpanKind, list[WorkSpan]], from_s: float) -> float:
    def of_step(kind: SpanKind) -> list[WorkSpan]:
        return [span for span in chunk[kind] if span.step == step and span.start_s >= from_s]

    updates = [span for span in of_step(SpanKind.UPDATE) if span.chunk != WHOLE_BLOCK]
    total_s = _last_s(of_step(SpanKind.COPY_GRAD_OUT)) + _last_s(of_step(SpanKind.WRITE_GRAD))
    if not updates:
        return total_s  # a skipped step
    # Reads cannot be selected by step, because they carry the step whose states they read. The last ones before the
    # update belong to it.
    reads = {
        kind: [span for span in chunk[kind] if from_s <= span.start_s and span.end_s <= updates[-1].start_s]
        for kind in (SpanKind.READ_STATES, SpanKind.READ_GRAD)
    }
    total_s += max(map(_last_s, reads.values())) + _duration_s(updates[-1])
    # Flushes of resident states do not count, because no work waits for them.
    return total_s + (_last_s(of_step(SpanKind.WRITE_STATES)) if reads[SpanKind.READ_STATES] else 0.0)


def _last_s(spans: Sequence[WorkSpan]) -> float:
    return _duration_s(spans[-1]) if spans else 0.0


def _duration_s(span: WorkSpan) -> float:
    return span.end_s - span.start_s
