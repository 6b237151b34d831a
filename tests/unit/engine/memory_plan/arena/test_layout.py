import pickle
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.engine.arena_plans import CHUNK, GIB, SIZE, TIED, plan
from windlass.amounts import bytes_text
from windlass.engine.memory_plan.activation_policy import RECOMPUTE_ALL, BlockActivations
from windlass.engine.memory_plan.plan import (
    ACTIVATION_SLOT_NBYTES,
    COMMIT_EVERY,
    TRANSIT_DEPTH,
    Crossings,
    ModelSize,
    Placement,
    Plan,
    PlanError,
)
from windlass.engine.memory_plan.queue_depths import (
    FETCH_DEPTH,
    MIN_STATE_DEPTH,
    STAGED_ACTIVATIONS,
    STATE_DEPTH,
    QueueDepths,
)

sizes = st.builds(
    ModelSize,
    block_numels=st.lists(st.integers(0, 10**6), min_size=3, max_size=30).map(tuple),
    chunk_numel=st.integers(1, 60).map(lambda n: n * 2048),
    param_itemsize=st.sampled_from([2, 4]),
    state_itemsize=st.sampled_from([6, 12, 14]),
)


@given(
    size=sizes,
    num_optimizers=st.integers(1, 4),
    grad_itemsize=st.sampled_from([2, 4]),
    keep_grads=st.booleans(),
    in_memory=st.sampled_from([(), (0,), (2, 1)]),
    on_device=st.booleans(),
    group_size=st.sampled_from([None, 1, 2]),
)
def test_pools_lie_side_by_side_and_fill_the_arena(
    size: ModelSize,
    num_optimizers: int,
    grad_itemsize: int,
    keep_grads: bool,
    in_memory: tuple[int, ...],
    on_device: bool,
    group_size: int | None,
) -> None:
    where = "device_blocks" if on_device else "host_blocks"
    placement = Placement(group_size=group_size, **{where: in_memory})
    found = plan(
        size,
        num_optimizers=num_optimizers,
        grad_itemsize=grad_itemsize,
        keep_grads=keep_grads,
        num_microbatches=3,
        placement=placement,
    )
    in_transit = [found.transit, found.partial_grads]
    pools = [found.params, found.grads, *found.states, found.host_states, *in_transit, found.activations]
    assert len(found.states) == num_optimizers
    assert pools[0].offset == 0
    assert all(pool.offset + pool.nbytes == next_pool.offset for pool, next_pool in pairwise(pools))
    assert found.arena_nbytes == sum(pool.slot_nbytes * pool.num_slots for pool in pools)
    # O_DIRECT: every slot begins at a page.
    assert all(pool.offset % 4096 == 0 and pool.slot_nbytes % 4096 == 0 for pool in pools)
    assert all(pool.num_slots >= 1 for pool in pools[:-4])
    # A block's gradient is offloaded as one: all its slots are acquired at once.
    num_chunks = {block: size.num_chunks(block) for block in size.blocks if block not in found.device_blocks}
    assert found.grads.num_slots >= (sum(num_chunks.values()) if keep_grads else max(num_chunks.values(), default=0))
    assert found.host_states.num_slots == sum(size.num_chunks(block) for block in found.host_blocks)
    assert (found.transit.num_slots > 0) == bool(found.device_blocks)
    assert found.partial_grads.num_slots == (sum(num_chunks.values()) if group_size else 0)


@pytest.mark.parametrize(
    ("lent", "borrowed", "num_slots"),
    [(0, 0, (0, 0)), (5, 0, (5, TRANSIT_DEPTH)), (0, 5, (TRANSIT_DEPTH, 5)), (1, 0, (1, 1))],
)
def test_a_shared_block_is_sent_from_slots_for_all_of_it_and_received_in_few(
    lent: int, borrowed: int, num_slots: tuple[int, int]
) -> None:
    crossings = Crossings(num_neighbours=1, microbatch_nbytes=4096, num_lent_chunks=lent, num_borrowed_chunks=borrowed)
    found = plan(crossings=crossings)
    assert (found.shared_params.num_slots, found.shared_sums.num_slots) == num_slots
    assert (found.shared_params.slot_nbytes, found.shared_sums.slot_nbytes) == (2 * CHUNK, 4 * CHUNK)
    pools = [found.crossings, found.shared_params, found.shared_sums]
    assert all(pool.offset + pool.nbytes == next_pool.offset for pool, next_pool in pairwise(pools))
    assert found.arena_nbytes == found.shared_sums.offset + found.shared_sums.nbytes


