"""Resident states, commits every few steps, and spilled gradients: the effect of each."""

from typing import Any

import pytest

from tests.support.policy.jobs import GPU, WITH_GRADIENT, make_shape
from tests.support.policy.world import World, deliver_all_but, sent
from windlass.actors.messages import (
    CommitStore,
    FlushBlock,
    Phase,
    RestoreStates,
    SkipStep,
    UpdateStep,
)
from windlass.actors.policy.pending_replies import DeadlineMissedError

ALL = frozenset(range(4))
HOST_0_DEVICE_3 = {"host_blocks": frozenset({0}), "device_blocks": frozenset({3})}


def begun(*, initial_step: int | None = None, bad: frozenset[tuple[int, int]] = frozenset(), **options: Any) -> World:
    world = World(make_shape(**options), initial_step, bad=bad)
    world.start()
    return world


# --- commits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"host_blocks": ALL}, {"device_blocks": ALL}], ids=["ssd", "host", "device"])
def test_between_commits_updates_wait_for_none(options: dict[str, Any]) -> None:
    world = begun(commit_every=3, total_steps=6, **options)
    deliver_all_but(world, "commit 3")
    assert world.committed == 0
    assert set(world.written) == {3}
    assert (4, Phase.BACKWARD, 0, 0) in world.computed
    messages = sent(world, CommitStore)
    assert [message.step for message in messages] == [6]
    world.check_end()


def test_checkpoints_are_committed_too() -> None:
    world = begun(commit_every=3, checkpoint_every=2, total_steps=7, host_blocks=ALL)
    assert [message.step for message in sent(world, CommitStore)] == [0, 2, 3, 4, 6, 7]
    assert [step for step, _ in world.exports] == [2, 4, 6, 7]


def test_resident_blocks_are_flushed_as_soon_as_each_is_updated() -> None:
    world = begun(commit_every=2, total_steps=3, **HOST_0_DEVICE_3)
    deliver_all_but(world, "flush 2", "gradient 2 0")
    assert {block: flushes.keys() for block, flushes in world.flushing.items()} == {3: {GPU}}
    deliver_all_but(world, "flush 2 3")
    assert world.asked_commits == [0]
    deliver_all_but(world)
    world.check_end()


def test_a_commit_that_waits_for_its_flush_is_not_overtaken_by_a_skipped_steps() -> None:
    """It also keeps the trainer's state of its step, although the trainer has advanced."""
    bad = frozenset({(4, 0)})
    world = begun(keeps_grads=True, commit_every=3, checkpoint_every=4, total_steps=5, host_blocks=ALL, bad=bad)
    deliver_all_but(world, "flush 3 0")
    assert world.pipeline.trainer.num_bad_steps == 1
    assert world.asked_commits == [0]
    deliver_all_but(world, "flush 5")
    assert world.asked_commits == [0, 3, 4]
    deliver_all_but(world)
    world.check_end()


def test_skipped_steps_between_commits_do_not_wait_for_one() -> None:
    bad = frozenset({(4, 0), (5, 1)})
    world = begun(keeps_grads=True, commit_every=3, total_steps=6, host_blocks=ALL, bad=bad)
    deliver_all_but(world, "commit 3")
    assert (6, Phase.BACKWARD, 0, 0) in world.computed
    assert world.last_complete == 2
    deliver_all_but(world)
    world.check_end()


def test_a_skipped_commit_step_flushes_what_no_commit_has_kept() -> None:
    world = begun(keeps_grads=True, commit_every=3, total_steps=4, bad=frozenset({(2, 0), (3, 1)}), **HOST_0_DEVICE_3)
    messages = sent(world, FlushBlock, CommitStore)
    order = [(type(message), message.step) for message in messages]
    assert order[:4] == [(CommitStore, 0), (FlushBlock, 1), (FlushBlock, 1), (CommitStore, 3)]
    assert [message.states_step for message in messages if isinstance(message, CommitStore)] == [0, 1, 4]
    world.check_end()


def test_where_all_steps_since_the_last_commit_are_skipped_nothing_is_flushed() -> None:
    world = begun(keeps_grads=True, commit_every=2, total_steps=2, bad=frozenset({(1, 0), (2, 1)}), host_blocks=ALL)
    assert [(type(m), m.step) for m in sent(world, FlushBlock, CommitStore)] == [(CommitStore, 0), (CommitStore, 2)]
    world.check_end()


# --- stop -----------------------------------------------------------------------------------------------------------


