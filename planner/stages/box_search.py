"""Searches the best plan of a job for each choice of boxes."""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from windlass.engine.memory_plan import PARTIAL_GRAD_ITEMSIZE
from windlass.engine.model import ModelLayout
from windlass.planner.feasibility import numbers_of_microbatches
from windlass.planner.planning import best_plan, fastest_plan, numbers_of_gpus
from windlass.planner.question import KeptShapes, Profiles
from windlass.planner.solver import DoesNotFitError, group_sizes, penalty_of_cut
from windlass.planner.stages.box_plans import BoxKind, BoxPlan, BoxPlans, Rounds, agree, times_of
from windlass.planner.stages.lacking import lacks_with_all
from windlass.planner.stages.pipeline import Pipeline, least_step_s
from windlass.planner.stages.predicted import fastest_by_simulation
from windlass.planner.stages.splits import PlannedStages, Splitter, ranks_of
from windlass.planner.stages.stages_report import StagesReport, report_of_stages

# A division of layers is improved if its step is at most so many times that of the best plan so far.
_WORTH_REFINING = 1.2
# Share of a step by which a plan must be better than the best one so far.
_WORTH = 1e-3
# The same for a plan with another choice that all boxes make alike. By the formula boxes that choose alone are faster.
_WORTH_ALIKE = 5e-3
# Maximum number of orders of kinds of boxes to try.
_MOST_ORDERS = 24
# Maximum number of choices of boxes to compare, if a job is to have some of them, and to plan.
_MOST_COMPARED = 64
_MOST_PLANNED = 32
# Plans whose step is at most so many times that of the best one are near it, and at most so many are kept. The formula
# and simulations differ by as much.
_NEAR = 1.1
_MOST_NEAR = 2
# The maximum number of plans with other rounds that are kept, too: each is the best one found with its rounds.
_MOST_OTHER_ROUNDS = 4

# Kinds of boxes, each with the number of its boxes.
Choice = Sequence[tuple[BoxPlans, int]]


class StagesError(ValueError):
    """The job cannot be planned over several boxes. The message says why."""


def plans_over_boxes(kinds: Sequence[BoxKind]) -> list[StagesReport]:
    """Returns the best plan for each choice of boxes, the fastest first; of equally fast ones, that with fewest boxes.

    A choice is a number of each kind, up to all of them. Choices with which the job does not fit are left out. Plans
    are searched by the formula of `Pipeline`. The best few are then simulated, where that takes a few seconds.

    Raises:
        StagesError: there are several boxes, and the rate of a network card is not known, or the model cannot be
            divided.
    """
    boxes = _plans_of(kinds)
    # Blocks are measured for jobs that fit only, because that takes up to a minute.
    if any(each.kind.question.measures for each in boxes) and not best_plans(_unmeasured(boxes)):
        return []
    return best_plans(boxes, simulates=True)


def what_boxes_lack(kinds: Sequence[BoxKind]) -> list[str]:
    """Returns sentences that tell what each box lacks if the job is on all of them. Empty: it is close to their memory.

    Raises:
        StagesError: as `plans_over_boxes`.
    """
    boxes = _unmeasured(_plans_of(kinds))
    number = sum(each.kind.number for each in boxes)
    if number > 1:
        _check(boxes, number)
    names = [
        each.kind.name if each.kind.number == 1 else f"{each.kind.name} {place}"
        for each in boxes
        for place in range(1, each.kind.number + 1)
    ]
    lacks = lacks_with_all([(each, each.kind.number) for each in boxes], boxes[0].profiles.layout)
    return [lack.in_words(names[lack.box]) for lack in lacks]


def _plans_of(kinds: Sequence[BoxKind]) -> list[BoxPlans]:
    shapes = KeptShapes()
    return [
        BoxPlans(kind=kind, profiles=Profiles(replace(kind.question, kept_shapes=kind.question.kept_shapes or shapes)))
        for kind in kinds
    ]


def _unmeasured(boxes: Sequence[BoxPlans]) -> list[BoxPlans]:
    """Returns empty plans of the same boxes, which measure nothing."""
    return [BoxPlans(kind=each.kind, profiles=each.profiles.unmeasured()) for each in boxes]


