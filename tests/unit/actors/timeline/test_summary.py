"""The summary of a step's time, from spans made by hand. Times are whole seconds from 100 on."""

from typing import Any

import pytest

from windlass.actors.messages import SpanKind, WorkSpan
from windlass.actors.timeline.recorder import COMPUTE, FROM_DEVICE, NO_BLOCK, TO_DEVICE, WHOLE_BLOCK
from windlass.actors.timeline.stalls import Stall
from windlass.actors.timeline.summary import MAX_SPANS, Timeline

BEGIN_S = 100.0


def span(
    resource: str,
    kind: SpanKind,
    start: float,
    stop: float,
    *,
    block: int = 0,
    chunk: int = WHOLE_BLOCK,
    step: int = 1,
    nbytes: int = 0,
) -> WorkSpan:
    return WorkSpan(resource, kind, step, block, chunk, BEGIN_S + start, BEGIN_S + stop, nbytes)


def compute(kind: SpanKind, start: float, stop: float, block: int = 0, step: int = 1) -> WorkSpan:
    return span(COMPUTE, kind, start, stop, block=block, step=step)


def operations(step: int = 1, at: float = 0.0) -> list[WorkSpan]:
    """The operations of two blocks: forward 10 to 12, the head 12 to 16, backward 16 to 20."""
    return [
        compute(SpanKind.FORWARD, at + 10, at + 12, 0, step),
        compute(SpanKind.HEAD, at + 12, at + 16, 1, step),
        compute(SpanKind.BACKWARD, at + 16, at + 20, 0, step),
    ]


def make_timeline(spans: list[WorkSpan], *, keeps_grads: bool = False, overlaps_steps: bool = True) -> Timeline:
    timeline = Timeline(2, keeps_grads=keeps_grads, overlaps_steps=overlaps_steps)
    timeline.begin(BEGIN_S)
    timeline.add(spans)
    return timeline


def summary_of(spans: list[WorkSpan], **options: bool) -> dict[str, Any]:
    kept = make_timeline([*spans, *operations()], **options).end_step(1)
    assert kept is not None
    return kept.summary


def test_busy_time_is_what_a_resources_spans_cover_within_the_period() -> None:
    found = summary_of(
        [
            span("ssd-0", SpanKind.READ_STATES, -5, 3, nbytes=50),  # begins before the period
            span("ssd-0", SpanKind.WRITE_STATES, 2, 4, nbytes=7),  # directly after the previous one
            span("ssd-0", SpanKind.READ_PARAMS, 2.5, 3.5, nbytes=7),
            span("ssd-0", SpanKind.READ_STATES, 19, 30, nbytes=100),  # ends after the period
            span("ssd-0", SpanKind.COMMIT, 5, 9, block=NO_BLOCK),  # moves no bytes
            span("ssd-1", SpanKind.READ_STATES, 8, 9, nbytes=3),
            span("ssd-1", SpanKind.READ_STATES, -3, -1, nbytes=1000),
            compute(SpanKind.UPDATE, 19, 20, block=1),
            compute(SpanKind.WAIT_OPERATION, 0, 10),
        ]
    )
    assert found["period_s"] == 20.0
    assert found["busy_s"] == {COMPUTE: 10.0, "ssd-0": 5.0, "ssd-1": 1.0}
    assert found["moved_bytes"] == {"ssd-0": 64, "ssd-1": 3}
    assert found["busiest"] == COMPUTE
    assert found["overlap_efficiency"] == 0.5


def test_periods_follow_each_other_and_nothing_counts_twice() -> None:
    straddling = span("ssd-0", SpanKind.READ_STATES, 18, 23, nbytes=10)
    timeline = make_timeline([straddling, *operations(), *operations(step=2, at=15)])
    first, second = timeline.end_step(1), timeline.end_step(2)
    assert first is not None
    assert second is not None
    assert (first.start_s, first.end_s, second.start_s, second.end_s) == (100.0, 120.0, 120.0, 135.0)
    assert [each.summary["busy_s"]["ssd-0"] for each in (first, second)] == [2.0, 3.0]
    assert first.summary["moved_bytes"] == {}
    assert second.summary["moved_bytes"] == {"ssd-0": 10}
    assert second.summary["busiest"] == COMPUTE


