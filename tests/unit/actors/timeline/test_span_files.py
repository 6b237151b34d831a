"""Files with the spans of the last steps: bounded in number, and complete or missing."""

import json
from dataclasses import replace
from pathlib import Path

from windlass.actors.messages import SpanKind, WorkSpan
from windlass.actors.timeline.memory_levels import Level
from windlass.actors.timeline.span_files import KEPT_STEPS, StepSpans, held_steps, keep_step, load_step
from windlass.engine.memory_plan.memory_tier import MemoryTier


def spans_of(step: int) -> StepSpans:
    span = WorkSpan("ssd-0", SpanKind.READ_STATES, step, 2, 7, 0.1 + 0.2, 101.5, 4096)
    return StepSpans(step=step, start_s=99.0, end_s=102.0, summary={"period_s": 3.0}, spans=(span,))


def test_come_back_as_they_were(tmp_path: Path) -> None:
    keep_step(tmp_path / "timeline", spans_of(3))
    loaded = load_step(tmp_path / "timeline", 3)
    assert loaded == spans_of(3)
    assert loaded is not None
    assert isinstance(loaded.spans[0].kind, SpanKind)


def test_levels_of_a_simulated_step_come_back_as_well(tmp_path: Path) -> None:
    levels = tuple(
        Level(tier, "params", allocated_nbytes, ((99.0, 0), (0.1 + 99.2, 4096)))
        for tier, allocated_nbytes in ((MemoryTier.DEVICE, None), (MemoryTier.HOST, 8192))
    )
    kept = replace(spans_of(3), levels=levels)
    keep_step(tmp_path, kept)
    loaded = load_step(tmp_path, 3)
    assert loaded == kept
    assert loaded is not None
    assert isinstance(loaded.levels[0].tier, MemoryTier)


def test_a_file_from_before_there_were_levels_is_read(tmp_path: Path) -> None:
    keep_step(tmp_path, spans_of(3))
    (path,) = tmp_path.iterdir()
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "levels"}))
    assert load_step(tmp_path, 3) == spans_of(3)


def test_spans_from_before_they_named_other_boxes_are_read(tmp_path: Path) -> None:
    keep_step(tmp_path, spans_of(3))
    (path,) = tmp_path.iterdir()
    facts = json.loads(path.read_text())
    facts["spans"] = [span[:8] for span in facts["spans"]]
    path.write_text(json.dumps(facts))
    assert load_step(tmp_path, 3) == spans_of(3)


def test_old_steps_make_room(tmp_path: Path) -> None:
    for step in range(1, 21):
        keep_step(tmp_path, spans_of(step))
    assert held_steps(tmp_path) == list(range(21 - KEPT_STEPS, 21))
    assert len(list(tmp_path.iterdir())) == KEPT_STEPS
    assert load_step(tmp_path, 12) is None


def test_an_attempt_that_goes_back_leaves_no_steps_of_the_one_before(tmp_path: Path) -> None:
    for step in (8, 9, 10, 11):
        keep_step(tmp_path, spans_of(step))
    keep_step(tmp_path, spans_of(9))
    assert held_steps(tmp_path) == [8, 9]


def test_folder_without_files_has_no_steps(tmp_path: Path) -> None:
    assert held_steps(tmp_path / "timeline") == []
    assert load_step(tmp_path / "timeline", 1) is None