def best_plans(
    boxes: Sequence[BoxPlans],
    *,
    numbers: Collection[int] | None = None,
    simulates: bool = False,
    most_events: int | None = None,
) -> list[StagesReport]:
    """Does the same as `plans_over_boxes`, and keeps the plans of single boxes for further calls.

    `numbers`: of boxes to plan; None: all. `simulates`: the times are simulated, if a step has no more than
    `most_events` (None: as many as take seconds).
    """
    if sum(each.kind.number for each in boxes) > 1:
        _check(boxes, 1)  # choices of more boxes than layers are left out
    found: list[PlannedStages] = []
    for choice in itertools.product(*(range(each.kind.number + 1) for each in boxes)):
        chosen = [(each, number) for each, number in zip(boxes, choice, strict=True) if number]
        if not chosen or (numbers is not None and sum(choice) not in numbers):
            continue
        best = _best_of(chosen, found[-1].rounds if found else None, simulates=simulates)
        if best is not None:
            found.append(best)
    told = (fastest_by_simulation(each, most_events=most_events) if simulates else (each, None) for each in found)
    reports = [report_of_stages(planned, simulated_s) for planned, simulated_s in told]
    return sorted(reports, key=lambda each: (each.step_s, len(each.boxes)))


def choices_of(boxes: Sequence[BoxPlans], number: int) -> list[Choice]:
    """Returns the choices of so many boxes, one of the first kind among them. There are `_MOST_COMPARED` at most.

    Those are first that may have the shortest step, by a lower bound.

    Raises:
        StagesError: as `plans_over_boxes`, or there are more boxes than layers.
    """
    if number == 1:
        return [[(boxes[0], 1)]]
    _check(boxes, number)
    choices = []
    for numbers in itertools.islice(_numbers_of(boxes, number), _MOST_COMPARED):
        choice = [(each, number) for each, number in zip(boxes, numbers, strict=True) if number]
        choices.append((_rounds_by_bound(choice, None)[0][0], choice))
    return [choice for _, choice in sorted(choices, key=lambda each: each[0])]


def best_of_choices(choices: Sequence[Choice]) -> PlannedStages | None:
    """Returns the best plan with one of these choices, a box of its first kind first, or None if nothing fits.

    Of many choices, the first `_MOST_PLANNED` are planned.
    """
    best: PlannedStages | None = None
    for choice in choices[:_MOST_PLANNED]:
        below, likely = (math.inf, None) if best is None else ((1 - _WORTH) * best.step_s, best.rounds)
        best = _best_of(choice, likely, leads=True, below=below) or best
    return best


def _numbers_of(boxes: Sequence[BoxPlans], number: int, *, least: int = 1) -> Iterator[tuple[int, ...]]:
    """Yields the numbers of boxes of each kind that are so many together, at least `least` of the first kind."""
    if not boxes:
        yield from [()] if number == 0 else []
        return
    for first in range(min(boxes[0].kind.number, number), least - 1, -1):
        yield from ((first, *others) for others in _numbers_of(boxes[1:], number - first, least=0))


def check_division(layout: ModelLayout, num_boxes: int) -> None:
    """Raises StagesError if the model cannot be divided over so many boxes."""
    num_layers = len(layout.blocks) - 2
    if num_boxes > num_layers:
        raise StagesError(
            f"the model has {num_layers} layers, and each of the job's {num_boxes} boxes needs one: "
            f"use at most {num_layers} boxes"
        )


def _check(boxes: Sequence[BoxPlans], num_boxes: int) -> None:
    """Raises StagesError if no plan over so many of these boxes can be made."""
    unknown = [each.kind.name for each in boxes if each.kind.network_bytes is None]
    if unknown:
        raise StagesError(f"the rate of the network between boxes is not known for {', '.join(unknown)}")
    check_division(boxes[0].profiles.layout, num_boxes)


