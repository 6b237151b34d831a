"""The part of a step's summary that says how the boxes of a job used their time, and the links between them.

No clock, no I/O.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from windlass.actors.messages import SpanKind, WorkSpan
from windlass.actors.timeline.intervals import Interval, length
from windlass.actors.timeline.recorder import box_of_resource, link_resource, worker_of
from windlass.actors.timeline.stalls import OPERATIONS, Elsewhere, Stall, Stalls, last_operation, stalls_of
from windlass.amounts import GB

# The names of what crosses a link, in a summary.
_CROSSES = {
    SpanKind.PULL_HIDDEN: "hidden_states",
    SpanKind.PULL_GRADS: "gradients",
    SpanKind.PULL_SHARED: "shared_params",
    SpanKind.PULL_EXPORTED: "exports",
}
# Smaller shares of a step are not told, nor more waits than these.
_LEAST_SHARE, _MAX_TOLD = 0.01, 3
_DIGITS = 6  # of seconds


class BoxTimes:
    """Summarizes a period for each box of a job over several.

    Of several GPUs of a box it is about one: the one that ends the box's work for the step, because that computes the
    last group of micro-batches.
    """

    def __init__(self, boxes: Sequence[str]) -> None:
        """`boxes`: their names, in the order of their blocks."""
        self._boxes = boxes

    def summarize(
        self, step: int, spans: Sequence[WorkSpan], period: Interval, busy: Mapping[str, list[Interval]]
    ) -> dict[str, Any]:
        """Returns the keys that the summary of a step has because of its boxes. `busy`: the intervals of resources."""
        period_s = period[1] - period[0]
        of_box = _by_box(spans)
        operations = [(box, span) for box, own in of_box.items() for span in own if span.kind in OPERATIONS]
        commits = [span for span in spans if span.kind is SpanKind.COMMIT]
        found = []
        for box, name in enumerate(self._boxes):
            own, computing, stalls = of_box.get(box, []), list[Interval](), Stalls({}, {})
            if (last := last_operation(own, step)) is not None:  # else its spans were dropped
                seen = [span for span in without_other_workers(own, last.resource) if span.kind is not SpanKind.COMMIT]
                computing = busy[last.resource]
                elsewhere = Elsewhere((other, span) for other, span in operations if other != box)
                stalls = stalls_of([*seen, *commits], period, computing, elsewhere)
            waits_s = sorted(stalls.by_box.items(), key=itemgetter(1), reverse=True)
            found.append(
                {
                    "box": name,
                    "compute_s": round(length(computing), _DIGITS),
                    "stall_s": told_stalls(stalls.by_cause),
                    "waits_for_s": {self._boxes[each]: round(seconds, _DIGITS) for each, seconds in waits_s if seconds},
                }
            )
        links = self._links(spans, period, busy)
        return {"boxes": found, "links": links, "boxes_in_words": _in_words(found, links, period_s)}

    def _links(
        self, spans: Iterable[WorkSpan], period: Interval, busy: Mapping[str, list[Interval]]
    ) -> list[dict[str, Any]]:
        moved: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for span in spans:
            if (what := _CROSSES.get(span.kind)) is not None and period[0] < span.end_s <= period[1]:
                moved[span.resource][what] += span.nbytes
        names = {
            link_resource(source, target): {"from": self._boxes[source], "to": self._boxes[target]}
            for source in range(len(self._boxes))
            for target in range(len(self._boxes))
        }
        return [
            {
                **names[link],
                "busy_s": round(length(busy.get(link, [])), _DIGITS),
                "moved_bytes": sum(moved[link].values()),
                "moved_bytes_of": dict(moved[link]),
            }
            for link in names
            if busy.get(link) or link in moved
        ]


def names_of_boxes(summary: Mapping[str, Any]) -> list[str]:
    """Returns the names of the boxes of a step's summary, in the order of their blocks; empty for a job on one box."""
    return [each["box"] for each in summary.get("boxes", ())]


def told_stalls(stalls: Mapping[Stall, float]) -> dict[str, float]:
    """Returns stalls as a summary has them."""
    return {str(cause): round(seconds, _DIGITS) for cause, seconds in stalls.items() if seconds > 0}


def without_other_workers(spans: Iterable[WorkSpan], compute: str) -> list[WorkSpan]:
    """Returns the spans without those of other GPU workers than the one that computes with the resource `compute`."""
    own = f"{worker_of(compute)}/"
    return [span for span in spans if worker_of(span.resource) is None or span.resource.startswith(own)]


def _by_box(spans: Iterable[WorkSpan]) -> dict[int, list[WorkSpan]]:
    """Returns the spans of each box's own resources."""
    boxes: dict[str, int | None] = {}
    found: dict[int, list[WorkSpan]] = defaultdict(list)
    for span in spans:
        if span.resource not in boxes:
            boxes[span.resource] = box_of_resource(span.resource)
        if (box := boxes[span.resource]) is not None:
            found[box].append(span)
    return found


def _in_words(boxes: Sequence[Mapping[str, Any]], links: Sequence[Mapping[str, Any]], period_s: float) -> str:
    """Says which boxes hold others up, and how busy the busiest link is."""
    waits = sorted(
        ((seconds / period_s, each["box"], other) for each in boxes for other, seconds in each["waits_for_s"].items()),
        reverse=True,
    )
    told = [
        f"{box} waits {_percent(share)} of a step for {other}"
        for share, box, other in waits[:_MAX_TOLD]
        if share >= _LEAST_SHARE
    ]
    if busiest := max(links, key=itemgetter("busy_s"), default=None):
        share, rate = busiest["busy_s"] / period_s, busiest["moved_bytes"] / (busiest["busy_s"] or 1.0)
        told_rate = f"{rate / GB:.2g} GB/s"
        told.append(f"link {busiest['from']} to {busiest['to']} {_percent(share)} busy, {told_rate}")
    return "; ".join(told or ["no box waits for another"])


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")
