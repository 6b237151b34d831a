"""The decisions of workers that need no scheduler: which operation, offload or update begins, which report is due.

Pure: the workers' threads and the simulator drive the same classes.
"""

from collections import deque
from typing import NamedTuple

from windlass.actors.messages import (
    BlockComputed,
    ComputeBlock,
    ComputeProgressed,
    GradOffloaded,
    GradReady,
    SkipStep,
    UpdateBlock,
    UpdateStep,
)
from windlass.actors.worker_policy.block_queue import BlockQueue, Ordering, QueueOrder
from windlass.actors.worker_policy.chunk_queue import Countdown
from windlass.storage.ids import ActorName, BlockIndex, JobId, Span, Step

# The worker reports finished operations in batches of this many, unless something waits for them.
REPORT_EVERY = 4
# Operations that the scheduler grants beyond those which the worker may have begun, so that the next ones are there
# while reports and grants are on their way.
GRANTED_AHEAD = 2 * REPORT_EVERY
# An optimizer keeps at most this part of the gradient slots back before it releases several in one message.
_HELD_SHARE = 1 / 8
# Seconds after which a finished operation is reported without waiting for further ones.
REPORT_EVERY_S = 1.0


class OperationWindow:
    """The granted operations. At most `max_prefetched` of them are in progress: prefetched or computed."""

    def __init__(self, ordering: Ordering) -> None:
        self._max_in_progress = ordering.max_prefetched
        self._granted: deque[ComputeBlock] = deque()
        self._num_in_progress = 0

    def grant(self, operations: tuple[ComputeBlock, ...]) -> list[ComputeBlock]:
        """Adds operations. Returns those that begin now."""
        self._granted.extend(operations)
        return self._begin()

    def computed(self) -> list[ComputeBlock]:
        """Records the end of the first operation that has begun. Returns those that begin now."""
        self._num_in_progress -= 1
        return self._begin()

    @property
    def is_empty(self) -> bool:
        """True if every granted operation is computed."""
        return not self._granted and not self._num_in_progress

    def _begin(self) -> list[ComputeBlock]:
        begun = []
        while self._granted and self._num_in_progress < self._max_in_progress:
            begun.append(self._granted.popleft())
            self._num_in_progress += 1
        return begun


class OffloadQueue:
    """The complete gradients that wait to be copied off the device, in the scheduler's order."""

    def __init__(self, ordering: Ordering, spilled_blocks: frozenset[int]) -> None:
        """Gradients of `spilled_blocks` overwrite states of an older commit on the SSDs."""
        self._max_offloading = ordering.max_offloading
        self._spilled = spilled_blocks
        self._waiting = BlockQueue(ordering.queues)
        self._num_offloading = 0
        self._committed = -1

    def push(self, step: Step, block: BlockIndex) -> list[tuple[Step, BlockIndex]]:
        """Adds a gradient. Returns the gradients whose offload begins now."""
        self._waiting.push(step, block)
        return self._begin()

    def offload_finished(self) -> list[tuple[Step, BlockIndex]]:
        """Records the end of an offload. Returns the gradients whose offload begins now."""
        self._num_offloading -= 1
        return self._begin()

    def commit_reached(self, step: Step) -> list[tuple[Step, BlockIndex]]:
        """Records a commit. Returns the gradients whose offload begins now."""
        self._committed = step
        return self._begin()

    def _begin(self) -> list[tuple[Step, BlockIndex]]:
        begun = []
        while self._waiting and self._num_offloading < self._max_offloading:
            step, block = self._waiting.first
            if block in self._spilled and self._committed < step - 1:
                break
            self._waiting.pop()
            self._num_offloading += 1
            begun.append((step, block))
        return begun


class UpdateActions(NamedTuple):
    """The next tasks of an actor with its share of blocks."""

    begin: list[UpdateBlock]
    discard: list[GradOffloaded]  # gradients that will not be used
    is_step_over: bool = False  # the actor has updated its last block of the step


