"""Spans in the form that trace viewers read: Perfetto (ui.perfetto.dev) and chrome://tracing.

Source: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: the JSON
object form with complete events ("X", times in microseconds) and metadata events ("M").
"""

from collections.abc import Iterable, Sequence
from typing import Any

from windlass.actors.messages import WorkSpan
from windlass.actors.spans import NO_BLOCK, WHOLE_BLOCK


def trace_of(spans: Iterable[WorkSpan], *, begins_s: float, about: dict[str, Any]) -> dict[str, Any]:
    """A trace whose time 0 is `begins_s`. Each resource is a process; `about` is what a viewer shows as its facts.

    Events of one thread must nest, so spans of a resource that overlap go to threads of their own.
    """
    by_resource: dict[str, list[WorkSpan]] = {}
    for span in spans:
        by_resource.setdefault(span.resource, []).append(span)
    events: list[dict[str, Any]] = []
    for pid, (resource, its_spans) in enumerate(sorted(by_resource.items()), start=1):
        events.append(_named("process_name", resource, pid, 0))
        events.append({"name": "process_sort_index", "ph": "M", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
        for tid, lane in enumerate(_lanes(its_spans), start=1):
            events.append(_named("thread_name", resource if tid == 1 else f"{resource} #{tid}", pid, tid))
            events += [_event(span, pid, tid, begins_s) for span in lane]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _named(what: str, name: str, pid: int, tid: int) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _lanes(spans: Sequence[WorkSpan]) -> list[list[WorkSpan]]:
    """As few rows as there are spans at once; in a row they follow each other."""
    lanes: list[list[WorkSpan]] = []
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        for lane in lanes:
            if lane[-1].end_s <= span.start_s:
                lane.append(span)
                break
        else:
            lanes.append([span])
    return lanes


def _event(span: WorkSpan, pid: int, tid: int, begins_s: float) -> dict[str, Any]:
    where = "" if span.block == NO_BLOCK else f" {span.block}"
    if span.chunk != WHOLE_BLOCK:
        where += f".{span.chunk}"
    return {
        "name": f"{span.kind}{where}",
        "cat": str(span.kind),
        "ph": "X",
        "ts": round((span.start_s - begins_s) * 1e6, 3),
        "dur": round((span.end_s - span.start_s) * 1e6, 3),
        "pid": pid,
        "tid": tid,
        "args": {"step": span.step, "block": span.block, "chunk": span.chunk, "bytes": span.nbytes},
    }
