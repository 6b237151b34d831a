"""The GPU worker's own decisions: which operation begins, which gradient leaves, when a report is due."""

from collections.abc import Sequence

import pytest

from tests.support.policy.jobs import GPU, JOB, computed
from windlass.actors.messages import BlockComputed, ComputeBlock, GradOffloaded, Loss, Phase, SkipStep, UpdateStep
from windlass.actors.policy.block_states import BlockInStep, BlockState
from windlass.actors.policy.pending_replies import UnexpectedEventError
from windlass.actors.worker_policy.block_queue import Ordering, QueueOrder
from windlass.actors.worker_policy.worker_queues import (
    REPORT_EVERY,
    ComputeReports,
    GradReleases,
    OffloadQueue,
    OperationWindow,
    UpdateActions,
    UpdateQueue,
)
from windlass.storage.ids import BlockIndex, Span, Step

STEP = Step(1)


def operation(op: int, phase: Phase = Phase.FORWARD) -> ComputeBlock:
    return ComputeBlock(
        job=JOB, step=STEP, op=op, phase=phase, block=BlockIndex(op), params=(), group=0, loss_scale=1.0
    )


def offloaded(step: Step, block: int) -> GradOffloaded:
    return GradOffloaded(job=JOB, step=step, block=BlockIndex(block), chunks=())


def update(step: Step) -> UpdateStep:
    return UpdateStep(
        job=JOB, step=step, from_step=Step(step - 1), optimizer_step=step, learning_rate=0.1, grad_scale=1.0
    )


def done(op: int) -> BlockComputed:
    return computed(operation(op)).computed[0]


def test_a_few_operations_begin_at_a_time_in_the_order_of_their_grants() -> None:
    window = OperationWindow(Ordering(max_prefetched=2))
    assert [each.op for each in window.grant((operation(1), operation(2), operation(3)))] == [1, 2]
    assert window.grant((operation(4),)) == []
    assert [each.op for each in window.computed()] == [3]
    assert [each.op for each in window.computed()] == [4]
    assert not window.is_empty
    assert window.computed() == window.computed() == []
    assert window.is_empty


def order_of_offloads(ordering: Ordering) -> list[int]:
    """The blocks of a backward pass in the order in which they leave, if the first one takes long."""
    queue, left = OffloadQueue(ordering, frozenset()), list[int]()

    def leave(keys: Sequence[tuple[Step, BlockIndex]]) -> None:
        left.extend(block for _, block in keys)

    for block in reversed(range(6)):
        leave(queue.push(STEP, BlockIndex(block)))
    while len(left) < 6:
        leave(queue.offload_finished())
    return left


@pytest.mark.parametrize(
    ("ordering", "expected"),
    [
        (Ordering(max_offloading=1), [5, 0, 1, 2, 3, 4]),
        (Ordering(max_offloading=1, queues=QueueOrder.FIFO), [5, 4, 3, 2, 1, 0]),
        (Ordering(max_offloading=3), [5, 4, 3, 0, 1, 2]),  # what has begun to leave cannot be overtaken
    ],
)
def test_an_urgent_gradient_overtakes_what_waits(ordering: Ordering, expected: list[int]) -> None:
    assert order_of_offloads(ordering) == expected


def test_a_spilled_gradient_waits_for_the_commit_before_its_step() -> None:
    queue = OffloadQueue(Ordering(), frozenset({1}))
    queue.commit_reached(STEP)
    assert queue.push(Step(2), BlockIndex(1)) == [(2, 1)]
    queue.offload_finished()
    assert queue.push(Step(3), BlockIndex(1)) == []
    assert queue.push(Step(3), BlockIndex(2)) == []  # it would overtake
    assert queue.push(Step(3), BlockIndex(0)) == [(3, 0)]
    assert queue.commit_reached(Step(2)) == [(3, 1)]
    assert queue.offload_finished() == [(3, 2)]


def order_of_updates(max_updating: int, order: QueueOrder, *, is_late: bool) -> list[int]:
    """The blocks of a backward pass in the order of their updates, if updates take long.

    `is_late`: the step's result is known only after all gradients.
    """
    queue, begun = UpdateQueue(order, max_updating, 6), list[int]()

    def take(actions: UpdateActions) -> None:
        assert actions.discard == []
        begun.extend(update.block for update in actions.begin)

    if not is_late:
        take(queue.add(update(STEP)))
    for block in reversed(range(6)):
        take(queue.add(offloaded(STEP, block)))
    if is_late:
        assert begun == []
        take(queue.add(update(STEP)))
    while len(begun) < 6:
        take(queue.updated(STEP))
    return begun