def test_a_stop_between_commits_commits_the_step_that_is_over() -> None:
    world = begun(commit_every=5, total_steps=9, num_evaluation_groups=1, evaluate_every=2, **HOST_0_DEVICE_3)
    deliver_all_but(world, "compute 15")  # the first operation of the evaluation after step 2
    assert world.last_complete == 2
    world.stop()
    assert {block: {flush.step for flush in flushes.values()} for block, flushes in world.flushing.items()} == {
        0: {2},
        3: {2},
    }
    deliver_all_but(world, "compute 15")
    assert world.committed == 2
    assert world.last_complete == 2
    deliver_all_but(world)
    world.check_end()


def test_a_stop_after_a_skipped_step_renames_nothing_that_is_read() -> None:
    bad = frozenset({(2, 0)})
    options: dict[str, Any] = {"num_evaluation_groups": 1, "evaluate_every": 2, "host_blocks": ALL}
    world = begun(keeps_grads=True, commit_every=5, total_steps=9, bad=bad, **options)
    deliver_all_but(world, "compute 15")
    world.stop()
    deliver_all_but(world, "compute 15")
    assert not world.flushing
    assert world.asked_commits == [0]
    (commit,) = sent(world, CommitStore)
    assert isinstance(commit, CommitStore)
    assert (commit.step, commit.states_step) == (2, 1)
    world.check_end()


# --- places of gradients and states -------------------------------------------------------------------------------


def test_actors_with_device_blocks_and_with_others_update_and_skip_a_step() -> None:
    device = frozenset({1, 3})
    world = begun(device_blocks=device, keeps_grads=True, total_steps=2, bad=frozenset({(2, 0)}))
    messages = sent(world, UpdateStep, SkipStep)
    assert [(type(m), m.step) for m in messages] == [(UpdateStep, 1)] * 2 + [(SkipStep, 2)] * 2  # gpu-0, optimizer-0
    world.check_end()


def test_updates_on_the_device_and_at_the_optimizers_take_no_place_from_each_other() -> None:
    world = begun(keeps_grads=True, chunks_per_block=(1,) * 6, device_blocks=frozenset({0, 1, 2}), max_updating=2)
    deliver_all_but(world, "update")
    assert sorted(block for _, block in world.updating) == [0, 1, 3, 4]
    deliver_all_but(world)
    world.check_end()


def test_spilled_gradients_wait_until_the_step_before_is_committed() -> None:
    world = begun(keeps_grads=True, spilled_blocks=frozenset({2, 3}))
    deliver_all_but(world, "commit 1")
    assert {block for step, block in world.reported if step == 2} == {0, 1}
    assert {block for step, phase, block, _ in world.computed if step == 2 and phase in WITH_GRADIENT} == {0, 1, 2, 3}
    assert not world.offloading
    deliver_all_but(world)
    world.check_end()


# --- restoring ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("initial_step", "step"), [(None, 0), (1, 1)], ids=["fresh", "resumed"])
def test_nothing_is_computed_before_all_states_are_restored(initial_step: int | None, step: int) -> None:
    world = begun(num_optimizers=2, initial_step=initial_step, **HOST_0_DEVICE_3)
    last = f"restore {step} {GPU}"
    deliver_all_but(world, last)
    assert world.choices()[0].answers == last
    assert not world.computing
    assert not sent(world, RestoreStates)
    world.check_end()


def test_a_stop_before_anything_is_computed_restores_nothing() -> None:
    world = begun(host_blocks=ALL)
    world.stop()
    assert not sent(world, RestoreStates)
    world.check_end()


# --- timeouts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kept", "actor", "what"),
    [
        ("restore 0 gpu-0", "gpu-0", "reading the states of step 0 into memory"),
        ("update 1 3", "gpu-0", "the update of block 3 in step 1"),
        ("flush 2 0 optimizer-1", "optimizer-1", "the flush of block 0, as step 2 left it"),
    ],
)
def test_a_missed_deadline_names_step_block_and_actor(kept: str, actor: str, what: str) -> None:
    world = begun(num_optimizers=2, commit_every=2, deadline_s=30.0, **HOST_0_DEVICE_3)
    deliver_all_but(world, kept)
    world.pipeline.waits.check(30.0)
    with pytest.raises(
        DeadlineMissedError, match=f"{actor} has been silent for 30.1 s; its oldest pending reply is {what}"
    ):
        world.pipeline.waits.check(30.1)
