"""Single cases of the policy's behaviour."""

import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.policy.jobs import GPU, JOB, grad_chunks, make_shape
from tests.support.policy.world import World, deliver_all_but, sent
from windlass.actors.messages import (
    BlockBackwardDone,
    BlockComputed,
    BlockFlushed,
    BlockUpdated,
    CommitStore,
    ComputeBlock,
    GradDiscarded,
    GradOffloaded,
    LossComputed,
    Message,
    ModelExported,
    ModelLoaded,
    OffloadGrad,
    Phase,
    StatesRestored,
    StoreCommitted,
    UpdateBlock,
)
from windlass.actors.policy.block_queue import QueueOrder
from windlass.actors.policy.pending_replies import DeadlineMissedError, Instruction, UnexpectedEventError
from windlass.actors.policy.scheduler_core import NotFiniteError, Pipeline
from windlass.actors.policy.trainer_state import TrainerState
from windlass.storage.ids import ActorName, BlockIndex, Step

STEP, BLOCK = Step(1), BlockIndex(2)


# --- benefits of the update orders ---------------------------------------------------------------------------------


def test_updates_begin_while_the_backward_pass_goes_on() -> None:
    world = World(make_shape())
    world.start()
    deliver_all_but(world, "gradient 1 2")  # the backward pass of the last layer never ends
    assert (1, Phase.HEAD, 3, 0) in world.computed
    assert world.written[3] == 1
    assert world.written[:3] == [0, 0, 0]


def test_the_next_forward_pass_begins_while_later_blocks_are_updated() -> None:
    world = World(make_shape(clip_norm=1.0))
    world.start()
    deliver_all_but(world, "gradient 1 0")  # by then all other gradients are in host memory
    deliver_all_but(world, "update 1 2", "update 1 3")
    assert world.computed[-2:] == [(2, Phase.FORWARD, 0, 0), (2, Phase.FORWARD, 1, 0)]
    assert world.committed == 0
    deliver_all_but(world)
    world.check_end()


def test_kept_gradients_are_updated_when_the_backward_pass_is_over() -> None:
    world = World(make_shape(keeps_grads=True))
    world.start()
    deliver_all_but(world, "gradient 1 0")
    assert set(world.written) == {0}
    deliver_all_but(world, "commit 1")
    assert set(world.written) == {1}
    deliver_all_but(world)
    world.check_end()


@pytest.mark.parametrize("keeps_grads", [False, True])
@pytest.mark.parametrize("overlaps_steps", [False, True])
def test_updates_share_the_time_with_the_next_step_where_steps_overlap(overlaps_steps: bool, keeps_grads: bool) -> None:
    world = World(make_shape(keeps_grads=keeps_grads, overlaps_steps=overlaps_steps))
    world.start()
    deliver_all_but(world, "update 1 3")
    assert world.written == [1, 1, 1, 0]
    forward = [(2, Phase.FORWARD, block, 0) for block in range(3)]
    assert world.computed[-3:] == (forward if overlaps_steps else [(1, Phase.BACKWARD, b, 0) for b in (2, 1, 0)])
    deliver_all_but(world)
    world.check_end()


def test_the_next_step_reads_what_is_not_yet_committed_and_overwrites_nothing() -> None:
    world = World(make_shape())
    world.start()
    deliver_all_but(world, "commit 1")
    assert (2, Phase.BACKWARD, 0, 0) in world.computed
    assert world.to_update
    assert set(world.written) == {1}
    deliver_all_but(world)
    world.check_end()


def turns(world: World, kind: type[OffloadGrad] | type[UpdateBlock], *kept: str) -> list[int]:
    """Blocks of step 1 in the order of the policy's `kind` commands, if everything else is faster."""
    found: list[int] = []
    world.start()
    while choices := world.choices():
        faster = [choice for choice in choices if not choice.answers.startswith(kept)]
        messages = [instruction.message for instruction in world.deliver((faster or choices)[0])]
        found += [message.block for message in messages if isinstance(message, kind) and message.step == 1]
    return found


@pytest.mark.parametrize(("kind", "kept"), [(OffloadGrad, "offload 1"), (UpdateBlock, "update 1")])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [5, 0, 1, 2, 3, 4]),
        ({"queues": QueueOrder.FIFO}, [5, 4, 3, 2, 1, 0]),
        # Commands that were sent cannot be overtaken.
        ({"max_updating": 3, "max_offloading": 3}, [5, 4, 3, 0, 1, 2]),
    ],
)
def test_a_late_urgent_block_overtakes_what_waits(
    kind: type[OffloadGrad] | type[UpdateBlock], kept: str, options: dict[str, Any], expected: list[int]
) -> None:
    limits = {"max_updating": 1, "max_offloading": 1}
    world = World(make_shape(chunks_per_block=(1,) * 6, **(limits | options)))
    assert turns(world, kind, kept) == expected


