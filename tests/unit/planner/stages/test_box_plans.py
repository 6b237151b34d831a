"""The plan of one box for its run of blocks, and the times of its stage."""

from dataclasses import replace

import pytest

from tests.support.planner.stage_jobs import NUM_TOKENS, SHAPE, box_plans, kind_of, question_on, server
from windlass.engine.memory_plan import MemoryTier
from windlass.planner.feasibility.feasibility import with_part
from windlass.planner.solver.step_bounds import Part
from windlass.planner.stages.box_plans import BoxKind, BoxPlan, BoxPlans, Rounds, Run

ROUNDS = Rounds(num_ranks=1, num_microbatches=8, group_size=2)
NUM_BLOCKS = SHAPE.num_layers + 2
WHOLE = Run(first=0, stop=NUM_BLOCKS, stage=0, ranks=(1,))
FIRST = Run(first=0, stop=4, stage=0, ranks=(1, 1))
LAST = Run(first=4, stop=NUM_BLOCKS, stage=1, ranks=(1, 1))


def planned(plans: BoxPlans, run: Run, rounds: Rounds = ROUNDS) -> BoxPlan:
    plan = plans.of(run, rounds)
    assert plan is not None, "it fits"
    return plan


def test_a_run_of_blocks_has_the_params_and_the_work_of_these_blocks_only() -> None:
    model = box_plans(kind_of(server(), 1)).job(ROUNDS).model
    first, last = model.of_blocks(0, 4), model.of_blocks(4, NUM_BLOCKS)
    assert first.numel + last.numel == model.numel
    assert first.num_flops + last.num_flops == model.num_flops
    assert (first.num_own_layers, last.num_own_layers) == (3, 3)
    assert first.head.numel == last.embedding.numel == 0
    assert first.blocks_of_layers == {model.layers[0]: (1, 2, 3)}


def test_two_stages_compute_as_much_as_the_whole_model() -> None:
    # With two GPUs no states rest on a device, so no params are rounded there.
    rounds = Rounds(num_ranks=2, num_microbatches=8, group_size=2)
    plans = box_plans(kind_of(server(), 2, num_ranks=2))
    whole, *stages = (planned(plans, run, rounds).solution.seconds[Part.FORWARD] for run in (WHOLE, FIRST, LAST))
    assert sum(stages) == pytest.approx(whole)


def test_a_stage_has_slots_for_a_groups_hidden_states_to_and_from_its_neighbours() -> None:
    plans = box_plans(kind_of(server(), 3))
    middle = planned(plans, Run(first=3, stop=5, stage=1, ranks=(1, 1, 1))).solution
    assert middle.plan.crossings.num_slots == 2 * 2 * ROUNDS.group_size
    hidden_nbytes = NUM_TOKENS * SHAPE.hidden_size * 2  # bf16, one example
    assert middle.plan.crossings.slot_nbytes == hidden_nbytes
    assert planned(plans, WHOLE).solution.plan.crossings.nbytes == 0


def test_the_first_of_several_stages_holds_the_activations_of_more_groups() -> None:
    plans = box_plans(kind_of(server(), 4))
    # The same layers in two places, so only the number of groups in flight differs.
    early, late = (
        planned(plans, Run(first=3, stop=5, stage=stage, ranks=(1, 1, 1, 1))).solution.nbytes[MemoryTier.DEVICE]
        for stage in (1, 2)
    )
    assert early > late


def test_no_stage_takes_longer_alone_than_its_passes_and_updates() -> None:
    plans = box_plans(kind_of(server(), 2))
    for run in (WHOLE, FIRST, LAST):
        times = planned(plans, run).times
        assert 0 < times.beside_updates_s < times.round_s
        assert ROUNDS.number * times.round_s <= times.alone_s * (1 + 1e-9)
        assert times.updates_s > 0


def test_least_work_is_no_more_than_that_of_a_plan() -> None:
    plans = box_plans(kind_of(server(), 1))
    least, times = plans.least_work(ROUNDS), planned(plans, WHOLE).times
    assert 0 < least.passes_s <= ROUNDS.number * times.round_s * (1 + 1e-3)
    assert least.passes_s <= least.step_s <= times.alone_s * (1 + 1e-3)


def test_a_box_without_room_for_its_blocks_has_no_plan_and_one_for_fewer() -> None:
    hardware = server()
    model_nbytes = 2 * 14 * box_plans(kind_of(hardware, 1)).job(ROUNDS).model.numel
    ssds = with_part(hardware.ssds, count=1, capacity_gib=0.8 * model_nbytes / 2**30)
    plans = box_plans(kind_of(with_part(hardware, ssds=ssds), 2))
    assert plans.of(WHOLE, ROUNDS) is None
    assert plans.of(FIRST, ROUNDS) is not None


def test_a_limit_of_the_step_time_excludes_a_plan_until_the_limit_is_raised() -> None:
    plans = box_plans(kind_of(server(), 2))
    assert plans.of(FIRST, ROUNDS, below=1e-9) is None
    assert plans.of(FIRST, ROUNDS) is not None


def test_equal_runs_of_layers_in_equal_places_are_planned_once() -> None:
    plans = box_plans(kind_of(server(), 3))
    assert planned(plans, Run(first=2, stop=4, stage=1, ranks=(1, 1, 1))) is planned(
        plans, Run(first=3, stop=5, stage=1, ranks=(1, 1, 1))
    )


def test_choices_that_boxes_make_alike_are_the_order_of_updates_and_where_gradients_are_kept() -> None:
    question = question_on(server(), chooses_order=True)
    free = replace(question, training=replace(question.training, clip_norm=None))
    for each, choices in (
        (question, {("kept", False), ("kept", True)}),
        (free, {("active", None), ("kept", False), ("kept", True)}),
    ):
        plans = box_plans(BoxKind(name="a", number=2, question=each))
        jobs = [alike.job(ROUNDS) for alike in plans.alike]
        assert {(job.update_order, job.spills) for job in jobs} == choices
        assert not any(job.chooses_order for job in jobs)


def test_box_whose_gradients_go_to_the_ssds_has_no_states_in_memory() -> None:
    kept, spilled = (planned(plans, FIRST).solution for plans in box_plans(kind_of(server(), 2)).alike)
    assert (kept.costs.spills, spilled.costs.spills) == (False, True)
    assert kept.plan.host_blocks or kept.plan.device_blocks
    assert not spilled.plan.host_blocks
    assert not spilled.plan.device_blocks
