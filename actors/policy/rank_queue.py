"""A rank's place in its stage's program, and what ranks wait for: gradient sums, and hidden states of other boxes."""

from collections.abc import Iterable
from itertools import islice

from windlass.actors.messages import BlockComputed, Phase
from windlass.actors.policy.config import Operation, SchedulerConfig, program
from windlass.actors.policy.pending_replies import UnexpectedEventError
from windlass.actors.worker_policy import REPORT_EVERY, Stage
from windlass.storage.ids import BlockIndex, Step

# An operation that takes results of another box: its step, phase, block and group.
_Taker = tuple[Step, Phase, int, int]


class RankQueue:
    """The operations of one rank: those that are granted and not reported, and those to come."""

    def __init__(self, config: SchedulerConfig, rank: int, first_step: int, stage: int = 0) -> None:
        self.actor = config.stages[stage].gpu_workers[rank]
        self.blocks = config.stages[stage].blocks
        self.num_ranks = config.ranks[stage]  # of the stage, this one included
        self.trains = rank < config.num_groups  # False: it has no group of a step, but perhaps some of an evaluation
        self.running: dict[int, Operation] = {}  # by number, in order
        self._program = program(config, first_step, rank, stage)
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


class PassedResults:
    """The results that ranks have passed to others, as far as their reports say.

    Each group of micro-batches adds its gradient of a block to the sum of the groups before. With several ranks, a
    rank's operation waits for that sum of another rank. With several boxes, the first operation of a group on a box
    waits for hidden states of another box, or for their gradient.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._last: dict[BlockIndex, tuple[Step, int]] = {}  # of each block: the last step and group that was added
        # The operations of which one box is known to be done, and not the other: hidden states, or their gradient,
        # that are computed and not taken, and those that are taken, as a report has overtaken another one.
        self._computed: set[_Taker] = set()
        self._taken: set[_Taker] = set()

    def computed(self, operation: Operation, blocks: Stage) -> None:
        """Records the end of an operation of a stage. Reports of several ranks may come in any order."""
        if operation.adds_gradients:
            added = (operation.step, operation.group)
            self._last[operation.block] = max(added, self._last.get(operation.block, added))
        assert operation.phase is not None
        if blocks.takes_results(operation.phase, operation.block):
            taker = (operation.step, operation.phase, operation.block, operation.group)
            _move(taker, self._computed, self._taken)
        if (found := blocks.taker_of(operation.phase, operation.block, self._num_blocks)) is not None:
            _move((operation.step, *found, operation.group), self._taken, self._computed)

    def is_missed_by(self, rank: RankQueue) -> bool:
        """Returns whether one of a rank's next operations waits for another rank's sum, or for another box.

        Operations before one that waits for a sum may be computed and not reported: fewer than `REPORT_EVERY`, because
        a GPU worker reports so many at once. Before one that waits for another box, all are reported.
        """
        first = next(iter(rank.running.values()), None)
        if first is not None and self._waits_for_box(first, rank.blocks):
            return True
        if rank.num_ranks == 1:
            return False  # its sums are its own
        return self._is_missed(islice(rank.running.values(), REPORT_EVERY))

    def _is_missed(self, operations: Iterable[Operation]) -> bool:
        nothing = (Step(0), 0)
        return any(
            operation.adds_gradients
            and operation.group > 0
            and self._last.get(operation.block, nothing) < (operation.step, operation.group - 1)
            for operation in operations
        )

    def _waits_for_box(self, operation: Operation, blocks: Stage) -> bool:
        assert operation.phase is not None
        if not blocks.takes_results(operation.phase, operation.block):
            return False
        return (operation.step, operation.phase, operation.block, operation.group) not in self._computed


def _move(taker: _Taker, source: set[_Taker], target: set[_Taker]) -> None:
    """Removes an operation from one set or, if it is not there, adds it to the other."""
    if taker in source:
        source.remove(taker)
    else:
        target.add(taker)
