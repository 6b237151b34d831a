"""The fastest plan by simulation: which plans are simulated, and which of them is taken."""

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.papers.published.models import RATEL_SHAPES
from tests.support.planner.questions import MACHINE, SHAPE, answer, machine, on_a_desktop, question
from windlass.amounts import GIB
from windlass.engine.memory_plan.update_order import UpdateOrder
from windlass.planner.feasibility.feasibility import with_part
from windlass.planner.hardware.model_shape import ModelShape, published_models
from windlass.planner.hardware.named_machines import machine_of
from windlass.planner.hardware.yaml_files import load
from windlass.planner.planning import simulated_search
from windlass.planner.profiling.model_config import ShapeConfig
from windlass.planner.question.exact_search import counted, search_exactly
from windlass.planner.question.kept_shapes import KeptShapes
from windlass.planner.question.profiles import Profiles
from windlass.planner.question.question import PlanQuestion
from windlass.planner.solver.placement_search import DoesNotFitError, search
from windlass.planner.solver.solution import Solution


@pytest.mark.parametrize("has_gpu", [True, pytest.param(False, marks=pytest.mark.long)])
def test_the_promise_is_the_simulated_step_of_the_fastest(has_gpu: bool) -> None:
    hardware = machine(host=8)
    if not has_gpu:
        hardware = with_part(hardware, gpus=with_part(hardware.gpus, count=0))
    few_layers = ShapeConfig(shape=SHAPE.model_copy(update={"num_layers": 4}), num_tokens=512)
    asked = question(hardware, config=few_layers)
    profiles = Profiles(asked)
    _, fastest, step_s = simulated_search.fastest_plan(asked, profiles)
    _, least_bound = simulated_search.best_plan(asked, profiles)
    assert step_s is not None
    assert fastest.step_s >= least_bound.step_s * (1 - 1e-3)

    assert step_s == simulated_search.promised_step_s(asked, profiles, fastest)
    assert step_s <= simulated_search.promised_step_s(asked, profiles, least_bound)
    report = answer(asked)
    assert (report.step_s, report.bound_s) == (step_s, fastest.step_s)


@pytest.mark.long
def test_plans_swap_less_to_the_ssds_where_compute_would_wait_for_them() -> None:
    """By the cost model alone both are busy all the time. Simulated, each waits for the other."""
    hardware = with_part(machine(host=32), ssds=with_part(MACHINE.ssds, count=4))
    few_layers = ShapeConfig(shape=RATEL_SHAPES[6].model_copy(update={"num_layers": 12}), num_tokens=1024)
    asked = question(
        hardware, config=few_layers, batch_size=32, sequence_length=1024, num_microbatches=2, clip_norm=None
    ).changed(commit_minutes=0.0)
    profiles = Profiles(asked)
    _, least_bound = simulated_search.best_plan(asked, profiles)
    _, fastest, step_s = simulated_search.fastest_plan(asked, profiles)
    busy_s = simulated_search.promised_step_s(asked, profiles, least_bound)
    assert step_s is not None
    assert step_s < 0.95 * busy_s
    assert fastest.placement.ssd_activation_nbytes < least_bound.placement.ssd_activation_nbytes
    assert counted(asked, profiles, fastest)[1] <= 0


def test_kept_gradients_are_planned_where_updates_during_the_backward_pass_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few_layers = ShapeConfig(shape=SHAPE.model_copy(update={"num_layers": 2}), num_tokens=512)
    asked = question(machine(host=8), config=few_layers, clip_norm=None, num_microbatches=2, chooses_order=True)

    def promised_step_s(_: PlanQuestion, __: Profiles, solution: Solution, **___: float) -> float:
        return solution.step_s * (1000 if solution.costs.job.update_order is UpdateOrder.ACTIVE else 1)

    monkeypatch.setattr(simulated_search, "promised_step_s", promised_step_s)
    job, fastest, _ = simulated_search.fastest_plan(asked, Profiles(asked))
    assert job.update_order is fastest.costs.job.update_order is UpdateOrder.KEPT


@pytest.mark.long
@pytest.mark.parametrize("size", [6, 13])
def test_a_step_without_clipping_is_not_slower_in_the_simulation(size: int) -> None:
    shape = ShapeConfig(shape=RATEL_SHAPES[size], num_tokens=1024)
    clipped = question(config=shape, sequence_length=1024)
    free = question(config=shape, sequence_length=1024, clip_norm=None, chooses_order=True)
    profiles = Profiles(clipped)
    clipped_s, free_s = (simulated_search.fastest_plan(asked, profiles)[2] for asked in (clipped, free))
    assert clipped_s is not None
    assert free_s is not None
    assert free_s <= clipped_s


