"""Searches the best plan of a job for each choice of boxes."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from windlass.planner.feasibility import numbers_of_microbatches
from windlass.planner.planning import numbers_of_gpus
from windlass.planner.question import KeptShapes, Profiles
from windlass.planner.solver import group_sizes
from windlass.planner.stages.box_plans import BoxKind, BoxPlans, Rounds
from windlass.planner.stages.pipeline import Pipeline, least_step_s
from windlass.planner.stages.splits import PlannedStages, Splitter
from windlass.planner.stages.stages_report import StagesReport, report_of_stages

# A division of layers is improved if its step is at most so many times that of the best plan so far.
_WORTH_REFINING = 1.2
# Share of a step by which a plan must be better than the best one so far.
_WORTH = 1e-3


class StagesError(ValueError):
    """The job cannot be planned over several boxes. The message says why."""


def plans_over_boxes(kinds: Sequence[BoxKind]) -> list[StagesReport]:
    """Returns the best plan for each choice of boxes, the fastest first; of equally fast ones, that with fewest boxes.

    A choice is a number of each kind, up to all of them. Choices with which the job does not fit are left out.

    Raises:
        StagesError: there are several boxes, and the rate of a network card is not known, or the model cannot be
            divided.
    """
    shapes = KeptShapes()
    boxes = [
        BoxPlans(kind=kind, profiles=Profiles(replace(kind.question, kept_shapes=kind.question.kept_shapes or shapes)))
        for kind in kinds
    ]
    if sum(kind.number for kind in kinds) > 1:
        _check(boxes)
    found: list[PlannedStages] = []
    for numbers in itertools.product(*(range(kind.number + 1) for kind in kinds)):
        chosen = [(each, number) for each, number in zip(boxes, numbers, strict=True) if number]
        best = _best_of(chosen, found[-1].rounds if found else None) if chosen else None
        if best is not None:
            found.append(best)
    return [report_of_stages(planned) for planned in sorted(found, key=lambda each: (each.step_s, len(each.boxes)))]


def _check(boxes: Sequence[BoxPlans]) -> None:
    """Raises StagesError if no plan over several boxes can be made."""
    unknown = [each.kind.name for each in boxes if each.kind.network_bytes is None]
    if unknown:
        raise StagesError(f"the rate of the network between boxes is not known for {', '.join(unknown)}")
    if any(len(blocks) > 1 for blocks in boxes[0].profiles.layout.shared):
        raise StagesError(
            "the model's embedding and head share a tensor, and would be on different boxes: that is not supported yet"
        )


def _best_of(chosen: Sequence[tuple[BoxPlans, int]], likely: Rounds | None) -> PlannedStages | None:
    """Returns the best plan for a number of boxes of each kind. Boxes of a kind follow each other.

    `likely`: rounds of a good plan of other boxes. They are tried first if there is a round for each box.
    """
    best: PlannedStages | None = None
    for bound, rounds in _rounds_by_bound(chosen, likely):
        for order in itertools.permutations(chosen):
            below = math.inf if best is None else (1 - _WORTH) * best.step_s
            sequence = tuple(boxes for boxes, number in order for _ in range(number))
            if bound >= below or len(sequence) > len(sequence[0].job(rounds).model.layers):
                continue
            splitter = Splitter(
                boxes=sequence,
                rounds=rounds,
                work_s=tuple(boxes.least_work(rounds).passes_s for boxes in sequence),
                pipeline=_pipeline(sequence, rounds),
                below=below,
            )
            is_same = best is not None and all(one is other for one, other in zip(best.boxes, sequence, strict=True))
            known = best.division if best is not None and is_same else None
            best = splitter.best(known=known, worth_refining=_WORTH_REFINING * below) or best
    return best


def _rounds_by_bound(chosen: Sequence[tuple[BoxPlans, int]], likely: Rounds | None) -> list[tuple[float, Rounds]]:
    """Returns all divisions of a step with lower bounds of the step time, the smallest bound first after `likely`."""
    bounds = []
    num_boxes = sum(number for _, number in chosen)
    for rounds in _all_rounds([boxes for boxes, _ in chosen], num_boxes=num_boxes):
        least = [boxes.least_work(rounds) for boxes, number in chosen for _ in range(number)]
        bounds.append((least_step_s(least, rounds.number), rounds))
    return sorted(bounds, key=lambda each: (each[1] != likely or each[1].number < num_boxes, each[0]))


def _all_rounds(boxes: Sequence[BoxPlans], *, num_boxes: int) -> Iterator[Rounds]:
    """Yields the divisions of a step: numbers of GPUs and of micro-batches, and sizes of groups.

    For several boxes, and the same number of rounds, only the smallest and the largest micro-batches are tried. The
    plans of the others are between theirs.
    """
    question = boxes[0].kind.question
    most = min(each.kind.question.num_ranks for each in boxes)
    number = None if question.chooses_microbatches else question.training.num_microbatches
    for num_ranks in numbers_of_gpus(most, number) if question.chooses_ranks else (most,):
        of_ranks = replace(question, num_ranks=num_ranks, chooses_ranks=False)
        by_number = dict[int, list[Rounds]]()
        for num_microbatches in numbers_of_microbatches(of_ranks):
            for size in group_sizes(-(-num_microbatches // num_ranks)):
                rounds = Rounds(num_ranks=num_ranks, num_microbatches=num_microbatches, group_size=size)
                by_number.setdefault(rounds.number, []).append(rounds)
        for same in by_number.values():
            yield from dict.fromkeys((same[-1], same[0])) if num_boxes > 1 else reversed(same)


def _pipeline(sequence: Sequence[BoxPlans], rounds: Rounds) -> Pipeline:
    """Returns the boxes' pipeline without stages."""
    job, layout = sequence[0].job(rounds), sequence[0].profiles.layout
    num_tokens = job.training.batch_size * job.model.num_tokens * job.model.size_share
    hidden_nbytes = num_tokens * layout.hidden_size * job.training.formats.precision.itemsize
    return Pipeline(
        stages=(),
        num_rounds=rounds.number,
        crossing_nbytes=hidden_nbytes / rounds.number,
        network_bytes=tuple(boxes.kind.network_bytes or math.inf for boxes in sequence),
    )
