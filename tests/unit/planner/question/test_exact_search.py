"""Device memory that is counted exactly: programs are solved with smaller limits until their plans fit."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.planner.profiles import make_job, make_speeds
from windlass.engine.memory_plan import MIN_PASSING_BLOCKS, MIN_STATE_DEPTH, RECOMPUTE_ALL
from windlass.engine.training_config import TrainingConfig
from windlass.planner.cost import ActivationOption, LayerProfile, ways_of_layer
from windlass.planner.feasibility import with_part
from windlass.planner.hardware import ModelShape, load, machine_of, published_models
from windlass.planner.planning.simulated_search import best_plan
from windlass.planner.profiling.model_config import ShapeConfig
from windlass.planner.question import KeptShapes, PlanQuestion, Profiles, exact_search
from windlass.planner.solver import DoesNotFitError
from windlass.planner.solver.family import kinds_of
from windlass.planner.solver.planned_job import Limits
from windlass.planner.solver.step_cost import StepCosts

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
    monkeypatch.setattr(exact_search._Counter, "_unfit", lambda *_: frozenset())
    monkeypatch.setattr(exact_search._Counter, "_lighter", lambda *_: None)
    monkeypatch.setattr(exact_search._Counter, "_with_lightest", lambda *_: None)
    counter = exact_search._Counter(SimpleNamespace(num_layers=None), None)  # type: ignore[arg-type]
    whole = StepCosts(
        job=make_job(), speeds=make_speeds(), limits=LIMITS, group_size=1, streams=True, num_grad_buffers=1
    )
    fitting = counter.solved(whole, 2.0)
    assert fitting is not None
    assert 0.88e9 < fitting.costs.limits.device_nbytes <= 0.9e9
    limits.clear()
    counter.solved(whole, 2.0)
    assert limits[1] == fitting.costs.limits.device_nbytes
    limits.clear()
    in_pieces = counter.solved(replace(whole, streams_grads=True), 2.0)
    assert in_pieces is not None
    assert limits == [LIMITS.device_nbytes]


def test_counter_makes_no_kind_fit_that_costs_more_than_one_with_the_same_buffers_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All plans exceed their count by a tenth. Fewer chunks at an optimizer cost more in the first two kinds."""
    tried = []

    def solved(costs: StepCosts, below: float) -> Any:
        tried.append(costs.depths.states)
        solution = Deep(costs=costs)
        return solution if solution.cost < below else None

    counter = counter_of(monkeypatch, solved)
    deep = StepCosts(job=make_job(), speeds=make_speeds(), limits=LIMITS, group_size=1)
    kinds = [replace(deep, depths=replace(deep.depths, states=states)) for states in (9, 5, 2)]
    first = counter.solved(kinds[0], 10.0)
    assert first is not None
    assert counter.solved(kinds[1], first.cost) is None
    assert tried.count(5) == 1
    assert counter.solved(kinds[2], first.cost) is not None  # it costs less before it is made to fit
    assert counter.solved(replace(kinds[1], overflows=False), 10.0) is not None


def test_counter_tries_only_the_smallest_buffers_where_no_kind_with_these_on_the_device_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = []

    def solved(costs: StepCosts, below: float) -> Any:
        tried.append(costs.depths)
        if costs.limits != LIMITS:
            raise DoesNotFitError(dict)
        return Solved(costs=costs)

    counter = counter_of(monkeypatch, solved)
    first, *others, last = kinds_alike()
    assert last.depths.states > MIN_STATE_DEPTH  # some activations may be on their way out of the device
    for kind in (first, *others, last):
        with pytest.raises(DoesNotFitError):
            counter.solved(kind, math.inf)
    assert [tried.count(kind.depths) for kind in others] == [1] * len(others)
    assert tried.count(last.depths) == tried.count(first.depths) > 1