def test_a_steps_spans_are_those_of_its_period_and_what_was_done_for_it_later() -> None:
    late = span("optimizer-0", SpanKind.UPDATE, 22, 23, step=1)
    others = [span("optimizer-0", SpanKind.UPDATE, 22, 23, step=2), span("optimizer-0", SpanKind.UPDATE, -9, -8)]
    kept = make_timeline([late, *others, *operations()]).end_step(1)
    assert kept is not None
    assert set(kept.spans) == {late, *operations()}


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], {Stall.BETWEEN: 10.0}),
        (
            [
                compute(SpanKind.WAIT_PARAMS, 1, 9, block=1),
                span(TO_DEVICE, SpanKind.COPY_PARAMS_IN, 6, 10, block=1, nbytes=1),
                span("ssd-0", SpanKind.READ_PARAMS, 3, 7, block=1, nbytes=1),
                span("ssd-0", SpanKind.READ_PARAMS, 1, 3, block=0, nbytes=1),  # of another block
                span("ssd-0", SpanKind.READ_STATES, 1, 3, block=1, nbytes=1),
            ],
            {Stall.COPY_PARAMS: 3.0, Stall.READ_PARAMS: 3.0, Stall.PARAMS_QUEUE: 2.0, Stall.BETWEEN: 2.0},
        ),
        (
            [
                compute(SpanKind.WAIT_OPERATION, -2, 10),
                span("ssd-0", SpanKind.READ_STATES, 1, 2, nbytes=1),
                span("optimizer-0", SpanKind.UPDATE, 2, 4),
                span("ssd-0", SpanKind.WRITE_STATES, 4, 5, nbytes=1),
                span("ssd-1", SpanKind.COMMIT, 4, 6, block=NO_BLOCK),
                span("optimizer-0", SpanKind.UPDATE, 5, 8, block=1),
            ],
            {Stall.UPDATE: 4.0, Stall.COMMIT: 1.0, Stall.UPDATE_QUEUE: 2.0, Stall.NO_OPERATION: 3.0},
        ),
        (
            [
                compute(SpanKind.WAIT_GRAD_BUFFER, 2, 6),
                compute(SpanKind.UPDATE, 5, 6, block=1),  # the device works
            ],
            {Stall.GRAD_BUFFER: 3.0, Stall.BETWEEN: 6.0},
        ),
        (
            [
                compute(SpanKind.WAIT_ACTIVATIONS, 8, 9),  # before the operation: belongs to one that is not reported
                compute(SpanKind.WAIT_ACTIVATIONS, 16, 17),
                compute(SpanKind.WAIT_ACTIVATIONS, 18.5, 19),
                compute(SpanKind.UPDATE, 18, 18.75, block=1),  # the device works meanwhile
            ],
            {Stall.ACTIVATIONS: 2.25, Stall.BETWEEN: 9.0},
        ),
    ],
    ids=["nothing told", "params", "operation", "gradient buffer", "activations"],
)
def test_stalls_have_causes_and_add_up(spans: list[WorkSpan], expected: dict[Stall, float]) -> None:
    found = summary_of(spans)
    assert found["stall_s"] == {str(cause): seconds for cause, seconds in expected.items()}
    assert sum(found["stall_s"].values()) + found["busy_s"][COMPUTE] == found["period_s"]


