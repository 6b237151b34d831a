"""The timeline of a step in the terminal."""

import json
from pathlib import Path
from typing import Any

import pytest

from windlass.actors.messages import SpanKind, WorkSpan
from windlass.actors.timeline.recorder import link_resource
from windlass.actors.timeline.summary import Timeline
from windlass.actors.timeline.trace_export import trace_of
from windlass.service.cli.errors import CommandError
from windlass.service.cli.jobs import _busy, timeline
from windlass.service.cli.step_timeline import boxes_in_words, print_trace
from windlass.service.installation.client import ServiceClient

HERE, THERE = "gpu-0/compute", "b1/gpu-0/compute"


def span(resource: str, kind: SpanKind, start_s: float, end_s: float, *, nbytes: int = 0, box: int = -1) -> WorkSpan:
    return WorkSpan(resource, kind, 2, int(kind is SpanKind.HEAD), -1, 50 + start_s, 50 + end_s, nbytes, box)


def trace(*spans: WorkSpan, boxes: tuple[str, ...] = ("head", "attic")) -> dict[str, Any]:
    """The trace of a step of 20 s, as the service returns it."""
    collected = Timeline(2, keeps_grads=True, overlaps_steps=True, boxes=boxes)
    collected.begin(50.0)
    collected.add([span(HERE, SpanKind.FORWARD, 0, 4), span(HERE, SpanKind.BACKWARD, 16, 20), *spans])
    step = collected.end_step(2)
    assert step is not None
    about = {"job_id": "ftjob-1", "step": 2, "held_steps": [2], "summary": step.summary}
    found: dict[str, Any] = json.loads(json.dumps(trace_of(step.spans, begins_s=50.0, about=about, boxes=boxes)))
    return found


OF_BOXES = (
    span(HERE, SpanKind.WAIT_BOX, 4, 16, box=1),
    span(THERE, SpanKind.WAIT_BOX, 0, 3, box=0),
    span(THERE, SpanKind.HEAD, 3, 15.5),
    span("b1/ssd-0", SpanKind.COMMIT, 0, 9),
    span("b1/ssd-0", SpanKind.READ_STATES, 9.5, 10, nbytes=1),
    span(link_resource(0, 1), SpanKind.PULL_HIDDEN, 2, 4, nbytes=3 * 10**9, box=0),
    span(link_resource(0, 1), SpanKind.PULL_SHARED, 4, 5, nbytes=2**20, box=0),
)


def test_step_over_boxes_is_drawn_by_box_with_who_waits(capsys: pytest.CaptureFixture[str]) -> None:
    print_trace(trace(*OF_BOXES), num_columns=0)
    assert capsys.readouterr().out.splitlines() == [
        "step 2 took 20 s; a column is 1 s",
        "head/gpu-0/compute   |████············████|",
        "attic/gpu-0/compute  |···████████████▓    |",
        "attic/ssd-0          |         ▓          |",
        "link head to attic   |  ███               |",
        "worked in a column: █ 75%, ▓ 50%, ▒ 25%, ░ 2% of its time at least; · waited for another box",
        "boxes: head waits 60 % of a step for attic; attic waits 15 % of a step for head; "
        "link head to attic 15 % busy, 1 GB/s",
        "box head: computes 40%; waits for attic 60%",
        "box attic: computes 62%; waits between operations 22%, for head 15%",
        "link head to attic: busy 15%, 1 GB/s; a step: hidden states 2.79 GiB, shared params 1.00 MiB",
    ]


def test_step_on_one_box_is_drawn_without_boxes(capsys: pytest.CaptureFixture[str]) -> None:
    print_trace(trace(span("ssd-0", SpanKind.READ_STATES, 0, 0.1), boxes=()), num_columns=40)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("gpu-0/compute  |████▓ ")
    assert lines[2] == f"ssd-0          |░{' ' * 22}|"  # a column is 0.87 s
    assert len(lines) == 4
    assert "another box" not in lines[3]


def test_show_tells_of_boxes_or_of_gpus() -> None:
    told = _busy({"timeline": trace(*OF_BOXES)["otherData"]["summary"]})
    assert list(told) == ["boxes", "box head", "box attic", "link head to attic"]
    assert _busy({"timeline": {"period_s": 2.0, "busy_s": {HERE: 1.0, "gpu-1/compute": 2.0}}}) == {
        "GPUs busy": "gpu-0 50%, gpu-1 100%"
    }
    assert _busy(None) == {"GPUs busy": None}
    assert boxes_in_words({"period_s": 2.0}) == {}


def test_timeline_writes_the_trace_or_draws_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int | None] = []

    def answer(client: ServiceClient, job_id: str, step: int | None) -> dict[str, Any]:
        asked.append(step)
        return trace(*OF_BOXES)

    monkeypatch.setattr(ServiceClient, "timeline", answer)
    timeline("ftjob-1", home=tmp_path)
    assert capsys.readouterr().out.startswith("step 2 took 20 s")
    file = tmp_path / "step.json"
    timeline("ftjob-1", step=2, trace=file, home=tmp_path)
    assert json.loads(file.read_text()) == trace(*OF_BOXES)
    assert capsys.readouterr().out == f"{file}\n"
    assert asked == [None, 2]
    with pytest.raises(CommandError, match=f"--trace {tmp_path}/nowhere/step.json: "):
        timeline("ftjob-1", trace=tmp_path / "nowhere" / "step.json", home=tmp_path)
