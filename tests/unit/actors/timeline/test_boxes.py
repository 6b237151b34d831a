"""The summary of a step of a job over several boxes, from spans made by hand. Times are whole seconds from 100 on."""

from typing import Any

import pytest

from tests.unit.actors.timeline.test_summary import BEGIN_S, span
from windlass.actors.messages import SpanKind, WorkSpan
from windlass.actors.timeline.boxes import names_of_boxes
from windlass.actors.timeline.recorder import NO_BLOCK, box_of_resource, in_order, link_resource, resource_in_words
from windlass.actors.timeline.summary import Timeline

BOXES = ("head", "attic")
HERE, THERE = "gpu-0/compute", "b1/gpu-0/compute"


def wait(resource: str, kind: SpanKind, start: float, stop: float, *, box: int = -1, step: int = 1) -> WorkSpan:
    return span(resource, kind, start, stop, step=step)._replace(box=box)


def pull(source: int, target: int, kind: SpanKind, start: float, stop: float, nbytes: int) -> WorkSpan:
    return span(link_resource(source, target), kind, start, stop, nbytes=nbytes)._replace(box=source)


# Block 0 is the head's, and block 1 the attic's. Two groups. The period is 20 s long.
OPERATIONS = [
    span(HERE, SpanKind.FORWARD, 1, 3),
    span(HERE, SpanKind.FORWARD, 3, 5),
    span(THERE, SpanKind.HEAD, 4, 9, block=1),
    span(THERE, SpanKind.HEAD, 10, 15, block=1),
    span(HERE, SpanKind.BACKWARD, 10, 12),
    span(HERE, SpanKind.BACKWARD, 16, 20),
]


def summary_of(*spans: WorkSpan, boxes: tuple[str, ...] = BOXES, step: int = 1) -> dict[str, Any]:
    timeline = Timeline(2, keeps_grads=True, overlaps_steps=True, boxes=boxes)
    timeline.begin(BEGIN_S)
    timeline.add([*OPERATIONS, *spans])
    kept = timeline.end_step(step)
    assert kept is not None
    return kept.summary


def test_each_box_has_its_compute_and_its_waits_for_others() -> None:
    found = summary_of(
        wait(HERE, SpanKind.WAIT_BOX, 5, 10, box=1),
        wait(HERE, SpanKind.WAIT_BOX, 12, 16, box=1),
        wait(THERE, SpanKind.WAIT_BOX, 0, 4, box=0),
        wait(THERE, SpanKind.WAIT_PARAMS, 9, 10),
        span("ssd-0", SpanKind.READ_PARAMS, 9, 10, nbytes=1),  # of the other box
        span("b1/ssd-0", SpanKind.READ_PARAMS, 9.5, 10, nbytes=1),
    )
    head, attic = found["boxes"]
    assert head == {
        "box": "head",
        "compute_s": 10.0,
        "stall_s": {"other_box": 9.0, "between": 1.0},
        "waits_for_s": {"attic": 9.0},
    }
    assert attic == {
        "box": "attic",
        "compute_s": 10.0,
        "stall_s": {"read_params": 0.5, "params_queue": 0.5, "other_box": 4.0, "between": 5.0},
        "waits_for_s": {"head": 4.0},
    }
    assert found["stall_s"] == head["stall_s"]
    assert found["dependency_bound_s"] is None
    assert names_of_boxes(found) == ["head", "attic"]
    assert found["boxes_in_words"] == "head waits 45 % of a step for attic; attic waits 20 % of a step for head"


def test_resources_have_the_names_of_their_boxes_and_stand_by_box() -> None:
    found = summary_of(
        span("b1/ssd-0", SpanKind.WRITE_STATES, 2, 3, nbytes=5),
        span("optimizer-0", SpanKind.UPDATE, 2, 3),
        pull(1, 0, SpanKind.PULL_GRADS, 9, 10, 7),
    )
    names = ["head/gpu-0/compute", "head/optimizer-0", "attic/gpu-0/compute", "attic/ssd-0", "link attic to head"]
    assert list(found["busy_s"]) == names
    assert found["moved_bytes"] == {"attic/ssd-0": 5, "link attic to head": 7}
    assert found["busiest"] == "head/gpu-0/compute"


