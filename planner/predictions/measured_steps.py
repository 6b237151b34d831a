"""Converts the spans of a job's steps to the measurements that the planner corrects its rates with."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from windlass.actors.job import GPU_WORKER, gpu_worker_name
from windlass.actors.messages import SpanKind, WorkSpan
from windlass.actors.timeline import (
    COMPUTE,
    FROM_DEVICE,
    TO_DEVICE,
    WHOLE_BLOCK,
    Interval,
    StepSpans,
    clip,
    held_steps,
    length,
    load_step,
    own_resource,
    shared_out,
    subtract,
    union,
    worker_of,
)
from windlass.engine.model import ModelLayout
from windlass.planner.predictions.rate_correction import MeasuredStep, WorkDone
from windlass.storage.ids import BlockIndex

# Number of steps needed for a correction. With fewer, one step that other work disturbed could decide it.
MIN_STEPS = 3

_FORWARD = frozenset((SpanKind.FORWARD, SpanKind.HEAD))
_OPERATIONS = frozenset((*_FORWARD, SpanKind.BACKWARD, SpanKind.EVALUATE, SpanKind.EVALUATE_HEAD))
_READS = frozenset((SpanKind.READ_PARAMS, SpanKind.READ_STATES, SpanKind.READ_GRAD, SpanKind.READ_ACTIVATIONS))
_WRITES = frozenset((SpanKind.WRITE_STATES, SpanKind.WRITE_GRAD, SpanKind.WRITE_ACTIVATIONS))
_SSD = "ssd-"
# A key for operations among the work that shares the cores. It is no rate of `Speeds`.
_COMPUTING = "compute"


def load_measured(
    folder: Path,
    layout: ModelLayout,
    *,
    first_step: int,
    shares_cores: bool,
    read_to_write: float,
    microbatches: Sequence[int] = (1,),
) -> list[MeasuredStep]:
    """Loads the steps from `first_step` on whose spans a folder holds. For the parameters see `measured_step`."""
    held = (load_step(folder, step) for step in held_steps(folder) if step >= first_step)
    return [
        measured_step(
            step_spans, layout, shares_cores=shares_cores, read_to_write=read_to_write, microbatches=microbatches
        )
        for step_spans in held
        if step_spans is not None
    ]


def measured_step(
    step_spans: StepSpans,
    layout: ModelLayout,
    *,
    shares_cores: bool,
    read_to_write: float,
    microbatches: Sequence[int] = (1,),
) -> MeasuredStep:
    """Computes a step's amounts of work and busy times from its spans.

    `microbatches`: the micro-batches of a step that each GPU worker computes. The times of blocks are those of the
    worker that takes longest for each, as if it had the largest number. The rate of a link is that of the slowest.

    `shares_cores`: the device is the CPU, so concurrent work slows down all of it. `read_to_write`: assumed ratio of an
    SSD's read rate to its write rate. It is used for the time in which an SSD did both.
    """
    spans = [span for span in step_spans.spans if step_spans.start_s < span.end_s <= step_spans.end_s]
    amounts, when = _by_rate(spans, layout)
    worked, times = _slowest(spans, step_spans.step, microbatches)
    done = {name: WorkDone(amount=amounts[name], busy_s=_busy_s(by_resource)) for name, by_resource in when.items()}
    done |= _of_ssds(spans, read_to_write)
    share = 1.0
    if shares_cores:
        kinds = {name: [part for each in by.values() for part in each] for name, by in when.items()}
        kinds[_COMPUTING] = [part for _, parts in worked for part in parts]
        shares = shared_out(kinds)
        share = shares.pop(_COMPUTING) / (sum(length(parts) for _, parts in worked) or 1.0)
        done |= {name: WorkDone(amount=amounts[name], busy_s=busy_s) for name, busy_s in shares.items()}
    forward_s: dict[int, float] = defaultdict(float)
    backward_s: dict[int, float] = defaultdict(float)
    for operation, parts in worked:
        if operation.step == step_spans.step and operation.kind in _FORWARD:
            forward_s[operation.block] += share * times * length(parts)
        elif operation.step == step_spans.step and operation.kind is SpanKind.BACKWARD:
            backward_s[operation.block] += share * times * length(parts)
    return MeasuredStep(
        period_s=step_spans.end_s - step_spans.start_s,
        done=done,
        forward_s=dict(forward_s),
        backward_s=dict(backward_s),
    )


def _by_rate(
    spans: Iterable[WorkSpan], layout: ModelLayout
) -> tuple[dict[str, float], dict[str, dict[str, list[Interval]]]]:
    """Returns, for each rate that is not an SSD's, the amount of work and when each resource worked on it.

    Of the links of several GPUs, only the slowest one in each direction counts.
    """
    spans, amounts = list(spans), defaultdict[str, float](float)
    to_device, from_device = _slowest_link(spans, TO_DEVICE), _slowest_link(spans, FROM_DEVICE)
    when: dict[str, dict[str, list[Interval]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        amount = float(span.nbytes)
        if span.kind is SpanKind.UPDATE:
            name = "device_params" if span.resource == COMPUTE else "optimizer_params"
            amount = _num_params(span, layout)
        elif span.resource == to_device:
            name = "h2d_bytes"
        elif span.resource == from_device:
            name = "d2h_bytes"
        else:
            continue
        amounts[name] += amount
        when[name][span.resource].append((span.start_s, span.end_s))
    return amounts, when


def _slowest_link(spans: Iterable[WorkSpan], first: str) -> str:
    """Returns the slowest of the resources that correspond to one of the first GPU worker's."""
    end = first.removeprefix(GPU_WORKER)
    nbytes: dict[str, int] = defaultdict(int)
    when: dict[str, list[Interval]] = defaultdict(list)
    for span in spans:
        if worker_of(span.resource) is not None and span.resource.endswith(end) and span.nbytes:
            nbytes[span.resource] += span.nbytes
            when[span.resource].append((span.start_s, span.end_s))
    busy_s = {name: length(union(intervals)) for name, intervals in when.items()}
    return min(nbytes, key=lambda name: nbytes[name] / (busy_s[name] or 1.0), default=first)


