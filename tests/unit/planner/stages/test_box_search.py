"""The best plans of a job for each choice of boxes."""

import itertools
from dataclasses import replace
from functools import cache

import pytest

from tests.support.planner.stage_jobs import NUM_TOKENS, SHAPE, box_plans, kind_of, question_on, server
from windlass.planner.feasibility.feasibility import with_part
from windlass.planner.planning.planner import best_plan
from windlass.planner.question.profiles import Profiles
from windlass.planner.stages.box_search import StagesError, best_plans, plans_over_boxes
from windlass.planner.stages.stages_report import StagesReport

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


def test_one_more_box_never_makes_the_best_plan_slower() -> None:
    one, two, three = (plans_on_server(number)[0].step_s for number in (1, 2, 3))
    assert three <= two <= one


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
    _, solution = best_plan(question, Profiles(question))
    (alone,) = plans_over_boxes([kind_of(with_part(server(), network_gb_per_s=None), 1)])
    assert alone.step_s == pytest.approx(solution.step_s, rel=0.01)


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


def test_tied_embeddings_on_boxes_with_several_gpus_are_refused() -> None:
    tied = SHAPE.model_copy(update={"tied_embeddings": True})
    hardware = with_part(server(), gpus=with_part(server().gpus, count=2))
    with pytest.raises(StagesError, match=r"share a tensor, .* boxes with 2 GPUs"):
        plans_over_boxes([kind_of(hardware, 2, shape=tied, num_ranks=2)])


@pytest.mark.long
def test_tied_embeddings_are_planned_for_one_gpu_of_each_of_several_boxes() -> None:
    tied = SHAPE.model_copy(update={"tied_embeddings": True})
    hardware = with_part(server(), gpus=with_part(server().gpus, count=2))
    plans = by_number(plans_over_boxes([kind_of(hardware, 2, shape=tied, num_ranks=2, chooses_ranks=True)]))
    assert plans[2].gpus == 1