@pytest.mark.long
@pytest.mark.parametrize(
    ("billions", "host_gib", "num_ssds"), [(13, 64, 2), (70, 128, 2), (70, 128, 8), (70, 128, 12), (175, 256, 12)]
)
def test_a_simulated_step_is_hardly_longer_than_the_bound_it_was_chosen_by(
    billions: int, host_gib: int, num_ssds: int
) -> None:
    """Errors of the cost model would make the simulated step several times longer than its bound."""
    hardware = machine(host=host_gib)
    hardware = with_part(hardware, ssds=with_part(hardware.ssds, count=num_ssds))
    config = ShapeConfig(shape=RATEL_SHAPES[billions], num_tokens=1024)
    asked = question(hardware, config=config, batch_size=32, sequence_length=1024)
    profiles = Profiles(asked)
    for number in (4, 32):
        job = profiles.job(asked, number)
        found = search((job,), asked.speeds, asked.limits, num_others=3, near=0.02)
        for solution in [found.best, *found.others][:4]:
            assert simulated_search.promised_step_s(asked, profiles, solution) < 1.4 * solution.step_s


def test_no_plan_is_simulated_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of several kinds may become the same one, because free memory goes to deeper queues."""
    few_layers = ShapeConfig(shape=SHAPE.model_copy(update={"num_layers": 2}), num_tokens=512)
    asked = question(machine(host=8), config=few_layers, clip_norm=None, num_microbatches=2, chooses_order=True)
    plans = []

    def promised_step_s(_: PlanQuestion, __: Profiles, solution: Solution, **___: float) -> float:
        job = solution.costs.job
        plans.append((job.num_microbatches, job.update_order, solution.placement, solution.plan))
        return 2 * solution.step_s

    monkeypatch.setattr(simulated_search, "promised_step_s", promised_step_s)
    simulated_search.fastest_plan(asked, Profiles(asked))
    assert plans
    assert all(one != other for one, other in itertools.combinations(plans, 2))


def test_a_simulation_that_ended_early_counts_for_no_larger_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says only that the step takes longer than its limit. A whole simulation counts for all."""
    asked = question(machine(host=8), batch_size=8, num_microbatches=2)
    profiles = Profiles(asked)
    solution = search_exactly(asked, (2,), profiles).best
    whole_s = 2 * solution.step_s
    limits_s = []

    def promised_step_s(*_: object, most_s: float) -> float:
        limits_s.append(most_s / whole_s)
        return min(whole_s, 1.001 * most_s)

    monkeypatch.setattr(simulated_search, "promised_step_s", promised_step_s)
    simulations = simulated_search._Simulations(question=asked, profiles=profiles, watcher=simulated_search.NOBODY)

    def step_s(share: float) -> float:
        return simulations.step_of(solution, share * whole_s)

    assert step_s(0.8) < 0.9 * whole_s
    assert step_s(0.7) < 0.9 * whole_s
    assert len(limits_s) == 1
    assert step_s(1.1) == whole_s
    assert step_s(math.inf) == whole_s
    assert len(limits_s) == 2


def test_a_far_slower_plan_with_the_smallest_bound_does_not_hide_a_faster_one_of_its_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = question(machine(host=8), batch_size=8, clip_norm=None, chooses_order=True)
    kept_s = itertools.chain((2e3, 9e2), itertools.repeat(3e3))

    def promised_step_s(_: PlanQuestion, __: Profiles, solution: Solution, **___: float) -> float:
        return next(kept_s) if solution.costs.job.update_order is UpdateOrder.KEPT else 1e3

    monkeypatch.setattr(simulated_search, "promised_step_s", promised_step_s)
    assert simulated_search.fastest_plan(asked, Profiles(asked))[2] == 9e2


def test_plans_of_both_places_of_kept_gradients_are_tried_with_fewer_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ShapeConfig(shape=load(ModelShape, published_models()["llama-3.1-70b"]), num_tokens=1024)
    settings = {"batch_size": 64, "sequence_length": 1024, "clip_norm": 1.0, "num_microbatches": 8}
    asked = question(config=config, kept_shapes=KeptShapes(), **settings)
    tried = []

    def with_fewer_waits(busy: Solution, simulations: simulated_search._Simulations) -> tuple[Solution, float]:
        tried.append(busy.costs.spills)
        return busy, simulations.step_of(busy)

    monkeypatch.setattr(simulated_search, "promised_step_s", lambda _, __, solution, **___: 1.2 * solution.step_s)
    monkeypatch.setattr(simulated_search, "_with_fewer_waits", with_fewer_waits)
    simulated_search.fastest_plan(asked, Profiles(asked))
    assert len(tried) == len(set(tried)) == 2


