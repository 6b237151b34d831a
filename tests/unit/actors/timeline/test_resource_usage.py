"""The resources that a job has used, reported step by step and over attempts."""

import pytest

from windlass.actors.messages import MemoryKind, MemoryReported, SpanKind, WorkSpan
from windlass.actors.timeline.resource_usage import NUM_FIRST_STEPS, Measured
from windlass.actors.timeline.span_files import StepSpans
from windlass.storage.ids import ActorName, JobId, Step


def step_of(number: int, length_s: float, *spans: WorkSpan) -> StepSpans:
    return StepSpans(step=number, start_s=100.0, end_s=100.0 + length_s, summary={}, spans=spans)


def told(actor: str, kind: MemoryKind, nbytes: int) -> MemoryReported:
    return MemoryReported(job=JobId("ftjob-1"), step=Step(1), actor=ActorName(actor), kind=kind, nbytes=nbytes)


def evaluation(start_s: float) -> WorkSpan:
    return WorkSpan("gpu-0/compute", SpanKind.EVALUATE, 3, 1, -1, start_s, start_s + 0.5, 0)


def test_the_first_steps_and_those_with_an_evaluation_do_not_count() -> None:
    measured = Measured(1, None)
    for number in range(1, NUM_FIRST_STEPS + 1):
        measured.note_step(step_of(number, 50.0))
    assert measured.data == {"step_s": None, "num_steps": 0, "recent": None, "peak_bytes": {}}
    measured.note_step(step_of(3, 2.0))
    measured.note_step(step_of(4, 9.0, evaluation(101.0)))
    measured.note_step(step_of(5, 4.0, evaluation(104.5)))  # after its end
    assert measured.data["step_s"] == pytest.approx(3.0)
    assert measured.data["num_steps"] == 2


def test_peaks_are_sums_over_actors_and_never_fall() -> None:
    measured = Measured(1, None)
    measured.note_memory(told("ssd-0", MemoryKind.SSD, 10))
    measured.note_memory(told("ssd-1", MemoryKind.SSD, 20))
    measured.note_memory(told("gpu-0", MemoryKind.DEVICE, 7))
    measured.note_memory(told("gpu-0", MemoryKind.DEVICE, 5))
    assert measured.data["peak_bytes"] == {"ssd": 30, "gpu": 7}


def test_peaks_of_several_gpu_workers_are_those_of_the_largest() -> None:
    """A plan's bytes are those of each GPU, and all GPU workers report the same arena."""
    measured = Measured(1, None)
    for actor, num in (("gpu-0", 5), ("gpu-1", 7), ("gpu-2", 6)):
        for kind in (MemoryKind.DEVICE, MemoryKind.DEVICE_RESERVED, MemoryKind.HOST):
            measured.note_memory(told(actor, kind, num))
    assert measured.data["peak_bytes"] == {"gpu": 7, "gpu_reserved": 7, "host": 7}


def test_next_attempt_continues_from_reported_usage() -> None:
    first = Measured(1, None)
    for number, length_s in ((3, 2.0), (4, 4.0)):
        first.note_step(step_of(number, length_s))
    first.note_memory(told("gpu-0", MemoryKind.DEVICE, 7))
    first.note_memory(told("ssd-0", MemoryKind.SSD, 30))
    second = Measured(5, first.data)
    assert second.data == first.data
    second.note_step(step_of(5, 60.0))  # the first steps of an attempt are not steady either
    second.note_step(step_of(7, 9.0))
    second.note_memory(told("gpu-0", MemoryKind.DEVICE, 6))
    second.note_memory(told("ssd-0", MemoryKind.SSD, 31))
    assert second.data["peak_bytes"] == {"gpu": 7, "ssd": 31}
    assert (second.data["step_s"], second.data["num_steps"]) == (pytest.approx(5.0), 3)


def test_recent_time_is_that_of_the_last_steps_and_of_the_attempt_before_until_there_are_enough() -> None:
    first = Measured(1, None)
    for number in range(3, 40):
        first.note_step(step_of(number, 2.0 if number < 30 else 3.0))
    assert first.data["step_s"] == pytest.approx(84 / 37)
    assert first.data["recent"] | {"step_s_low": 0, "step_s_high": 0} == {
        "step_s": 3.0,
        "num_steps": 9,
        "step_s_low": 0,
        "step_s_high": 0,
    }
    assert first.data["recent"]["step_s_low"] < 3.0 < first.data["recent"]["step_s_high"]
    second = Measured(40, first.data)
    for number in (42, 43):
        second.note_step(step_of(number, 4.0))
    assert second.data["recent"] == first.data["recent"]
    second.note_step(step_of(44, 4.0))
    assert second.data["recent"] == {"step_s": 4.0, "num_steps": 3, "step_s_low": 4.0, "step_s_high": 4.0}
