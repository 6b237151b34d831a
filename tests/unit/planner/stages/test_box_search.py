"""The best plans of a job for each choice of boxes."""

import itertools
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.planner.stage_jobs import NUM_TOKENS, SHAPE, box_plans, kind_of, question_on, server
from windlass.planner.feasibility.feasibility import least_memory_of, with_part
from windlass.planner.feasibility.shortfall import least_gpu
from windlass.planner.planning.simulated_search import fastest_plan
from windlass.planner.question.profiles import Profiles
from windlass.planner.stages import box_search, predicted
from windlass.planner.stages.box_plans import BoxPlan, BoxPlans, agree
from windlass.planner.stages.box_search import (
    StagesError,
    best_of_choices,
    best_plans,
    choices_of,
    orders_of_boxes,
    plans_over_boxes,
)
from windlass.planner.stages.splits import PlannedStages
from windlass.planner.stages.stages_report import StagesReport, report_of_stages

HIDDEN_NBYTES = 8 * NUM_TOKENS * SHAPE.hidden_size * 2  # of a step: eight examples in bf16


def by_number(plans: list[StagesReport]) -> dict[int, StagesReport]:
    return {len(plan.boxes): plan for plan in plans}


@cache
def plans_on_server(number: int) -> list[StagesReport]:
    return plans_over_boxes([kind_of(server(), number)])


def test_each_number_of_boxes_has_a_plan_and_the_fastest_comes_first() -> None:
    plans = plans_on_server(3)
    assert set(by_number(plans)) == {1, 2, 3}
    assert [plan.step_s for plan in plans] == sorted(plan.step_s for plan in plans)
    for plan in plans:
        assert sum(box.num_layers for box in plan.boxes) == SHAPE.num_layers
        bounds = [(box.first_block, box.last_block) for box in plan.boxes]
        assert [first for first, _ in bounds] == [0, *(last + 1 for _, last in bounds[:-1])]
        assert bounds[-1][1] == SHAPE.num_layers + 1


def test_boxes_whose_gpus_are_too_small_for_whole_matrices_have_one_cut() -> None:
    shape = SHAPE.model_copy(
        update={"hidden_size": 4096, "num_heads": 32, "num_kv_heads": 32, "intermediate_size": 12288}
    )
    whole = question_on(server(), shape=shape)
    least = least_gpu(whole, least_memory_of(whole, Profiles(whole)))
    assert least is not None
    small = with_part(server(), gpus=with_part(server().gpus, memory_gib=least.gib - 0.2))
    assert not best_plans([box_plans(kind_of(small, 2, shape=shape))], numbers={2})
    (cut,) = best_plans([box_plans(kind_of(small, 2, shape=shape, chooses_cut=True))], numbers={2})
    assert cut.cut_matrices == 2**24
    (alone,) = best_plans([box_plans(kind_of(small, 1, shape=shape, chooses_cut=True))])
    assert alone.cut_matrices == 2**24
    (large,) = best_plans([box_plans(kind_of(server(), 2, shape=shape, chooses_cut=True))], numbers={2})
    assert large.cut_matrices is None


@pytest.mark.long
def test_one_more_box_never_makes_the_best_plan_slower() -> None:
    one, two, three = (plans_on_server(number)[0].step_s for number in (1, 2, 3))
    assert three <= two <= one


@pytest.mark.long
@pytest.mark.parametrize(("chooses", "number"), [(False, 3), pytest.param(True, 2, marks=pytest.mark.long)])
def test_a_faster_network_never_makes_a_plan_slower(*, chooses: bool, number: int) -> None:
    boxes = box_plans(kind_of(server(), number, chooses_microbatches=chooses))
    steps_s = []
    for rate in (1e-4, 0.125, 1.25, 12.5):
        hardware = with_part(server(), network_gb_per_s=rate)
        kind = replace(boxes.kind, question=replace(boxes.kind.question, hardware=hardware))
        plans = by_number(best_plans([replace(boxes, kind=kind)], numbers={number}))
        steps_s.append(plans[number].step_s)
    for slow_s, fast_s in itertools.pairwise(steps_s):
        assert fast_s <= slow_s * (1 + 2e-3)
    assert steps_s[-1] < steps_s[0]


def test_the_network_carries_the_hidden_states_and_their_gradients_once_a_step() -> None:
    plans = by_number(plans_on_server(3))
    assert plans[1].network_gb_per_step == plans[1].network_s == 0.0
    assert plans[2].network_gb_per_step == pytest.approx(HIDDEN_NBYTES / 1e9)
    assert plans[3].network_gb_per_step == pytest.approx(2 * HIDDEN_NBYTES / 1e9)  # of the box in the middle
    assert plans[3].network_s == pytest.approx(2 * HIDDEN_NBYTES / 1e9)  # at 1 GB/s


def test_one_box_has_the_plan_of_a_job_on_one_box() -> None:
    question = question_on(server())
    _, solution, step_s = fastest_plan(question, Profiles(question))
    (alone,) = plans_over_boxes([kind_of(with_part(server(), network_gb_per_s=None), 1)])
    assert alone.formula_step_s == pytest.approx(solution.step_s, rel=0.01)
    # Its step is that of a job on one box: no less than its bounds, and with what queues.
    assert alone.is_simulated
    assert alone.step_s == pytest.approx(step_s, rel=0.01)