class TestSeveralGpuWorkers:
    """The first one computes from 6 to 16, and the second, which computes the last group, from 10 to 20."""

    FIRST = (*operations(at=-4),)
    SECOND = (*(each._replace(resource="gpu-1/compute") for each in operations()),)

    def summary_of(self, spans: list[WorkSpan]) -> dict[str, Any]:
        kept = make_timeline([*spans, *self.FIRST, *self.SECOND]).end_step(1)
        assert kept is not None
        return kept.summary

    def test_each_has_its_own_busy_time(self) -> None:
        waits = compute(SpanKind.WAIT_ACTIVATIONS, 10, 11, 1)
        updating = span("optimizer-0", SpanKind.UPDATE, 0, 9)
        found = self.summary_of([waits, updating])
        assert found["busy_s"] == {COMPUTE: 9.0, "gpu-1/compute": 10.0, "optimizer-0": 9.0}
        assert (found["busiest"], found["overlap_efficiency"]) == ("gpu-1/compute", 0.5)

    def test_stalls_are_those_of_the_one_that_ends_the_period(self) -> None:
        waits = [
            compute(SpanKind.WAIT_PARAMS, 1, 6),
            span("gpu-1/compute", SpanKind.WAIT_PARAMS, 1, 7),
            span(TO_DEVICE, SpanKind.COPY_PARAMS_IN, 1, 4, nbytes=1),  # to the other one
            span("gpu-1/h2d", SpanKind.COPY_PARAMS_IN, 4, 7, nbytes=1),
            span("ssd-0", SpanKind.READ_PARAMS, 1, 3, nbytes=1),
        ]
        stalls = self.summary_of(waits)["stall_s"]
        assert stalls == {"copy_params": 3.0, "read_params": 2.0, "params_queue": 1.0, "between": 4.0}
        assert sum(stalls.values()) + 10.0 == 20.0

    def test_bound_is_that_of_the_one_that_ends_the_period(self) -> None:
        spans = [
            *PARAMS,  # copied to the other one, 1 s after the SSD has read them in 2 s
            span("gpu-1/h2d", SpanKind.COPY_PARAMS_IN, 4, 8, chunk=0, step=0, nbytes=1),
            compute(SpanKind.WAIT_ACTIVATIONS, 12, 13),  # in the other one's operation
            compute(SpanKind.WAIT_ACTIVATIONS, 16, 16.5),
        ]
        assert self.summary_of([])["dependency_bound_s"] == 10.0
        assert self.summary_of(spans)["dependency_bound_s"] == 10.0 + 2.0 + 4.0


def test_a_step_without_spans_has_no_timeline() -> None:
    timeline = make_timeline([])
    assert timeline.end_step(1) is None
    timeline.add(operations(step=2))
    kept = timeline.end_step(2)
    assert kept is not None
    assert kept.start_s == BEGIN_S


def test_too_many_spans_are_counted() -> None:
    timeline = make_timeline(operations())
    timeline.add([span("ssd-0", SpanKind.READ_STATES, 1, 2)] * MAX_SPANS)
    timeline.add([span("ssd-0", SpanKind.READ_STATES, 1, 2)] * 10)
    kept = timeline.end_step(1)
    assert kept is not None
    assert kept.summary["num_dropped_spans"] == 13
    assert len(kept.spans) == MAX_SPANS


def test_spans_before_the_first_period_are_dropped() -> None:
    timeline = Timeline(2, keeps_grads=False, overlaps_steps=True)
    loading = span("ssd-0", SpanKind.WRITE_STATES, -20, -10, nbytes=5)
    timeline.add([loading, *operations()])
    timeline.begin(BEGIN_S)
    kept = timeline.end_step(1)
    assert kept is not None
    assert set(kept.spans) == set(operations())


def block_spans(block: int, at: float, chunk: int = 0, read: float = 3.0) -> list[WorkSpan]:
    """The spans of a block's update: gradient offload takes 1 s, reading `read`, the update 2 s, writing 4 s."""
    place: dict[str, Any] = {"block": block, "chunk": chunk}
    return [
        span(FROM_DEVICE, SpanKind.COPY_GRAD_OUT, at, at + 1, **place, nbytes=1),
        span("ssd-0", SpanKind.READ_STATES, at + 2, at + 2 + read, **place, step=0, nbytes=1),
        span("optimizer-0", SpanKind.UPDATE, at + 10, at + 12, **place),
        span("ssd-0", SpanKind.WRITE_STATES, at + 20, at + 24, **place, nbytes=1),
    ]


PARAMS = [
    span("ssd-0", SpanKind.READ_PARAMS, 1, 3, chunk=0, step=0, nbytes=1),
    span(TO_DEVICE, SpanKind.COPY_PARAMS_IN, 4, 5, chunk=0, step=0, nbytes=1),
]