@pytest.mark.parametrize(
    ("max_updating", "order", "is_late", "expected"),
    [
        (1, QueueOrder.PRIORITY, False, [5, 0, 1, 2, 3, 4]),
        (1, QueueOrder.FIFO, False, [5, 4, 3, 2, 1, 0]),
        (3, QueueOrder.PRIORITY, False, [5, 4, 3, 0, 1, 2]),  # what has begun cannot be overtaken
        (1, QueueOrder.PRIORITY, True, [0, 1, 2, 3, 4, 5]),
        (1, QueueOrder.FIFO, True, [5, 4, 3, 2, 1, 0]),
    ],
)
def test_an_urgent_block_overtakes_what_waits_for_its_update(
    max_updating: int, order: QueueOrder, is_late: bool, expected: list[int]
) -> None:
    assert order_of_updates(max_updating, order, is_late=is_late) == expected


def test_step_is_over_with_the_update_of_its_last_block() -> None:
    queue, steps = UpdateQueue(QueueOrder.PRIORITY, 6, 3), (Step(1), Step(2))
    for step in steps:
        queue.add(update(step))
        for block in range(3):
            queue.add(offloaded(step, block))
    ended = [queue.updated(step).is_step_over for step in (*steps, *steps, *reversed(steps))]
    assert ended == [False] * 4 + [True] * 2


@pytest.mark.parametrize("num_early", range(4))
def test_the_gradients_of_a_skipped_step_are_discarded_whenever_they_come(num_early: int) -> None:
    queue = UpdateQueue(QueueOrder.PRIORITY, 1, 3)
    discarded: list[GradOffloaded] = []
    for number in range(4):
        if number == num_early:
            discarded += queue.add(SkipStep(job=JOB, step=STEP)).discard
        if number < 3:
            actions = queue.add(offloaded(STEP, number))
            assert actions.begin == []
            discarded += actions.discard
    assert discarded == [offloaded(STEP, block) for block in range(3)]
    queue.add(offloaded(Step(2), 1))
    (begun,) = queue.add(update(Step(2))).begin
    assert (begun.step, begun.block, begun.how) == (2, 1, update(Step(2)))


def test_operations_are_reported_together_unless_something_waits_for_them() -> None:
    reports = ComputeReports(JOB, GPU)

    def reported(computed: BlockComputed, now_s: float = 0.0, *, is_idle: bool = False) -> tuple[BlockComputed, ...]:
        report = reports.computed(computed, now_s, is_idle=is_idle)
        return () if report is None else report.computed

    first = [done(op) for op in range(1, REPORT_EVERY + 1)]
    for each in first[:-1]:
        assert reported(each) == ()
    assert reported(first[-1]) == tuple(first)
    reported(done(7))
    assert reported(done(8), is_idle=True) == (done(7), done(8))
    reported(done(7))
    assert reported(done(8), now_s=1.1) == (done(7), done(8))
    reported(done(7), now_s=1.1)
    assert reports.gradient(operation(6), (3.0,), now_s=1.1, is_idle=False) is None
    report = reports.gradient(operation(7), (2.0,), now_s=1.1, is_idle=True)
    assert report is not None
    assert report.computed == (done(7),)
    assert [(grad.step, grad.block, grad.sq_sums) for grad in report.grads] == [(1, 6, (3.0,)), (1, 7, (2.0,))]
    head = BlockComputed(
        job=JOB,
        step=STEP,
        op=9,
        phase=Phase.HEAD,
        block=BlockIndex(9),
        group=0,
        compute_s=0.1,
        is_finite=True,
        loss=Loss((1.0,), 2, 1),
    )
    assert reported(head, now_s=1.1) == (head,)


def test_an_impossible_change_of_a_block_is_refused_with_its_story() -> None:
    block = BlockInStep(STEP, BlockIndex(3))
    for state in (BlockState.KEPT, BlockState.UPDATING):
        block.become(state)
    with pytest.raises(
        UnexpectedEventError, match="block 3 of step 1 was computing, kept, updating: it cannot be discarded"
    ):
        block.become(BlockState.DISCARDED)


# --- released gradient slots -----------------------------------------------------------------------------------------


def spans_of(*numbers: int) -> tuple[Span, ...]:
    return tuple(Span(4096 * number, 4096) for number in numbers)


@pytest.mark.parametrize(("num_slots", "num_optimizers"), [(1, 1), (7, 1), (15, 2)])
def test_few_gradient_slots_are_released_at_once(num_slots: int, num_optimizers: int) -> None:
    releases = GradReleases(num_slots, num_optimizers)
    releases.begin(4)
    for span in spans_of(0, 1, 2):
        assert releases.updated(span) == (span,)


def test_many_gradient_slots_are_released_together() -> None:
    releases = GradReleases(16, 1)
    releases.begin(3)
    releases.begin(4)
    found = [releases.updated(span) for span in spans_of(0, 1, 2, 3, 4)]
    assert found == [(), (), spans_of(0, 1, 2), (), ()]
    assert releases.updated(None) == ()  # a gradient from an SSD has no slot
    assert releases.updated(None) == spans_of(3, 4)  # the last chunk
