"""Slots of blocks and gradients that come and leave in pieces."""

from dataclasses import replace
from typing import Any

import pytest

from tests.support.engine.arena_plans import CHUNK, GIB, SIZE, TIED, plan, sharing
from windlass.engine.memory_plan.plan import (
    Crossings,
    ModelSize,
    Placement,
    Plan,
    PlanError,
)
from windlass.engine.memory_plan.queue_depths import (
    FETCH_DEPTH,
)


@pytest.mark.parametrize(
    ("num_lanes", "num_ranks", "group_size", "num_slots"),
    [
        (1, 2, 1, 0),
        (4, 4, 1, 0),  # a lane has one micro-batch, and a group one lane
        (2, 2, 2, 3),  # a layer's lane waits between micro-batches
        (4, 2, 2, 4),  # the total of embedding or head waits between lanes
        (2, 1, 4, 4),
    ],
)
def test_lanes_in_pieces_take_slots_for_one_operation_of_each_gpu_worker(
    num_lanes: int, num_ranks: int, group_size: int, num_slots: int
) -> None:
    placement = Placement(group_size=group_size, streamed_blocks=(1, 2, 3, 4), streams_grads=True)
    found = plan(num_microbatches=4, num_lanes=num_lanes, num_ranks=num_ranks, placement=placement)
    assert found.running_sums.num_slots == num_slots
    assert found.running_sums.offset == found.open_lanes.offset + found.open_lanes.nbytes
    assert found.activations.offset == found.running_sums.offset + num_ranks * num_slots * 4 * CHUNK
    assert found.grad_overlaid_blocks == (0, 5)
    whole = plan(
        num_microbatches=4,
        num_lanes=num_lanes,
        num_ranks=num_ranks,
        placement=replace(placement, streams_grads=False),
    )
    assert whole.running_sums.num_slots == 0
    # Sums that pass at once: those of two layers, or of the head and a layer that begins while the head's are read.
    num_passed = whole.partial_grads.num_slots, found.partial_grads.num_slots
    if num_lanes == 1:
        assert num_passed == (17, 17)  # they wait for a further round
    else:
        assert num_passed == ((num_ranks - 1) * 2 * 3, (num_ranks - 1) * (4 + 3))
    num_more = num_ranks * num_slots + num_passed[1] - num_passed[0]
    assert found.arena_nbytes == whole.arena_nbytes + num_more * 4 * CHUNK


def test_streamed_ends_have_slots_for_params_and_for_lanes_as_layers_have() -> None:
    layers = Placement(streamed_blocks=(1, 2, 3, 4), streams_grads=True, group_size=2, num_cached_params=0)
    ends = replace(layers, streams_ends=True)
    assert not plan(placement=layers).streams_ends
    found = plan(placement=ends)
    assert found.streams_ends
    assert found.streamed_blocks == found.grad_streamed_blocks == (0, 1, 2, 3, 4, 5)
    assert found.grad_overlaid_blocks == ()
    assert not found.ends_share_params
    assert found.params.num_slots == FETCH_DEPTH + 4 + 3  # the head and a layer
    without = plan(placement=replace(ends, streams_grads=False))
    assert (without.streamed_blocks, without.grad_streamed_blocks) == (found.streamed_blocks, ())
    resident = plan(placement=replace(ends, device_blocks=(0,)))
    assert resident.streamed_blocks == (1, 2, 3, 4, 5)
    # The head has slices, so a lane's sum may wait between them. Longer lanes of all blocks wait between micro-batches.
    options: dict[str, Any] = {"num_microbatches": 4, "placement": ends}
    assert plan(**options, num_lanes=1).running_sums.num_slots == 0
    assert plan(**options, num_lanes=2).running_sums.num_slots == 4
    assert plan(**options, num_lanes=4).running_sums.num_slots == 4
    no_head = replace(ends, device_blocks=(5,))
    assert plan(**options | {"placement": no_head}, num_lanes=4).running_sums.num_slots == 0


def test_the_sum_over_slices_of_a_streamed_head_has_slots_where_its_gradient_is_rounded() -> None:
    placement = Placement(streamed_blocks=(1, 2), streams_grads=True, streams_ends=True, num_cached_params=0)
    options: dict[str, Any] = {"placement": placement, "grad_itemsize": 2, "is_sliced": True}
    found = plan(**options)
    assert (found.fp32_in_pieces, found.running_sums.num_slots) == ((5,), SIZE.num_chunks(5))
    assert found.running_sums.slot_nbytes == 4 * CHUNK
    several = plan(**options, num_microbatches=4, num_ranks=2)
    assert several.arena_nbytes - plan(
        **options | {"is_sliced": False}, num_microbatches=4, num_ranks=2
    ).arena_nbytes == (2 * found.running_sums.nbytes)
    others: list[dict[str, Any]] = [
        {"grad_itemsize": 4},
        {"is_sliced": False},
        {"placement": replace(placement, streams_ends=False)},
        {"placement": replace(placement, streams_grads=False)},
        {"placement": replace(placement, device_blocks=(5,))},
    ]
    for change in others:
        other = plan(**options | change)
        assert (other.fp32_in_pieces, other.running_sums.num_slots) == ((), 0), change
    tied = plan(TIED, **options)
    assert (tied.fp32_in_pieces, tied.running_sums.num_slots) == (tied.tied_in_pieces, 0), "it has slots of its own"