@pytest.mark.parametrize("spills", [False, True])
@pytest.mark.parametrize("order", [UpdateOrder.ACTIVE, UpdateOrder.KEPT])
def test_the_other_place_of_kept_gradients_is_tried_whatever_order_the_smallest_bound_has(
    spills: bool, order: UpdateOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(order: UpdateOrder, spills: bool) -> SimpleNamespace:
        job = SimpleNamespace(update_order=order, keeps_grads=order.keeps_grads)
        return SimpleNamespace(costs=SimpleNamespace(job=job, spills=spills), step_s=1.0)

    kinds = [plan(order, spills) for order in UpdateOrder for spills in (False, True)]
    fastest, wanted = (plan(UpdateOrder.KEPT, spills), 1.05), []
    best = fastest[0] if order is UpdateOrder.KEPT else plan(order, spills=False)

    def of_kind(is_wanted: Callable[[Any], bool], _: float) -> None:
        wanted.append([(kind.costs.job.update_order, kind.costs.spills) for kind in kinds if is_wanted(kind.costs)])

    found = SimpleNamespace(best=best, of_kind=of_kind)
    monkeypatch.setattr(simulated_search, "_search", lambda *_, **__: found)
    monkeypatch.setattr(simulated_search, "_fastest_of", lambda *_: fastest)
    monkeypatch.setattr(simulated_search, "_with_fewer_waits", lambda *_: fastest)
    asked = question(clip_norm=None, chooses_order=True, num_microbatches=1)
    simulated_search.fastest_plan(asked, SimpleNamespace())  # type: ignore[arg-type]
    assert wanted == [[(UpdateOrder.KEPT, not spills)], [(UpdateOrder.ACTIVE, False), (UpdateOrder.ACTIVE, True)]]


def simulations_of(asked: PlanQuestion, solutions: list[Any]) -> Any:
    """Returns simulations of these plans, whose steps do not matter."""
    known = [simulated_search._Simulated(solution=solution, step_s=1.0) for solution in solutions]
    profiles: Any = None
    return simulated_search._Simulations(
        question=asked, profiles=profiles, watcher=simulated_search.NOBODY, simulated=known
    )


def plan_of_kind(group_size: int, num_microbatches: int, step_s: float = 1.0, num_passing_blocks: int = 8) -> Any:
    job = SimpleNamespace(num_microbatches=num_microbatches, update_order=UpdateOrder.ACTIVE, cut=None)
    costs = SimpleNamespace(job=job, group_size=group_size, spills=False, saver_of_device_memory=())
    return SimpleNamespace(step_s=step_s, costs=costs, placement=SimpleNamespace(num_passing_blocks=num_passing_blocks))


@pytest.mark.parametrize(
    ("step_s", "simulated", "numbers"),
    [
        (1.003, (4,), set()),
        (1.01, (4,), {1}),
        (1.01, (1, 2, 4), set()),
        (1.05, (1, 2, 4), {1, 4}),
        (1.05, (1, 1, 4), {4}),
    ],
)
def test_numbers_of_microbatches_of_which_plans_may_be_faster_are_planned_as_if_fixed(
    step_s: float, simulated: tuple[int, ...], numbers: set[int]
) -> None:
    """`simulated`: the numbers of micro-batches of different kinds of plans. The last one is the fastest."""
    plans = [plan_of_kind(group_size, number) for group_size, number in enumerate(simulated, start=1)]
    found: Any = SimpleNamespace(best=plans[0])
    open_ = simulations_of(question(batch_size=8), plans)
    assert simulated_search._numbers_to_look_at(open_, found, plans[-1], step_s) == numbers
    fixed = simulations_of(question(batch_size=8, num_microbatches=1), plans)
    assert simulated_search._numbers_to_look_at(fixed, found, plans[-1], step_s) == set()


@pytest.mark.parametrize(
    ("plan", "is_similar"),
    [
        (plan_of_kind(1, 4, step_s=1.0009), True),
        (plan_of_kind(1, 4, step_s=1.0011), False),
        (plan_of_kind(2, 4), False),
        (plan_of_kind(1, 2), False),
        (plan_of_kind(1, 4, num_passing_blocks=16), False),
    ],
)
def test_plans_of_a_kind_with_nearly_the_same_bound_are_similar(plan: Any, *, is_similar: bool) -> None:
    assert simulations_of(question(), [plan_of_kind(1, 4)]).has_similar(plan) is is_similar


def test_job_that_fits_with_many_micro_batches_only_is_planned_with_these() -> None:
    """It waits, so the fewest are looked at, too, with which nothing fits."""
    asked = question(machine(host=8), batch_size=8, clip_norm=1.0, device_memory_nbytes=int(0.8 * GIB))
    job, solution, step_s = simulated_search.fastest_plan(asked, Profiles(asked))
    assert step_s is not None
    assert step_s > 1.05 * solution.step_s
    assert job.num_microbatches == 8
    with pytest.raises(DoesNotFitError):
        simulated_search.best_plan(fewest := asked.changed(num_microbatches=1), Profiles(fewest))


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "desktop", "number"),
    [("llama-3.1-8b", "rtx4090:ram=96,ssds=4", 1), ("llama-3.1-70b", "rtx4090:ram=128,ssds=4", 1)],
)
def test_chosen_number_of_microbatches_is_hardly_slower_than_a_fixed_one(model: str, desktop: str, number: int) -> None:
    """By the bound alone other numbers are as good. Of one micro-batch, the plan with the least bound waits most."""
    asked = on_a_desktop(model, desktop, batch_size=16, clip_norm=None)
    fixed = on_a_desktop(model, desktop, batch_size=16, clip_norm=None, num_microbatches=number)
    chosen_s, fixed_s = (simulated_search.fastest_plan(each, Profiles(each))[2] for each in (asked, fixed))
    assert chosen_s is not None
    assert fixed_s is not None
    assert chosen_s <= 1.005 * fixed_s