@pytest.mark.long
def test_boxes_of_several_kinds_are_planned_in_every_choice() -> None:
    slow = with_part(server(), gpus=with_part(server().gpus, tflops=server().gpus.tflops / 3))
    plans = plans_over_boxes([kind_of(server(), 1, name="fast"), kind_of(slow, 1, name="slow")])
    choices = {tuple(sorted(box.hardware for box in plan.boxes)): plan for plan in plans}
    assert set(choices) == {("fast",), ("slow",), ("fast", "slow")}
    together = {box.hardware: box.num_layers for box in choices["fast", "slow"].boxes}
    assert together["fast"] > together["slow"]


def test_a_model_for_which_one_box_has_no_room_has_plans_over_two() -> None:
    model_nbytes = 2 * 14 * Profiles(question_on(server())).job(question_on(server()), 8).model.numel
    ssds = with_part(server().ssds, count=1, capacity_gib=0.7 * model_nbytes / 2**30)
    plans = by_number(plans_over_boxes([kind_of(with_part(server(), ssds=ssds), 2)]))
    assert set(plans) == {2}


def test_several_gpus_of_each_box_take_turns_with_the_groups() -> None:
    hardware = with_part(server(), gpus=with_part(server().gpus, count=2))
    plan = by_number(plans_over_boxes([kind_of(hardware, 2, num_ranks=2)]))[2]
    assert plan.gpus == 2
    assert plan.num_rounds == 8 // (2 * plan.group_size)


@pytest.mark.long
def test_box_with_fewer_gpus_uses_all_of_its_own() -> None:
    two = with_part(server(), gpus=with_part(server().gpus, count=2))
    kinds = [kind_of(two, 1, name="two", num_ranks=2), kind_of(server(), 1, name="one")]
    plan = best_plans([box_plans(kind) for kind in kinds], numbers={2}, simulates=True)[0]
    gpus = {box.hardware: box.gpus for box in plan.boxes}
    assert (plan.gpus, gpus) == (2, {"two": 2, "one": 1})
    assert plan.num_rounds == 8 // (2 * plan.group_size)
    assert plan.is_simulated


def test_boxes_with_an_unknown_network_are_refused() -> None:
    with pytest.raises(StagesError, match="network between boxes is not known for a"):
        plans_over_boxes([kind_of(with_part(server(), network_gb_per_s=None), 2)])


def test_tied_embeddings_and_their_gradients_cross_the_network_once_a_step() -> None:
    tied = SHAPE.model_copy(update={"tied_embeddings": True})
    plans = by_number(plans_over_boxes([kind_of(server(), 2, shape=tied)]))
    assert set(plans) == {1, 2}
    sum_nbytes = 4 * SHAPE.vocab_size * SHAPE.hidden_size  # fp32, of the box with the head
    assert plans[2].network_gb_per_step == pytest.approx((HIDDEN_NBYTES + sum_nbytes) / 1e9)
    assert plans[1].network_gb_per_step == 0.0


@pytest.mark.long
@pytest.mark.parametrize("chooses_ranks", [False, True])
def test_tied_embeddings_are_planned_for_several_gpus_of_each_of_several_boxes(chooses_ranks: bool) -> None:
    """A step takes hardly longer than that of the same model with two matrices. GPUs are slow, so two are of use."""
    tied = SHAPE.model_copy(update={"tied_embeddings": True})
    hardware = with_part(server(), gpus=with_part(server().gpus, count=2, tflops=server().gpus.tflops / 100))
    kinds = (kind_of(hardware, 2, shape=shape, num_ranks=2, chooses_ranks=chooses_ranks) for shape in (SHAPE, tied))
    untied_plan, tied_plan = (by_number(plans_over_boxes([kind]))[2] for kind in kinds)
    assert tied_plan.gpus == untied_plan.gpus == 2
    assert tied_plan.is_simulated
    assert 0.9 <= tied_plan.step_s / untied_plan.step_s <= 1.1


def over_all(*kinds: Any) -> PlannedStages:
    planned = best_of_choices(choices_of([box_plans(kind) for kind in kinds], sum(kind.number for kind in kinds)))
    assert planned is not None, "it fits"
    return planned


def test_plan_over_all_boxes_is_the_best_one_for_this_number_of_equal_boxes() -> None:
    boxes = [box_plans(kind_of(server(), 2))]
    (report,) = best_plans(boxes, numbers={2})
    planned = best_of_choices(choices_of(boxes, 2))
    assert planned is not None
    assert report_of_stages(planned) == report