def test_a_tied_embedding_is_streamed_and_its_sums_have_slots() -> None:
    placement = Placement(streamed_blocks=(1, 2), streams_grads=True, streams_ends=True, num_cached_params=0)
    num_chunks = TIED.num_chunks(0)
    one, several = (plan(TIED, num_microbatches=number, placement=placement) for number in (1, 4))
    for found in (one, several):
        assert found.streamed_blocks == found.grad_streamed_blocks == (0, 1, 2), "the head has no matrix of its own"
        assert found.tied_in_pieces == (0,)
        assert found.grad_overlaid_blocks == ()
    assert one.partial_grads.num_slots == num_chunks, "of the head's use"
    assert several.partial_grads.num_slots == 2 * num_chunks, "and of the embedding's, between micro-batches"
    groups = plan(TIED, num_microbatches=4, placement=replace(placement, group_size=2))
    assert groups.partial_grads.num_slots == TIED.total_chunks + num_chunks, "as where blocks are whole"
    params = plan(TIED, placement=replace(placement, streams_grads=False))
    assert (params.streamed_blocks, params.tied_in_pieces, params.partial_grads.num_slots) == ((0, 1, 2), (), 0)
    resident = plan(TIED, placement=replace(placement, device_blocks=(0,)))
    assert (resident.streamed_blocks, resident.tied_in_pieces) == ((1, 2), ())


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (sharing((5, 3)), {}),
        (sharing((2, 0)), {}),  # with a layer
        (sharing((2, 0), (5, 0)), {}),
        (TIED, {"num_microbatches": 2, "num_lanes": 2}),
        (TIED, {"num_microbatches": 2, "num_ranks": 2}),
        (SIZE, {"crossings": Crossings(num_neighbours=1, microbatch_nbytes=8, num_lent_chunks=1)}),
    ],
)
def test_ends_that_share_params_otherwise_are_not_streamed(size: ModelSize, options: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"streams_ends is set, and .* share params.*; leave streams_ends"):
        plan(size, placement=Placement(streamed_blocks=(1,), streams_ends=True), **options)


def test_streamed_layers_stay_in_host_memory_while_they_are_computed() -> None:
    """Two of them if there is space. One, and the slots that prefetch the next, are required."""

    def with_layers(*layers: int, budget: int | None = None, **options: Any) -> Plan:
        placement = Placement(streamed_blocks=layers, num_cached_params=0, **options)
        return plan(placement=placement, host_memory_nbytes=budget)

    assert with_layers().params.num_slots == FETCH_DEPTH
    assert with_layers(2).params.num_slots == FETCH_DEPTH + 3
    enough = with_layers(4, 1, 2)
    assert enough.params.num_slots == FETCH_DEPTH + 2 * 3
    assert enough.streamed_blocks == (1, 2, 4)
    assert with_layers(4, 1, 2, host_blocks=(1, 4)).params.num_slots == FETCH_DEPTH + 3  # the other slots exist anyway

    smallest = with_layers(4, 1, 2, budget=3 * GIB)
    while True:
        try:
            smallest = with_layers(4, 1, 2, budget=smallest.arena_nbytes - 1)
        except PlanError:
            break
    assert smallest.params.num_slots == FETCH_DEPTH + 3


@pytest.mark.parametrize(
    ("blocks", "uses", "wrong"),
    [
        ((0, 1), (), r"leave out \[0\]"),
        ((5,), (), r"leave out \[5\]"),
        ((2, 6), (), r"leave out \[6\]"),
        ((1, 3), (), r"leave out \[3\]"),
        ((2, 4), ((5, 2),), r"leave out \[2\]"),
        ((2, 2), (), "remove duplicates"),
    ],
    ids=str,
)
def test_only_layers_of_their_own_that_rest_elsewhere_are_streamed(
    blocks: tuple[int, ...], uses: tuple[tuple[int, int], ...], wrong: str
) -> None:
    placement = Placement(streamed_blocks=blocks, device_blocks=(3,))
    with pytest.raises(PlanError, match=rf"streamed_blocks .* must name layers, each once: .* {wrong}"):
        plan(sharing(*uses), placement=placement)