def test_waits_of_an_order_that_is_far_slower_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = question(machine(host=8), batch_size=8, clip_norm=None, chooses_order=True)

    def orders_with(kept_share: float) -> list[UpdateOrder]:
        """Returns the orders of the simulated plans, if those that keep gradients take so many times as long."""
        orders = []

        def promised_step_s(_: PlanQuestion, __: Profiles, solution: Solution, **___: float) -> float:
            order = solution.costs.job.update_order
            orders.append(order)
            return 1e3 * (kept_share if order is UpdateOrder.KEPT else 1.0)

        monkeypatch.setattr(simulated_search, "promised_step_s", promised_step_s)
        simulated_search.fastest_plan(asked, Profiles(asked))
        return orders

    far, near = orders_with(2.0), orders_with(1.01)
    assert far.count(UpdateOrder.ACTIVE) == near.count(UpdateOrder.ACTIVE)
    assert 0 < far.count(UpdateOrder.KEPT) < near.count(UpdateOrder.KEPT)
    assert near.count(UpdateOrder.KEPT) < near.count(UpdateOrder.ACTIVE)


def test_plan_whose_links_are_busy_all_the_time_is_tried_with_idle_ones() -> None:
    """By the bound, all activations that fit into host memory are swapped: a step of 3.35 s, and 3.9 by simulation."""
    asked = on_a_desktop("gpt2-xl", "rtx3090:ram=128,ssds=4", batch_size=16, clip_norm=1.0)
    _, solution, step_s = simulated_search.fastest_plan(asked, Profiles(asked))
    best = simulated_search.best_plan(asked, Profiles(asked))[1]
    assert step_s is not None
    assert best.step_s < solution.step_s < step_s < 1.07 * best.step_s
    assert solution.busy_s["d2h"] < 0.7 * best.busy_s["d2h"]


def test_plan_that_updates_meanwhile_has_room_for_gradients_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the bound two blocks are enough, and by simulation such plans wait. Those with more cost little more."""
    asked = on_a_desktop("qwen2.5-32b", "rtx3090:ram=128,ssds=4", batch_size=8, clip_norm=None)
    simulated = []

    def promised_step_s(_: PlanQuestion, __: Profiles, solution: Solution, **___: float) -> float:
        simulated.append(solution.placement.num_passing_blocks)
        return solution.step_s

    assert simulated_search.best_plan(asked, Profiles(asked))[1].placement.num_passing_blocks == 2
    monkeypatch.setattr(simulated_search, "promised_step_s", promised_step_s)
    simulated_search.fastest_plan(asked, Profiles(asked))
    assert simulated[0] == 8
    assert simulated[-1] == 2  # its bound is smaller


@pytest.mark.long
def test_program_whose_presolve_does_not_end_is_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    hardware = machine_of("rtx4090:gpus=1,ram=128,ssds=2")
    hardware = with_part(hardware, host=with_part(hardware.host, memory_gib=0.8 * hardware.host.memory_gib))
    config = ShapeConfig(shape=load(ModelShape, published_models()["llama-3.1-8b"]), num_tokens=1024)
    asked = question(hardware, config=config, sequence_length=1024, clip_norm=None, chooses_order=True)
    monkeypatch.setattr(simulated_search, "promised_step_s", lambda _, __, solution, **___: 1.05 * solution.step_s)
    simulated_search.fastest_plan(asked, Profiles(asked))