class UpdateQueue:
    """An actor's blocks that wait for their gradient, for the result of their step, or for other updates to end."""

    def __init__(self, order: QueueOrder, max_updating: int, num_blocks: int) -> None:
        """`num_blocks` is the number of blocks of which the actor has a share."""
        self._max_updating = max_updating
        self._num_blocks = num_blocks
        self._waiting = BlockQueue(order)
        self._updates: dict[tuple[int, int], UpdateBlock] = {}  # by step and block, of those that wait
        self._num_updating = 0
        self._early: dict[Step, list[GradOffloaded]] = {}  # those that came before the result of their step, in order
        # Results of steps, and the number of gradients that are still to come, until all have come.
        self._results: dict[Step, UpdateStep | SkipStep] = {}
        self._num_to_come: dict[Step, int] = {}
        self._updates_left = Countdown()  # by step

    def add(self, message: GradOffloaded | UpdateStep | SkipStep) -> UpdateActions:
        """Adds the gradient of a block, or the result of a step."""
        step = message.step
        if not isinstance(message, GradOffloaded):
            self._results[step], self._num_to_come[step] = message, self._num_blocks
            if isinstance(message, UpdateStep):
                self._updates_left.start(step, self._num_blocks)
            return self._place(message, self._early.pop(step, []))
        if step in self._results:
            return self._place(self._results[step], [message])
        self._early.setdefault(step, []).append(message)
        return UpdateActions([], [])

    def updated(self, step: Step) -> UpdateActions:
        """Records the end of an update of a block in a step."""
        self._num_updating -= 1
        is_step_over = self._updates_left.part_done(step)
        return UpdateActions(self._begin(), [], is_step_over)

    def _place(self, result: UpdateStep | SkipStep, grads: list[GradOffloaded]) -> UpdateActions:
        step = result.step
        self._num_to_come[step] -= len(grads)
        if not self._num_to_come[step]:
            del self._num_to_come[step], self._results[step]
        if isinstance(result, SkipStep):
            return UpdateActions([], grads)
        for grad in grads:
            self._waiting.push(step, grad.block)
            self._updates[(step, grad.block)] = UpdateBlock(
                job=grad.job, step=step, block=grad.block, chunks=grad.chunks, how=result
            )
        return UpdateActions(self._begin(), [])

    def _begin(self) -> list[UpdateBlock]:
        begun = []
        while self._waiting and self._num_updating < self._max_updating:
            self._num_updating += 1
            begun.append(self._updates.pop(self._waiting.pop()))
        return begun


class GradReleases:
    """The gradient slots that an optimizer has read and not released yet. It releases several in one message."""

    def __init__(self, num_slots: int, num_optimizers: int) -> None:
        """`num_slots` is the number of all gradient slots, which the optimizers share."""
        self._max_held = int(num_slots * _HELD_SHARE / num_optimizers)
        self._held: list[Span] = []
        self._num_left = 0  # chunks that the optimizer has and has not updated yet

    def begin(self, num_chunks: int) -> None:
        """Records chunks whose update has begun."""
        self._num_left += num_chunks

    def updated(self, span: Span | None) -> tuple[Span, ...]:
        """Adds the slot of an updated chunk; None: its gradient had none. Returns the slots to release now.

        After the last chunk all slots are released, because nothing would release them later.
        """
        self._num_left -= 1
        if span is not None:
            self._held.append(span)
        if self._num_left and len(self._held) <= self._max_held:
            return ()
        released, self._held = tuple(self._held), []
        return released


class ComputeReports:
    """The GPU worker's reports. Finished operations and gradients are collected until their report is due."""

    def __init__(self, job: JobId, actor: ActorName) -> None:
        self._job = job
        self._actor = actor
        self._computed: list[BlockComputed] = []
        self._grads: list[GradReady] = []
        self._reported_s = 0.0  # time of the last report

    def computed(self, computed: BlockComputed, now_s: float, *, is_idle: bool) -> ComputeProgressed | None:
        """Adds a finished operation. Returns the report of all that was not reported yet, if it is due.

        `is_idle`: the worker has no other operation.
        """
        self._computed.append(computed)
        return self._report(computed.step, now_s, is_due=is_idle or computed.loss is not None)

    def gradient(
        self, operation: ComputeBlock, sq_sums: tuple[float, ...], now_s: float, *, is_idle: bool
    ) -> ComputeProgressed | None:
        """Adds the gradient that `operation` completed, and is otherwise like `computed`.

        Only a worker without operations can wait for what the scheduler does with a gradient.
        """
        step = operation.step
        self._grads.append(GradReady(job=self._job, step=step, block=operation.block, sq_sums=sq_sums))
        return self._report(step, now_s, is_due=is_idle)

    def _report(self, step: Step, now_s: float, *, is_due: bool) -> ComputeProgressed | None:
        is_late = now_s - self._reported_s > REPORT_EVERY_S
        if not is_due and not is_late and max(len(self._computed), len(self._grads)) < REPORT_EVERY:
            return None
        computed, self._computed = tuple(self._computed), []
        grads, self._grads = tuple(self._grads), []
        self._reported_s = now_s
        return ComputeProgressed(
            job=self._job, step=grads[-1].step if grads else step, actor=self._actor, computed=computed, grads=grads
        )
