"""Several ranks: each has its own operations, and some things wait for all of them."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.policy.jobs import EVALUATION, GPU, computed, grad_ready, make_shape
from tests.support.policy.world import World, deliver_all_but, sent
from windlass.actors.messages import CommitReached, ComputeBlocks, ExportModel, Phase
from windlass.actors.policy.actions import Action
from windlass.actors.policy.config import program
from windlass.actors.policy.pending_replies import (
    DeadlineMissedError,
    Instruction,
    PendingReplies,
    UnexpectedEventError,
)
from windlass.actors.policy.scheduler_core import Pipeline
from windlass.actors.policy.trainer_state import TrainerState
from windlass.storage.ids import ActorName, BlockIndex, Step

GPU_1 = ActorName("gpu-1")


def begun(*stuck: int, num_ranks: int = 2, num_groups: int = 2, **options: Any) -> World:
    """A world of three blocks, in which each group has five operations a step: 1 to 5, 6 to 10, and so on.

    The operations with these numbers get stuck.
    """
    options = {"chunks_per_block": (1,) * 3, **options}
    world = World(make_shape(num_ranks=num_ranks, num_groups=num_groups, **options))
    world.stuck = set(stuck)
    world.start()
    return world


def groups_of(world: World, actor: ActorName, step: int, *phases: Phase) -> set[int]:
    """The groups of which a GPU worker has computed operations in a step, or has been granted some."""
    issued = world.expected_of(actor)[: world.num_issued[actor]]
    return {group for at, phase, _, group in issued if at == step and phase in phases}


def grants(actions: Sequence[Action]) -> list[ComputeBlocks]:
    messages = (action.message for action in actions if isinstance(action, Instruction))
    return [message for message in messages if isinstance(message, ComputeBlocks)]


# --- programs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_ranks", "num_groups", "num_evaluation_groups"), [(2, 5, 3), (3, 3, 1), (4, 2, 0)])
def test_programs_of_ranks_have_each_operation_once_and_all_exports(
    num_ranks: int, num_groups: int, num_evaluation_groups: int
) -> None:
    options: dict[str, Any] = {"evaluate_every": 1, "checkpoint_every": 2, "total_steps": 3}
    options |= {"num_groups": num_groups, "num_evaluation_groups": num_evaluation_groups}
    alone = list(program(make_shape(**options), 1))
    shape = make_shape(num_ranks=num_ranks, **options)
    programs = [list(program(shape, 1, rank)) for rank in range(num_ranks)]
    for rank, operations in enumerate(programs):
        assert operations == [o for o in alone if o.phase is None or o.group % num_ranks == rank]
    assert {operation for operations in programs for operation in operations} == set(alone)


@pytest.mark.parametrize(("num_ranks", "num_groups", "name"), [(1, 3, "gpu-0"), (2, 3, "gpu-0"), (3, 5, "gpu-1")])
def test_worker_of_the_last_group_completes_gradients(num_ranks: int, num_groups: int, name: str) -> None:
    shape = make_shape(num_ranks=num_ranks, num_groups=num_groups)
    assert shape.grads_worker(shape.stages[0]) == name


# --- grants ---------------------------------------------------------------------------------------------------------


def test_all_ranks_are_granted_their_first_operations_at_once() -> None:
    world = begun(*range(1, 16), num_ranks=3, num_groups=3)
    deliver_all_but(world)
    for rank in range(3):
        computing = world.computing_of(ActorName(f"gpu-{rank}"))
        assert [compute.op for compute in computing] == list(range(5 * rank + 1, 5 * rank + 6))


def test_fast_rank_goes_on_to_its_next_group_without_the_slow_one() -> None:
    world = begun(6, num_groups=4)
    deliver_all_but(world)
    assert [each for each in world.computed if each[3] % 2 == 1] == []
    assert world.computed[-2:] == [(1, Phase.FORWARD, 0, 2), (1, Phase.FORWARD, 1, 2)]
    world.stuck.clear()
    deliver_all_but(world)
    world.check_end()


def test_head_of_any_rank_can_be_the_first_of_a_step_with_the_loss_scale() -> None:
    """The slow rank has many blocks before its head."""
    shape = make_shape(chunks_per_block=(1,) * 14, num_ranks=2, num_groups=2, keeps_grads=True, total_steps=3)
    world = World(shape, bad=frozenset({(1, 0)}), scales_loss=True)
    world.start()
    deliver_all_but(world, "compute 1")
    assert not groups_of(world, GPU, 1, Phase.HEAD)
    assert groups_of(world, GPU_1, 1, Phase.HEAD) == {1}
    deliver_all_but(world)
    world.check_end()


def test_rank_that_is_behind_begins_the_step_that_another_has_begun_with_a_full_window() -> None:
    """A step's beginning waits until few operations of the step before are left, but only for the first rank."""
    world = begun(num_evaluation_groups=1, evaluate_every=1, chunks_per_block=(1,) * 5, max_prefetched=1)
    deliver_all_but(world, "compute 19")  # rank 0's first operation of the evaluation after step 1
    assert [compute.step for compute in world.computing_of(GPU)] == [1] * 5 + [2] * 4
    assert {compute.step for compute in world.computing_of(GPU_1)} == {2}
    deliver_all_but(world)
    world.check_end()


