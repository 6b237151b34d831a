"""Device memory that is counted exactly: programs are solved with smaller limits until their plans fit."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.planner.profiles import make_job, make_speeds
from windlass.planner.question import exact_search
from windlass.planner.solver.step_cost import Limits, StepCosts

LIMITS = Limits(device_nbytes=1e9, host_nbytes=1e12, ssd_nbytes=1e12)


@dataclass(frozen=True, kw_only=True)
class Solved:
    """A plan that uses all device memory that it may."""

    costs: StepCosts


def test_counter_begins_with_the_limit_that_fitted_for_the_same_buffers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans with whole gradients exceed their count by a tenth of the memory, and plans with pieces by nothing."""
    limits = []

    def solved(costs: StepCosts, below: float) -> Any:
        limits.append(costs.limits.device_nbytes)
        return Solved(costs=costs)

    def counted(_: object, __: object, solution: Solved) -> tuple[Solved, float]:
        used = solution.costs.limits.device_nbytes
        exact = used + (0 if solution.costs.streams_grads else 0.1 * LIMITS.device_nbytes)
        return solution, exact - LIMITS.device_nbytes

    monkeypatch.setattr(exact_search, "solved", solved)
    monkeypatch.setattr(exact_search, "counted", counted)
    counter = exact_search._Counter(SimpleNamespace(num_layers=None), None)  # type: ignore[arg-type]
    whole = StepCosts(
        job=make_job(), speeds=make_speeds(), limits=LIMITS, group_size=1, streams=True, num_grad_buffers=1
    )
    fitting = counter.solved(whole, 1.0)
    assert fitting is not None
    assert 0.88e9 < fitting.costs.limits.device_nbytes <= 0.9e9
    limits.clear()
    counter.solved(whole, 1.0)
    assert limits[1] == fitting.costs.limits.device_nbytes
    limits.clear()
    in_pieces = counter.solved(replace(whole, streams_grads=True), 1.0)
    assert in_pieces is not None
    assert limits == [LIMITS.device_nbytes]
