"""The depths of queues."""

import pytest

from windlass.engine.memory_plan.queue_depths import MIN_STATE_DEPTH, QueueDepths
from windlass.planner.solver.depth_choice import depths_for, depths_to_try

MIB = 2**20


def test_depths_for_one_ssd_are_the_defaults() -> None:
    assert depths_for(1, num_optimizers=1, leaving_nbytes=512 * MIB) == QueueDepths()


def test_depths_for_several_ssds_give_each_a_current_and_a_next_request() -> None:
    found = depths_for(12, num_optimizers=1, leaving_nbytes=0)
    assert found.states == 2 * 12 + 1
    assert found.params >= 2 * 12
    assert found.staged_activations >= 2 * 12 * 4
    assert depths_for(12, num_optimizers=4, leaving_nbytes=0).states == 2 * 12 // 4 + 1


def test_more_chunks_of_states_may_wait_for_their_update() -> None:
    assert depths_for(2, num_optimizers=1, leaving_nbytes=0, spare_states=8).states == 8 * 2 + 1
    tried = [each.states for each in depths_to_try(1, num_optimizers=1, leaving_nbytes=0)]
    assert tried == [9, 5, 3, MIN_STATE_DEPTH]


@pytest.mark.parametrize("num_ssds", [1, 2, 5, 12, 100])
def test_depths_to_try_of_more_ssds_include_those_of_fewer(num_ssds: int) -> None:
    fewer, more = (
        set(depths_to_try(number, num_optimizers=1, leaving_nbytes=MIB)) for number in (num_ssds, 2 * num_ssds)
    )
    assert fewer <= more
    assert QueueDepths(states=MIN_STATE_DEPTH, leaving_nbytes=0) in fewer


@pytest.mark.parametrize(
    ("name", "least"), [("params", 1), ("states", 1), ("staged_activations", 1), ("leaving_nbytes", 0)]
)
def test_nothing_moves_without_a_buffer(name: str, least: int) -> None:
    QueueDepths(**{name: least})
    with pytest.raises(ValueError, match=f"depths: {name} is {least - 1}; at least {least}"):
        QueueDepths(**{name: least - 1})
