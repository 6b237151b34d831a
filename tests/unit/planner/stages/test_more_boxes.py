"""A job over more or better boxes gets no slower plan, also where matrices are cut."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from tests.support.planner.stage_jobs import SHAPE, box_plans, kind_of, server
from windlass.planner.feasibility.feasibility import with_part
from windlass.planner.planning import fastest_plan
from windlass.planner.profiling.model_config import ShapeConfig
from windlass.planner.stages.box_plans import BoxPlans, agree
from windlass.planner.stages.box_search import best_of_choices, best_plans, choices_of
from windlass.planner.stages.predicted import fastest_by_simulation
from windlass.planner.stages.stages_report import StagesReport

NUM_TOKENS = 1024
LAYERS = {"num_heads": 32, "num_kv_heads": 32, "intermediate_size": 14336, "vocab_size": 32000}
LARGE_LAYERS = SHAPE.model_copy(update={"num_layers": 12, "hidden_size": 4096, **LAYERS})
_MOST = 1.03  # as for one box


@cache
def boxes_with(
    *, gpu_gib: float, num_microbatches: int = 4, network_gb_per_s: float = 1.25, chooses_cut: bool = True
) -> BoxPlans:
    """Four boxes, with 128 GiB of RAM, for a job of 16 x 1024 tokens."""
    hardware = with_part(
        server(),
        gpus=with_part(server().gpus, memory_gib=gpu_gib),
        host=with_part(server().host, memory_gib=128),
        network_gb_per_s=network_gb_per_s,
    )
    kind = kind_of(hardware, 4, shape=LARGE_LAYERS, chooses_cut=chooses_cut)
    config = ShapeConfig(shape=LARGE_LAYERS, num_tokens=NUM_TOKENS)
    training = replace(
        kind.question.training, batch_size=16, num_microbatches=num_microbatches, sequence_length=NUM_TOKENS
    )
    return box_plans(replace(kind, question=replace(kind.question, config=config, training=training)))


def plan_of(boxes: BoxPlans, number: int) -> StagesReport | None:
    """The plan over so many boxes. None: it does not fit."""
    plans = best_plans([boxes], numbers={number}, simulates=True)
    assert all(plan.is_simulated for plan in plans)
    return plans[0] if plans else None


def assert_no_slower(plans: Sequence[StagesReport | None]) -> None:
    """Each plan is at most 3 percent slower than the one before it."""
    for before, better in itertools.pairwise(plans):
        if before is not None:
            assert better is not None
            assert better.step_s <= _MOST * before.step_s
    assert plans[-1] is not None


@pytest.mark.parametrize(
    ("gpu_gib", "num_microbatches"),
    [(5, 4), (6, 2), *(pytest.param(*case, marks=pytest.mark.long) for case in ((5, 2), (6, 4), (8, 2), (8, 4)))],
)
def test_more_boxes_are_no_slower(gpu_gib: int, num_microbatches: int) -> None:
    boxes = boxes_with(gpu_gib=gpu_gib, num_microbatches=num_microbatches)
    assert_no_slower([plan_of(boxes, number) for number in (1, 2, 3, 4)])


@pytest.mark.parametrize("number", [2, pytest.param(4, marks=pytest.mark.long)])
def test_boxes_with_larger_gpus_are_no_slower(number: int) -> None:
    plans = [plan_of(boxes_with(gpu_gib=gib), number) for gib in (3, 4, 5, 6, 7, 8)]
    assert_no_slower(plans)
    cuts = [plan.cut_matrices for plan in plans if plan is not None]
    assert cuts[0] is not None
    assert cuts[-1] is None


@pytest.mark.parametrize(
    "num_ranks", [4, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)]
)
def test_one_box_with_larger_gpus_is_no_slower(num_ranks: int) -> None:
    """With 5 GiB whole layers have the least bound, but wait longer for what they need than parts with 4 GiB."""
    boxes = [boxes_with(gpu_gib=gib) for gib in (4, 5, 6, 8)]
    steps = []
    for box in boxes:
        step_s = fastest_plan(replace(box.kind.question, num_ranks=num_ranks), box.profiles)[2]
        assert step_s is not None
        steps.append(step_s)
    assert all(better_s <= _MOST * step_s for step_s, better_s in itertools.pairwise(steps))


@pytest.mark.parametrize("gpu_gib", [4, pytest.param(8, marks=pytest.mark.long)])
def test_boxes_with_a_faster_network_are_no_slower(gpu_gib: int) -> None:
    rates = (0.0125, 0.125, 1.25, 12.5)
    assert_no_slower([plan_of(boxes_with(gpu_gib=gpu_gib, network_gb_per_s=rate), 2) for rate in rates])


@pytest.mark.parametrize("number", [2, pytest.param(4, marks=pytest.mark.long)])
def test_matrices_are_cut_over_boxes_where_that_is_faster(number: int) -> None:
    whole, chosen = (
        plan_of(boxes_with(gpu_gib=6, num_microbatches=2, chooses_cut=cuts), number) for cuts in (False, True)
    )
    assert whole is not None, "it fits with whole matrices, too"
    assert chosen is not None
    assert (whole.cut_matrices, chosen.cut_matrices) == (None, 2**24)
    assert chosen.step_s < 0.95 * whole.step_s


@pytest.mark.parametrize(
    ("gpu_gib", "num_microbatches"),
    [(6, 4), *(pytest.param(*case, marks=pytest.mark.long) for case in ((6, 2), (8, 4)))],
)
def test_job_over_boxes_has_the_cut_of_the_plan_over_them(gpu_gib: int, num_microbatches: int) -> None:
    boxes = boxes_with(gpu_gib=gpu_gib, num_microbatches=num_microbatches)
    plan, planned = plan_of(boxes, 4), best_of_choices(choices_of([boxes], 4))
    assert plan is not None
    assert planned is not None
    taken, step_s = fastest_by_simulation(planned)
    assert agree(taken.plans)
    assert {each.solution.costs.job.cut for each in taken.plans} == {plan.cut_matrices}
    assert step_s == plan.step_s