def test_links_have_their_use_and_what_crossed_them() -> None:
    found = summary_of(
        pull(0, 1, SpanKind.PULL_HIDDEN, 3, 4, 10**9),
        pull(0, 1, SpanKind.PULL_HIDDEN, 3.5, 5, 10**9),
        pull(0, 1, SpanKind.PULL_SHARED, -1, 0.5, 10**9),  # half of it in the period before
        pull(1, 0, SpanKind.PULL_GRADS, 9, 10, 7),
        pull(1, 0, SpanKind.PULL_EXPORTED, 19.5, 21, 99),  # ends after the period
    )
    assert found["links"] == [
        {
            "from": "head",
            "to": "attic",
            "busy_s": 2.5,
            "moved_bytes": 3 * 10**9,
            "moved_bytes_of": {"hidden_states": 2 * 10**9, "shared_params": 10**9},
        },
        {"from": "attic", "to": "head", "busy_s": 1.5, "moved_bytes": 7, "moved_bytes_of": {"gradients": 7}},
    ]
    assert found["boxes_in_words"] == "link head to attic 12 % busy, 1.2 GB/s"


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ([], 0.0),
        # The box was granted nothing until the other one had computed the step before, whose gradients clip the step.
        ([span(HERE, SpanKind.BACKWARD, 0, 2, step=0)], 2.0),
        ([span(HERE, SpanKind.EVALUATE, 0, 1, step=1)], 1.0),
        ([span(HERE, SpanKind.FORWARD, 0, 2, step=1)], 0.0),  # of the same step
        ([span(HERE, SpanKind.BACKWARD, -2, 0, step=0)], 0.0),  # ends before the wait
        # Its own updates explain the wait as well, and come first.
        ([span(HERE, SpanKind.BACKWARD, 0, 2, step=0), span("b1/optimizer-0", SpanKind.UPDATE, 1, 4, step=0)], 1.0),
        # Updates and gradients of the other box do not explain it.
        ([span(HERE, SpanKind.BACKWARD, 0, 2, step=0), span("optimizer-0", SpanKind.UPDATE, 0, 4, step=0)], 2.0),
    ],
)
def test_a_box_without_an_operation_waits_for_the_one_that_computes_the_step_before(
    before: list[WorkSpan], expected: float
) -> None:
    found = summary_of(wait(THERE, SpanKind.WAIT_OPERATION, 0, 4), *before)
    assert found["boxes"][1]["waits_for_s"].get("head", 0.0) == expected
    assert found["boxes"][1]["stall_s"].get("other_box", 0.0) == expected


def test_a_commit_of_another_box_holds_up_the_next_operation() -> None:
    commit = span("ssd-0", SpanKind.COMMIT, 1, 3, block=NO_BLOCK)
    found = summary_of(wait(THERE, SpanKind.WAIT_OPERATION, 0, 4), commit)
    assert found["boxes"][1]["stall_s"] == {"commit": 2.0, "no_operation": 2.0, "between": 6.0}


def test_of_several_gpus_the_one_that_ends_the_work_of_its_box_counts() -> None:
    other = [
        span("b1/gpu-1/compute", SpanKind.HEAD, 16, 17, block=1),
        wait("b1/gpu-1/compute", SpanKind.WAIT_BOX, 2, 16, box=0),
    ]
    found = summary_of(*other, wait(THERE, SpanKind.WAIT_BOX, 0, 4, box=0))
    assert (found["boxes"][1]["compute_s"], found["boxes"][1]["waits_for_s"]) == (1.0, {"head": 14.0})


def test_waits_of_less_than_a_hundredth_are_not_told() -> None:
    assert summary_of(wait(HERE, SpanKind.WAIT_BOX, 5, 5.1, box=1))["boxes_in_words"] == "no box waits for another"


def test_a_job_on_one_box_has_no_boxes() -> None:
    found = summary_of(boxes=())
    assert "boxes" not in found
    assert names_of_boxes(found) == []


def test_resources_know_their_box() -> None:
    names = ["gpu-0/compute", "b1/gpu-1/h2d", "b2/ssd-0", "b1/optimizer-0", "ssd-11", "link-0-2", "b10/gpu-0/d2h"]
    assert [box_of_resource(name) for name in names] == [0, 1, 2, 1, 0, None, 10]
    assert in_order(names) == [
        "gpu-0/compute",
        "ssd-11",
        "b1/gpu-1/h2d",
        "b1/optimizer-0",
        "b2/ssd-0",
        "b10/gpu-0/d2h",
        "link-0-2",
    ]
    boxes = ["head", "b1", "attic"]
    assert [resource_in_words(name, boxes) for name in (*names[:3], names[5])] == [
        "head/gpu-0/compute",
        "b1/gpu-1/h2d",
        "attic/ssd-0",
        "link head to attic",
    ]
    assert [resource_in_words(name, ()) for name in names] == names
