"""Spans as a trace in the Trace Event Format, as its viewers need it."""

import json
from itertools import pairwise
from typing import Any

from windlass.actors.messages import SpanKind, WorkSpan
from windlass.actors.timeline.memory_levels import Level
from windlass.actors.timeline.trace_export import trace_of
from windlass.engine.memory_plan.memory_tier import MemoryTier

SPANS = [
    WorkSpan("ssd-0", SpanKind.READ_STATES, 4, 2, 7, 100.5, 101.5, 4096),
    WorkSpan("ssd-0", SpanKind.WRITE_STATES, 4, 1, 0, 101.0, 103.0, 8192),  # overlaps both others
    WorkSpan("ssd-0", SpanKind.READ_STATES, 4, 2, 8, 101.5, 102.0, 4096),
    WorkSpan("ssd-0", SpanKind.COMMIT, 4, -1, -1, 104.0, 104.25, 0),
    WorkSpan("gpu-0/compute", SpanKind.FORWARD, 5, 3, -1, 100.0, 100.125, 0),
]
LEVELS = [
    Level(MemoryTier.DEVICE, "running operation", None, ((100.0, 0), (100.5, 8192), (101.0, 0))),
    Level(MemoryTier.HOST, "params", 4096, ((100.0, 1024), (100.5, 2048))),
    Level(MemoryTier.HOST, "gradients", 1000, ((100.0, 0), (100.5, 1000))),
]
TRACE = trace_of(SPANS, begins_s=100.0, about={"step": 5}, levels=LEVELS)


def events(phase: str) -> list[dict[str, Any]]:
    return [event for event in TRACE["traceEvents"] if event["ph"] == phase]


def test_is_json_of_the_object_form() -> None:
    assert json.loads(json.dumps(TRACE, allow_nan=False)) == TRACE
    assert set(TRACE) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert TRACE["displayTimeUnit"] in ("ms", "ns")
    assert TRACE["otherData"] == {"step": 5}
    assert {event["ph"] for event in TRACE["traceEvents"]} == {"X", "M", "C"}


def test_complete_events_carry_the_spans_in_microseconds() -> None:
    assert len(events("X")) == len(SPANS)
    (forward,) = (event for event in events("X") if event["cat"] == "forward")
    assert forward | {"pid": 0, "tid": 0} == {
        "name": "forward 3",
        "cat": "forward",
        "ph": "X",
        "ts": 0.0,
        "dur": 125000.0,
        "pid": 0,
        "tid": 0,
        "args": {"step": 5, "block": 3, "chunk": -1, "bytes": 0},
    }
    assert sorted(event["name"] for event in events("X")) == [
        "commit",
        "forward 3",
        "read_states 2.7",
        "read_states 2.8",
        "write_states 1.0",
    ]


def test_each_resource_is_a_named_process() -> None:
    names = {event["pid"]: event["args"]["name"] for event in events("M") if event["name"] == "process_name"}
    assert sorted(names.values()) == ["gpu memory", "gpu-0/compute", "host memory", "ssd-0"]
    found = {(names[event["pid"]], event["cat"]) for event in events("X")}
    assert found == {(span.resource, str(span.kind)) for span in SPANS}
    threads = {(event["pid"], event["tid"]) for event in events("M") if event["name"] == "thread_name"}
    assert threads == {(event["pid"], event["tid"]) for event in events("X")}


def test_events_of_a_thread_follow_each_other() -> None:
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events("X"):
        threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for intervals in threads.values():
        assert all(before[1] <= after[0] for before, after in pairwise(sorted(intervals)))
    assert len(threads) == 3


def test_levels_are_counters_of_bytes_used_and_allocated() -> None:
    names = {event["pid"]: event["args"]["name"] for event in events("M") if event["name"] == "process_name"}
    counters: dict[tuple[str, str], list[tuple[float, dict[str, int]]]] = {}
    for event in events("C"):
        counters.setdefault((names[event["pid"]], event["name"]), []).append((event["ts"], event["args"]))
    assert counters == {
        ("gpu memory", "running operation"): [(0.0, {"used": 0}), (5e5, {"used": 8192}), (1e6, {"used": 0})],
        ("gpu memory", "all"): [(0.0, {"used": 0}), (5e5, {"used": 8192}), (1e6, {"used": 0})],
        ("host memory", "params"): [
            (0.0, {"used": 1024, "allocated": 4096}),
            (5e5, {"used": 2048, "allocated": 4096}),
        ],
        ("host memory", "gradients"): [(0.0, {"used": 0, "allocated": 1000}), (5e5, {"used": 1000, "allocated": 1000})],
        ("host memory", "all"): [(0.0, {"used": 1024, "allocated": 5096}), (5e5, {"used": 3048, "allocated": 5096})],
    }


def test_without_levels_there_are_no_counters() -> None:
    found = trace_of(SPANS, begins_s=100.0, about={})["traceEvents"]
    assert {event["ph"] for event in found} == {"X", "M"}


def test_resources_of_boxes_have_their_names_and_follow_each_other() -> None:
    spans = [
        WorkSpan("gpu-0/compute", SpanKind.WAIT_BOX, 5, 3, -1, 100.0, 100.125, 0, 1),
        WorkSpan("b1/gpu-0/compute", SpanKind.HEAD, 5, 3, -1, 100.0, 100.125, 0),
        WorkSpan("ssd-0", SpanKind.READ_STATES, 4, 2, 7, 100.5, 101.5, 4096),
        WorkSpan("link-1-0", SpanKind.PULL_GRADS, 5, 2, 0, 100.125, 100.25, 64, 1),
    ]
    found = trace_of(spans, begins_s=100.0, about={}, boxes=("head", "attic"))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}
    order = {event["pid"]: event["args"]["sort_index"] for event in found if event["name"] == "process_sort_index"}
    in_order = ["head/gpu-0/compute", "head/ssd-0", "attic/gpu-0/compute", "link attic to head"]
    assert [names[pid] for pid in sorted(order, key=order.__getitem__)] == in_order
    others = {event["cat"]: event["args"].get("other_box") for event in found if event["ph"] == "X"}
    assert others == {"wait_box": "attic", "head": None, "read_states": None, "pull_grads": "attic"}
