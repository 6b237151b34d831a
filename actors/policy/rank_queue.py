"""A rank's place in the job's program, and the gradient sums that ranks wait for."""

from collections.abc import Iterable
from itertools import islice

from windlass.actors.messages import BlockComputed
from windlass.actors.policy.config import Operation, SchedulerConfig, program
from windlass.actors.policy.pending_replies import UnexpectedEventError
from windlass.actors.worker_policy import REPORT_EVERY
from windlass.storage.ids import BlockIndex, Step


class RankQueue:
    """The operations of one rank: those that are granted and not reported, and those to come."""

    def __init__(self, config: SchedulerConfig, rank: int, first_step: int) -> None:
        self.actor = config.gpu_workers[rank]
        self.trains = rank < config.num_groups  # False: it has no group of a step, but perhaps some of an evaluation
        self.running: dict[int, Operation] = {}  # by number, in order
        self._program = program(config, first_step, rank)
        self.next: Operation | None = next(self._program, None)

    def begin(self, operation: Operation) -> None:
        """Records that the next operation is granted."""
        assert operation is self.next
        self.running[operation.op] = operation
        self.next = next(self._program, None)

    def computed(self, computed: BlockComputed) -> Operation:
        """Records the end of an operation. Raises UnexpectedEventError if it is not the first that is running."""
        first = next(iter(self.running.values()))
        if computed.op != first.op:
            raise UnexpectedEventError(
                f"{self.actor} finished the {computed.phase} of block {computed.block} in step "
                f"{computed.step}, and not the {first.phase} of block {first.block} in step {first.step}, which comes "
                "first: a BlockComputed message was lost"
            )
        return self.running.pop(first.op)

    def exported(self, step: Step) -> None:
        """Records the end of an export. The rank goes on, if its program has the export."""
        if self.next is not None and self.next.phase is None and self.next.step == step:
            self.next = next(self._program, None)

    def is_evaluating(self, before: Step) -> bool:
        """Returns whether an evaluation of a step before this one is not over, as far as the rank has a part in it."""
        if any(operation.evaluates for operation in self.running.values()):
            return True
        return self.next is not None and self.next.evaluates and self.next.step < before


class PassedSums:
    """The gradient sums that ranks have passed on, as far as their reports say.

    Each group of micro-batches adds its gradient of a block to the sum of the groups before. With several ranks, a
    rank's operation waits for that sum of another rank.
    """

    def __init__(self) -> None:
        self._last: dict[BlockIndex, tuple[Step, int]] = {}  # of each block: the last step and group that was added

    def computed(self, operation: Operation) -> None:
        """Records the end of an operation. Reports of several ranks may come in any order."""
        if operation.adds_gradients:
            added = (operation.step, operation.group)
            self._last[operation.block] = max(added, self._last.get(operation.block, added))

    def is_missed_by(self, rank: RankQueue) -> bool:
        """Returns whether one of a rank's next operations waits for another rank's sum.

        Operations before it may be computed and not reported: fewer than `REPORT_EVERY`, because a GPU worker reports
        so many at once.
        """
        return self._is_missed(islice(rank.running.values(), REPORT_EVERY))

    def _is_missed(self, operations: Iterable[Operation]) -> bool:
        nothing = (Step(0), 0)
        return any(
            operation.adds_gradients
            and operation.group > 0
            and self._last.get(operation.block, nothing) < (operation.step, operation.group - 1)
            for operation in operations
        )