def _best_of_one(box: BoxPlans, *, simulates: bool) -> PlannedStages | None:
    """Returns the best plan on one box. If it `simulates`, it is that of a job on one box, else by the cost model."""
    best, best_s = None, math.inf
    for num_ranks in reversed(list(_numbers_of_gpus([box]))):
        question = replace(box.kind.question, num_ranks=num_ranks, chooses_ranks=False)
        most_s = best_s / (1 - _WORTH)  # of fewer GPUs
        try:
            if best is not None and best_plan(question, box.profiles)[1].step_s > most_s:
                continue  # simulations would take longer
            if simulates:
                job, solution, simulated_s = fastest_plan(question, box.profiles)
            else:
                (job, solution), simulated_s = best_plan(question, box.profiles), None
        except DoesNotFitError:
            continue
        step_s = solution.step_s if simulated_s is None else simulated_s
        if best is None or step_s <= most_s:
            best_s = step_s
            rounds = Rounds(
                num_ranks=num_ranks, num_microbatches=job.num_microbatches, group_size=solution.costs.group_size
            )
            times = times_of(solution, rounds)
            best = PlannedStages(
                boxes=(box,),
                rounds=rounds,
                division=(len(job.model.layers),),
                plans=(BoxPlan(solution=solution, times=times),),
                pipeline=replace(_pipeline((box,), rounds), stages=(times,)),
            )
    return best


def _best_of(
    chosen: Choice,
    likely: Rounds | None,
    *,
    leads: bool = False,
    below: float = math.inf,
    simulates: bool = True,
) -> PlannedStages | None:
    """Returns the best plan for a number of boxes of each kind, all of whose boxes agree.

    `likely`: rounds of a good plan of other boxes. They are tried first if there is a round for each box. `leads`: a
    box of the first kind comes first. `below`: only plans with a shorter step count. `simulates`: see `_best_of_one`.
    """
    if sum(number for _, number in chosen) == 1:
        return _best_of_one(chosen[0][0], simulates=simulates)
    free = search_free(chosen, likely, leads=leads, below=below)
    if free is None:
        return None
    if not chosen[0][0].cuts:
        return _best_alike(free, chosen, leads=leads, below=below)
    best = _best_of_cuts(free, chosen, leads=leads, below=below)
    return best and replace(best, find_other_cut=functools.partial(_with_other_cut, best, chosen, leads=leads))


def _best_of_cuts(free: PlannedStages, chosen: Choice, *, leads: bool, below: float) -> PlannedStages | None:
    """Returns the best plan with one cut of matrices for all boxes. `free`: each box chooses its own.

    Cuts that are of use to some boxes are tried, and the smallest parts. If any plan fits, one with these does. Their
    search has more rounds than that of `free`; see `_all_rounds`.
    """
    cuts = Counter(plan.solution.costs.job.cut for plan in free.plans)
    if cuts.keys() == {None}:
        return _best_alike(free, chosen, leads=leads, below=below)
    best, best_cost, smallest = None, math.inf, chosen[0][0].cuts[-1]
    for cut in dict.fromkeys((*(cut for cut, _ in cuts.most_common()), smallest)):
        worth = 1 + penalty_of_cut(cut)
        most_s = min(below, best_cost / worth)
        if best is not None and cut != smallest and (1 + _WORTH_ALIKE) * free.step_s >= most_s:
            continue
        of_cut = _best_of_cut(cut, free, chosen, leads=leads, below=most_s)
        if of_cut is not None:
            best, best_cost = of_cut, worth * of_cut.step_s
    return best


def _best_of_cut(
    cut: int | None, known: PlannedStages, chosen: Choice, *, leads: bool, below: float
) -> PlannedStages | None:
    """Returns the best plan with a cut of matrices. `known`: a good plan with another one."""
    of_cut = [(boxes.with_cut(cut), number) for boxes, number in chosen]
    found = search_free(of_cut, known.rounds, leads=leads, below=below)
    return None if found is None else _best_alike(found, of_cut, leads=leads, below=below)


