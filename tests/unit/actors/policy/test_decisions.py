"""A commit over the SSD servers of several boxes counts once all have it and that is noted durably."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.support.policy.jobs import JOB, make_shape
from tests.support.policy.world import World, deliver_all_but, sent
from windlass.actors.messages import CommitDecided, CommitReached, ExportModel, StoreCommitted
from windlass.actors.policy.actions import DecideCommit
from windlass.actors.policy.pending_replies import DeadlineMissedError, Instruction, UnexpectedEventError
from windlass.storage.ids import ActorName, Step

SSDS = tuple(map(ActorName, ("b0/ssd-0", "b0/ssd-1", "b1/ssd-0")))


def begun(**options: Any) -> World:
    world = World(replace(make_shape(**options), ssd_servers=SSDS))
    world.start()
    return world


def committed(ssd: ActorName, step: int) -> StoreCommitted:
    return StoreCommitted(job=JOB, step=Step(step), actor=ssd, bytes_read=0, bytes_written=0)


@pytest.mark.parametrize("order", list(itertools.permutations(SSDS)))
def test_nothing_follows_the_last_ssds_commit_before_it_is_durable(order: Sequence[ActorName]) -> None:
    world = begun(checkpoint_every=1)
    deliver_all_but(world, "commit 1")
    assert world.committed == 0
    assert 2 not in world.how
    pipeline = world.pipeline
    for ssd in order[:-1]:
        assert pipeline.handle(committed(ssd, 1), 0.0) == []
    assert pipeline.handle(committed(order[-1], 1), 0.0) == [DecideCommit(step=Step(1))]
    assert (pipeline.committed, pipeline.commits.last_complete_step) == (0, 0)
    assert not pipeline.finished
    follows = pipeline.commit_decided(Step(1), 0.0)
    assert pipeline.committed == 1
    message = CommitDecided(job=JOB, step=Step(1))
    assert follows[:3] == [Instruction(ssd, message) for ssd in SSDS], "the SSD servers are told first"
    assert [type(action.message) for action in follows[3:] if isinstance(action, Instruction)] == [ExportModel]


def test_spilled_gradients_and_updates_wait_for_the_decision() -> None:
    world = begun(spilled_blocks=frozenset(range(4)), keeps_grads=True)
    deliver_all_but(world, "commit 1 b1/ssd-0")
    assert world.committed == 0
    assert 2 not in world.how
    assert [message.step for message in sent(world, CommitReached)] == [1, 2]
    world.check_end()


def test_late_ssd_server_of_another_box_is_named() -> None:
    world = begun()
    deliver_all_but(world, "commit 1 b1/ssd-0")
    with pytest.raises(DeadlineMissedError, match=r"b1/ssd-0 has been silent .* the commit of step 1"):
        world.pipeline.waits.check(1000.0)
    assert world.committed == 0


def test_repeated_or_foreign_answer_is_an_error() -> None:
    world = begun()
    deliver_all_but(world, "commit 1 b1/ssd-0")
    for ssd in ("b0/ssd-1", "b2/ssd-0"):
        with pytest.raises(UnexpectedEventError, match=f"{ssd} sent StoreCommitted of 1"):
            world.pipeline.handle(committed(ActorName(ssd), 1), 0.0)
    assert world.committed == 0


def test_each_ssd_server_of_each_box_commits_each_step() -> None:
    world = begun(total_steps=3, commit_every=2, host_blocks=frozenset(range(4)))
    deliver_all_but(world)
    world.check_end()
    assert world.asked_commits == [0, 0, 0, 2, 2, 2, 3, 3, 3]