@pytest.mark.long
def test_first_kind_has_the_first_blocks_although_another_order_is_faster() -> None:
    # The head is a part of the last stage, so a slow box is better first, where it has more layers to give away.
    slow = with_part(server(), gpus=with_part(server().gpus, tflops=server().gpus.tflops / 3))
    kinds = [kind_of(server(), 1, name="fast"), kind_of(slow, 1, name="slow")]
    plans = [over_all(*kinds), over_all(*reversed(kinds))]
    assert [[boxes.kind.name for boxes in plan.boxes] for plan in plans] == [["fast", "slow"], ["slow", "fast"]]
    # Of these, of plans near them and of plans with other rounds, that with the shortest simulated step is taken.
    # By the formula it may take longer.
    taken = by_number(plans_over_boxes(kinds))[2]
    simulated_s = [predicted.simulated_step_s(plan) for plan in plans]
    assert taken.is_simulated
    assert taken.step_s <= min(step_s for step_s in simulated_s if step_s is not None)
    assert taken.formula_step_s is not None
    assert (1 - 2e-3) * min(plan.step_s for plan in plans) <= taken.formula_step_s
    assert plans[0].step_s != plans[1].step_s


def test_boxes_of_the_first_kind_need_not_follow_the_first_box() -> None:
    large = with_part(server(), gpus=with_part(server().gpus, memory_gib=2 * server().gpus.memory_gib))
    first, second = (box_plans(kind_of(each, 1, name=name)) for each, name in ((server(), "a"), (large, "b")))
    chosen = [(first, 3), (second, 1)]
    orders = ["".join(boxes.kind.name for boxes in order) for order in orders_of_boxes(chosen, leads=True)]
    assert orders == ["abaa", "aaab"], "the larger device comes early"
    free = ["".join(boxes.kind.name for boxes in order) for order in orders_of_boxes(chosen, leads=False)]
    assert free == ["baaa", "aaab"]


def test_more_boxes_than_layers_are_refused() -> None:
    with pytest.raises(StagesError, match="has 6 layers, and each of the job's 7 boxes needs one: use at most 6 boxes"):
        choices_of([box_plans(kind_of(server(), 7))], 7)


def test_choices_have_a_box_of_the_first_kind_and_the_fastest_come_first() -> None:
    slow = with_part(server(), gpus=with_part(server().gpus, tflops=server().gpus.tflops / 3))
    kinds = [kind_of(slow, 2, name="head"), kind_of(slow, 1, name="slow"), kind_of(server(), 1, name="fast")]
    choices = choices_of([box_plans(kind) for kind in kinds], 2)
    named = ["+".join(plans.kind.name * number for plans, number in choice) for choice in choices]
    assert named[0] == "head+fast"
    assert sorted(named) == ["head+fast", "head+slow", "headhead"]


def planned_for(
    *, order: str = "kept", spilled: tuple[int, ...] = (), resting: tuple[int, ...] = (), cut: int | None = None
) -> BoxPlan:
    plan = SimpleNamespace(spilled_blocks=spilled, host_blocks=(), device_blocks=resting)
    job = SimpleNamespace(update_order=order, cut=cut)
    solution = SimpleNamespace(plan=plan, costs=SimpleNamespace(job=job, spills=bool(spilled)))
    return BoxPlan(solution=cast("Any", solution), times=cast("Any", None))


def test_plans_with_other_orders_cuts_or_reasons_to_commit_do_not_agree() -> None:
    assert agree([planned_for(), planned_for()])
    assert agree([planned_for(spilled=(1,)), planned_for(spilled=(2,))])
    assert agree([planned_for(resting=(1,)), planned_for()])
    assert not agree([planned_for(), planned_for(order="active")])
    assert agree([planned_for(cut=2**24), planned_for(cut=2**24)])
    assert not agree([planned_for(cut=2**24), planned_for()])
    assert not agree([planned_for(spilled=(1,)), planned_for(resting=(2,))])


def test_boxes_whose_best_plans_do_not_agree_get_the_best_ones_that_do(monkeypatch: pytest.MonkeyPatch) -> None:
    step_s = {None: 1.0, False: 3.0, True: 2.0}

    def search(chosen: list[tuple[BoxPlans, int]], likely: object, *, leads: bool, below: float) -> Any:
        choices = {boxes.spills for boxes, _ in chosen}
        assert len(choices) == 1, "all boxes choose alike"
        assert ([number for _, number in chosen], leads) == ([1, 2], True)
        assert (likely is None) == (choices == {None}), "the rounds of the best plans are tried first"
        (spills,) = choices
        plans = [planned_for(spilled=(1,)), planned_for(resting=(2,))] if spills is None else [planned_for()] * 2
        return SimpleNamespace(plans=plans, step_s=step_s[spills], rounds="rounds", spills=spills)

    monkeypatch.setattr(box_search, "search_free", search)
    kinds = [kind_of(server(), 1, name="a"), kind_of(server(), 2, name="b")]
    best: Any = over_all(*kinds)
    assert (best.spills, best.step_s) == (True, 2.0)


@pytest.mark.long
def test_plans_that_agree_are_searched_as_well_as_free_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    free = over_all(kind_of(server(), 2))
    monkeypatch.setattr(box_search, "agree", lambda plans: False)
    alike = over_all(kind_of(server(), 2))
    assert agree(alike.plans)
    assert {boxes.spills for boxes in alike.boxes} == {False}, "gradients on SSDs would take longer"
    assert alike.step_s == pytest.approx(free.step_s, rel=2e-3)
