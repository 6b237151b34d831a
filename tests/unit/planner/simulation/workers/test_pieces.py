"""Simulated streamed layers: bytes by the use of buffers, one piece copied while another is in use."""

from dataclasses import replace
from typing import Any

import pytest

from tests.support.planner.simulated import CHUNK, job, layers_of, moved, rates, run
from windlass.actors.messages import Phase, SpanKind
from windlass.engine.memory_plan.activation_policy import ActivationChoice
from windlass.engine.memory_plan.plan import Placement, PlanError
from windlass.engine.memory_plan.queue_depths import FETCH_DEPTH
from windlass.planner.simulation.simulate import Work
from windlass.storage.ids import BlockIndex

LAYERS = (1, 2, 3, 4)
PIECE = 2 * CHUNK
NORMS = 10
# Three pieces of the same size, the second of two matrices.
LAYOUT = layers_of((PIECE,), (CHUNK, CHUNK), (PIECE,), num_norms=NORMS, num_blocks=6)
ITEMSIZE = 2


def streamed(num_microbatches: int, choice: ActivationChoice = ActivationChoice.RECOMPUTE) -> dict[str, Any]:
    return {
        "layout": LAYOUT,
        "training": {"num_microbatches": num_microbatches},
        "placement": Placement(streamed_blocks=LAYERS, activations=choice.of_layers(len(LAYERS)), num_cached_params=0),
    }


@pytest.mark.parametrize(
    ("choice", "num_forward", "num_again"),
    [
        # Recomputation ends with the last two pieces in the buffers, then backward: only the third is copied. After
        # that the first two are in the buffers for the next micro-batch.
        (ActivationChoice.RECOMPUTE, 4, 2),
        # A graph needs the last one first, which has replaced the first.
        (ActivationChoice.KEEP, 3, 3),
    ],
)
@pytest.mark.parametrize("num_microbatches", [1, 2, 8])
def test_pieces_come_as_often_as_they_are_not_in_a_buffer(
    choice: ActivationChoice, num_forward: int, num_again: int, num_microbatches: int
) -> None:
    spans = job(**streamed(num_microbatches, choice)).spans()
    num_pieces = 3 * num_microbatches + num_forward + (num_microbatches - 1) * num_again
    layers = len(LAYERS) * ITEMSIZE * (num_pieces * PIECE + 2 * NORMS)
    others = ITEMSIZE * (2 + 1) * CHUNK  # the embedding forward and backward, the head once
    for step in range(1, 5):
        # The copied params of a step carry the previous step's number.
        assert moved(spans, SpanKind.COPY_PARAMS_IN, step - 1) == layers + others


def test_a_layer_of_two_pieces_stays_while_it_is_computed() -> None:
    layout = layers_of((PIECE,), (PIECE,), num_norms=0, num_blocks=6)
    spans = job(**{**streamed(8), "layout": layout}).spans()
    # Once in each operation.
    assert moved(spans, SpanKind.COPY_PARAMS_IN, 1) == ITEMSIZE * (len(LAYERS) * 2 * 2 * PIECE + 3 * CHUNK)


def test_a_layer_of_norms_only_has_no_pieces() -> None:
    layout = layers_of(num_norms=CHUNK, num_blocks=6)
    spans = job(**{**streamed(2), "layout": layout}).spans()
    assert moved(spans, SpanKind.COPY_PARAMS_IN, 1) == ITEMSIZE * (len(LAYERS) * 2 + 3) * CHUNK


@pytest.mark.parametrize("launches_ahead", [False, True])
def test_where_all_else_is_fast_a_step_is_its_compute(launches_ahead: bool) -> None:
    for step in run(machine=rates(launches_ahead=launches_ahead), **streamed(2))[1:]:
        assert step.summary["period_s"] == pytest.approx(11.0, rel=1e-6)


@pytest.mark.parametrize("choice", [ActivationChoice.RECOMPUTE, ActivationChoice.KEEP])
def test_where_the_way_in_is_slow_a_step_is_its_bytes(choice: ActivationChoice) -> None:
    step = run(machine=rates(h2d_bytes=1e5), compute_s=1e-3, **streamed(4, choice))[-1]
    nbytes = step.summary["moved_bytes"]["gpu-0/h2d"]
    assert step.summary["period_s"] == pytest.approx(nbytes / 1e5, rel=0.02)


@pytest.mark.parametrize(("launches_ahead", "exposed_s"), [(True, 0.0), (False, 1.0)])
def test_one_piece_is_copied_while_another_is_computed_with(launches_ahead: bool, exposed_s: float) -> None:
    """A copy takes as long as the use of a piece.

    If an operation is given only when it begins, its first piece is late.
    """
    machine = rates(h2d_bytes=ITEMSIZE * PIECE, launches_ahead=launches_ahead)
    simulated = job(machine=machine, compute_s=3.0, num_steps=2, **streamed(1))
    # Recomputation, and backward for twice as long.
    seconds = {each: s * (3 if each[0] is Phase.BACKWARD else 1) for each, s in simulated.work.compute_s.items()}
    spans = replace(simulated, work=Work(compute_s=seconds)).spans()
    for kind, compute_s in ((SpanKind.FORWARD, 3.0), (SpanKind.BACKWARD, 9.0)):
        found = [span.end_s - span.start_s for span in spans if span.kind is kind and span.block in (2, 3)]
        assert found == pytest.approx([compute_s + exposed_s] * 4, abs=0.01)


