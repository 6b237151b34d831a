"""Single cases of the policy's behaviour."""

import math
import pickle
from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.policy.jobs import GPU, JOB, computed, grad_ready, make_shape
from tests.support.policy.world import World, deliver_all_but, sent
from windlass.actors.messages import (
    BlockFlushed,
    BlockUpdated,
    CommitReached,
    CommitStore,
    ComputeBlock,
    ComputeBlocks,
    ComputeProgressed,
    Message,
    ModelExported,
    ModelLoaded,
    Phase,
    SkipStep,
    StatesRestored,
    StoreCommitted,
    UpdateStep,
)
from windlass.actors.policy.actions import Action, EndStep
from windlass.actors.policy.pending_replies import (
    DeadlineMissedError,
    Instruction,
    PendingReplies,
    UnexpectedEventError,
)
from windlass.actors.policy.scheduler_core import Pipeline
from windlass.actors.policy.step_updates import NotFiniteError
from windlass.actors.policy.trainer_state import TrainerState
from windlass.storage.ids import ActorName, BlockIndex, Step

STEP, BLOCK = Step(1), BlockIndex(2)


def messages_of(actions: Sequence[Action]) -> list[Message]:
    return [action.message for action in actions if isinstance(action, Instruction)]


def updated(update: UpdateStep, num_blocks: int) -> list[BlockUpdated]:
    """The reports of all blocks."""
    actor = ActorName("optimizer-0")
    return [BlockUpdated(job=JOB, step=update.step, block=BlockIndex(b), actor=actor) for b in range(num_blocks)]


# --- benefits of the update orders ---------------------------------------------------------------------------------


def test_updates_begin_while_the_backward_pass_goes_on() -> None:
    world = World(make_shape())
    world.start()
    deliver_all_but(world, "compute 5")  # the backward pass of the last layer never ends
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
    assert {step for step, *_ in world.kept} == {2}  # no actor may update with these gradients yet
    assert set(world.written) == {1}
    deliver_all_but(world)
    world.check_end()


