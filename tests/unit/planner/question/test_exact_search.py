"""Device memory that is counted exactly: programs are solved with smaller limits until their plans fit."""

from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.planner.profiles import make_job, make_speeds
from windlass.engine.training_config import TrainingConfig
from windlass.planner.feasibility import with_part
from windlass.planner.hardware import ModelShape, load, machine_of, published_models
from windlass.planner.planning.planner import best_plan
from windlass.planner.profiling.model_config import ShapeConfig
from windlass.planner.question import KeptShapes, PlanQuestion, Profiles, exact_search
from windlass.planner.solver.step_cost import Limits, StepCosts

LIMITS = Limits(device_nbytes=1e9, host_nbytes=1e12, ssd_nbytes=1e12)


@dataclass(frozen=True, kw_only=True)
class Solved:
    """A plan that uses all device memory that it may."""

    costs: StepCosts

    @property
    def cost(self) -> float:
        """Less with more memory."""
        return 1e9 / self.costs.limits.device_nbytes


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
    monkeypatch.setattr(exact_search._Counter, "_lighter", lambda *_: None)
    monkeypatch.setattr(exact_search._Counter, "_with_lightest", lambda *_: None)
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


def test_counter_leaves_out_activations_that_need_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans with one choice of activations never fit, whatever their limit is. Later plans begin without it."""
    job = make_job()
    ways = job.ways(job.model.layers[0])
    heavy = next(way.choice for way in ways if way.choice.kept)
    numbers = []

    def solved(costs: StepCosts, below: float) -> Any:
        numbers.append(len(tuple(costs.job.ways(job.model.layers[0]))))
        return Chosen(costs=costs, kind=costs, is_heavy=numbers[-1] == len(tuple(ways)))

    monkeypatch.setattr(exact_search, "solved", solved)
    monkeypatch.setattr(exact_search, "counted", lambda _, __, solution: (solution, 1e8 if solution.is_heavy else 0.0))
    monkeypatch.setattr(exact_search._Counter, "_heaviest", lambda _, __: heavy)
    counter = exact_search._Counter(SimpleNamespace(num_layers=None), None)  # type: ignore[arg-type]
    costs = StepCosts(job=job, speeds=make_speeds(), limits=LIMITS, group_size=1)
    found = counter._lighter(costs, 1.0)
    assert found is not None
    assert found.costs.job is job
    all_ways = len(tuple(ways))
    assert numbers == [all_ways, all_ways, all_ways - 1]
    numbers.clear()
    assert counter._lighter(costs, 1.0) is not None
    assert numbers == [all_ways - 1]


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A plan with activations that need too much at the worst moment, or without."""

    costs: StepCosts
    kind: StepCosts
    is_heavy: bool
    cost: float = 0.5


@pytest.mark.parametrize(
    ("name", "share", "distances"),
    [
        pytest.param("gpt2-xl", 0.1617267, (1e-3, 2e-3), id="gpt2-xl"),
        pytest.param(
            "gpt2-xl",
            0.1617267,
            (1e-3, 1.5e-3, 2e-3, 4e-3, 6e-3, 8e-3, 1e-2, 2e-2),
            id="gpt2-xl-fine",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "llama-3.1-8b", 0.302456, (1e-3, 2e-3, 4e-3, 6e-3, 8e-3, 1e-2), id="llama-3.1-8b", marks=pytest.mark.long
        ),
    ],
)
def test_more_device_memory_where_plans_begin_to_fit_is_never_slower(
    name: str, share: float, distances: tuple[float, ...]
) -> None:
    """There the worst moment of a plan may be in a layer that keeps nothing."""
    costs = [cost_with(name, share * (1 + distance)) for distance in distances]
    assert all(later <= 1.005 * earlier for earlier, later in pairwise(costs)), costs


def cost_with(name: str, share: float) -> float:
    """Returns the cost of the best plan with a share of the memory of a GPU."""
    hardware = machine_of("rtx4090:ram=128,ssds=2")
    hardware = with_part(hardware, gpus=with_part(hardware.gpus, memory_gib=hardware.gpus.memory_gib * share))
    shape = load(ModelShape, published_models()[name])
    question = PlanQuestion(
        config=ShapeConfig(shape=shape, num_tokens=1024),
        hardware=hardware,
        training=TrainingConfig(batch_size=8, sequence_length=1024, clip_norm=1.0, total_steps=1),
        kept_shapes=KeptShapes(),
    )
    return best_plan(question, Profiles(question))[1].cost