@pytest.mark.parametrize("keeps_grads", [False, True])
def test_step_ends_after_the_losses_of_all_ranks_are_reported(keeps_grads: bool) -> None:
    """A slow report of one rank may be the last, after those of all gradients and updates."""
    world = begun(total_steps=1, keeps_grads=keeps_grads)
    deliver_all_but(world, "compute 3")
    assert world.captured[-1] == 0
    assert world.committed == 0
    deliver_all_but(world)
    world.check_end()
    assert world.captured[-1] == 1


def test_commits_are_reported_to_the_worker_that_offloads_gradients() -> None:
    world = begun(num_groups=4, keeps_grads=True, spilled_blocks=frozenset({1}))
    assert world.grads_worker() == GPU_1
    assert [message.step for message in sent(world, CommitReached)] == [0, 1, 2]  # the world checks the receiver
    world.check_end()


# --- what waits for all ranks ---------------------------------------------------------------------------------------


def test_export_waits_for_the_evaluation_of_every_rank() -> None:
    world = begun(num_evaluation_groups=2, total_steps=1)
    deliver_all_but(world, "compute 16")  # rank 1's head of the evaluation
    assert world.committed == 1
    assert not world.exports
    assert len(sent(world, ExportModel)) == 1
    world.check_end()


@pytest.mark.parametrize("num_evaluation_groups", [1, 2, 3])
def test_no_rank_begins_a_step_before_an_evaluation_has_decided(num_evaluation_groups: int) -> None:
    """It waits with or without a part in the evaluation."""
    options: dict[str, Any] = {"num_evaluation_groups": num_evaluation_groups, "evaluate_every": 1}
    world = begun(evaluation_decides=True, max_prefetched=4, **options)
    last = 10 + 3 * num_evaluation_groups
    deliver_all_but(world, f"compute {last}")
    assert world.begun == 1
    deliver_all_but(world)
    world.check_end()


def test_rank_ahead_waits_for_operations_of_an_evaluation_that_are_not_granted_yet() -> None:
    world = begun(num_evaluation_groups=9, evaluate_every=1, evaluation_decides=True)
    deliver_all_but(world, "compute 11")
    assert groups_of(world, GPU_1, 1, *EVALUATION) == {1, 3, 5, 7}
    assert 8 not in groups_of(world, GPU, 1, *EVALUATION)
    assert not world.computing_of(GPU_1)
    deliver_all_but(world)
    world.check_end()


def test_rank_without_a_part_in_an_evaluation_waits_for_one_whose_params_are_not_there() -> None:
    world = begun(num_evaluation_groups=1, evaluate_every=1, evaluation_decides=True)
    deliver_all_but(world, "update 1 2")
    assert world.computed[-2:] == [(1, Phase.EVALUATE, 0, 0), (1, Phase.EVALUATE, 1, 0)]
    assert world.begun == 1
    deliver_all_but(world)
    world.check_end()


def test_rank_without_a_group_of_a_step_evaluates_before_the_next_step_changes_params() -> None:
    world = begun(num_groups=1, num_evaluation_groups=2, evaluate_every=1)
    deliver_all_but(world, "compute 9")  # rank 1's first operation of the evaluation
    assert world.begun == 1
    assert set(world.written) == {1}
    deliver_all_but(world)
    world.check_end()


