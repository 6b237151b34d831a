"""Rates and times computed from spans by hand."""

from pathlib import Path

import pytest

from tests.support.actors.specs import make_layout
from windlass.actors.messages import SpanKind, WorkSpan
from windlass.actors.timeline.recorder import COMPUTE, FROM_DEVICE, NO_BLOCK, TO_DEVICE, WHOLE_BLOCK
from windlass.actors.timeline.span_files import StepSpans, keep_step
from windlass.planner.predictions.measured_steps import load_measured, measured_step
from windlass.planner.predictions.rate_correction import MeasuredStep, WorkDone

# Blocks of 2000, 5000 and 3000 params, in chunks of at most 2048.
LAYOUT = make_layout(2000, 5000, 3000)
STEP = 7


def span(
    kind: SpanKind, resource: str, start_s: float, end_s: float, *, block: int = 1, chunk: int = 0, nbytes: int = 0
) -> WorkSpan:
    return WorkSpan(resource, kind, STEP, block, chunk, start_s, end_s, nbytes)


def computing(kind: SpanKind, block: int, start_s: float, end_s: float) -> WorkSpan:
    return span(kind, COMPUTE, start_s, end_s, block=block, chunk=WHOLE_BLOCK)


def measured(
    *spans: WorkSpan, shares_cores: bool = False, read_to_write: float = 1.0, microbatches: tuple[int, ...] = (1,)
) -> MeasuredStep:
    told = StepSpans(step=STEP, start_s=100.0, end_s=110.0, summary={}, spans=spans)
    return measured_step(
        told, LAYOUT, shares_cores=shares_cores, read_to_write=read_to_write, microbatches=microbatches
    )


def test_operations_count_for_their_blocks_without_what_they_waited_for() -> None:
    found = measured(
        computing(SpanKind.FORWARD, 0, 100, 101),
        computing(SpanKind.FORWARD, 1, 101, 103),
        span(SpanKind.WAIT_ACTIVATIONS, COMPUTE, 102, 102.5),
        span(SpanKind.WAIT_ACTIVATIONS, "gpu-1/compute", 101, 101.25),  # another GPU worker
        computing(SpanKind.HEAD, 2, 103, 104),
        # The second group of micro-batches.
        computing(SpanKind.FORWARD, 1, 104, 106),
        computing(SpanKind.BACKWARD, 1, 106, 109),
        computing(SpanKind.BACKWARD, 0, 109, 110),
        computing(SpanKind.EVALUATE, 1, 100, 109),
    )
    assert found.period_s == 10.0
    assert found.forward_s == {0: 1.0, 1: 3.5, 2: 1.0}
    assert found.backward_s == {1: 3.0, 0: 1.0}


def test_the_slowest_of_several_gpus_gives_the_times_of_blocks() -> None:
    def of_second(kind: SpanKind, start_s: float, end_s: float) -> WorkSpan:
        return span(kind, "gpu-1/compute", start_s, end_s, chunk=WHOLE_BLOCK)

    spans = (
        computing(SpanKind.FORWARD, 1, 100, 102),
        computing(SpanKind.BACKWARD, 1, 103, 106),
        of_second(SpanKind.FORWARD, 100, 101.5),
        span(SpanKind.WAIT_GRAD_BUFFER, "gpu-1/compute", 101.5, 106),  # for the first one's sum
        of_second(SpanKind.BACKWARD, 106, 108.5),
    )
    # The second computes one micro-batch in 4 s, and the first one two in 5 s.
    found = measured(*spans, microbatches=(2, 1))
    assert (found.forward_s, found.backward_s) == ({1: 3.0}, {1: 5.0})
    assert measured(*spans, microbatches=(1, 1)).forward_s == {1: 2.0}
    # A third GPU has no group of micro-batches.
    assert measured(*spans, microbatches=(1, 1, 0)).forward_s == {1: 2.0}


def test_the_slowest_of_several_links_gives_the_rate() -> None:
    found = measured(
        span(SpanKind.COPY_PARAMS_IN, TO_DEVICE, 100, 101, nbytes=50),
        span(SpanKind.COPY_PARAMS_IN, "gpu-1/h2d", 100, 102, nbytes=50),
        span(SpanKind.COPY_PARTIAL_OUT, FROM_DEVICE, 103, 104, nbytes=40),
        span(SpanKind.COPY_GRAD_OUT, "gpu-1/d2h", 103, 103.5, nbytes=40),
    )
    assert found.done == {"h2d_bytes": WorkDone(amount=50, busy_s=2.0), "d2h_bytes": WorkDone(amount=40, busy_s=1.0)}


def test_a_link_that_waits_is_not_a_slow_one() -> None:
    found = measured(
        span(SpanKind.COPY_PARAMS_IN, TO_DEVICE, 100, 101, nbytes=50),
        span(SpanKind.COPY_ACTIVATIONS_IN, TO_DEVICE, 100.5, 101.5, nbytes=70),
        span(SpanKind.COPY_PARAMS_IN, TO_DEVICE, 109, 109.5, nbytes=30),
        span(SpanKind.WAIT_PARAMS, COMPUTE, 101, 109),
        span(SpanKind.COPY_GRAD_OUT, FROM_DEVICE, 103, 104, nbytes=40),
    )
    assert found.done == {"h2d_bytes": WorkDone(amount=150, busy_s=2.0), "d2h_bytes": WorkDone(amount=40, busy_s=1.0)}


