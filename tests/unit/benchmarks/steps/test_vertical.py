"""The comparisons of `benchmarks.vertical`, and its conclusions from the measurements."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers.contenders import ContenderRun
from benchmarks.peers.windlass_runner import changed, placement_of
from benchmarks.vertical import CASES, Results, contender_of, horizontal, moved_a_step, ratios_of
from tests.support.actors.specs import TRAINING
from windlass.actors.messages import SpanKind, WorkSpan
from windlass.actors.timeline.span_files import StepSpans, keep_step


def test_orders_are_sizes_of_groups(tmp_path: Path) -> None:
    found, training = [], replace(TRAINING, batch_size=16)
    for case in CASES:
        arguments = contender_of(case, tmp_path).arguments
        values = {
            option: [arguments[i + 1] for i, each in enumerate(arguments) if each == option]
            for option in ("--change", "--place")
        }
        placement = placement_of(values["--place"], 6)
        assert placement.num_cached_params == 0
        found.append((changed(training, values["--change"]).num_microbatches, placement.group_size))
    assert found == [(1, 1), (1, 1), (4, 4), (4, 1), (16, 16), (16, 1), (16, 4)]
    assert len({case.name for case in CASES}) == len(CASES)


def test_bytes_are_those_of_the_timed_steps_periods(tmp_path: Path) -> None:
    def span(step: int, end_s: float, nbytes: int, kind: SpanKind = SpanKind.READ_PARAMS) -> WorkSpan:
        return WorkSpan("ssd-0", kind, step, 0, 0, end_s - 1, end_s, nbytes)

    for step in (1, 2, 3):
        spans = (
            span(step - 1, 10 * step, 100 * step),  # of the previous period
            span(step, 10 * step + 5, 4 * step),
            span(step, 10 * step + 10, 8, SpanKind.COPY_PARTIAL_IN),
            span(step, 10 * step + 11, 1000),  # of the next period
        )
        keep_step(tmp_path, StepSpans(step=step, start_s=10 * step, end_s=10 * step + 10, summary={}, spans=spans))
    assert moved_a_step(tmp_path, 2) == {SpanKind.READ_PARAMS: (8 + 12) // 2, SpanKind.COPY_PARTIAL_IN: 8}


def results(*, losses: tuple[float, ...] = (1.0,)) -> Results:
    """Results in which vertical steps take a second, and the others as many as there are groups."""
    runs = {case: [] for case in CASES}
    for case in CASES:
        num_groups = case.num_microbatches / case.group_size
        own = losses if case == horizontal(4) else (1.0,)
        runs[case].append(ContenderRun(step_s=(num_groups, 9 * num_groups, num_groups), losses=own))
    moved = {case: Counter({SpanKind.READ_PARAMS: 40 * case.num_microbatches // case.group_size}) for case in CASES}
    moved[horizontal(16)] += Counter({SpanKind.COPY_PARTIAL_OUT: 300, SpanKind.COPY_PARTIAL_IN: 300})
    return Results(runs, moved)


def test_ratios_are_of_medians_and_bytes_of_a_parameter() -> None:
    found = ratios_of(results(), num_params=10)
    assert found["vertical_over_horizontal"] == {"1": 1.0, "4": 4.0, "16": 16.0}
    assert found["groups_of_4_over_horizontal"] == 4.0
    assert found["fetched_bytes_per_param"] == {
        "vertical": {"1": 4.0, "4": 4.0, "16": 4.0},
        "horizontal": {"1": 4.0, "4": 16.0, "16": 64.0},
    }
    assert found["partial_bytes_per_param"]["horizontal"] == {"1": 0.0, "4": 0.0, "16": 60.0}


def test_orders_that_come_to_other_losses_are_an_error() -> None:
    results().check()
    with pytest.raises(RuntimeError, match="horizontal-4 came to other losses than vertical-4"):
        results(losses=(1.0000001,)).check()
