"""The least memory by a greedy path, beside the integer program's."""

import math
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.support.examples import examples
from tests.support.planner.profiles import make_job, make_speeds
from windlass.engine.memory_plan.memory_tier import MemoryTier
from windlass.planner.solver.memory_frontier import Bytes, MemoryFrontier, frontiers_of
from windlass.planner.solver.planned_job import TIER_INDEX, Limits
from windlass.planner.solver.program.integer_program import least_assignment, outcome_of
from windlass.planner.solver.step_cost import StepCosts

MIB = 2**20
PLENTY = Limits(device_nbytes=1e12, host_nbytes=1e12, ssd_nbytes=1e12)


def frontier(
    num_layers: int = 6, *, shares_cores: bool = False, keeps_grads: bool = True, **changes: Any
) -> MemoryFrontier:
    job = make_job(num_layers, num_microbatches=changes.get("group_size", 1), keeps_grads=keeps_grads)
    speeds = replace(make_speeds(), shares_cores=shares_cores)
    return MemoryFrontier(StepCosts(job=job, speeds=speeds, limits=PLENTY, **({"group_size": 1} | changes)))


@pytest.mark.parametrize("tier", list(MemoryTier))
@settings(max_examples=examples(15))
@given(data=st.data())
def test_no_assignment_needs_less_than_the_bound_and_the_path_needs_hardly_more(
    tier: MemoryTier, data: st.DataObject
) -> None:
    found = frontier(
        data.draw(st.sampled_from([2, 40])),
        keeps_grads=data.draw(st.booleans()),
        streams=data.draw(st.booleans()),
        overflows=data.draw(st.booleans()),
        group_size=data.draw(st.sampled_from([1, 4])),
    )
    limits = Bytes(
        device=data.draw(st.floats(30, 3000)) * MIB,
        host=data.draw(st.floats(30, 10000)) * MIB,
        ssd=data.draw(st.sampled_from([1e3, 1e4, 1e6])) * MIB,
    )
    needs, bound, best = found.needs(tier, limits), found.bound(tier, limits), found.best_assignment(tier, limits)
    if best is None:
        assert math.isinf(needs.min())
        return
    least = found.nbytes(best).of(tier)
    assert bound <= least + 1
    assert needs.min() >= least * (1 - 1e-6) - 1
    index = int(needs.argmin())
    if math.isfinite(needs[index]):
        nbytes = found.nbytes(found.assignment(index, found.moved(index, tier, limits)))
        assert nbytes.of(tier) == pytest.approx(needs[index])
        others = [other for other in MemoryTier if other is not tier]
        assert all(nbytes.of(other) <= limits.of(other) + 1 for other in others)


@pytest.mark.parametrize("tier", list(MemoryTier))
def test_best_assignment_needs_as_little_as_the_program_says(tier: MemoryTier) -> None:
    found = frontier()
    limits = Bytes(device=120 * MIB, host=900 * MIB, ssd=3000 * MIB)
    program = found.costs.program(found.kinds)
    # Of the tier itself all bytes are missing, so that the fewest are found.
    program = replace(program, limits=tuple(0.0 if each is tier else limits.of(each) for each in TIER_INDEX))
    best = found.best_assignment(tier, limits)
    least = least_assignment(program, TIER_INDEX[tier], elastic=(TIER_INDEX[tier],))
    assert best is not None
    assert least is not None
    nbytes = outcome_of(program, least).nbytes[TIER_INDEX[tier]]
    assert found.nbytes(best).of(tier) == pytest.approx(nbytes, rel=1e-4)


def test_frontiers_of_a_cpu_count_the_devices_bytes_as_the_hosts() -> None:
    on_gpu, on_cpu = frontier(), frontier(shares_cores=True)
    more = on_cpu.host[: len(on_cpu.device)] - on_cpu.device
    assert on_cpu.host.min() > on_gpu.host.min()
    assert more.min() > 0


def test_frontiers_cover_every_way_to_save_memory() -> None:
    ways = {
        (each.costs.spills, each.costs.streams, each.costs.group_size, each.costs.overflows)
        for each in frontiers_of(make_job(num_microbatches=4, keeps_grads=True), make_speeds(), PLENTY)
    }
    assert len(ways) == 2 * 2 * 2 * 2
    assert all(each.costs.num_grad_buffers == 1 for each in frontiers_of(make_job(), make_speeds(), PLENTY))
