"""The GPU worker's own decisions: which operation begins, which gradient leaves, when a report is due."""

from collections.abc import Sequence

import pytest

from tests.support.policy.jobs import JOB, computed
from windlass.actors.messages import BlockComputed, ComputeBlock, Loss, Phase
from windlass.actors.policy.block_queue import Ordering, QueueOrder
from windlass.actors.policy.block_states import BlockInStep, BlockState
from windlass.actors.policy.pending_replies import UnexpectedEventError
from windlass.actors.policy.worker_queues import (
    REPORT_EVERY,
    ComputeReports,
    OffloadQueue,
    OperationWindow,
    Turns,
    UpdateQueue,
)
from windlass.storage.ids import BlockIndex, Step

STEP = Step(1)


def operation(op: int, phase: Phase = Phase.FORWARD) -> ComputeBlock:
    return ComputeBlock(
        job=JOB, step=STEP, op=op, phase=phase, block=BlockIndex(op), params=(), group=0, loss_scale=1.0
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
        leave(queue.left())
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
    queue.left()
    assert queue.push(Step(3), BlockIndex(1)) == []
    assert queue.push(Step(3), BlockIndex(2)) == []  # it would overtake
    assert queue.push(Step(3), BlockIndex(0)) == [(3, 0)]
    assert queue.commit_reached(Step(2)) == [(3, 1)]
    assert queue.left() == [(3, 2)]


def order_of_updates(max_updating: int, order: QueueOrder, *, is_late: bool) -> list[int]:
    """The blocks of a backward pass in the order of their updates, if updates take long.

    `is_late`: the step's result is known only after all gradients.
    """
    queue, begun = UpdateQueue(order, max_updating, 6), list[int]()

    def take(turns: Turns) -> None:
        assert turns.discard == []
        begun.extend(block for _, block in turns.begin)

    if not is_late:
        take(queue.result_came(STEP, is_updated=True))
    for block in reversed(range(6)):
        take(queue.gradient_came(STEP, BlockIndex(block)))
    if is_late:
        assert begun == []
        take(queue.result_came(STEP, is_updated=True))
    while len(begun) < 6:
        take(queue.updated())
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


@pytest.mark.parametrize("num_early", range(4))
def test_the_gradients_of_a_skipped_step_are_discarded_whenever_they_come(num_early: int) -> None:
    queue = UpdateQueue(QueueOrder.PRIORITY, 1, 3)
    discarded: list[tuple[Step, BlockIndex]] = []
    for number in range(4):
        if number == num_early:
            discarded += queue.result_came(STEP, is_updated=False).discard
        if number < 3:
            turns = queue.gradient_came(STEP, BlockIndex(number))
            assert turns.begin == []
            discarded += turns.discard
    assert discarded == [(1, 0), (1, 1), (1, 2)]
    queue.gradient_came(Step(2), BlockIndex(1))
    assert queue.result_came(Step(2), is_updated=True).begin == [(2, 1)]


def test_operations_are_reported_together_unless_something_waits_for_them() -> None:
    reports = ComputeReports()
    first = [done(op) for op in range(1, REPORT_EVERY + 1)]
    for each in first[:-1]:
        assert reports.add(each, is_idle=False, is_late=False) == ()
    assert reports.add(first[-1], is_idle=False, is_late=False) == tuple(first)
    assert reports.take() == ()
    for reasons in ({"is_idle": True, "is_late": False}, {"is_idle": False, "is_late": True}):
        reports.add(done(7), is_idle=False, is_late=False)
        assert reports.add(done(8), **reasons) == (done(7), done(8))
    head = BlockComputed(
        job=JOB,
        step=STEP,
        op=9,
        phase=Phase.HEAD,
        block=BlockIndex(9),
        group=0,
        compute_s=0.1,
        is_finite=True,
        loss=Loss(1.0, 2, 1),
    )
    assert reports.add(head, is_idle=False, is_late=False) == (head,)


def test_an_impossible_change_of_a_block_is_refused_with_its_story() -> None:
    block = BlockInStep(STEP, BlockIndex(3))
    for state in (BlockState.KEPT, BlockState.UPDATING):
        block.become(state)
    with pytest.raises(
        UnexpectedEventError, match="block 3 of step 1 was computing, kept, updating: it cannot be discarded"
    ):
        block.become(BlockState.DISCARDED)