def test_an_ssd_that_reads_and_writes_at_once_is_as_fast_at_both_as_its_profile_says() -> None:
    spans = (
        span(SpanKind.READ_STATES, "ssd-0", 100, 103, nbytes=60),
        span(SpanKind.WRITE_STATES, "ssd-0", 102, 104, nbytes=40),
        span(SpanKind.READ_ACTIVATIONS, "ssd-1", 100, 101, nbytes=20),
        span(SpanKind.COMMIT, "ssd-0", 104, 109, block=NO_BLOCK, chunk=WHOLE_BLOCK),
    )
    # The mean of the SSDs: for 2 s and 1 s they only read, for 1 s one only writes, for 1 s it does both.
    found = measured(*spans).done
    assert found["ssd_read_bytes"] == WorkDone(amount=40, busy_s=pytest.approx((3 + 1 / 3) / 2))
    assert found["ssd_write_bytes"] == WorkDone(amount=20, busy_s=pytest.approx((1 + 2 / 3) / 2))
    # Transfers in one direction count more than the profile: 80 bytes in 3 s, so their work is at most 4 s.
    for read_to_write, read_s, write_s in ((0.5, 4.0, 1.0), (10.0, 3.0, 2.0)):
        found = measured(*spans, read_to_write=read_to_write).done
        assert found["ssd_read_bytes"] == WorkDone(amount=40, busy_s=pytest.approx(read_s / 2))
        assert found["ssd_write_bytes"] == WorkDone(amount=20, busy_s=pytest.approx(write_s / 2))


def test_an_ssd_that_only_reads_says_nothing_of_writes() -> None:
    found = measured(span(SpanKind.READ_STATES, "ssd-0", 100, 103, nbytes=60))
    assert found.done == {"ssd_read_bytes": WorkDone(amount=60, busy_s=3.0)}


def test_updates_count_the_params_of_their_chunk() -> None:
    found = measured(
        span(SpanKind.UPDATE, "optimizer-0", 100, 101, block=1, chunk=0),
        span(SpanKind.UPDATE, "optimizer-1", 100, 102, block=1, chunk=2),
        span(SpanKind.UPDATE, COMPUTE, 103, 104, block=2, chunk=WHOLE_BLOCK),
    )
    last = 5000 - 2 * LAYOUT.chunk_numel
    # Both together: as if one did all of it in the mean of their times.
    assert found.done["optimizer_params"] == WorkDone(amount=LAYOUT.chunk_numel + last, busy_s=1.5)
    assert found.done["device_params"] == WorkDone(amount=3000, busy_s=1.0)


def test_concurrent_work_on_a_cpu_device_shares_its_time() -> None:
    found = measured(
        computing(SpanKind.FORWARD, 1, 100, 104),
        computing(SpanKind.BACKWARD, 1, 106, 108),
        span(SpanKind.UPDATE, "optimizer-0", 102, 106, block=1, chunk=0),
        span(SpanKind.COPY_PARAMS_IN, TO_DEVICE, 100, 101, nbytes=50),
        span(SpanKind.READ_STATES, "ssd-0", 100, 108, nbytes=60),
        shares_cores=True,
    )
    # Compute: 0.5 of the first second, 1, 1 of the two beside the update, and 2: 4.5 of 6.
    assert found.forward_s == {1: pytest.approx(4 * 4.5 / 6)}
    assert found.backward_s == {1: pytest.approx(2 * 4.5 / 6)}
    assert found.done["optimizer_params"].busy_s == pytest.approx(3.0)
    assert found.done["h2d_bytes"] == WorkDone(amount=50, busy_s=0.5)
    assert found.done["ssd_read_bytes"] == WorkDone(amount=60, busy_s=8.0)


def test_span_that_ended_in_another_period_counts_once() -> None:
    before, later = (span(SpanKind.COPY_PARAMS_IN, TO_DEVICE, *when, nbytes=50) for when in ((98, 100), (109, 111)))
    over_the_edge = span(SpanKind.COPY_PARAMS_IN, TO_DEVICE, 99, 101, nbytes=30)
    found = measured(before, later, over_the_edge)
    assert found.done == {"h2d_bytes": WorkDone(amount=30, busy_s=2.0)}


def test_steps_are_read_from_their_folder(tmp_path: Path) -> None:
    for step in (3, 4, 5):
        spans = (WorkSpan(COMPUTE, SpanKind.FORWARD, step, 0, WHOLE_BLOCK, 0.0, float(step), 0),)
        keep_step(tmp_path, StepSpans(step=step, start_s=-1.0, end_s=9.0, summary={}, spans=spans))
    found = load_measured(tmp_path, LAYOUT, first_step=4, shares_cores=False, read_to_write=1.0)
    assert [each.forward_s for each in found] == [{0: 4.0}, {0: 5.0}]
