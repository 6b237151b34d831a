"""Simulated activations: all swapped bytes return, from the SSDs beyond host memory, and compute waits for them."""

from dataclasses import replace
from itertools import product

import pytest

from tests.support.planner.simulated import CHUNK, job, moved, rates, run
from windlass.actors.messages import SpanKind
from windlass.engine.memory_plan.activation_policy import ActivationChoice
from windlass.engine.memory_plan.plan import Placement
from windlass.engine.memory_plan.queue_depths import QueueDepths

pytestmark = pytest.mark.usefixtures("small_activation_slots")

SLOT = 4096
LAYERS = range(1, 5)
NUM_MICROBATCHES = 2
# Bytes of the three tensors of a layer and micro-batch; they take five slots.
TENSORS = (SLOT + 100, SLOT, 2 * SLOT)
SWAPPED = dict.fromkeys(LAYERS, TENSORS)
NUM_SLOTS = 5 * len(LAYERS) * NUM_MICROBATCHES
NBYTES = sum(TENSORS) * len(LAYERS) * NUM_MICROBATCHES


def placed(
    choice: ActivationChoice = ActivationChoice.SWAP, *, num_host: int = NUM_SLOTS, num_ssd: int = 0
) -> Placement:
    return Placement(
        activations=choice.of_layers(len(LAYERS)),
        host_activation_nbytes=num_host * SLOT,
        ssd_activation_nbytes=num_ssd * SLOT,
    )


@pytest.mark.parametrize("choice", [ActivationChoice.SWAP, ActivationChoice.RECOMPUTE_SWAP_INPUT])
@pytest.mark.parametrize("num_host", [NUM_SLOTS, 17, 0])
def test_swapped_bytes_return_and_use_ssds_beyond_host_memory(choice: ActivationChoice, num_host: int) -> None:
    num_ssd = NUM_SLOTS - num_host
    spans = job(swapped_nbytes=SWAPPED, placement=placed(choice, num_host=num_host, num_ssd=num_ssd)).spans()
    for step in range(1, 5):
        assert moved(spans, SpanKind.COPY_ACTIVATIONS_OUT, step) == NBYTES
        assert moved(spans, SpanKind.COPY_ACTIVATIONS_IN, step) == NBYTES
        # Each tensor begins at a slot, and takes only as much of an SSD as O_DIRECT needs.
        for kind in (SpanKind.WRITE_ACTIVATIONS, SpanKind.READ_ACTIVATIONS):
            assert moved(spans, kind, step) == num_ssd * SLOT


def test_nothing_comes_back_before_it_left() -> None:
    slow = rates(d2h_bytes=1e4, h2d_bytes=1e4, ssd_write_bytes=(2e4, 2e4))
    spans = job(swapped_nbytes=SWAPPED, machine=slow, placement=placed(num_host=11, num_ssd=NUM_SLOTS - 11)).spans()
    out, back = (
        [span for span in spans if span.kind is kind]
        for kind in (SpanKind.COPY_ACTIVATIONS_OUT, SpanKind.COPY_ACTIVATIONS_IN)
    )
    for step, block in product(range(1, 5), LAYERS):
        left = [(span.end_s, span.nbytes) for span in out if (span.step, span.block) == (step, block)]
        came = [(span.start_s, span.nbytes) for span in back if (span.step, span.block) == (step, block)]
        for at_s, _ in came:
            num_begun = sum(nbytes for start_s, nbytes in came if start_s <= at_s)
            assert num_begun <= sum(nbytes for end_s, nbytes in left if end_s <= at_s)


def test_no_more_is_on_its_way_to_the_ssds_than_has_staging_buffers() -> None:
    slow = rates(ssd_write_bytes=(1e4, 1e4))
    placement = placed(num_host=0, num_ssd=NUM_SLOTS)
    found = job(swapped_nbytes=SWAPPED, num_steps=1, compute_s=1e-3, machine=slow, placement=placement)
    spans, staged_nbytes = found.spans(), found.context.plan.num_staged_activations * SLOT
    assert staged_nbytes < NBYTES
    written = [(span.end_s, span.nbytes) for span in spans if span.kind is SpanKind.WRITE_ACTIVATIONS]
    out_nbytes, most_nbytes = 0, 0
    for span in sorted(spans, key=lambda span: span.start_s):
        if span.kind is SpanKind.COPY_ACTIVATIONS_OUT:
            out_nbytes += span.nbytes
            on_its_way = out_nbytes - sum(nbytes for end_s, nbytes in written if end_s <= span.start_s)
            most_nbytes = max(most_nbytes, on_its_way)
    assert staged_nbytes / 2 < most_nbytes <= staged_nbytes


@pytest.mark.parametrize("num_host", [NUM_SLOTS, 0])
def test_where_all_else_is_fast_a_step_is_its_compute(num_host: int) -> None:
    steps = run(swapped_nbytes=SWAPPED, placement=placed(num_host=num_host, num_ssd=NUM_SLOTS - num_host))
    for step in steps[1:]:
        assert step.summary["period_s"] == pytest.approx(11.0, rel=1e-6)
        assert "activations" not in step.summary["stall_s"] or step.summary["stall_s"]["activations"] < 1e-4


