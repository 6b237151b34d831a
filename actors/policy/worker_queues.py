"""The decisions of workers that need no scheduler: which operation, offload or update begins, which report is due.

Pure: the workers' threads and the simulator drive the same classes.
"""

from collections import deque
from typing import NamedTuple

from windlass.actors.messages import BlockComputed, ComputeBlock
from windlass.actors.policy.block_queue import BlockQueue, Ordering, QueueOrder
from windlass.storage.ids import BlockIndex, Step

# Finished operations are reported by so many, unless something waits for them.
REPORT_EVERY = 4
# Operations that the scheduler grants beyond those which the worker may have begun, so that the next ones are there
# while reports and grants are on their way.
GRANTED_AHEAD = 2 * REPORT_EVERY


# Seconds after which a finished operation is reported without waiting for further ones.
REPORT_EVERY_S = 1.0


class OperationWindow:
    """The granted operations. So many at a time have begun: their params are prefetched, or they are computed."""

    def __init__(self, ordering: Ordering) -> None:
        self._max_begun = ordering.max_prefetched
        self._granted: deque[ComputeBlock] = deque()
        self._num_begun = 0

    def grant(self, operations: tuple[ComputeBlock, ...]) -> list[ComputeBlock]:
        """Adds operations. Returns those that begin now."""
        self._granted.extend(operations)
        return self._begin()

    def computed(self) -> list[ComputeBlock]:
        """Records the end of the first operation that has begun. Returns those that begin now."""
        self._num_begun -= 1
        return self._begin()

    @property
    def is_empty(self) -> bool:
        """True if no operation is granted that is not computed."""
        return not self._granted and not self._num_begun

    def _begin(self) -> list[ComputeBlock]:
        begun = []
        while self._granted and self._num_begun < self._max_begun:
            begun.append(self._granted.popleft())
            self._num_begun += 1
        return begun


class OffloadQueue:
    """The complete gradients that wait for the way out of the device, in the scheduler's order."""

    def __init__(self, ordering: Ordering, spilled_blocks: frozenset[int]) -> None:
        """Gradients of `spilled_blocks` overwrite states of an older commit on the SSDs."""
        self._max_leaving = ordering.max_offloading
        self._spilled = spilled_blocks
        self._waiting = BlockQueue(ordering.queues)
        self._num_leaving = 0
        self._committed = -1

    def push(self, step: Step, block: BlockIndex) -> list[tuple[Step, BlockIndex]]:
        """Adds a gradient. Returns the gradients that leave now."""
        self._waiting.push(step, block)
        return self._begin()

    def left(self) -> list[tuple[Step, BlockIndex]]:
        """Records that one of the gradients has left. Returns those that leave now."""
        self._num_leaving -= 1
        return self._begin()

    def commit_reached(self, step: Step) -> list[tuple[Step, BlockIndex]]:
        """Records a commit. Returns the gradients that leave now."""
        self._committed = step
        return self._begin()

    def _begin(self) -> list[tuple[Step, BlockIndex]]:
        begun = []
        while self._waiting and self._num_leaving < self._max_leaving:
            step, block = self._waiting.first
            if block in self._spilled and self._committed < step - 1:
                break
            self._waiting.pop()
            self._num_leaving += 1
            begun.append((Step(step), BlockIndex(block)))
        return begun


class Turns(NamedTuple):
    """The next tasks of an actor with its share of blocks, each with its step."""

    begin: list[tuple[Step, BlockIndex]]  # update them
    discard: list[tuple[Step, BlockIndex]]  # drop their gradients


class UpdateQueue:
    """An actor's blocks that wait for their gradient, for the result of their step, or for their turn to be updated."""

    def __init__(self, order: QueueOrder, max_updating: int, num_blocks: int) -> None:
        """`num_blocks` is the number of blocks of which the actor has a share."""
        self._max_updating = max_updating
        self._num_blocks = num_blocks
        self._waiting = BlockQueue(order)
        self._num_updating = 0
        # Gradients that came before the result of their step, in order of arrival.
        self._early: dict[Step, list[BlockIndex]] = {}
        # Steps with a known result, until all their gradients have come: whether they are updated, and how many are
        # still to come.
        self._is_updated: dict[Step, bool] = {}
        self._num_to_come: dict[Step, int] = {}

    def gradient_came(self, step: Step, block: BlockIndex) -> Turns:
        """Records that the gradient of a block is there."""
        if step in self._is_updated:
            return self._place(step, [block])
        self._early.setdefault(step, []).append(block)
        return Turns([], [])

    def result_came(self, step: Step, *, is_updated: bool) -> Turns:
        """Records that a step may be updated, or that it is skipped."""
        self._is_updated[step], self._num_to_come[step] = is_updated, self._num_blocks
        return self._place(step, self._early.pop(step, []))

    def updated(self) -> Turns:
        """Records the end of an update that had begun."""
        self._num_updating -= 1
        return Turns(self._begin(), [])

    def _place(self, step: Step, blocks: list[BlockIndex]) -> Turns:
        is_updated = self._is_updated[step]
        self._num_to_come[step] -= len(blocks)
        if not self._num_to_come[step]:
            del self._num_to_come[step], self._is_updated[step]
        if not is_updated:
            return Turns([], [(step, block) for block in blocks])
        for block in blocks:
            self._waiting.push(step, block)
        return Turns(self._begin(), [])

    def _begin(self) -> list[tuple[Step, BlockIndex]]:
        begun = []
        while self._waiting and self._num_updating < self._max_updating:
            step, block = self._waiting.pop()
            self._num_updating += 1
            begun.append((Step(step), BlockIndex(block)))
        return begun


class ComputeReports:
    """Collects finished operations until their report is due."""

    def __init__(self) -> None:
        self._computed: list[BlockComputed] = []

    def add(self, computed: BlockComputed, *, is_idle: bool, is_late: bool) -> tuple[BlockComputed, ...]:
        """Adds a finished operation. Returns what to report now: nothing, or all that was not reported yet.

        `is_idle`: the worker has no other operation. `is_late`: the last report was long ago.
        """
        self._computed.append(computed)
        is_due = is_idle or is_late or computed.loss is not None or len(self._computed) >= REPORT_EVERY
        return self.take() if is_due else ()

    def take(self) -> tuple[BlockComputed, ...]:
        """Removes and returns all that was not reported yet."""
        computed, self._computed = tuple(self._computed), []
        return computed
