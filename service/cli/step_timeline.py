"""The timeline of a step in the terminal: a row for each resource, by box, and how each of several boxes used it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from windlass.actors.timeline import Interval, clip, length, subtract, union
from windlass.amounts import GB, bytes_text
from windlass.service.cli.table import print_columns

# The least share of a column's time in which a resource worked, for each mark.
_MARKS = ((0.75, "█"), (0.5, "▓"), (0.25, "▒"), (0.02, "░"))
_WAITED = "·"  # it did not work, and waited for another box for half of the column's time
_IDLE = " "
_NO_WORK = ("wait_", "commit")  # what the kinds of spans without work begin with
_MIN_WIDTH, _MAX_WIDTH = 20, 120  # columns of a row
_LEAST_SHARE = 0.01  # of a step; smaller waits are left out


def print_trace(trace: Mapping[str, Any], *, num_columns: int) -> None:
    """Prints a step's trace, as the service returns it. `num_columns`: the width of the terminal."""
    about = trace["otherData"]
    summary = about["summary"]
    period_s, resources = summary["period_s"], _by_resource(trace["traceEvents"])
    width = min(_MAX_WIDTH, max(_MIN_WIDTH, num_columns - max(map(len, resources), default=0) - 4))
    print(f"step {about['step']} took {period_s:.3g} s; a column is {period_s / width:.2g} s")
    print_columns([(name, f"|{_drawn(events, period_s, width)}|") for name, events in resources.items()])
    told = boxes_in_words(summary)
    marks = ", ".join(f"{mark} {share:.0%}" for share, mark in _MARKS)
    print(f"worked in a column: {marks} of its time at least" + (f"; {_WAITED} waited for another box" if told else ""))
    for name, text in told.items():
        print(f"{name}: {text}")


def boxes_in_words(timeline: Mapping[str, Any] | None) -> dict[str, str]:
    """Describes, for a job over several boxes, who holds others up, each box, and each link, by their names."""
    timeline = timeline or {}
    if not timeline.get("boxes"):
        return {}
    period_s = timeline["period_s"]
    return {
        "boxes": timeline["boxes_in_words"],
        **{f"box {each['box']}": _box_in_words(each, period_s) for each in timeline["boxes"]},
        **{f"link {each['from']} to {each['to']}": _link_in_words(each, period_s) for each in timeline["links"]},
    }


def _box_in_words(box: Mapping[str, Any], period_s: float) -> str:
    own = [(_spaced(cause), seconds) for cause, seconds in box["stall_s"].items() if cause != "other_box"]
    waits_s = [*((f"for {name}", seconds) for name, seconds in box["waits_for_s"].items()), *own]
    told = sorted(((seconds / period_s, what) for what, seconds in waits_s), reverse=True)
    parts = [f"{what} {share:.0%}" for share, what in told if share >= _LEAST_SHARE]
    return f"computes {box['compute_s'] / period_s:.0%}" + (f"; waits {', '.join(parts)}" if parts else "")


def _link_in_words(link: Mapping[str, Any], period_s: float) -> str:
    parts = ", ".join(f"{_spaced(what)} {bytes_text(nbytes)}" for what, nbytes in link["moved_bytes_of"].items())
    rate = link["moved_bytes"] / (link["busy_s"] or 1.0)
    return f"busy {link['busy_s'] / period_s:.0%}, {rate / GB:.2g} GB/s; a step: {parts or 'nothing'}"


def _spaced(word: str) -> str:
    return "between operations" if word == "between" else word.replace("_", " ")


def _by_resource(events: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Returns the spans of each resource, in the trace's order of resources."""
    names, found = dict[int, str](), dict[str, list[Mapping[str, Any]]]()
    for event in events:
        if event["name"] == "process_name":
            names[event["pid"]] = event["args"]["name"]
            found[event["args"]["name"]] = []
        elif event["ph"] == "X":
            found[names[event["pid"]]].append(event)
    return found


def _drawn(events: Sequence[Mapping[str, Any]], period_s: float, width: int) -> str:
    """Draws the time in which a resource worked, and in which it waited for another box."""
    waits = [event for event in events if event["cat"] == "wait_box"]
    worked = _intervals(event for event in events if not event["cat"].startswith(_NO_WORK))
    waited = subtract(_intervals(waits), worked)
    column_s, row = period_s / width, []
    for column in range(width):
        start_s, end_s = column * column_s, (column + 1) * column_s
        share = length(clip(worked, start_s, end_s)) / column_s
        mark = next((mark for least, mark in _MARKS if share >= least), _IDLE)
        if mark is _IDLE and length(clip(waited, start_s, end_s)) >= column_s / 2:
            mark = _WAITED
        row.append(mark)
    return "".join(row)


def _intervals(events: Iterable[Mapping[str, Any]]) -> list[Interval]:
    return union((event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for event in events)