def _with_other_cut(best: PlannedStages, chosen: Choice, below_s: float, *, leads: bool) -> PlannedStages | None:
    """Returns the best plan with whole matrices if those of the given one are cut, else with the smallest parts.

    None: it takes `below_s` or more, or would be of no use because devices have room for whole layers.
    """
    costs = [plan.solution.costs for plan in best.plans]
    is_cut = costs[0].job.cut is not None
    if not is_cut and not any(each.lacks_room_for_layers for each in costs):
        return None
    return _best_of_cut(None if is_cut else chosen[0][0].cuts[-1], best, chosen, leads=leads, below=below_s)


def _best_alike(free: PlannedStages, chosen: Choice, *, leads: bool, below: float) -> PlannedStages | None:
    """Returns a plan of `search_free` if its boxes agree, else the best one with which they do."""
    if agree(free.plans):
        return free
    best: PlannedStages | None = None
    every = zip(*(each.alike for each, _ in chosen), strict=True)
    # What most boxes do anyway is mostly best, and ends the search of the others early.
    for boxes in sorted(every, key=lambda each: -sum(each[0].is_alike(plan) for plan in free.plans)):
        most_s = below if best is None else best.step_s
        if best is not None and (1 + _WORTH_ALIKE) * free.step_s >= most_s:
            break
        alike = list(zip(boxes, (number for _, number in chosen), strict=True))
        best = search_free(alike, free.rounds, leads=leads, below=most_s) or best
    return best


def search_free(chosen: Choice, likely: Rounds | None, *, leads: bool, below: float = math.inf) -> PlannedStages | None:
    """Does the same as `_best_of`, for boxes that need not agree."""
    best: PlannedStages | None = None
    found: list[PlannedStages] = []
    for bound, rounds in _rounds_by_bound(chosen, likely):
        for sequence in orders_of_boxes(chosen, leads=leads):
            below = below if best is None else (1 - _WORTH) * best.step_s
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
            found += splitter.planned
    own = None if best is None else best.with_own_blocks()
    if own is None:
        return None
    near = _near(own, [planned for planned in found if agree(planned.plans)])
    return replace(own, near=near, other_rounds=_other_rounds((own, *near), found))


def _near(best: PlannedStages, found: Sequence[PlannedStages]) -> tuple[PlannedStages, ...]:
    """Returns the plans of those found whose steps are nearly as short as the best one, the shortest first."""
    near = list[PlannedStages]()
    known = {_choice_of(best)}
    for planned in sorted(found, key=lambda each: each.step_s):
        if planned.step_s > _NEAR * best.step_s or len(near) == _MOST_NEAR:
            break
        if (choice := _choice_of(planned)) not in known:
            known.add(choice)
            own = planned.with_own_blocks()
            near += [] if own is None else [own]
    return tuple(near)


def _other_rounds(chosen: Sequence[PlannedStages], found: Sequence[PlannedStages]) -> tuple[PlannedStages, ...]:
    """Returns the best plan of those found with each rounds and cut that no chosen one has, the shortest first."""
    alike = itertools.chain.from_iterable(map(_with_one_cut, sorted(found, key=lambda each: -each.step_s)))
    by_rounds = {_rounds_of(planned, cut): planned for planned, cut in alike}
    for planned in chosen:
        by_rounds.pop(_rounds_of(planned, planned.plans[0].solution.costs.job.cut), None)
    return tuple(sorted(by_rounds.values(), key=lambda each: each.step_s)[:_MOST_OTHER_ROUNDS])


def _with_one_cut(planned: PlannedStages) -> Iterator[tuple[PlannedStages, int | None]]:
    """Yields a plan with each cut that a box of it has, for all boxes. If they differ, boxes are yet to be planned."""
    cuts = {plan.solution.costs.job.cut for plan in planned.plans}
    if len(cuts) == 1:
        yield planned, cuts.pop()
        return
    for cut in cuts:
        yield replace(planned, boxes=tuple(boxes.with_cut(cut) for boxes in planned.boxes)), cut


def _rounds_of(planned: PlannedStages, cut: int | None) -> object:
    return tuple(id(boxes.profiles) for boxes in planned.boxes), planned.rounds, cut


