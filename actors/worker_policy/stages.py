"""The stages of a job over several boxes: each box computes a run of the model's blocks.

All boxes compute at once, each another group of micro-batches. In the backward pass each goes on with the sums of the
group before, as on one box. So results do not depend on the number of boxes.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from windlass.actors.messages import Phase


class Stage(NamedTuple):
    """The blocks of one box: those from `first` on, before `stop`."""

    first: int
    stop: int

    def has(self, block: int) -> bool:
        """Returns whether a block belongs to the stage."""
        return self.first <= block < self.stop

    def begins_group(self, phase: Phase, block: int) -> bool:
        """Returns whether an operation is the first one of a group of micro-batches in the stage."""
        return block == self.first and phase is not Phase.BACKWARD

    def ends_group(self, phase: Phase, block: int) -> bool:
        """Returns whether an operation of training is the last one of a group of micro-batches in the stage."""
        return block == self.first and phase in (Phase.BACKWARD, Phase.HEAD)

    def takes_hidden(self, phase: Phase, block: int) -> bool:
        """Returns whether an operation takes hidden states that another box has computed."""
        return self.first > 0 and self.begins_group(phase, block)

    def takes_grads(self, phase: Phase, block: int) -> bool:
        """Returns whether an operation takes gradients of hidden states that another box has computed.

        In the last stage there is none, because the head goes forward and backward in one operation.
        """
        return phase is Phase.BACKWARD and block == self.stop - 1

    def takes_results(self, phase: Phase, block: int) -> bool:
        """Returns whether an operation takes results of another box."""
        return self.takes_hidden(phase, block) or self.takes_grads(phase, block)

    def taker_of(self, phase: Phase, block: int, num_blocks: int) -> tuple[Phase, int] | None:
        """Returns the operation on another box that takes an operation's results: its phase and block. None: no such.

        `num_blocks`: those of the model.
        """
        head = num_blocks - 1
        if phase in (Phase.FORWARD, Phase.EVALUATE) and block == self.stop - 1:
            if self.stop < head:
                return phase, self.stop
            return Phase.HEAD if phase is Phase.FORWARD else Phase.EVALUATE_HEAD, head
        if self.first > 0 and self.ends_group(phase, block):
            return Phase.BACKWARD, self.first - 1
        return None


def params_version(phase: Phase, step: int) -> int:
    """Returns the step whose updated params an operation reads. An evaluation follows its step's updates."""
    return step if phase in (Phase.EVALUATE, Phase.EVALUATE_HEAD) else step - 1


class GroupPass(NamedTuple):
    """One pass of a group of micro-batches through the blocks of a stage."""

    group: int
    goes_forward: bool


def check_stages(stages: tuple[Stage, ...], num_blocks: int) -> None:
    """Raises ValueError unless each block belongs to one stage, and each stage has blocks."""
    bounds = [0, *(stage.stop for stage in stages)]
    starts = [stage.first for stage in stages]
    if starts != bounds[:-1] or bounds[-1] != num_blocks or any(stage.first >= stage.stop for stage in stages):
        raise ValueError(
            f"stages {[tuple(stage) for stage in stages]} must divide blocks 0 to {num_blocks - 1} into runs, in order"
        )


def num_groups_ahead(stage: int, ranks: Sequence[int], num_groups: int) -> int:
    """Returns how many rounds of groups have passed forward through a stage when the first one returns.

    It is as many as keep the GPUs of the later stages busy meanwhile. The inputs of so many groups are on each device
    at once. With as many GPUs in all stages, it is the number of stages from this one on.

    Args:
        stage: the index of the stage.
        ranks: the number of GPU workers of each stage.
        num_groups: of micro-batches in a step.
    """
    num_ahead, num_rounds = 1, 0
    for num_ranks, next_ranks in zip(reversed(ranks[stage:]), (0, *reversed(ranks[stage + 1 :])), strict=True):
        num_ahead = 1 + -(-num_ahead * next_ranks // num_ranks)
        num_rounds = -(-num_groups // num_ranks)
    return max(1, min(num_rounds, num_ahead))


def passes_of_step(stage: int, ranks: Sequence[int], num_groups: int) -> Iterator[GroupPass]:
    """Yields the passes of a step through one stage. Each GPU worker makes those of its groups in this order.

    One forward and one backward pass take turns, after some forward passes. With one stage, or in the last one, each
    group passes forward and at once backward. The arguments are those of `num_groups_ahead`.
    Source: PipeDream-Flush, the one-forward-one-backward schedule without stale weights.
    """
    num_ranks = ranks[stage]
    num_rounds = -(-num_groups // num_ranks)
    num_ahead = num_groups_ahead(stage, ranks, num_groups)
    if num_ahead == 1:
        for group in range(num_groups):
            yield GroupPass(group, goes_forward=True)
            yield GroupPass(group, goes_forward=False)
        return

    def of_round(index: int, *, goes_forward: bool) -> Iterator[GroupPass]:
        for group in range(index * num_ranks, min((index + 1) * num_ranks, num_groups)):
            yield GroupPass(group, goes_forward)

    for index in range(num_rounds + num_ahead):
        if index < num_rounds:
            yield from of_round(index, goes_forward=True)
        if index >= num_ahead - 1 and index - num_ahead + 1 < num_rounds:
            yield from of_round(index - num_ahead + 1, goes_forward=False)
