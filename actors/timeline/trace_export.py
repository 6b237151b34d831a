"""Exports spans for trace viewers: Perfetto (ui.perfetto.dev) and chrome://tracing.

Source: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: the JSON
object form with complete events ("X", times in microseconds), counter events ("C") and metadata events ("M").
"""

from collections.abc import Iterable, Sequence
from typing import Any

from windlass.actors.messages import WorkSpan
from windlass.actors.timeline.memory_levels import Level, TierMemory, memory_of
from windlass.actors.timeline.recorder import (
    NO_BLOCK,
    NO_BOX,
    WHOLE_BLOCK,
    in_order,
    resource_in_words,
)

# The name of a memory tier's counter for all kinds of data together.
TOGETHER = "all"


def trace_of(
    spans: Iterable[WorkSpan],
    *,
    begins_s: float,
    about: dict[str, Any],
    levels: Sequence[Level] = (),
    boxes: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns a trace whose time 0 is `begins_s`. Viewers show `about` as facts about the trace.

    Each resource is a process. Resources of one box follow each other. Events of one thread must nest, so overlapping
    spans of a resource go to separate threads. Each tier with `levels` is a process too. It has a counter for each kind
    of data, with the bytes used and allocated. `boxes`: the names of the boxes of a job over several.
    """
    by_resource: dict[str, list[WorkSpan]] = {}
    for span in spans:
        by_resource.setdefault(span.resource, []).append(span)
    events: list[dict[str, Any]] = []
    for pid, resource in enumerate(in_order(by_resource), start=1):
        name = resource_in_words(resource, boxes)
        events += _process(name, pid)
        for tid, lane in enumerate(_lanes(by_resource[resource]), start=1):
            events.append(_named("thread_name", name if tid == 1 else f"{name} #{tid}", pid, tid))
            events += [_event(span, pid, tid, begins_s, boxes) for span in lane]
    for pid, (tier, memory) in enumerate(memory_of(levels).items(), start=len(by_resource) + 1):
        events += _process(f"{tier} memory", pid)
        for level in levels:
            if level.tier is tier:
                events += _counter(level.what, level.points, level.allocated_nbytes, pid, begins_s)
        events += _counter(TOGETHER, _sums(memory), memory.allocated_nbytes, pid, begins_s)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _process(name: str, pid: int) -> list[dict[str, Any]]:
    order = {"name": "process_sort_index", "ph": "M", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    return [_named("process_name", name, pid, 0), order]


def _named(what: str, name: str, pid: int, tid: int) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _lanes(spans: Sequence[WorkSpan]) -> list[list[WorkSpan]]:
    """Distributes spans to as few lanes as possible, so that the spans of a lane do not overlap."""
    lanes: list[list[WorkSpan]] = []
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        for lane in lanes:
            if lane[-1].end_s <= span.start_s:
                lane.append(span)
                break
        else:
            lanes.append([span])
    return lanes


def _event(span: WorkSpan, pid: int, tid: int, begins_s: float, boxes: Sequence[str]) -> dict[str, Any]:
    where = "" if span.block == NO_BLOCK else f" {span.block}"
    if span.chunk != WHOLE_BLOCK:
        where += f".{span.chunk}"
    other = {} if span.box == NO_BOX else {"other_box": boxes[span.box] if boxes else span.box}
    return {
        "name": f"{span.kind}{where}",
        "cat": str(span.kind),
        "ph": "X",
        "ts": _microseconds(span.start_s - begins_s),
        "dur": _microseconds(span.end_s - span.start_s),
        "pid": pid,
        "tid": tid,
        "args": {"step": span.step, "block": span.block, "chunk": span.chunk, "bytes": span.nbytes, **other},
    }


def _sums(memory: TierMemory) -> list[tuple[float, int]]:
    return [(at_s, sum(by_kind.values())) for at_s, by_kind in memory.timeline]


def _counter(
    name: str, points: Iterable[tuple[float, int]], allocated_nbytes: int | None, pid: int, begins_s: float
) -> list[dict[str, Any]]:
    """Returns the counter events of a level. Viewers draw each of their arguments as a line."""
    allocated = {} if allocated_nbytes is None else {"allocated": allocated_nbytes}
    return [
        {
            "name": name,
            "cat": "memory",
            "ph": "C",
            "ts": _microseconds(at_s - begins_s),
            "pid": pid,
            "tid": 0,
            "args": {"used": nbytes, **allocated},
        }
        for at_s, nbytes in points
    ]


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
