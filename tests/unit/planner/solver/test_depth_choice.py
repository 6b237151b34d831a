"""The depths of queues."""

import pytest

from tests.support.planner.profiles import make_speeds
from windlass.engine.memory_plan.queue_depths import QueueDepths
from windlass.planner.cost.rates import Speeds
from windlass.planner.solver.depth_choice import depths_of

MIB = 2**20


def depths(speeds: Speeds, *, num_optimizers: int = 1) -> QueueDepths:
    return depths_of(speeds, param_nbytes=32 * MIB, part_slots=4, slot_nbytes=MIB, num_optimizers=num_optimizers)


@pytest.mark.parametrize("h2d_bytes", [1e8, 1e9, 2e9, 1e12])
def test_one_ssd_needs_only_the_default_depth(h2d_bytes: float) -> None:
    assert depths(make_speeds(h2d_bytes=h2d_bytes)) == QueueDepths()


def test_depth_gives_each_ssd_current_and_next_request() -> None:
    fast_link = make_speeds(num_ssds=12, h2d_bytes=1e12, d2h_bytes=1e12)
    found = depths(fast_link)
    assert found.states == 2 * 12 + 1
    assert found.params >= 2 * 12
    assert found.staged_activations >= 2 * 12 * 4
    assert depths(fast_link, num_optimizers=4).states == 2 * 12 // 4 + 1


def test_depth_is_limited_by_the_link() -> None:
    """Half of the reads of twelve SSDs: twice six, and the bytes in flight on the link."""
    found = depths(make_speeds(num_ssds=12, ssd_read_bytes=2e9, h2d_bytes=11e9))
    assert found.params == 2 * 7


@pytest.mark.parametrize(
    ("name", "least"), [("params", 1), ("states", 1), ("staged_activations", 1), ("leaving_nbytes", 0)]
)
def test_nothing_moves_without_a_buffer(name: str, least: int) -> None:
    QueueDepths(**{name: least})
    with pytest.raises(ValueError, match=f"depths: {name} is {least - 1}; at least {least}"):
        QueueDepths(**{name: least - 1})