@pytest.mark.parametrize("most_moved_nbytes", [1e12, 4e8], ids=["slower", "does-not-fit"])
def test_counter_tries_the_smallest_buffers_where_larger_ones_leave_little_host_memory(
    most_moved_nbytes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes beyond the device's memory go to the host, which takes longer the less memory the buffers leave."""
    tried = []

    def solved(costs: StepCosts, below: float) -> Any:
        tried.append(costs.depths)
        solution = Moved(costs=costs)
        if solution.moved_nbytes * costs.depths.states > most_moved_nbytes:
            raise DoesNotFitError(dict)
        return solution if solution.cost < below else None

    counter = counter_of(monkeypatch, solved)
    first, second, *_, last = (kind for kind in kinds_alike() if kind.depths.states <= 9)
    best_cost = 15.0
    try:
        fitting = counter.solved(first, best_cost)
    except DoesNotFitError:
        assert most_moved_nbytes < 1e12
        assert counter.solved(second, best_cost) is None
        assert tried.count(second.depths) == 1
    else:
        assert fitting is not None
        best_cost = fitting.cost
        assert best_cost > 13
    smallest = counter.solved(last, best_cost)
    assert smallest is not None
    assert smallest.cost < 12
    tried.clear()
    with contextlib.suppress(DoesNotFitError):
        counter.solved(second, smallest.cost)  # of which the first one tells nothing any more
    assert tried.count(second.depths) > 1


def test_counter_knows_of_no_kind_that_it_does_not_fit_by_a_search_below_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def solved(costs: StepCosts, below: float) -> Any:
        if costs.limits != LIMITS and below < math.inf:
            raise DoesNotFitError(dict)
        return Solved(costs=costs)

    counter = counter_of(monkeypatch, solved)
    first, second, *_ = kinds_alike()
    with pytest.raises(DoesNotFitError):
        counter.solved(first, 10.0)
    assert counter.solved(second, math.inf) is not None


def counter_of(monkeypatch: pytest.MonkeyPatch, solved: Callable[[StepCosts, float], Any]) -> exact_search._Counter:
    """Returns a counter for plans that exceed their count by a tenth of the memory."""
    monkeypatch.setattr(exact_search, "solved", solved)
    monkeypatch.setattr(
        exact_search,
        "counted",
        lambda _, __, solution: (solution, solution.costs.limits.device_nbytes - 0.9 * LIMITS.device_nbytes),
    )
    monkeypatch.setattr(exact_search._Counter, "_unfit", lambda *_: frozenset())
    monkeypatch.setattr(exact_search._Counter, "_lighter", lambda *_: None)
    monkeypatch.setattr(exact_search._Counter, "_with_lightest", lambda *_: None)
    return exact_search._Counter(SimpleNamespace(num_layers=None), None)  # type: ignore[arg-type]


def kinds_alike() -> list[StepCosts]:
    """Returns kinds that differ in host memory alone, the largest buffers first."""
    speeds = replace(make_speeds(), num_ssds=4)
    base = StepCosts(job=make_job(), speeds=speeds, limits=LIMITS, group_size=1)
    first, *others = (kind for kind in kinds_of(base) if kind.num_passing_blocks in (None, MIN_PASSING_BLOCKS))
    return [first, *(kind for kind in others if exact_search._on_device(kind) == exact_search._on_device(first))]


@dataclass(frozen=True, kw_only=True)
class Moved:
    """A plan that costs less with deeper queues, but more the more bytes it has on the host beside them."""

    costs: StepCosts

    @property
    def moved_nbytes(self) -> float:
        """Bytes that the device has no room for."""
        return LIMITS.device_nbytes - self.costs.limits.device_nbytes

    @property
    def cost(self) -> float:
        """Hardly more with shallow queues, if nothing is moved."""
        states = self.costs.depths.states
        return 10 + 0.3 / states + 4 * self.moved_nbytes / 1e8 * states / 9


@dataclass(frozen=True, kw_only=True)
class Deep(Solved):
    """A plan that costs more with fewer chunks at an optimizer, but for the fewest."""

    @property
    def cost(self) -> float:
        """The cost beside that of the memory."""
        states = self.costs.depths.states
        return super().cost * (0.5 if states == 2 else 1 + 1 / states)


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
    question = question_of(name, share)
    return best_plan(question, Profiles(question))[1].cost


def question_of(name: str, share: float) -> PlanQuestion:
    """A model by name, on a desktop with a share of the memory of a GPU."""
    hardware = machine_of("rtx4090:ram=128,ssds=2")
    return PlanQuestion(
        config=ShapeConfig(shape=load(ModelShape, published_models()[name]), num_tokens=1024),
        hardware=with_part(hardware, gpus=with_part(hardware.gpus, memory_gib=hardware.gpus.memory_gib * share)),
        training=TrainingConfig(batch_size=8, sequence_length=1024, clip_norm=1.0, total_steps=1),
        kept_shapes=KeptShapes(),
    )


def test_layers_that_may_not_recompute_all_of_their_activations_get_a_plan() -> None:
    def ways(layer: LayerProfile) -> list[ActivationOption]:
        return [way for way in ways_of_layer(layer) if way.choice != RECOMPUTE_ALL]

    question = replace(question_of("gpt2-xl", 1.0), ways=ways)
    _, solution = best_plan(question, Profiles(question))
    assert RECOMPUTE_ALL not in solution.placement.activations