# --- clipping -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scales_loss", [False, True])
@pytest.mark.parametrize("size", [0.0, 1e-4, 0.3, 1.0, 40.0, 1e30])
def test_the_clipping_factor_is_torchs(size: float, scales_loss: bool) -> None:
    shape = make_shape(chunks_per_block=(1, 1, 1), clip_norm=0.75, total_steps=1)
    loss_scale = 65536.0 if scales_loss else 1.0
    pipeline = Pipeline(shape, TrainerState(scales_loss=scales_loss), Step(0))
    messages = messages_of(pipeline.start(0.0))
    grads = [torch.full((3,), value, dtype=torch.float64) for value in (0.2, 0.3, size)]
    scales, ends = [], []
    while messages:
        message, events = messages.pop(0), list[Message]()
        if isinstance(message, ComputeBlocks):
            for operation in message.operations:
                events.append(computed(operation))
                if operation.phase in (Phase.HEAD, Phase.BACKWARD):
                    sq_sum = float((grads[operation.block] * loss_scale).square().sum())
                    events.append(grad_ready(operation.step, operation.block, sq_sum))
        elif isinstance(message, UpdateStep):
            scales.append(message.grad_scale)
            events += updated(message, len(grads))
        for event in events:
            actions = pipeline.handle(event, 0.0)
            messages += messages_of(actions)
            ends += [action.end for action in actions if isinstance(action, EndStep)]
    parameters = [torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.clone()
    norm = torch.nn.utils.clip_grad_norm_(parameters, 0.75)
    (scale,) = scales
    torch.testing.assert_close(parameters[0].grad, grads[0] * loss_scale * scale, rtol=1e-12, atol=0)
    (end,) = ends
    assert end is not None
    torch.testing.assert_close(end.grad_norm, float(norm), rtol=1e-12, atol=0)


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
    actions: list[Action] = []
    for block in order:
        actions += pipeline.handle(grad_ready(STEP, block, sq_sums[block]), 0.0)
    (update,) = (message for message in messages_of(actions) if isinstance(message, UpdateStep))
    for event in updated(update, 6):
        actions += pipeline.handle(event, 0.0)
    total = 0.0
    for sq_sum in reversed(sq_sums):
        total += sq_sum
    (end,) = (action.end for action in actions if isinstance(action, EndStep))
    assert end is not None
    assert end.grad_norm == math.sqrt(total)
    assert update.grad_scale == min(0.75 / (math.sqrt(total) + 1e-6), 1.0)


@settings(deadline=None, max_examples=examples(60))
@given(order=st.permutations(range(3)), sq_sums=st.lists(st.floats(1e-8, 1e8), min_size=6, max_size=6))
@example(order=[0, 1, 2], sq_sums=[1.0, 0.7, 1e-3, 3e5, 0.1, 1e16])
def test_pipeline_with_lanes_adds_squared_norms_in_the_order_of_chunks(order: list[int], sq_sums: list[float]) -> None:
    """Whichever block comes first, and whoever reports it."""
    shape = make_shape(chunks_per_block=(2, 1, 3), clip_norm=0.75, total_steps=1, max_prefetched=20, has_lanes=True)
    of_blocks = [tuple(sq_sums[:2]), tuple(sq_sums[2:3]), tuple(sq_sums[3:])]
    pipeline = Pipeline(shape, TrainerState(scales_loss=False), Step(0))
    pipeline.start(0.0)
    actions: list[Action] = []
    for block in order:
        actions += pipeline.handle(grad_ready(STEP, block, *of_blocks[block]), 0.0)
    (update,) = (message for message in messages_of(actions) if isinstance(message, UpdateStep))
    total = 0.0
    for sq_sum in sq_sums:
        total += sq_sum
    assert update.grad_scale == min(0.75 / (math.sqrt(total) + 1e-6), 1.0)


# --- gradients that are not finite ----------------------------------------------------------------------------------


def test_a_skipped_step_is_committed_as_it_was_and_counts_for_nothing() -> None:
    world = World(make_shape(keeps_grads=True, total_steps=3), bad=frozenset({(2, 1)}), scales_loss=True)
    world.start()
    deliver_all_but(world, "gradient 2 0")
    assert world.committed == 1
    messages = sent(world, Message)
    world.check_end()
    assert {m.step for m in messages if isinstance(m, UpdateStep)} == {3}
    assert {m.optimizer_step for m in messages if isinstance(m, UpdateStep)} == {2}
    assert {m.grad_scale for m in messages if isinstance(m, UpdateStep)} == {1 / 32768}
    assert [(m.step, m.states_step) for m in messages if isinstance(m, CommitStore)] == [(2, 1), (3, 3)]
    assert [m.step for m in messages if isinstance(m, SkipStep)] == [2]


def test_a_skipped_step_is_not_committed_while_a_gradient_is_on_its_way() -> None:
    world = World(make_shape(keeps_grads=True), bad=frozenset({(1, 3)}))
    world.start()
    deliver_all_but(world, "gradient 1 2")
    assert world.asked_commits == [0]
    assert world.computed[-1] == (1, Phase.BACKWARD, 0, 0)
    assert [message.step for message in sent(world, SkipStep)] == [1]
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
    assert isinstance(last, ComputeProgressed)
    assert [(grad.step, grad.block) for grad in last.grads] == [(2, block)]


@pytest.mark.parametrize("sizes", [(math.inf, 1.0), (1.0, math.nan), (math.nan, math.inf), (math.inf, math.inf)])
def test_any_gradient_that_is_not_finite_makes_the_step_bad(sizes: tuple[float, float]) -> None:
    shape = make_shape(chunks_per_block=(1, 1), clip_norm=1.0, max_bad_steps=0)
    pipeline = Pipeline(shape, TrainerState(False), Step(0))
    pipeline.start(0.0)
    pipeline.handle(grad_ready(STEP, 1, sizes[0]), 0.0)
    with pytest.raises(NotFiniteError, match="the gradients of 1 steps in a row, up to step 1, were not") as caught:
        pipeline.handle(grad_ready(STEP, 0, sizes[1]), 0.0)
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

_OPERATION = ComputeBlock(
    job=JOB, step=STEP, op=99, phase=Phase.FORWARD, block=BLOCK, params=(), group=0, loss_scale=1.0
)
UNASKED = [
    ModelLoaded(job=JOB, step=Step(0), actor=ActorName("optimizer-0")),
    computed(_OPERATION),
    grad_ready(2, BLOCK, 1.0),
    BlockUpdated(job=JOB, step=Step(2), block=BLOCK, actor=ActorName("optimizer-0")),
    BlockFlushed(job=JOB, step=STEP, block=BLOCK, actor=ActorName("optimizer-0")),
    StatesRestored(job=JOB, step=STEP, actor=ActorName("optimizer-0")),
    StoreCommitted(job=JOB, step=STEP, actor=ActorName("ssd-0"), bytes_read=0, bytes_written=0),
    ModelExported(job=JOB, step=STEP, actor=ActorName("optimizer-0"), path="/models/out"),
    CommitReached(job=JOB, step=STEP),
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
    granted = messages_of(pipeline.start(0.0))[0]
    assert isinstance(granted, ComputeBlocks)
    with pytest.raises(UnexpectedEventError, match="the forward of block 1 in step 1, and not the forward of block 0"):
        pipeline.handle(computed(granted.operations[1]), 0.0)


def test_an_answer_of_the_wrong_actor_is_refused() -> None:
    # there is one chunk, which is optimizer-0's
    world = World(make_shape(chunks_per_block=(1, 1, 1), num_optimizers=2))
    world.start()
    deliver_all_but(world, "update")
    stranger = BlockUpdated(job=JOB, step=STEP, block=BLOCK, actor=ActorName("optimizer-1"))
    with pytest.raises(
        UnexpectedEventError, match=r"optimizer-1 sent BlockUpdated of 1, block 2, which was not requested"
    ):
        world.pipeline.handle(stranger, 0.0)


# --- timeouts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kept", "actor", "what"),
    [
        ("load", "optimizer-0", "loading the model"),
        ("compute 2", "gpu-0", "the forward of block 1 in step 1"),
        ("gradient 1 2", "gpu-0", "the gradient of block 2 in step 1"),
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
        text = f"{actor} has been silent for 30.1 s; its oldest pending reply is {what}"
        assert str(caught.value).startswith(text)
    assert caught.value.late[0] == actor
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.late) == (str(caught.value), caught.value.late)


def test_all_overdue_actors_are_named() -> None:
    """The order of requests to two SSD servers does not show which of them hangs."""
    world = World(make_shape(num_ssds=2, deadline_s=30.0))
    world.start(now_s=100.0)
    while choices := [c for c in world.choices() if not c.answers.startswith("commit 0")]:
        world.deliver(choices[0], 100.0)
    with pytest.raises(DeadlineMissedError) as caught:
        world.pipeline.waits.check(130.1)
    late = [f"ssd-{i} has been silent for 30.1 s; its oldest pending reply is the commit of step 0" for i in (0, 1)]
    assert str(caught.value).startswith("; ".join(late))


def test_progress_puts_a_deadline_off() -> None:
    world = World(make_shape(deadline_s=30.0))
    world.start(now_s=0.0)
    world.pipeline.waits.heard_from(ActorName("optimizer-0"), 25.0)
    world.pipeline.waits.check(55.0)
    with pytest.raises(DeadlineMissedError, match=r"^optimizer-0 has been silent for 30\.1 s; "):
        world.pipeline.waits.check(55.1)


def test_an_actor_that_was_heard_from_is_late_with_its_oldest_reply() -> None:
    """A sign of life makes the silence equal for all of its replies."""
    waits = PendingReplies(30.0, num_groups=1)
    for step, now_s in ((4, 20.0), (2, 0.0), (3, 10.0)):
        waits.expect_update(Step(step), BlockIndex(0), GPU, now_s)
    waits.heard_from(GPU, 25.0)
    with pytest.raises(
        DeadlineMissedError, match=r"silent for 35\.0 s; its oldest .* the update of block 0 in step 2;"
    ):
        waits.check(60.0)


def test_another_actors_progress_does_not() -> None:
    world = World(make_shape(deadline_s=30.0))
    world.start(now_s=0.0)
    world.pipeline.waits.heard_from(GPU, 25.0)
    with pytest.raises(DeadlineMissedError):
        world.pipeline.waits.check(31.0)


def test_an_update_that_is_reported_before_its_gradient_counts_once_the_gradient_is() -> None:
    """They come from different actors."""
    pipeline = Pipeline(make_shape(chunks_per_block=(1, 1)), TrainerState(scales_loss=False), Step(0))
    granted = messages_of(pipeline.start(0.0))[0]
    assert isinstance(granted, ComputeBlocks)
    early = BlockUpdated(job=JOB, step=STEP, block=BlockIndex(1), actor=ActorName("optimizer-0"))
    assert pipeline.handle(early, 0.0) == []
    with pytest.raises(UnexpectedEventError, match="which was not requested"):
        pipeline.handle(early, 0.0)
    assert pipeline.commits.versions == [0, 0]
    pipeline.handle(computed(granted.operations[0]), 0.0)
    pipeline.handle(computed(granted.operations[1]), 0.0)
    pipeline.handle(grad_ready(STEP, 1, 1.0), 0.0)
    assert pipeline.commits.versions == [0, 1]
    pipeline.check_invariants()