# --- stop, and early end --------------------------------------------------------------------------------------------


def test_stop_ends_after_the_step_that_any_rank_has_begun() -> None:
    """Also if the other one, whose evaluation is long, is then granted operations of the step before."""
    world = begun(num_evaluation_groups=1, evaluate_every=1, total_steps=3, chunks_per_block=(1,) * 14)
    first = 2 * 27 + 1  # of the evaluation
    deliver_all_but(world, f"compute {first + 3}")
    assert groups_of(world, GPU_1, 2, Phase.FORWARD)
    assert not groups_of(world, GPU, 2, Phase.FORWARD)
    world.deliver(next(c for c in world.choices() if c.answers == f"compute {first + 3}"))
    world.stop()
    deliver_all_but(world)
    world.check_end()
    assert world.committed == 2


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_stop_in_an_evaluation_lets_all_ranks_use_the_params_that_one_has_begun_to_use(num_ranks: int) -> None:
    """They stay in their slots until every rank of the round has copied them."""
    world = begun(
        num_ranks=num_ranks,
        num_groups=num_ranks,
        num_evaluation_groups=2 * num_ranks,
        evaluate_every=1,
        total_steps=2,
        chunks_per_block=(1,) * 14,
    )
    first = num_ranks * 27 + 1
    # The first rank's first operations are reported, and so it is granted more than the others.
    deliver_all_but(world, *(f"compute {op}" for op in range(first + 4, first + 28 * num_ranks)))
    world.stop()
    deliver_all_but(world)
    world.check_end()
    begun_uses: dict[str, set[tuple[int, int]]] = {actor: set() for actor in world.shape.gpu_workers}
    for _, phase, block, group in world.computed:
        if phase in (Phase.EVALUATE, Phase.EVALUATE_HEAD):
            begun_uses[world.worker_of(group)].add((group // num_ranks, block))
    (uses, *others) = begun_uses.values()
    assert 4 < len(uses) < 2 * 14
    assert all(each == uses for each in others)


def test_early_end_has_a_model_of_its_step_on_all_ranks() -> None:
    options: dict[str, Any] = {"num_evaluation_groups": 3, "evaluate_every": 1, "evaluation_decides": True}
    shape = make_shape(num_ranks=2, num_groups=3, total_steps=4, **options)
    world = World(shape, finish_at=2)
    world.start()
    deliver_all_but(world)
    world.check_end()
    assert world.exports == [(2, "/models/out")]


# --- unexpected events ----------------------------------------------------------------------------------------------


def test_reports_of_another_rank_are_refused() -> None:
    pipeline = Pipeline(make_shape(num_ranks=2, num_groups=2), TrainerState(scales_loss=False), Step(0))
    first, _ = grants(pipeline.start(0.0))
    for actor in (GPU_1, ActorName("gpu-2")):
        with pytest.raises(UnexpectedEventError, match=f"{actor} sent BlockComputed of 1, block 0, which was not"):
            pipeline.handle(computed(first.operations[0], actor), 0.0)
    with pytest.raises(UnexpectedEventError, match="gpu-0 sent GradReady of 1, block 3, which was not requested"):
        pipeline.handle(grad_ready(1, 3, 1.0, actor=GPU), 0.0)
    pipeline.handle(grad_ready(1, 3, 1.0, actor=GPU_1), 0.0)


def test_lost_report_names_its_rank() -> None:
    pipeline = Pipeline(make_shape(num_ranks=2, num_groups=2), TrainerState(scales_loss=False), Step(0))
    _, second = grants(pipeline.start(0.0))
    with pytest.raises(UnexpectedEventError, match=r"^gpu-1 finished the forward of block 1 in step 1, and not the"):
        pipeline.handle(computed(second.operations[1], GPU_1), 0.0)


# --- timeouts -------------------------------------------------------------------------------------------------------


def late_of(world: World, now_s: float) -> tuple[ActorName, ...]:
    try:
        world.pipeline.waits.check(now_s)
    except DeadlineMissedError as error:
        return error.late
    return ()


def deliver_at(world: World, now_s: float, *kept: str) -> None:
    while choices := [c for c in world.choices() if c.answers not in kept]:
        world.deliver(choices[0], now_s)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("op", range(1, 6))
def test_ranks_that_wait_for_a_stopped_one_are_not_late(op: int, num_ranks: int) -> None:
    world = begun(op, num_ranks=num_ranks, num_groups=num_ranks, deadline_s=30.0)
    deliver_at(world, 100.0)
    assert len({wait.actor for wait in world.pipeline.waits.outstanding.values()}) == num_ranks
    assert late_of(world, 130.0) == ()
    assert late_of(world, 130.1) == (GPU,)
    assert late_of(world, 1000.0) == (GPU,)


@pytest.mark.parametrize("unreported", [(), ("compute 12",), ("compute 11",)])
@pytest.mark.parametrize("op", [6, 7, 8])
def test_rank_that_waits_with_its_next_group_is_not_late(op: int, unreported: tuple[str, ...]) -> None:
    """Even if it has not reported all operations before that one, because it reports several at once."""
    world = begun(op, num_groups=3, deadline_s=30.0)
    deliver_at(world, 100.0, *unreported)
    assert {compute.op for compute in world.computing_of(GPU)} >= {13, 14, 15}
    assert late_of(world, 130.1) == (GPU_1,)


def test_timeout_of_a_rank_starts_anew_when_it_no_longer_waits() -> None:
    world = begun(3, 8, deadline_s=30.0)
    deliver_at(world, 100.0)
    world.stuck.remove(3)
    deliver_at(world, 125.0)
    assert not world.computing_of(GPU)
    assert late_of(world, 155.0) == ()
    with pytest.raises(DeadlineMissedError, match=r"^gpu-1 has been silent for 30\.1 s; .* the head of block 2"):
        world.pipeline.waits.check(155.1)


def test_rank_is_late_if_an_earlier_group_is_reported_after_the_one_before_its_own() -> None:
    """Reports of several ranks may overtake each other."""
    world = begun(15, num_ranks=3, num_groups=3, deadline_s=30.0)
    deliver_at(world, 100.0, "compute 5", "update 1 2 optimizer-0")
    assert (1, Phase.BACKWARD, 0, 1) in world.computed
    deliver_at(world, 100.0, "update 1 2 optimizer-0")
    assert set(late_of(world, 130.1)) == {"gpu-2", "optimizer-0"}


@pytest.mark.parametrize(
    ("op", "late"), [(1, "gpu-0"), (3, "gpu-0"), (2, "b1/gpu-0"), (4, "b1/gpu-0"), (6, "b1/gpu-0"), (11, "gpu-0")]
)
def test_boxes_that_wait_for_a_stopped_one_are_not_late(op: int, late: str) -> None:
    """The first box has blocks 0 and 1, and odd numbers: 1 and 3 go forward with its first group, 11 backward."""
    world = begun(op, num_ranks=1, num_groups=2, cuts=(2,), chunks_per_block=(1,) * 4, deadline_s=30.0)
    deliver_at(world, 100.0)
    assert late_of(world, 130.0) == ()
    assert late_of(world, 130.1) == (late,)


def test_single_rank_waits_for_no_other() -> None:
    """Also if its next operations are those of two groups with the same block."""
    world = begun(9, num_ranks=1, chunks_per_block=(1,) * 2, deadline_s=30.0)
    deliver_at(world, 100.0, "commit 1 ssd-0")
    assert [compute.block for compute in world.computing] == [0, 0, 1, 0]
    assert set(late_of(world, 130.1)) == {GPU, "ssd-0"}


def test_pending_replies_of_an_excused_actor_are_late_only_if_all_are_excused() -> None:
    waits = PendingReplies(30.0, num_groups=1)
    for actor in (GPU, GPU_1):
        waits.expect_update(Step(1), BlockIndex(0), actor, 0.0)
    waits.excuse(frozenset({GPU_1}), 0.0)
    with pytest.raises(DeadlineMissedError) as caught:
        waits.check(30.1)
    assert caught.value.late == (GPU,)
    waits.excuse(frozenset({GPU, GPU_1}), 0.0)
    with pytest.raises(DeadlineMissedError) as caught:
        waits.check(30.1)
    assert caught.value.late == (GPU, GPU_1)
