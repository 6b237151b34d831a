import pickle
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.planner.plan import (
    FETCH_DEPTH,
    MIN_STATE_DEPTH,
    STATE_DEPTH,
    ModelSize,
    Plan,
    PlanError,
    make_plan,
)

CHUNK = 4096
GIB = 2**30
# 1, 3, 3, 3, 3 and 4 chunks.
SIZE = ModelSize(
    block_numels=(4000, 12000, 12000, 12000, 12000, 15000), chunk_numel=CHUNK, param_itemsize=2, state_itemsize=14
)


def plan(size: ModelSize = SIZE, **options: Any) -> Plan:
    settings: dict[str, Any] = {
        "num_optimizers": 2,
        "grad_itemsize": 2,
        "keep_grads": False,
        "host_memory_nbytes": None,
    }
    return make_plan(size, **(settings | options))


sizes = st.builds(
    ModelSize,
    block_numels=st.lists(st.integers(0, 10**6), min_size=3, max_size=30).map(tuple),
    chunk_numel=st.integers(1, 60).map(lambda n: n * 2048),
    param_itemsize=st.sampled_from([2, 4]),
    state_itemsize=st.sampled_from([6, 12, 14]),
)


@given(size=sizes, num_optimizers=st.integers(1, 4), grad_itemsize=st.sampled_from([2, 4]), keep_grads=st.booleans())
def test_pools_lie_side_by_side_and_fill_the_arena(
    size: ModelSize, num_optimizers: int, grad_itemsize: int, keep_grads: bool
) -> None:
    found = plan(size, num_optimizers=num_optimizers, grad_itemsize=grad_itemsize, keep_grads=keep_grads)
    pools = [found.params, found.grads, *found.states]
    assert len(found.states) == num_optimizers
    assert pools[0].offset == 0
    assert all(pool.offset + pool.nbytes == next_pool.offset for pool, next_pool in pairwise(pools))
    assert found.arena_nbytes == sum(pool.slot_nbytes * pool.num_slots for pool in pools)
    # O_DIRECT: every slot begins at a page.
    assert all(pool.offset % 4096 == 0 and pool.slot_nbytes % 4096 == 0 for pool in pools)
    assert all(pool.num_slots >= 1 for pool in pools)
    # A block's gradient is offloaded as one: all its slots are taken at once.
    largest = max(max(1, -(-numel // size.chunk_numel)) for numel in size.block_numels)
    assert found.grads.num_slots >= (size.total_chunks if keep_grads else largest)


def test_the_plan_of_a_small_model_to_the_byte() -> None:
    found = plan()
    assert SIZE.total_chunks == 17
    assert (found.params.slot_nbytes, found.params.num_slots) == (2 * CHUNK, FETCH_DEPTH)
    assert (found.grads.slot_nbytes, found.grads.num_slots) == (2 * CHUNK, 6)  # two layers of three chunks
    assert [(s.slot_nbytes, s.num_slots) for s in found.states] == [(14 * CHUNK, STATE_DEPTH)] * 2
    assert found.arena_nbytes == CHUNK * (4 * 2 + 6 * 2 + 2 * 3 * 14)
    assert found.ssd_nbytes == 2 * 17 * CHUNK * 14


def test_clipping_keeps_every_gradient() -> None:
    found = plan(keep_grads=True, grad_itemsize=4)
    assert (found.grads.slot_nbytes, found.grads.num_slots) == (4 * CHUNK, 17)


def test_without_clipping_memory_does_not_grow_with_depth() -> None:
    def of_depth(num_layers: int) -> Plan:
        numels = (4000, *[12000] * num_layers, 15000)
        return plan(ModelSize(block_numels=numels, chunk_numel=CHUNK, param_itemsize=2, state_itemsize=14))

    assert of_depth(8).arena_nbytes == of_depth(800).arena_nbytes
    assert of_depth(800).ssd_nbytes == 2 * (1 + 800 * 3 + 4) * CHUNK * 14


def test_a_tiny_model_takes_no_more_slots_than_it_has_chunks() -> None:
    size = ModelSize(block_numels=(10, 10, 0), chunk_numel=2048, param_itemsize=4, state_itemsize=12)
    found = plan(size, keep_grads=True)
    assert size.total_chunks == 3  # a block without parameters counts one
    assert [pool.num_slots for pool in (found.params, found.grads, *found.states)] == [3, 3, 3, 3]


def test_a_budget_is_kept_by_shallower_queues_and_then_refused() -> None:
    def arena(depth: int) -> int:
        return CHUNK * (4 * 2 + 6 * 2 + 2 * depth * 14)

    for depth in range(MIN_STATE_DEPTH, STATE_DEPTH + 1):
        found = plan(host_memory_nbytes=arena(depth))
        assert found.arena_nbytes == arena(depth)
        assert [pool.num_slots for pool in found.states] == [depth] * 2
    assert plan(host_memory_nbytes=arena(STATE_DEPTH) - 1).arena_nbytes == arena(STATE_DEPTH - 1)
    least = arena(MIN_STATE_DEPTH)
    with pytest.raises(PlanError) as caught:
        plan(host_memory_nbytes=least - 1)
    assert f"needs {least} bytes" in str(caught.value)
    assert f"its budget is {least - 1} bytes; raise the budget" in str(caught.value)
    assert "clip" not in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_naive_optimizer_has_one_chunk_at_a_time() -> None:
    assert [pool.num_slots for pool in plan(is_naive=True).states] == [1, 1]
    least = plan(is_naive=True).arena_nbytes
    with pytest.raises(PlanError, match=f"needs {least} bytes"):
        plan(is_naive=True, host_memory_nbytes=least - 1)


def test_a_refusal_tells_when_clipping_is_what_takes_the_memory() -> None:
    size = ModelSize(block_numels=(GIB,) * 8, chunk_numel=16 * 2**20, param_itemsize=2, state_itemsize=14)
    advice = r"needs \d+ bytes \(17\.\d\d GiB\).*train in bf16 without clipping \(clip_norm: null\)"
    with pytest.raises(PlanError, match=advice):
        plan(size, keep_grads=True, host_memory_nbytes=8 * GIB)
    assert plan(size, host_memory_nbytes=8 * GIB).arena_nbytes <= 8 * GIB
