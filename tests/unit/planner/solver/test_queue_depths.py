"""How deep buffers are."""

import pytest

from tests.support.planner.profiles import make_speeds
from windlass.engine.memory_plan.queue_depths import QueueDepths
from windlass.planner.cost.rates import Speeds
from windlass.planner.solver.queue_depths import depths_of

MIB = 2**20


def depths(speeds: Speeds, *, num_optimizers: int = 1) -> QueueDepths:
    return depths_of(speeds, param_nbytes=32 * MIB, part_slots=4, slot_nbytes=MIB, num_optimizers=num_optimizers)


@pytest.mark.parametrize("h2d_bytes", [1e8, 1e9, 2e9, 1e12])
def test_one_ssd_needs_no_more_than_nobody_decided(h2d_bytes: float) -> None:
    assert depths(make_speeds(h2d_bytes=h2d_bytes)) == QueueDepths()


def test_each_ssd_has_something_to_do_and_something_to_do_next() -> None:
    fast_link = make_speeds(num_ssds=12, h2d_bytes=1e12, d2h_bytes=1e12)
    found = depths(fast_link)
    assert found.states == 2 * 12 + 1
    assert found.params >= 2 * 12
    assert found.staged_activations >= 2 * 12 * 4
    assert depths(fast_link, num_optimizers=4).states == 2 * 12 // 4 + 1


def test_what_the_link_cannot_take_need_not_be_on_its_way() -> None:
    """Half of what twelve SSDs read: twice six, and what is on the link meanwhile."""
    found = depths(make_speeds(num_ssds=12, ssd_read_bytes=2e9, h2d_bytes=11e9))
    assert found.params == 2 * 7


@pytest.mark.parametrize(
    ("name", "least"), [("params", 1), ("states", 1), ("staged_activations", 1), ("leaving_nbytes", 0)]
)
def test_nothing_moves_without_a_buffer(name: str, least: int) -> None:
    QueueDepths(**{name: least})
    with pytest.raises(ValueError, match=f"depths: {name} is {least - 1}; at least {least}"):
        QueueDepths(**{name: least - 1})
