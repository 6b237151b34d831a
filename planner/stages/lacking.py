"""The memory that boxes lack for a job that does not fit them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from windlass.engine.model import ModelLayout
from windlass.planner.feasibility import (
    LeastMemory,
    Shortfall,
    extremes,
    limits_for_plans,
    numbers_of_microbatches,
    shortfall_of,
)
from windlass.planner.solver import largest
from windlass.planner.stages.box_plans import BoxPlans, Rounds, Run
from windlass.planner.stages.even_stages import even_division
from windlass.planner.stages.splits import Division, ranks_of, run_of, run_with


@dataclass(frozen=True, slots=True, kw_only=True)
class Lack:
    """The memory that a box lacks for a run of blocks."""

    box: int  # its place among the boxes
    run: Run
    shortfall: Shortfall

    @property
    def nbytes(self) -> int:
        """The fewest bytes of memory, of all kinds together, with which the box would have room."""
        lacking = [nbytes for nbytes in self.shortfall.missing.values() if nbytes]
        return sum(lacking) if self.shortfall.is_together else min(lacking, default=0)

    def in_words(self, name: str) -> str:
        """Tells what the box lacks, which has this name."""
        blocks = f"blocks {self.run.first} to {self.run.stop - 1}"
        return f"with {blocks}, box {name} lacks {self.shortfall.amounts_in_words()}"


def lacks_with_all(boxes: Sequence[tuple[BoxPlans, int]], layout: ModelLayout) -> list[Lack]:
    """Returns what boxes lack, so many of each kind. It matters little which of them is where."""
    cut = min(boxes[0][0].cuts, default=None)  # so that boxes need least
    each = [plans.with_cut(cut) for plans, number in boxes for _ in range(number)]
    return lacks_of(each, even_division([block.numel for block in layout.blocks], len(each)))


def lacks_of(boxes: Sequence[BoxPlans], even: Division) -> list[Lack]:
    """Returns what boxes lack, if each has as many layers as it has room for, and the rest is divided evenly.

    `even`: a division that counts all boxes as equal. The rounds are those for which the boxes would lack least then.
    Empty: each box has room for its layers, although no plan was found.
    """
    num_layers = sum(even)
    rounds = min(_rounds_that_save(boxes[0]), key=lambda each: sum(lack.nbytes for lack in _lacking(boxes, even, each)))
    ranks = ranks_of(boxes, rounds)
    most = [_most_layers(plans, box, ranks, num_layers, rounds) for box, plans in enumerate(boxes)]
    left, extra = divmod(max(0, num_layers - sum(most)), len(boxes))
    if not left and not extra:
        return []
    full = tuple(number + left + (box < extra) for box, number in enumerate(most))
    return _lacking(boxes, full if min(full) else even, rounds)


def _rounds_that_save(boxes: BoxPlans) -> Iterator[Rounds]:
    """Yields rounds that may need least memory: with small groups devices do, with one group the host does."""
    question = boxes.kind.question
    question = replace(question, num_ranks=1, chooses_ranks=False) if question.chooses_ranks else question
    for number in extremes(numbers_of_microbatches(question)):
        for size in dict.fromkeys((1, -(-number // question.num_ranks))):
            yield Rounds(num_ranks=question.num_ranks, num_microbatches=number, group_size=size)


def _most_layers(plans: BoxPlans, box: int, ranks: tuple[int, ...], num_layers: int, rounds: Rounds) -> int:
    """Returns the most layers for which a box has room, in its place among the boxes."""

    def has_room(number: int) -> bool:
        return _has_room(plans, run_with(number, box, ranks, num_layers=num_layers), rounds)

    return largest(has_room, most=num_layers - len(ranks) + 1)


def _lacking(boxes: Sequence[BoxPlans], division: Division, rounds: Rounds) -> list[Lack]:
    """Returns what boxes lack for their parts of a division."""
    ranks = ranks_of(boxes, rounds)
    runs = [(box, plans, run_of(division, box, ranks)) for box, plans in enumerate(boxes)]
    return [
        Lack(box=box, run=run, shortfall=shortfall_of(plans.question_of(rounds), _least_memory(plans, run, rounds)))
        for box, plans, run in runs
        if not _has_room(plans, run, rounds)
    ]


def _has_room(plans: BoxPlans, run: Run, rounds: Rounds) -> bool:
    limits = limits_for_plans(plans.question_of(rounds))
    return _least_memory(plans, run, rounds).fitting(limits) is not None


def _least_memory(plans: BoxPlans, run: Run, rounds: Rounds) -> LeastMemory:
    return LeastMemory(plans.question_of(rounds), plans.profiles.unmeasured(), [plans.job_of(run, rounds)])