def _num_params(span: WorkSpan, layout: ModelLayout) -> int:
    numel = layout.blocks[BlockIndex(span.block)].numel
    if span.chunk == WHOLE_BLOCK:
        return numel
    return min(layout.chunk_numel, numel - span.chunk * layout.chunk_numel)


def _busy_s(by_resource: dict[str, list[Interval]]) -> float:
    """Returns the mean busy time of resources that work in parallel."""
    return sum(length(union(intervals)) for intervals in by_resource.values()) / len(by_resource)


def _of_ssds(spans: Iterable[WorkSpan], read_to_write: float) -> dict[str, WorkDone]:
    """Returns what one SSD read and wrote, as a mean over all SSDs, with its busy times.

    How an SSD divides the time in which it both reads and writes is unknown. The division is chosen so that the ratio
    of the two rates is `read_to_write`. Times in which the SSD did only one of both limit this choice.
    """
    amounts = {"ssd_read_bytes": 0.0, "ssd_write_bytes": 0.0}
    when: dict[str, dict[str, list[Interval]]] = defaultdict(lambda: {name: [] for name in amounts})
    for span in spans:
        if span.resource.startswith(_SSD) and (span.kind in _READS or span.kind in _WRITES):
            name = "ssd_read_bytes" if span.kind in _READS else "ssd_write_bytes"
            amounts[name] += span.nbytes
            when[span.resource][name].append((span.start_s, span.end_s))
    read_nbytes, written_nbytes = amounts.values()
    if not read_nbytes + written_nbytes:
        return {}
    reads_s = writes_s = together_s = 0.0
    for reads, writes in (map(union, kinds.values()) for kinds in when.values()):
        reads_s += length(subtract(reads, writes))
        writes_s += length(subtract(writes, reads))
        together_s += length(reads) - length(subtract(reads, writes))
    # read_nbytes / (reads_s + share_s) = read_to_write * written_nbytes / (writes_s + together_s - share_s)
    weighed = read_to_write * written_nbytes
    share_s = (read_nbytes * (writes_s + together_s) - weighed * reads_s) / (read_nbytes + weighed)
    share_s = min(max(share_s, 0.0), together_s)
    busy_s = (reads_s + share_s, writes_s + together_s - share_s)
    return {
        name: WorkDone(amount=amount / len(when), busy_s=seconds / len(when))
        for (name, amount), seconds in zip(amounts.items(), busy_s, strict=True)
        if amount
    }


def _slowest(
    spans: Sequence[WorkSpan], step: int, microbatches: Sequence[int]
) -> tuple[list[tuple[WorkSpan, list[Interval]]], float]:
    """Returns the operations of the GPU worker that takes longest for a micro-batch.

    Also returns by how much more it would take with the largest number of micro-batches of a worker.
    """
    computing = {rank: _computing(spans, rank) for rank, number in enumerate(microbatches) if number}
    lasts_s = {
        rank: sum(length(parts) for operation, parts in worked if operation.step == step) / microbatches[rank]
        for rank, worked in computing.items()
    }
    slowest = max(lasts_s, key=lasts_s.__getitem__)
    return computing[slowest], max(microbatches) / microbatches[slowest]


def _computing(spans: Sequence[WorkSpan], rank: int) -> list[tuple[WorkSpan, list[Interval]]]:
    """Returns a GPU worker's operations.

    Each has the intervals in which it computed and did not wait for activations.
    """
    resource = own_resource(COMPUTE, gpu_worker_name(rank))
    own = [span for span in spans if span.resource == resource]
    waits = union((span.start_s, span.end_s) for span in own if span.kind is SpanKind.WAIT_ACTIVATIONS)
    return [
        (span, subtract([(span.start_s, span.end_s)], clip(waits, span.start_s, span.end_s)))
        for span in own
        if span.kind in _OPERATIONS
    ]