def _choice_of(planned: PlannedStages) -> object:
    """Returns what two plans of a search differ in."""
    return tuple(map(id, planned.boxes)), planned.rounds, planned.division


def orders_of_boxes(chosen: Choice, *, leads: bool) -> Iterator[tuple[BoxPlans, ...]]:
    """Yields the orders of the boxes to try. Boxes of a kind follow each other, but for a first one that leads.

    Earlier stages hold more activations, so of many orders those with large devices first are tried.
    """
    lead = (chosen[0][0],) if leads else ()
    others = [(boxes, number - (leads and index == 0)) for index, (boxes, number) in enumerate(chosen)]
    others.sort(key=lambda each: -each[0].kind.question.limits.device_nbytes)
    orders = itertools.permutations([each for each in others if each[1]])
    for order in itertools.islice(orders, _MOST_ORDERS):
        yield (*lead, *(boxes for boxes, number in order for _ in range(number)))


def _rounds_by_bound(chosen: Choice, likely: Rounds | None) -> list[tuple[float, Rounds]]:
    """Returns all divisions of a step with lower bounds of the step time, the smallest bound first after `likely`."""
    bounds = []
    num_boxes = sum(number for _, number in chosen)
    for rounds in _all_rounds([boxes for boxes, _ in chosen]):
        least = [boxes.least_work(rounds) for boxes, number in chosen for _ in range(number)]
        bounds.append((least_step_s(least, rounds.number), rounds))
    return sorted(bounds, key=lambda each: (each[1] != likely or each[1].number < num_boxes, each[0]))


def _numbers_of_gpus(boxes: Sequence[BoxPlans]) -> Iterator[int]:
    """Yields the numbers of GPUs of each box to try. A box with fewer uses all of its own."""
    question = boxes[0].kind.question
    most = max(each.kind.question.num_ranks for each in boxes)
    number = None if question.chooses_microbatches else question.training.num_microbatches
    if question.chooses_ranks:
        yield from numbers_of_gpus(most, number)
    else:
        yield most


def _all_rounds(boxes: Sequence[BoxPlans]) -> Iterator[Rounds]:
    """Yields the divisions of a step: numbers of GPUs and of micro-batches, and sizes of groups.

    Of those with the same number of rounds, only those with the smallest and the largest micro-batches are tried. The
    plans of the others are between theirs. With cut matrices they are not: the largest need too much memory of the
    device, and the smallest move each matrix most often.
    """
    for num_ranks in _numbers_of_gpus(boxes):
        of_ranks = replace(boxes[0].kind.question, num_ranks=num_ranks, chooses_ranks=False)
        by_number = dict[int, list[Rounds]]()
        for num_microbatches in numbers_of_microbatches(of_ranks):
            for size in group_sizes(-(-num_microbatches // num_ranks)):
                rounds = Rounds(num_ranks=num_ranks, num_microbatches=num_microbatches, group_size=size)
                by_number.setdefault(rounds.number, []).append(rounds)
        for same in by_number.values():
            yield from dict.fromkeys((same[-1], same[0]) if of_ranks.training.cut_matrices is None else reversed(same))


def _pipeline(sequence: Sequence[BoxPlans], rounds: Rounds) -> Pipeline:
    """Returns the boxes' pipeline without stages."""
    job, layout = sequence[0].job(rounds), sequence[0].profiles.layout
    num_tokens = job.training.batch_size * job.model.num_tokens * job.model.size_share
    hidden_nbytes = num_tokens * layout.hidden_size * job.training.formats.precision.itemsize
    is_shared = len(sequence) > 1 and any(len(blocks) > 1 for blocks in layout.shared)
    shared_numel = layout.blocks[0].numel if is_shared else 0
    return Pipeline(
        stages=(),
        num_rounds=rounds.number,
        crossing_nbytes=hidden_nbytes / rounds.number,
        network_bytes=tuple(boxes.kind.network_bytes or math.inf for boxes in sequence),
        ranks=ranks_of(sequence, rounds),
        shared_params_nbytes=shared_numel * job.param_itemsize,
        shared_sum_nbytes=shared_numel * PARTIAL_GRAD_ITEMSIZE,
    )