@pytest.mark.parametrize(
    ("queues", "expected"), [(QueueOrder.PRIORITY, [1, 0, 2, 3, 4, 5]), (QueueOrder.FIFO, [5, 4, 3, 2, 1, 0])]
)
def test_kept_gradients_are_updated_in_forward_order_or_as_they_came(queues: QueueOrder, expected: list[int]) -> None:
    """The last gradient is still in flight when the updates begin."""
    world = World(make_shape(chunks_per_block=(1,) * 6, keeps_grads=True, queues=queues, max_updating=1))
    assert turns(world, UpdateBlock, "update 1", "gradient 1 0") == expected


# --- clipping -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scales_loss", [False, True])
@pytest.mark.parametrize("size", [0.0, 1e-4, 0.3, 1.0, 40.0, 1e30])
def test_the_clipping_factor_is_torchs(size: float, scales_loss: bool) -> None:
    shape = make_shape(chunks_per_block=(1, 1, 1), clip_norm=0.75, total_steps=1)
    loss_scale = 65536.0 if scales_loss else 1.0
    pipeline = Pipeline(shape, TrainerState(scales_loss=scales_loss), Step(0))
    instructions = pipeline.start(0.0)
    grads = [torch.full((3,), value, dtype=torch.float64) for value in (0.2, 0.3, size)]
    scales = []
    while instructions:
        instruction = instructions.pop(0)
        message = instruction.message
        events: list[Message] = []
        if isinstance(message, ComputeBlock):
            if message.phase in (Phase.HEAD, Phase.BACKWARD):
                sq_sum = float((grads[message.block] * loss_scale).square().sum())
                events.append(BlockBackwardDone(job=JOB, step=message.step, block=message.block, grad_sq_sum=sq_sum))
            events.append(
                BlockComputed(
                    job=JOB,
                    step=message.step,
                    op=message.op,
                    phase=message.phase,
                    block=message.block,
                    compute_s=0.0,
                    is_finite=True,
                )
            )
        elif isinstance(message, UpdateBlock):
            scales.append(message.grad_scale)
        elif isinstance(message, OffloadGrad):
            events.append(
                GradOffloaded(job=JOB, step=message.step, block=message.block, chunks=grad_chunks(shape, message.block))
            )
        for event in events:
            instructions += pipeline.handle(event, 0.0)
    parameters = [torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.clone()
    norm = torch.nn.utils.clip_grad_norm_(parameters, 0.75)
    assert len(scales) == len(grads)
    for scale in scales:
        torch.testing.assert_close(parameters[0].grad, grads[0] * loss_scale * scale, rtol=1e-12, atol=0)
    torch.testing.assert_close(pipeline.ends[1].grad_norm, float(norm), rtol=1e-12, atol=0)


@settings(deadline=None, max_examples=examples(60))
@given(order=st.permutations(range(6)), sq_sums=st.lists(st.floats(1e-8, 1e8), min_size=6, max_size=6))
@example(order=[0, 1, 2, 3, 4, 5], sq_sums=[1.0, 0.7, 1e-3, 3e5, 0.1, 1e16])
def test_pipeline_with_squared_norms_in_any_order_gives_the_bits_of_one_worker(
    order: list[int], sq_sums: list[float]
) -> None:
    """One worker reports them last to first, and the policy adds each on arrival."""
    shape = make_shape(chunks_per_block=(1,) * 6, clip_norm=0.75, total_steps=1, max_prefetched=20)
    pipeline = Pipeline(shape, TrainerState(scales_loss=False), Step(0))
    pipeline.start(0.0)
    instructions: list[Instruction] = []
    for block in order:
        event = BlockBackwardDone(job=JOB, step=STEP, block=BlockIndex(block), grad_sq_sum=sq_sums[block])
        instructions += pipeline.handle(event, 0.0)
    total = 0.0
    for sq_sum in reversed(sq_sums):
        total += sq_sum
    assert pipeline.ends[1].grad_norm == math.sqrt(total)
    offloads = [each.message for each in instructions if isinstance(each.message, OffloadGrad)]
    for message in offloads:
        chunks = grad_chunks(shape, message.block)
        event = GradOffloaded(job=JOB, step=STEP, block=message.block, chunks=chunks)
        instructions += pipeline.handle(event, 0.0)
    scales = {each.message.grad_scale for each in instructions if isinstance(each.message, UpdateBlock)}
    assert scales == {min(0.75 / (math.sqrt(total) + 1e-6), 1.0)}


# --- gradients that are not finite ----------------------------------------------------------------------------------


def test_a_skipped_step_is_committed_as_it_was_and_counts_for_nothing() -> None:
    world = World(make_shape(keeps_grads=True, total_steps=3), bad=frozenset({(2, 1)}), scales_loss=True)
    world.start()
    deliver_all_but(world, "gradient 2 0")
    assert world.committed == 1
    messages = sent(world, Message)
    world.check_end()
    assert {m.step for m in messages if isinstance(m, UpdateBlock)} == {3}
    assert {m.optimizer_step for m in messages if isinstance(m, UpdateBlock)} == {2}
    assert {m.grad_scale for m in messages if isinstance(m, UpdateBlock)} == {1 / 32768}
    assert [(m.step, m.states_step) for m in messages if isinstance(m, CommitStore)] == [(2, 1), (3, 3)]
    dropped = [(m.step, m.block) for m in messages if isinstance(m, GradDiscarded)]
    assert sorted(dropped) == [(2, block) for block in range(4)]


def test_a_skipped_step_is_not_committed_while_a_gradient_is_on_its_way() -> None:
    world = World(make_shape(keeps_grads=True), bad=frozenset({(1, 3)}))
    world.start()
    deliver_all_but(world, "offload 1 2")
    assert world.asked_commits == [0]
    assert world.computed[-1] == (1, Phase.BACKWARD, 0, 0)
    assert sent(world, GradDiscarded) == [
        GradDiscarded(job=JOB, step=STEP, block=BLOCK, chunks=grad_chunks(world.shape, BLOCK))
    ]
    world.check_end()


def test_a_skipped_step_waits_until_the_one_before_is_safe() -> None:
    world = World(make_shape(keeps_grads=True, num_ssds=2), bad=frozenset({(2, 0)}))
    world.start()
    deliver_all_but(world, "commit 1 ssd-1")
    assert world.computed[-1] == (2, Phase.BACKWARD, 0, 0)
    assert world.asked_commits == [0, 0, 1, 1]
    deliver_all_but(world, "commit 2 ssd-0")
    assert world.asked_commits == [0, 0, 1, 1, 2, 2]
    assert world.committed == 1
    deliver_all_but(world)
    world.check_end()


def test_nothing_of_the_next_step_begins_before_a_skipped_one_is_committed() -> None:
    world = World(make_shape(keeps_grads=True), bad=frozenset({(1, 0)}))
    world.start()
    deliver_all_but(world, "commit 1")
    assert world.asked_commits == [0, 1]
    assert max(step for step, *_ in world.computed) == 1
    assert not world.computing
    deliver_all_but(world)
    world.check_end()


def test_the_last_step_can_be_skipped_and_is_evaluated_and_exported() -> None:
    world = World(make_shape(keeps_grads=True, num_evaluation_groups=1), bad=frozenset({(2, 0)}))
    world.start()
    deliver_all_but(world)
    world.check_end()
    assert world.exports == [(2, "/models/out")]


def bad_in_all_blocks(*steps: int) -> frozenset[tuple[int, int]]:
    return frozenset((step, block) for step in steps for block in range(4))


@pytest.mark.parametrize("max_bad_steps", [0, 1, 2])
def test_too_many_skipped_steps_in_a_row_end_the_job(max_bad_steps: int) -> None:
    shape = make_shape(keeps_grads=True, total_steps=5, max_bad_steps=max_bad_steps)
    world = World(shape, bad=bad_in_all_blocks(2, 3, 4, 5))
    world.start()
    deliver_all_but(world, f"gradient {2 + max_bad_steps} 0")
    assert world.committed == 1 + max_bad_steps
    assert not world.failed
    deliver_all_but(world)
    assert world.failed


def test_a_good_step_in_between_resets_the_count() -> None:
    shape = make_shape(keeps_grads=True, total_steps=8, max_bad_steps=2)
    world = World(shape, bad=bad_in_all_blocks(1, 2, 4, 5, 7, 8))
    world.start()
    deliver_all_but(world)
    assert not world.failed
    world.check_end()


def test_a_resumed_job_counts_the_steps_skipped_before() -> None:
    shape = make_shape(keeps_grads=True, total_steps=5, max_bad_steps=2)
    world = World(shape, 3, bad=bad_in_all_blocks(2, 3, 4))
    world.start()
    deliver_all_but(world)
    assert world.failed
    assert world.committed == 3


@pytest.mark.parametrize("block", [3, 1, 0])
def test_where_updates_have_begun_a_bad_gradient_ends_the_job_at_once(block: int) -> None:
    world = World(make_shape(), bad=frozenset({(2, block)}))
    world.start()
    deliver_all_but(world)
    assert world.failed
    last = world.delivered[-1]
    assert isinstance(last, BlockBackwardDone)
    assert (last.step, last.block) == (2, block)


@pytest.mark.parametrize("sizes", [(math.inf, 1.0), (1.0, math.nan), (math.nan, math.inf), (math.inf, math.inf)])
def test_any_gradient_that_is_not_finite_makes_the_step_bad(sizes: tuple[float, float]) -> None:
    pipeline = Pipeline(
        make_shape(chunks_per_block=(1, 1), clip_norm=1.0, max_bad_steps=0), TrainerState(False), Step(0)
    )
    pipeline.start(0.0)
    head = {"job": JOB, "step": STEP, "op": 2, "phase": Phase.HEAD, "block": BlockIndex(1), "compute_s": 0.1}
    first = {"job": JOB, "step": STEP, "op": 1, "phase": Phase.FORWARD, "block": BlockIndex(0), "compute_s": 0.1}
    pipeline.handle(BlockComputed(**first, is_finite=True), 0.0)
    pipeline.handle(BlockBackwardDone(job=JOB, step=STEP, block=BlockIndex(1), grad_sq_sum=sizes[0]), 0.0)
    pipeline.handle(BlockComputed(**head, is_finite=True), 0.0)
    with pytest.raises(NotFiniteError, match="the gradients of 1 steps in a row, up to step 1, were not") as caught:
        pipeline.handle(BlockBackwardDone(job=JOB, step=STEP, block=BlockIndex(0), grad_sq_sum=sizes[1]), 0.0)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


# --- stop and resume -----------------------------------------------------------------------------------------------


def test_a_stop_while_the_model_loads_trains_nothing() -> None:
    world = World(make_shape())
    world.start()
    world.stop()
    assert not world.pipeline.finished
    deliver_all_but(world)
    world.check_end()
    assert world.computed == []
    assert world.committed == 0


def test_a_stop_in_the_last_step_skips_evaluation_and_export() -> None:
    world = World(make_shape(total_steps=1, num_evaluation_groups=1))
    world.start()
    deliver_all_but(world, "compute 2")
    world.stop()
    deliver_all_but(world)
    world.check_end()
    assert world.exports == []
    assert Phase.EVALUATE not in {phase for _, phase, _, _ in world.computed}


def test_a_stop_during_an_export_waits_for_it() -> None:
    world = World(make_shape(checkpoint_every=1))
    world.start()
    deliver_all_but(world, "export")
    world.stop()
    assert not world.pipeline.finished
    deliver_all_but(world)
    world.check_end()
    assert world.exports == [(1, "/models/out-step-1")]


def test_a_job_lost_after_its_last_commit_resumes_with_evaluation_and_export() -> None:
    world = World(make_shape(num_evaluation_groups=1), initial_step=2)
    assert world.expected == [
        *((2, Phase.EVALUATE, block, 0) for block in range(3)),
        (2, Phase.EVALUATE_HEAD, 3, 0),
        (2, None, 0, 0),
    ]
    world.start()
    deliver_all_but(world)
    world.check_end()
    assert world.exports == [(2, "/models/out")]


# --- unexpected events ---------------------------------------------------------------------------------------------

UNASKED = [
    ModelLoaded(job=JOB, step=Step(0)),
    BlockComputed(job=JOB, step=STEP, op=9, phase=Phase.FORWARD, block=BLOCK, compute_s=0.1, is_finite=True),
    BlockBackwardDone(job=JOB, step=STEP, block=BLOCK, grad_sq_sum=1.0),
    GradOffloaded(job=JOB, step=STEP, block=BLOCK, chunks=()),
    BlockUpdated(job=JOB, step=STEP, block=BLOCK, actor=ActorName("optimizer-0")),
    BlockFlushed(job=JOB, step=STEP, block=BLOCK, actor=ActorName("optimizer-0")),
    StatesRestored(job=JOB, step=STEP, actor=ActorName("optimizer-0")),
    StoreCommitted(job=JOB, step=STEP, actor=ActorName("ssd-0"), bytes_read=0, bytes_written=0),
    ModelExported(job=JOB, step=STEP, path="/models/out"),
    LossComputed(job=JOB, step=STEP, phase=Phase.HEAD, loss_sum=1.0, num_targets=1, num_correct=0, group=0),
]


@pytest.mark.parametrize("event", UNASKED, ids=lambda event: type(event).__name__)
def test_unexpected_event_is_refused(event: Message) -> None:
    pipeline = Pipeline(make_shape(), TrainerState(scales_loss=False), Step(0))
    pipeline.start(0.0)
    with pytest.raises(UnexpectedEventError) as caught:
        pipeline.handle(event, 0.0)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_pipeline_with_skipped_operation_raises_at_once() -> None:
    """If its step were committed in between, no attempt would repeat the operation: an evaluation would be missing."""
    pipeline = Pipeline(make_shape(), TrainerState(scales_loss=False), Step(0))
    asked = [i.message for i in pipeline.start(0.0) if isinstance(i.message, ComputeBlock)]
    done: dict[str, Any] = {"job": JOB, "step": STEP, "phase": Phase.FORWARD, "compute_s": 0.0, "is_finite": True}
    with pytest.raises(UnexpectedEventError, match="the forward of block 1 in step 1, and not the forward of block 0"):
        pipeline.handle(BlockComputed(**done, op=asked[1].op, block=asked[1].block), 0.0)


def test_an_answer_of_the_wrong_actor_is_refused() -> None:
    # there is one chunk, which is optimizer-0's
    world = World(make_shape(chunks_per_block=(1, 1, 1), num_optimizers=2))
    world.start()
    deliver_all_but(world, "update")
    stranger = BlockUpdated(job=JOB, step=STEP, block=BLOCK, actor=ActorName("optimizer-1"))
    with pytest.raises(UnexpectedEventError, match=r"optimizer-1 reported .* update .* was not requested"):
        world.pipeline.handle(stranger, 0.0)


# --- timeouts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kept", "actor", "what"),
    [
        ("load", "optimizer-0", "loading the model"),
        ("compute 2", "gpu-0", "the forward of block 1 in step 1"),
        ("gradient 1 2", "gpu-0", "the gradient of block 2 in step 1"),
        ("offload 1 3", "gpu-0", "the gradient offload of block 3 in step 1"),
        ("update 1 2 optimizer-1", "optimizer-1", "the update of block 2 in step 1"),
        ("commit 1 ssd-1", "ssd-1", "the commit of step 1"),
        ("export 2", "optimizer-0", "the export of step 2"),
    ],
)
def test_a_missed_deadline_names_step_block_and_actor(kept: str, actor: str, what: str) -> None:
    world = World(make_shape(num_optimizers=2, num_ssds=2, deadline_s=30.0))
    world.start(now_s=100.0)
    while choices := [c for c in world.choices() if not c.answers.startswith(kept)]:
        world.deliver(choices[0], 100.0)
    world.pipeline.waits.check(130.0)
    with pytest.raises(DeadlineMissedError) as caught:
        world.pipeline.waits.check(130.1)
    assert what in {wait.what for wait in world.pipeline.waits.outstanding.values() if wait.actor == actor}
    if not kept.startswith("gradient"):  # its operation was requested at the same time, and is named first
        assert str(caught.value).startswith(f"{actor} did not finish {what} within 30 s")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_all_overdue_actors_are_named() -> None:
    """The order of requests to two SSD servers does not show which of them hangs."""
    world = World(make_shape(num_ssds=2, deadline_s=30.0))
    world.start(now_s=100.0)
    while choices := [c for c in world.choices() if not c.answers.startswith("commit 0")]:
        world.deliver(choices[0], 100.0)
    with pytest.raises(DeadlineMissedError) as caught:
        world.pipeline.waits.check(130.1)
    late = [f"ssd-{i} did not finish the commit of step 0 within 30 s" for i in (0, 1)]
    assert str(caught.value).startswith("; ".join(late))


def test_progress_puts_a_deadline_off() -> None:
    world = World(make_shape(deadline_s=30.0))
    world.start(now_s=0.0)
    world.pipeline.waits.heard_from(ActorName("optimizer-0"), 25.0)
    world.pipeline.waits.check(55.0)
    with pytest.raises(DeadlineMissedError):
        world.pipeline.waits.check(55.1)


def test_another_actors_progress_does_not() -> None:
    world = World(make_shape(deadline_s=30.0))
    world.start(now_s=0.0)
    world.pipeline.waits.heard_from(GPU, 25.0)
    with pytest.raises(DeadlineMissedError):
        world.pipeline.waits.check(31.0)