@pytest.mark.parametrize(("num_ranks", "group_size", "num_more"), [(1, 1, 0), (2, 1, 5), (4, 1, 3 * 3), (2, 2, 3)])
def test_gpu_workers_of_the_heads_box_pass_on_its_sum_of_another_boxs_embedding(
    num_ranks: int, group_size: int, num_more: int
) -> None:
    """If sums pass at once, each but the last one has slots for the operation with most: the head, with 4 chunks more.

    Without these there would be slots for two layers of three chunks.
    """
    options: dict[str, Any] = {"num_microbatches": 4, "num_ranks": num_ranks}
    options["placement"] = Placement(group_size=group_size)
    crossings = Crossings(num_neighbours=1, microbatch_nbytes=4096, num_borrowed_chunks=5)
    without = plan(crossings=replace(crossings, num_borrowed_chunks=0), **options)
    assert plan(crossings=crossings, **options).partial_grads.num_slots == without.partial_grads.num_slots + num_more


def test_the_plan_of_a_small_model_to_the_byte() -> None:
    found = plan()
    assert SIZE.total_chunks == 17
    # Two layers of three chunks stay from one use to the next.
    assert (found.params.slot_nbytes, found.params.num_slots) == (2 * CHUNK, FETCH_DEPTH + 6)
    # Gradients of a third of six blocks wait for their update, two more are in flight.
    assert (found.grads.slot_nbytes, found.grads.num_slots) == (2 * CHUNK, 4 * 3)
    assert [(s.slot_nbytes, s.num_slots) for s in found.states] == [(14 * CHUNK, STATE_DEPTH)] * 2
    assert found.arena_nbytes == CHUNK * (10 * 2 + 12 * 2 + 2 * 3 * 14)
    assert found.ssd_nbytes == 2 * 17 * CHUNK * 14
    assert found.commit_every == 1


def test_clipping_keeps_every_gradient() -> None:
    found = plan(keep_grads=True, grad_itemsize=4)
    assert (found.grads.slot_nbytes, found.grads.num_slots, found.spilled_blocks) == (4 * CHUNK, 17, ())


def of_depth(num_layers: int, **options: Any) -> Plan:
    numels = (4000, *[12000] * num_layers, 15000)
    return plan(ModelSize(block_numels=numels, chunk_numel=CHUNK, param_itemsize=2, state_itemsize=14), **options)


def test_without_clipping_a_deeper_model_needs_no_more_memory() -> None:
    budget = of_depth(4).arena_nbytes
    assert of_depth(4, host_memory_nbytes=budget).grads.num_slots == 4 * 3
    assert of_depth(800, host_memory_nbytes=budget).arena_nbytes <= budget
    assert of_depth(800).ssd_nbytes == 2 * (1 + 800 * 3 + 4) * CHUNK * 14


@pytest.mark.parametrize("num_layers", [4, 22, 40, 800])
def test_where_memory_is_free_the_gradients_of_a_third_of_the_blocks_wait_for_their_update(num_layers: int) -> None:
    free, deep = of_depth(num_layers), of_depth(num_layers, keep_grads=True)
    num_blocks = free.grads.num_slots / 3  # of three chunks
    assert (num_layers + 2) / 3 + 2 <= num_blocks < (num_layers + 2) / 3 + 3
    assert free.grads.num_slots < deep.grads.num_slots
    assert (free.params, free.states[0].nbytes) == (deep.params, deep.states[0].nbytes)