def test_where_the_way_out_is_slow_a_step_is_its_bytes() -> None:
    """The last layer's bytes leave last and are needed first: nothing returns before all have left."""
    step = run(swapped_nbytes=SWAPPED, placement=placed(), compute_s=1e-4, machine=rates(d2h_bytes=1e5))[-1]
    grad_nbytes = 4 * 6 * 2 * CHUNK
    assert step.summary["moved_bytes"]["gpu-0/d2h"] == NBYTES + grad_nbytes
    assert step.summary["period_s"] == pytest.approx((NBYTES + grad_nbytes) / 1e5, rel=0.02)
    assert step.summary["busiest"] == "gpu-0/d2h"
    # And for the gradients that are copied out first.
    assert NBYTES / 1e5 * 0.98 <= step.summary["stall_s"]["activations"] <= (NBYTES + grad_nbytes) / 1e5


def test_where_the_way_back_is_slow_the_backward_pass_is_its_bytes() -> None:
    """No params are transferred here."""
    placement = replace(placed(), device_blocks=tuple(range(6)), commit_every=100)
    step = run(swapped_nbytes=SWAPPED, placement=placement, compute_s=0.1, machine=rates(h2d_bytes=1e4))[-1]
    assert step.summary["moved_bytes"]["gpu-0/h2d"] == NBYTES
    # Forward, and the embedding's backward; the head runs under the copies.
    assert step.summary["period_s"] == pytest.approx(NBYTES / 1e4 + 6 * 0.1, rel=0.02)


def test_where_the_ssds_are_slow_a_step_is_their_bytes() -> None:
    slow = rates(ssd_read_bytes=(1e5, 1e5), ssd_write_bytes=(1e5, 1e5))
    placement = replace(placed(num_host=0, num_ssd=NUM_SLOTS), device_blocks=tuple(range(6)), commit_every=100)
    step = run(swapped_nbytes=SWAPPED, placement=placement, compute_s=1e-3, machine=slow)[-1]
    assert step.summary["period_s"] == pytest.approx(2 * NUM_SLOTS * SLOT / 2e5, rel=0.05)


@pytest.mark.parametrize("num_host", [NUM_SLOTS, 0])
def test_compute_waits_where_too_much_is_on_its_way_out(num_host: int) -> None:
    """With space on the device for outgoing tensors, copies may take as long as the forward pass. Without, it waits."""
    placement = placed(num_host=num_host, num_ssd=NUM_SLOTS - num_host)

    def waits_s(leaving_nbytes: int) -> float:
        limited = replace(placement, depths=QueueDepths(leaving_nbytes=leaving_nbytes))
        spans = job(swapped_nbytes=SWAPPED, placement=limited, machine=rates(d2h_bytes=NBYTES / 3.9)).spans()
        waits = [span for span in spans if span.kind is SpanKind.WAIT_ACTIVATIONS and span.step == 2]
        forward = [span for span in spans if span.kind is SpanKind.FORWARD and span.step == 2]
        return sum(span.end_s - span.start_s for span in waits if span.end_s <= forward[-1].end_s)

    assert waits_s(2 * NBYTES) == 0.0
    # One tensor at a time: the last one of a micro-batch is half of it, and has a third of its time.
    assert waits_s(0) > 0.1


@pytest.mark.parametrize(
    ("choice", "order"),
    [(ActivationChoice.SWAP, TENSORS[::-1]), (ActivationChoice.RECOMPUTE_SWAP_INPUT, TENSORS)],
)
def test_simulated_graph_prefetches_latest_activations_first(choice: ActivationChoice, order: tuple[int, ...]) -> None:
    spans = job(swapped_nbytes=SWAPPED, num_steps=1, placement=placed(choice)).spans()
    back = [span for span in spans if span.kind is SpanKind.COPY_ACTIVATIONS_IN]
    first = sorted(back, key=lambda span: span.start_s)[: len(TENSORS)]
    # Tensors of the last layer's first micro-batch.
    assert [(span.block, span.nbytes) for span in first] == [(LAYERS[-1], nbytes) for nbytes in order]


def test_swaps_beyond_the_plan_are_refused() -> None:
    with pytest.raises(ValueError, match=r"what blocks \[\] swap, and the plan has blocks \[1, 2, 3, 4\]"):
        run(placement=placed())
    with pytest.raises(ValueError, match=r"what blocks \[1, 2, 3, 4\] swap, and the plan has blocks \[\]"):
        run(swapped_nbytes=SWAPPED)
    with pytest.raises(ValueError, match=f"take 40 slots of 4.00 KiB at once, and the plan has 39; .* {40 * SLOT}$"):
        run(swapped_nbytes=SWAPPED, placement=placed(num_host=30, num_ssd=9))
