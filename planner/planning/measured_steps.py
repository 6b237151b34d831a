"""From the spans of a job's steps to what the planner can learn from them."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

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
    shared_out,
    subtract,
    union,
)
from windlass.engine.model import ModelLayout
from windlass.planner.planning.rate_correction import Done, MeasuredStep
from windlass.storage.ids import BlockIndex

# So many tell what the others are like: one that something else disturbed must not decide.
MIN_STEPS = 3

_FORWARD = frozenset((SpanKind.FORWARD, SpanKind.HEAD))
_OPERATIONS = frozenset((*_FORWARD, SpanKind.BACKWARD, SpanKind.EVALUATE, SpanKind.EVALUATE_HEAD))
_READS = frozenset((SpanKind.READ_PARAMS, SpanKind.READ_STATES, SpanKind.READ_GRAD, SpanKind.READ_ACTIVATIONS))
_WRITES = frozenset((SpanKind.WRITE_STATES, SpanKind.WRITE_GRAD, SpanKind.WRITE_ACTIVATIONS))
_SSD = "ssd-"
# What is no rate of `Speeds`: the operations, among what shares the cores.
_COMPUTING = "compute"


def load_measured(
    folder: Path, layout: ModelLayout, *, first_step: int, shares_cores: bool, read_to_write: float
) -> list[MeasuredStep]:
    """Of the steps that are held in a folder, those from `first_step` on. The rest: see `measured_step`."""
    held = (load_step(folder, step) for step in held_steps(folder) if step >= first_step)
    return [
        measured_step(each, layout, shares_cores=shares_cores, read_to_write=read_to_write)
        for each in held
        if each is not None
    ]


def measured_step(told: StepSpans, layout: ModelLayout, *, shares_cores: bool, read_to_write: float) -> MeasuredStep:
    """What a step's spans say. `shares_cores`: the device is the CPU, so that what runs at once slows each other.

    `read_to_write`: how many times as fast SSDs read as they write, where they did both at once and nobody can tell.
    """
    spans = [span for span in told.spans if told.start_s < span.end_s <= told.end_s]
    amounts, when = _by_rate(spans, layout)
    worked = _computing(spans)
    done = {name: Done(amount=amounts[name], busy_s=_busy_s(by_resource)) for name, by_resource in when.items()}
    done |= _of_ssds(spans, read_to_write)
    share = 1.0
    if shares_cores:
        kinds = {name: [part for each in by.values() for part in each] for name, by in when.items()}
        kinds[_COMPUTING] = [part for _, parts in worked for part in parts]
        shares = shared_out(kinds)
        share = shares.pop(_COMPUTING) / (sum(length(parts) for _, parts in worked) or 1.0)
        done |= {name: Done(amount=amounts[name], busy_s=busy_s) for name, busy_s in shares.items()}
    forward_s: dict[int, float] = defaultdict(float)
    backward_s: dict[int, float] = defaultdict(float)
    for operation, parts in worked:
        if operation.step == told.step and operation.kind in _FORWARD:
            forward_s[operation.block] += share * length(parts)
        elif operation.step == told.step and operation.kind is SpanKind.BACKWARD:
            backward_s[operation.block] += share * length(parts)
    return MeasuredStep(
        period_s=told.end_s - told.start_s, done=done, forward_s=dict(forward_s), backward_s=dict(backward_s)
    )


def _by_rate(
    spans: Iterable[WorkSpan], layout: ModelLayout
) -> tuple[dict[str, float], dict[str, dict[str, list[Interval]]]]:
    """For each rate that is no SSD's: the amount, and when each resource worked at it."""
    amounts: dict[str, float] = defaultdict(float)
    when: dict[str, dict[str, list[Interval]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        amount = float(span.nbytes)
        if span.kind is SpanKind.UPDATE:
            name = "device_params" if span.resource == COMPUTE else "optimizer_params"
            amount = _num_params(span, layout)
        elif span.resource == TO_DEVICE:
            name = "h2d_bytes"
        elif span.resource == FROM_DEVICE:
            name = "d2h_bytes"
        else:
            continue
        amounts[name] += amount
        when[name][span.resource].append((span.start_s, span.end_s))
    return amounts, when


def _num_params(span: WorkSpan, layout: ModelLayout) -> int:
    numel = layout.blocks[BlockIndex(span.block)].numel
    if span.chunk == WHOLE_BLOCK:
        return numel
    return min(layout.chunk_numel, numel - span.chunk * layout.chunk_numel)


def _busy_s(by_resource: dict[str, list[Interval]]) -> float:
    """Resources of a kind work side by side: their mean."""
    return sum(length(union(intervals)) for intervals in by_resource.values()) / len(by_resource)


def _of_ssds(spans: Iterable[WorkSpan], read_to_write: float) -> dict[str, Done]:
    """Of one SSD, on average.

    How it shares the time in which it reads and writes is not known: so that its rates are to each other as they are
    taken to be, as far as the times in which it does one of both allow.
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
        name: Done(amount=amount / len(when), busy_s=seconds / len(when))
        for (name, amount), seconds in zip(amounts.items(), busy_s, strict=True)
        if amount
    }


def _computing(spans: Sequence[WorkSpan]) -> list[tuple[WorkSpan, list[Interval]]]:
    """Operations, each with when it computed and did not wait for activations."""
    waits = union((span.start_s, span.end_s) for span in spans if span.kind is SpanKind.WAIT_ACTIVATIONS)
    return [
        (span, subtract([(span.start_s, span.end_s)], clip(waits, span.start_s, span.end_s)))
        for span in spans
        if span.resource == COMPUTE and span.kind in _OPERATIONS
    ]