class TestDependencyBound:
    """Operations take 2, 4 and 4 seconds: the first block's forward, the head, the first block's backward."""

    def test_is_the_longest_cycle(self) -> None:
        assert summary_of([])["dependency_bound_s"] == 10.0  # block 0: all operations
        # The head's own cycle: 4 of compute and 1 + 3 + 2 + 4.
        assert summary_of(block_spans(1, 16))["dependency_bound_s"] == 14.0
        # Block 0's: 10 of compute, and the same. Pauses do not count.
        assert summary_of([*block_spans(1, 16), *block_spans(0, 20)])["dependency_bound_s"] == 20.0
        assert summary_of([*block_spans(0, 20), *PARAMS])["dependency_bound_s"] == 23.0

    def test_the_slowest_chunk_counts(self) -> None:
        spans = [*block_spans(0, 20, chunk=0), *block_spans(0, 20, chunk=1, read=5.0)]
        assert summary_of(spans)["dependency_bound_s"] == 22.0

    def test_kept_gradients_wait_for_the_last_operation(self) -> None:
        # The head's update begins after the backward pass of block 0: 4 + 4 of compute.
        assert summary_of(block_spans(1, 20), keeps_grads=True)["dependency_bound_s"] == 18.0

    def test_steps_that_do_not_overlap_begin_with_the_first_block(self) -> None:
        spans = [*block_spans(1, 20), *PARAMS]
        found = summary_of(spans, keeps_grads=True, overlaps_steps=False)
        assert found["dependency_bound_s"] == 3.0 + 10.0 + 10.0

    def test_params_that_were_in_host_memory_are_only_copied(self) -> None:
        again = [span(TO_DEVICE, SpanKind.COPY_PARAMS_IN, 6, 7.5, chunk=0, step=0, nbytes=1)]
        assert summary_of([*PARAMS, *again])["dependency_bound_s"] == 11.5

    def test_states_in_memory_are_updated_where_they_are(self) -> None:
        copied, _, update, written = block_spans(0, 20)
        # A flush writes them, and nothing waits for it.
        assert summary_of([copied, update, written])["dependency_bound_s"] == 13.0
        on_device = compute(SpanKind.UPDATE, 22, 28, 1)
        assert summary_of([on_device])["dependency_bound_s"] == 10.0  # 4 + 6: not longer than block 0's
        assert summary_of([on_device], keeps_grads=True)["dependency_bound_s"] == 14.0

    def test_a_gradient_that_waits_on_an_ssd_is_written_and_read(self) -> None:
        spilled = [
            span("ssd-0", SpanKind.WRITE_GRAD, 21, 22.5, chunk=0, nbytes=1),
            span("ssd-0", SpanKind.READ_GRAD, 23, 27, chunk=0, nbytes=1),
        ]
        # The states are read at the same time, and faster.
        assert summary_of([*block_spans(0, 20), *spilled])["dependency_bound_s"] == 20.0 + 1.5 + 1.0

    def test_a_skipped_step_updates_nothing(self) -> None:
        copied, *_ = block_spans(0, 20)
        assert summary_of([copied], keeps_grads=True)["dependency_bound_s"] == 11.0

    def test_an_operation_that_waits_for_activations_is_shorter_without(self) -> None:
        waits = [
            compute(SpanKind.WAIT_ACTIVATIONS, 10.5, 11),
            compute(SpanKind.WAIT_ACTIVATIONS, 17, 18.5),
            compute(SpanKind.WAIT_ACTIVATIONS, 7, 8),  # in an earlier operation of the block
            compute(SpanKind.WAIT_ACTIVATIONS, 13, 14, block=3),
        ]
        assert summary_of(waits)["dependency_bound_s"] == 8.0

    def test_each_group_of_micro_batches_goes_through_all_blocks(self) -> None:
        # Ten more seconds of compute, and the head's update begins after its second operation.
        earlier = operations(at=-10)
        assert summary_of(earlier)["dependency_bound_s"] == 20.0
        assert summary_of([*earlier, *block_spans(1, 16)])["dependency_bound_s"] == 4.0 + 10.0 + 10.0
        assert summary_of([*earlier, *block_spans(0, 20)])["dependency_bound_s"] == 30.0

    def test_is_not_known_without_all_operations(self) -> None:
        for spans in (operations()[1:], [*operations(at=-10)[:2], *operations()]):
            kept = make_timeline(spans).end_step(1)
            assert kept is not None
            assert kept.summary["dependency_bound_s"] is None