def test_the_gradients_that_wait_make_room_before_anything_else_does() -> None:
    whole, slots = of_depth(40), []
    for budget in range(whole.arena_nbytes, 0, -CHUNK):
        found = of_depth(40, host_memory_nbytes=budget)
        assert found.arena_nbytes <= budget
        assert found.states == tuple(
            replace(pool, offset=found.states[i].offset) for i, pool in enumerate(whole.states)
        )
        if found.num_cached_params < whole.num_cached_params:
            break
        slots.append(found.grads.num_slots // 3)
    assert sorted(set(slots), reverse=True) == list(range(42 // 3 + 2, 1, -1))


def test_a_tiny_model_takes_no_more_slots_than_it_has_chunks() -> None:
    size = ModelSize(block_numels=(10, 10, 0), chunk_numel=2048, param_itemsize=4, state_itemsize=12)
    found = plan(size, keep_grads=True)
    assert size.total_chunks == 3  # a block without parameters counts as one
    assert [pool.num_slots for pool in (found.grads, *found.states)] == [3, 3, 3]
    assert (found.params.num_slots, found.num_cached_params) == (3 + 2, 2)


def arena(*, cached: int, depth: int, grads: int = 6) -> int:
    """The arena's bytes for a job without clipping, with two optimizers.

    By default there are grad slots for two layers of three chunks.
    """
    return CHUNK * ((FETCH_DEPTH + cached) * 2 + grads * 2 + 2 * depth * 14)


def test_a_budget_is_kept_by_keeping_no_params_then_by_shallower_queues_and_then_refused() -> None:
    for depth in range(MIN_STATE_DEPTH, STATE_DEPTH + 1):
        found = plan(host_memory_nbytes=arena(cached=0, depth=depth))
        assert found.arena_nbytes == arena(cached=0, depth=depth)
        assert [pool.num_slots for pool in found.states] == [depth] * 2
    assert plan(host_memory_nbytes=arena(cached=6, depth=STATE_DEPTH)).num_cached_params == 6
    least = arena(cached=0, depth=MIN_STATE_DEPTH)
    with pytest.raises(PlanError) as caught:
        plan(host_memory_nbytes=least - 1)
    assert f"needs {bytes_text(least)} of host memory" in str(caught.value)
    assert f"1 bytes more than its budget of {bytes_text(least - 1)}; set host_memory_gib" in str(caught.value)
    assert caught.value.param == "windlass.budgets.host_memory_gib"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@given(num_free=st.integers(0, 40))
def test_rest_of_budget_keeps_params(num_free: int) -> None:
    budget = arena(cached=6, depth=STATE_DEPTH, grads=12) + num_free * 2 * CHUNK + 2 * CHUNK - 1
    found = plan(host_memory_nbytes=budget)
    assert found.num_cached_params == min(17, 6 + num_free)  # never more than there are
    assert found.arena_nbytes <= budget
    # Without a budget there is no known memory beyond the minimum.
    assert plan().num_cached_params == 6
    assert plan(placement=Placement(num_cached_params=1000)).num_cached_params == 17


def test_without_a_budget_a_job_takes_no_more_than_it_needs_of_what_is_free() -> None:
    assert plan(free_nbytes=GIB) == plan()
    tight = plan(keep_grads=True).arena_nbytes - 1
    found = plan(keep_grads=True, free_nbytes=tight)
    assert found.arena_nbytes <= tight
    assert found.num_cached_params == 0
    with pytest.raises(PlanError, match="more than the 1000 bytes that the machine has to spare; close other programs"):
        plan(free_nbytes=1000)
    # The user has chosen the budget, so free memory does not limit it.
    assert plan(host_memory_nbytes=GIB, free_nbytes=1000).arena_nbytes > 1000


def test_a_naive_optimizer_has_one_chunk_at_a_time_and_keeps_nothing() -> None:
    found = plan(is_naive=True, host_memory_nbytes=GIB)
    assert [pool.num_slots for pool in found.states] == [1, 1]
    assert found.num_cached_params == 0
    least = CHUNK * (FETCH_DEPTH * 2 + 6 * 2 + 2 * 14)
    assert plan(is_naive=True, host_memory_nbytes=least).arena_nbytes == least
    with pytest.raises(PlanError, match=f"needs {bytes_text(least)} of host memory"):
        plan(is_naive=True, host_memory_nbytes=least - 1)


# --- gradients on the SSDs -----------------------------------------------------------------------------------------


def test_as_many_gradients_stay_in_host_memory_as_the_budget_has_room_for() -> None:
    whole = plan(keep_grads=True, placement=Placement(num_cached_params=0))
    least = CHUNK * (FETCH_DEPTH * 2 + 6 * 2 + 2 * MIN_STATE_DEPTH * (14 + 2))
    spilled = set()
    for budget in range(least, whole.arena_nbytes, 2 * CHUNK):
        found = plan(keep_grads=True, host_memory_nbytes=budget)
        assert found.arena_nbytes <= budget
        # The last blocks: their gradients arrive first, and are used last.
        assert found.spilled_blocks == tuple(range(6 - len(found.spilled_blocks), 6))
        assert all(pool.slot_nbytes == (16 if found.spilled_blocks else 14) * CHUNK for pool in found.states)
        spilled.add(len(found.spilled_blocks))
    assert max(spilled) == 6
    assert 0 in spilled
    assert len(spilled) > 3
    with pytest.raises(PlanError, match=f"needs {bytes_text(least)} of host memory"):
        plan(keep_grads=True, host_memory_nbytes=least - 1)


def test_a_model_whose_gradients_do_not_fit_into_host_memory_trains_with_clipping() -> None:
    size = ModelSize(block_numels=(GIB,) * 8, chunk_numel=16 * 2**20, param_itemsize=2, state_itemsize=14)
    found = plan(size, keep_grads=True, host_memory_nbytes=8 * GIB)
    assert found.spilled_blocks
    assert found.arena_nbytes <= 8 * GIB


def test_grad_slots_hold_what_is_kept_and_what_passes_through() -> None:
    found = plan(keep_grads=True, placement=Placement(num_host_grad_blocks=2))
    assert found.spilled_blocks == (2, 3, 4, 5)
    assert found.grads.num_slots == 1 + 3 + 6
    assert plan(keep_grads=True, placement=Placement(num_host_grad_blocks=6)).spilled_blocks == ()


@pytest.mark.parametrize(
    ("placement", "keep_grads"),
    [
        (Placement(num_host_grad_blocks=2), False),
        (Placement(num_host_grad_blocks=2, host_blocks=(1,)), True),
        (Placement(num_host_grad_blocks=0, device_blocks=(1,)), True),
        (Placement(num_host_grad_blocks=0, commit_every=2), True),
    ],
)
def test_gradients_go_to_the_ssds_only_where_the_next_states_will_lie(placement: Placement, keep_grads: bool) -> None:
    with pytest.raises(PlanError, match="gradients would go to the SSDs, but they do only where"):
        plan(keep_grads=keep_grads, placement=placement)


# --- states in memory ----------------------------------------------------------------------------------------------


def test_states_in_host_memory_take_a_slot_a_chunk() -> None:
    found = plan(placement=Placement(host_blocks=(5, 1)))
    assert found.host_blocks == (1, 5)
    assert (found.host_states.slot_nbytes, found.host_states.num_slots) == (14 * CHUNK, 3 + 4)
    assert found.commit_every == COMMIT_EVERY


def test_states_on_the_device_need_no_grad_slots() -> None:
    found = plan(keep_grads=True, placement=Placement(device_blocks=(1, 2), commit_every=3))
    assert found.grads.num_slots == 17 - 6
    assert (found.transit.slot_nbytes, found.transit.num_slots) == (14 * CHUNK, TRANSIT_DEPTH)
    assert found.commit_every == 3


@pytest.mark.parametrize(
    "placement",
    [Placement(host_blocks=(6,)), Placement(host_blocks=(1, 1)), Placement(host_blocks=(1,), device_blocks=(2, 1))],
    ids=str,
)
def test_blocks_that_do_not_exist_or_rest_in_two_places_are_refused(placement: Placement) -> None:
    with pytest.raises(PlanError, match="must name different blocks of 0 to 5"):
        plan(placement=placement)


@pytest.mark.parametrize("placement", [Placement(host_blocks=(1,)), Placement(commit_every=2)], ids=str)
def test_gradients_do_not_spill_where_their_place_may_be_taken(placement: Placement) -> None:
    least = plan(keep_grads=True, placement=placement, host_memory_nbytes=GIB).arena_nbytes
    with pytest.raises(PlanError, match="set host_memory_gib"):
        plan(keep_grads=True, placement=placement, host_memory_nbytes=least // 2)


# --- groups of micro-batches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "size", "num_groups"), [(None, 7, 1), (1, 1, 7), (3, 3, 3), (6, 6, 2), (7, 7, 1), (100, 7, 1)]
)
def test_a_step_has_as_many_groups_as_its_micro_batches_fill(asked: int | None, size: int, num_groups: int) -> None:
    found = plan(num_microbatches=7, placement=Placement(group_size=asked))
    assert (found.group_size, found.num_groups) == (size, num_groups)


def test_sums_between_groups_take_a_slot_for_each_use_of_a_chunk() -> None:
    whole = plan(num_microbatches=4)
    assert whole.partial_grads.num_slots == 0
    found = plan(num_microbatches=4, placement=Placement(group_size=2))
    assert (found.partial_grads.slot_nbytes, found.partial_grads.num_slots) == (4 * CHUNK, 17)
    assert found.arena_nbytes == whole.arena_nbytes + 17 * 4 * CHUNK
    tied = plan(TIED, num_microbatches=4, placement=Placement(group_size=2))
    assert tied.partial_grads.num_slots == 17 + 1
    on_device = plan(num_microbatches=4, placement=Placement(group_size=2, device_blocks=(1, 5)))
    assert on_device.partial_grads.num_slots == 17 - 3 - 4
    budget = found.arena_nbytes - 1
    with pytest.raises(PlanError, match=f"more than its budget of {bytes_text(budget // 2)};"):
        plan(num_microbatches=4, placement=Placement(group_size=2), host_memory_nbytes=budget // 2)
    assert plan(num_microbatches=4, placement=Placement(group_size=2), host_memory_nbytes=budget).arena_nbytes <= budget


def test_groups_that_end_inside_of_lanes_take_two_slots_for_each_use_of_a_chunk() -> None:
    whole = plan(num_microbatches=4, num_lanes=2)
    assert whole.open_lanes.num_slots == 0
    assert plan(num_microbatches=4, num_lanes=2, placement=Placement(group_size=2)).open_lanes.num_slots == 0
    found = plan(num_microbatches=4, num_lanes=2, placement=Placement(group_size=1))
    assert found.open_lanes.num_slots == found.partial_grads.num_slots == 17
    assert found.open_lanes.offset == found.partial_grads.offset + found.partial_grads.nbytes
    assert found.arena_nbytes == whole.arena_nbytes + 2 * 17 * 4 * CHUNK


def test_an_empty_group_is_refused() -> None:
    with pytest.raises(PlanError, match="group_size is 0; a group has at least 1 micro-batch"):
        plan(placement=Placement(group_size=0))


def test_swapped_activations_have_slots_of_their_own() -> None:
    choices = (BlockActivations(swap_input=True), RECOMPUTE_ALL, RECOMPUTE_ALL, RECOMPUTE_ALL)
    before = plan()
    found = plan(
        placement=Placement(
            activations=choices,
            host_activation_nbytes=3 * ACTIVATION_SLOT_NBYTES - 1,
            ssd_activation_nbytes=5 * ACTIVATION_SLOT_NBYTES,
        )
    )
    assert found.layer_activations == choices
    assert (found.num_staged_activations, found.num_ssd_activations) == (5, 5)
    assert found.activations.num_slots == 3 + 5
    assert found.arena_nbytes == before.arena_nbytes + 8 * ACTIVATION_SLOT_NBYTES
    many = plan(placement=Placement(ssd_activation_nbytes=100 * ACTIVATION_SLOT_NBYTES))
    assert many.num_staged_activations == many.activations.num_slots == STAGED_ACTIVATIONS


def test_buffers_are_as_deep_as_the_placement_says() -> None:
    depths = QueueDepths(params=6, states=5, staged_activations=40, leaving_nbytes=1000)
    on_ssd = 100 * ACTIVATION_SLOT_NBYTES
    found = plan(
        num_optimizers=2, placement=Placement(depths=depths, num_cached_params=1, ssd_activation_nbytes=on_ssd)
    )
    assert found.params.num_slots == 6 + 1
    assert found.fetch_batch == 3
    assert [pool.num_slots for pool in found.states] == [5, 5]
    assert found.num_staged_activations == 40
    assert found.max_leaving_nbytes == 500  # half for writes to the SSDs

    def with_budget(nbytes: int) -> Plan:
        placement = Placement(depths=depths, num_cached_params=1, ssd_activation_nbytes=on_ssd)
        return plan(num_optimizers=2, placement=placement, host_memory_nbytes=nbytes)

    # With one byte less, there are slots for gradients of 3 typical blocks instead of 4; 2 is the minimum.
    assert with_budget(found.arena_nbytes - 1) == with_budget(found.arena_nbytes - 3 * 2 * CHUNK)
    least_grads = with_budget(found.arena_nbytes - 2 * 3 * 2 * CHUNK)
    assert (found.grads.num_slots, least_grads.grads.num_slots) == (4 * 3, 2 * 3)
    assert least_grads.arena_nbytes == found.arena_nbytes - 2 * 3 * 2 * CHUNK
    assert [pool.num_slots for pool in least_grads.states] == [5, 5]
    # With one byte less than that, optimizers have fewer slots, and the rest is unchanged.
    less = with_budget(least_grads.arena_nbytes - 1)
    assert [pool.num_slots for pool in less.states] == [4, 4]
    assert (less.params, less.grads) == (found.params, least_grads.grads)
    with pytest.raises(ValueError, match="depths: states is 0; at least 1"):
        QueueDepths(states=0)


@pytest.mark.parametrize(
    ("placement", "error"),
    [
        (Placement(activations=(RECOMPUTE_ALL,)), "given for 1 layers; the model has 4"),
        (Placement(activations=(BlockActivations(swap_input=True),) * 4), "no room for them"),
    ],
)
def test_invalid_activation_choices_are_refused(placement: Placement, error: str) -> None:
    with pytest.raises(PlanError, match=error):
        plan(placement=placement)