@pytest.mark.parametrize("num_held", [1, 2])
def test_chunks_stay_in_host_memory_while_their_layer_is_computed(num_held: int) -> None:
    """With space for one layer only, the next one's last chunks are not read earlier."""
    found = job(compute_s=5.0, num_steps=1, **streamed(1))
    while num_held == 1:
        nbytes = found.context.plan.arena_nbytes - 1
        try:
            found = job(compute_s=5.0, num_steps=1, host_memory_nbytes=nbytes, **streamed(1))
        except PlanError:
            break
    chunks_of_layer = found.context.layout.num_chunks(BlockIndex(1))
    assert found.context.plan.params.num_slots == FETCH_DEPTH + num_held * chunks_of_layer
    spans = found.spans()
    reads = [span.end_s for span in spans if span.kind is SpanKind.READ_PARAMS and span.block == 2]
    assert len(reads) == 2 * chunks_of_layer
    (before,) = (span.end_s for span in spans if span.kind is SpanKind.FORWARD and span.block == 1)
    is_late = reads[chunks_of_layer - 1] > before
    assert is_late == (num_held == 1)


def grads_streamed(num_microbatches: int, group_size: int | None = None, **changes: Any) -> dict[str, Any]:
    options = streamed(num_microbatches)
    placement = replace(options["placement"], streams_grads=True, group_size=group_size, **changes)
    return options | {"placement": placement}


@pytest.mark.parametrize(("num_microbatches", "group_size"), [(1, None), (4, 1), (4, 2), (4, None)])
def test_gradients_in_pieces_go_out_for_each_micro_batch_and_come_back_for_the_next(
    num_microbatches: int, group_size: int | None
) -> None:
    found = job(**grads_streamed(num_microbatches, group_size))
    spans, layers = found.spans(), len(LAYERS) * found.context.spec.training.grad_itemsize * (3 * PIECE + NORMS)
    out = [SpanKind.COPY_GRAD_OUT, SpanKind.COPY_PARTIAL_OUT]
    moves = [(span.kind, span.step, span.nbytes) for span in spans if span.block in LAYERS]
    for step in range(1, 5):
        assert sum(n for kind, at, n in moves if at == step and kind in out) == num_microbatches * layers
        back = sum(n for kind, at, n in moves if at == step and kind is SpanKind.COPY_PARTIAL_IN)
        assert back == (num_microbatches - 1) * layers


def test_sums_of_lanes_go_out_as_partial_in_the_last_group_too() -> None:
    options = grads_streamed(4)
    found = job(num_steps=2, **options | {"training": {"num_microbatches": 4, "lanes": 2}})
    spans = [span for span in found.spans() if span.step == 2 and span.block in LAYERS]
    layers = len(LAYERS) * found.context.spec.training.grad_itemsize * (3 * PIECE + NORMS)
    assert moved(spans, SpanKind.COPY_GRAD_OUT) == 3 * layers
    assert moved(spans, SpanKind.COPY_PARTIAL_OUT) == layers


@pytest.mark.parametrize(("group_size", "num_uses"), [(None, 2), (1, 3)])
def test_embedding_comes_back_for_backward_passes_because_the_head_had_its_buffer(
    group_size: int | None, num_uses: int
) -> None:
    layout = layers_of((PIECE,), (CHUNK, CHUNK), (PIECE,), num_norms=NORMS, num_blocks=6, head_numel=CHUNK + NORMS)
    found = job(num_steps=3, **grads_streamed(2, group_size) | {"layout": layout})
    numels = [block.numel for block in found.context.layout.blocks]
    spans = [span for span in found.spans() if (span.kind, span.step) == (SpanKind.COPY_PARAMS_IN, 2)]
    head = len(LAYERS) + 1
    assert sum(span.nbytes for span in spans if span.block == 0) == num_uses * ITEMSIZE * numels[0]
    assert sum(span.nbytes for span in spans if span.block == head) == (num_uses - 1) * ITEMSIZE * numels[head]


def test_a_gradient_in_pieces_leaves_while_its_layer_is_computed() -> None:
    spans = job(compute_s=3.0, num_steps=2, **grads_streamed(1)).spans()
    (layer,) = (s for s in spans if (s.kind, s.block, s.step) == (SpanKind.BACKWARD, 2, 1))
    leaving = [s.start_s for s in spans if (s.kind, s.block, s.step) == (SpanKind.COPY_GRAD_OUT, 2, 1)]
    assert len(leaving) == 3
    assert min(leaving) < layer.end_s <= max(leaving)


def test_gradients_in_pieces_that_spill_wait_for_the_commit() -> None:
    options = grads_streamed(1, num_host_grad_blocks=1)
    spans = job(num_steps=3, **options | {"training": {"clip_norm": 1.0}}).spans()
    written = [s for s in spans if s.kind is SpanKind.WRITE_GRAD and s.block in LAYERS]
    assert {s.step for s in written} == {1, 2, 3}


def test_layers_begin_backward_when_the_gradient_of_the_head_has_left_their_memory() -> None:
    spans = job(machine=rates(d2h_bytes=1e4), compute_s=1e-3, num_steps=2, **grads_streamed(1)).spans()
    head, last = len(LAYERS) + 1, len(LAYERS)
    copied = max(s.end_s for s in spans if (s.kind, s.block, s.step) == (SpanKind.COPY_GRAD_OUT, head, 1))
    begun = min(s.start_s for s in spans if (s.kind, s.block, s.step) == (SpanKind.BACKWARD, last, 1))
    assert begun >= copied
    left = max(s.end_s for s in spans if (s.kind, s.block, s.step) == (SpanKind.COPY_GRAD_OUT, 1, 1))
    embedding = min(s.start_s for s in spans if (s.kind, s.block, s.step) == (SpanKind.BACKWARD, 0, 1))
    assert embedding >= left
