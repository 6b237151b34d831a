"""The bytes between SSDs and host memory in a step, counted in the actors' requests."""

from collections import Counter
from pathlib import Path

import pytest

from tests.support.training import has_direct_io, make_partition, make_spec
from windlass.actors.messages import Message, ReadChunks, WriteChunks
from windlass.actors.runtime.local_runner import run_local
from windlass.engine.memory_plan.plan import Placement
from windlass.engine.memory_plan.update_order import UpdateOrder
from windlass.storage.ids import ActorName, Precision, StateKind, StatePrecision

NUM_STEPS = 5
# Chunks that are read once a step: the head (two of 18 chunks) goes forward and backward at once, the embedding (one)
# has a buffer of its own, and the last two layers (five each) are on the device after the head.
ONCE_SHARE = 13 / 18
SIZES = {StateKind.PARAM: 2, StateKind.RESIDUAL: 2, StateKind.GRAD: 2}


def traffic(root: Path, placement: Placement, states: StatePrecision, order: UpdateOrder) -> float:
    """Bytes read and written for each parameter and step, without the first weights and the model's export."""
    spec = make_spec(
        root,
        precision=Precision.BF16,
        state_precision=states,
        update_order=order,
        clip_norm=1.0 if order is UpdateOrder.KEPT else None,
        total_steps=NUM_STEPS,
        evaluate_every=None,
        num_validation_examples=0,
        placement=placement,
    )
    partition = make_partition(spec)
    moved = Counter[StateKind]()

    def look(to: ActorName, message: Message) -> None:
        if isinstance(message, ReadChunks | WriteChunks):
            moved.update(part.kind for item in message.items for part in item.parts)

    outcome = run_local(spec, partition=partition, direct=has_direct_io(root), on_message=look)
    assert outcome["status"] == "succeeded"
    num_chunks = sum(partition.layout.num_chunks(block.index) for block in partition.layout.blocks)
    nbytes = sum(SIZES.get(kind, 4) * number for kind, number in moved.items()) / num_chunks
    formats = spec.training.formats
    return (nbytes - sum(formats.itemsizes.values()) - formats.itemsizes[StateKind.PARAM]) / NUM_STEPS


@pytest.mark.short("split-28.0-active", "fp32-30.0-kept")
@pytest.mark.parametrize("order", [UpdateOrder.ACTIVE, UpdateOrder.KEPT])
@pytest.mark.parametrize(("states", "expected"), [(StatePrecision.FP32, 30.0), (StatePrecision.SPLIT, 28.0)])
def test_without_room_everything_moves(
    tmp_path: Path, order: UpdateOrder, states: StatePrecision, expected: float
) -> None:
    found = traffic(tmp_path, Placement(num_cached_params=0), states, order)
    assert found == pytest.approx(expected - ONCE_SHARE * 2)


@pytest.mark.short("split-22.0-active", "fp32-26.0-kept")
@pytest.mark.parametrize("order", [UpdateOrder.ACTIVE, UpdateOrder.KEPT])
@pytest.mark.parametrize(("states", "expected"), [(StatePrecision.FP32, 26.0), (StatePrecision.SPLIT, 22.0)])
def test_params_that_all_stay_are_never_read(
    tmp_path: Path, order: UpdateOrder, states: StatePrecision, expected: float
) -> None:
    found = traffic(tmp_path, Placement(num_cached_params=1000), states, order)
    assert found == pytest.approx(expected + 2 / NUM_STEPS)  # each is read once


@pytest.mark.short("split-6.0-kept", "fp32-4.0-active")
@pytest.mark.parametrize("order", [UpdateOrder.ACTIVE, UpdateOrder.KEPT])
@pytest.mark.parametrize(("states", "saved"), [(StatePrecision.FP32, 4.0), (StatePrecision.SPLIT, 6.0)])
def test_each_slot_spares_the_reads_of_its_chunk(
    tmp_path: Path, order: UpdateOrder, states: StatePrecision, saved: float
) -> None:
    without = 30.0 if states is StatePrecision.FP32 else 28.0
    found = traffic(tmp_path, Placement(num_cached_params=6), states, order)
    # The slots are the embedding's, which is read once without a slot, and the first layer's.
    assert found == pytest.approx(without - ONCE_SHARE * 2 - 6 / 18 * (saved - 2 / NUM_STEPS) + 2 / 18)


def test_gradients_that_spill_are_written_and_read_once(tmp_path: Path) -> None:
    placement = Placement(num_cached_params=0, num_host_grad_blocks=0)
    found = traffic(tmp_path, placement, StatePrecision.FP32, UpdateOrder.KEPT)
    assert found == pytest.approx(34.0 - ONCE_SHARE * 2)


@pytest.mark.short("kept")
@pytest.mark.parametrize("order", [UpdateOrder.ACTIVE, UpdateOrder.KEPT])
def test_states_in_memory_move_at_the_start_and_the_end(tmp_path: Path, order: UpdateOrder) -> None:
    placement = Placement(host_blocks=(0, 1, 2), device_blocks=(3, 4))
    found = traffic(tmp_path, placement, StatePrecision.SPLIT, order)
    assert found == pytest.approx((12 + 12) / NUM_STEPS)
