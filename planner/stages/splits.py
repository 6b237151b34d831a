"""Divides a model's layers over the boxes of a job, so that a step is as short as possible."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from windlass.planner.cost import ModelProfile
from windlass.planner.stages.box_plans import BoxPlan, BoxPlans, Rounds, Run
from windlass.planner.stages.pipeline import Pipeline, StageTimes

# Maximum number of divisions for which plans are made. Each is the best one by the times of those before.
_MOST_DIVISIONS = 5
# Numbers of layers that move from one box to another at once.
_MOVES = (1, 4)
# Share of a step by which a division must be better to be taken.
_WORTH = 1e-4

# The number of layers of each box.
Division = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStages:
    """The boxes of a job in order, each with its blocks and its plan."""

    boxes: tuple[BoxPlans, ...]
    rounds: Rounds
    division: Division
    plans: tuple[BoxPlan, ...]
    pipeline: Pipeline
    near: "tuple[PlannedStages, ...]" = ()  # other plans of the same boxes whose steps are nearly as short
    # Plans of the same boxes with other rounds, as `Splitter` found them: see `with_own_blocks`.
    other_rounds: "tuple[PlannedStages, ...]" = ()
    # Returns the best plan with a cut of matrices if this one has none, else that without one; see `box_search`. It
    # takes time. None: its step is not below the given seconds, or it would be of no use.
    find_other_cut: "Callable[[float], PlannedStages | None]" = lambda below_s: None

    @property
    def step_s(self) -> float:
        """The time of a step."""
        return self.pipeline.step_s

    @property
    def runs(self) -> tuple[Run, ...]:
        """The blocks of each box."""
        return tuple(run_of(self.division, box, self.ranks) for box in range(len(self.division)))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The number of GPUs of each box."""
        return ranks_of(self.boxes, self.rounds)

    def with_own_blocks(self) -> "PlannedStages | None":
        """Returns the same division, in which the plan of each box names its own blocks. None: a box has no such plan.

        While divisions are compared, equal runs of layers share a plan.
        """
        pairs = zip(self.boxes, self.runs, strict=True)
        plans = tuple(plan for box, run in pairs if (plan := box.of_blocks(run, self.rounds)) is not None)
        if len(plans) < len(self.boxes):
            return None
        return replace(self, plans=plans, pipeline=replace(self.pipeline, stages=tuple(plan.times for plan in plans)))


def ranks_of(boxes: Sequence[BoxPlans], rounds: Rounds) -> tuple[int, ...]:
    """Returns the number of GPUs that each box uses."""
    return tuple(box.num_ranks(rounds) for box in boxes)


def run_of(division: Division, box: int, ranks: tuple[int, ...]) -> Run:
    """Returns the blocks of a box. The first box has the embedding, too, and the last one the head.

    `ranks`: the number of GPUs of each box.
    """
    first, last = 1 + sum(division[:box]), len(division) - 1
    stop = first + division[box]
    return Run(first=0 if box == 0 else first, stop=stop + 1 if box == last else stop, stage=box, ranks=ranks)


def run_with(number: int, box: int, ranks: tuple[int, ...], *, num_layers: int) -> Run:
    """Returns a run of so many layers for a box, which has this place among the boxes. `ranks`: see `run_of`."""
    # The others' numbers do not matter, only that they add up.
    division = [0] * len(ranks)
    division[box] = number
    division[box - 1] += num_layers - number
    return run_of(tuple(division), box, ranks)


def planned_stages(
    boxes: tuple[BoxPlans, ...], rounds: Rounds, division: Division, pipeline: Pipeline, *, below: float = math.inf
) -> PlannedStages | None:
    """Plans all boxes of a division, or returns None: a box has no plan whose step is below `below`.

    `pipeline`: without stages.
    """
    plans = []
    for index, box in enumerate(boxes):
        plan = box.of(run_of(division, index, ranks_of(boxes, rounds)), rounds, below=below)
        if plan is None:
            return None
        plans.append(plan)
    stages = tuple(plan.times for plan in plans)
    return PlannedStages(
        boxes=boxes, rounds=rounds, division=division, plans=tuple(plans), pipeline=replace(pipeline, stages=stages)
    )


def in_proportion(num_layers: int, work_s: Sequence[float], *, like_head: float) -> Division:
    """Returns a division by which all boxes take about as long. Each has a layer at least.

    Args:
        num_layers: the number of the model's layers, which is not smaller than that of boxes.
        work_s: for each box, the seconds of all blocks.
        like_head: the number of layers that take as long as the head.
    """
    speed = sum(1 / seconds for seconds in work_s)
    wanted = [(num_layers + like_head) / seconds / speed for seconds in work_s]
    wanted[-1] -= like_head
    division = [max(1, math.floor(number)) for number in wanted]
    while (missing := num_layers - sum(division)) != 0:
        box = max(range(len(wanted)), key=lambda each: _wants(wanted[each] - division[each], division[each], missing))
        division[box] += 1 if missing > 0 else -1
    return tuple(division)


def _wants(more: float, number: int, missing: int) -> tuple[bool, float]:
    """Returns how much a box wants the next layer that is given, or that is taken. It keeps one."""
    return (True, more) if missing > 0 else (number > 1, -more)


@dataclass(kw_only=True)
class Splitter:
    """Searches the best division for one order of boxes, with fixed rounds.

    `work_s`: for each box, the least seconds of the passes of a step of the whole model. `pipeline`: without stages.
    `below`: only plans with a shorter step count.
    """

    boxes: tuple[BoxPlans, ...]
    rounds: Rounds
    work_s: tuple[float, ...]
    pipeline: Pipeline
    below: float = math.inf
    planned: list[PlannedStages] = field(default_factory=list)  # all divisions for which each box has a plan
    _known: list[dict[int, StageTimes]] = field(default_factory=list)  # for each box, by number of layers
    _too_many: list[int] = field(default_factory=list)  # for each box, the fewest layers for which there is no plan

    def __post_init__(self) -> None:
        """Begins without known plans."""
        self._known = [{} for _ in self.boxes]
        self._too_many = [self._num_layers + 1 for _ in self.boxes]

    def best(self, *, known: Division | None, worth_refining: float) -> PlannedStages | None:
        """Returns the best division found, or None if there is none.

        `known`: that of a good plan with other rounds, for boxes that have no plan in proportion to their speed. If the
        first step is not below `worth_refining`, no other division is tried.
        """
        best: PlannedStages | None = None
        tried = set[Division]()
        division = in_proportion(self._num_layers, self.work_s, like_head=self._like_head)
        while division not in tried and len(tried) < _MOST_DIVISIONS:
            tried.add(division)
            if self._plan(division, finds_most=known is None, worth=worth_refining):
                planned = planned_stages(self.boxes, self.rounds, division, self.pipeline, below=self.below)
                assert planned is not None, "each box has a plan"
                self.planned.append(planned)
                if best is None or planned.step_s < best.step_s:
                    best = planned
                division = self._fastest_from(division)
            elif known is not None:
                division = known
            else:
                division = self._fastest_from(division)
        return best if best is not None and best.step_s < self.below else None

    @cached_property
    def _model(self) -> ModelProfile:
        return self.boxes[0].job(self.rounds).model

    @cached_property
    def _ranks(self) -> tuple[int, ...]:
        return ranks_of(self.boxes, self.rounds)

    @property
    def _num_layers(self) -> int:
        return len(self._model.layers)

    @cached_property
    def _like_head(self) -> float:
        """The number of layers that compute as much as the head."""
        num_flops = sum(layer.num_flops for layer in self._model.layers)
        return self._model.head.num_flops * self._num_layers / num_flops

    def _plan(self, division: Division, *, finds_most: bool, worth: float) -> bool:
        """Plans each box, and notes its times. Returns whether all have a plan, and the step is below `worth`.

        `finds_most`: for a box that has none, the most layers for which it has one are searched.
        """
        for box, number in enumerate(division):
            if number not in self._known[box]:
                plan = None
                if number < self._too_many[box]:
                    plan = self.boxes[box].of(run_of(division, box, self._ranks), self.rounds, below=self.below)
                if plan is None:
                    self._too_many[box] = min(number, self._too_many[box])
                    if finds_most and len(division) > 1:
                        self._find_most(box)
                    return False
                self._known[box][number] = plan.times
            # The times of boxes that follow are not known yet. They count as if memory were no limit.
            if self._estimate(division, {})[1] >= worth:
                return False
        return True

    def _find_most(self, box: int) -> None:
        """Searches the most layers for which a box has a plan, and notes its times with them."""
        fits = max(self._known[box], default=0)
        while self._too_many[box] - fits > 1:
            number = (fits + self._too_many[box]) // 2
            run = run_with(number, box, self._ranks, num_layers=self._num_layers)
            plan = self.boxes[box].of(run, self.rounds, below=self.below)
            if plan is None:
                self._too_many[box] = number
            else:
                self._known[box][number] = plan.times
                fits = number

    def _fastest_from(self, division: Division) -> Division:
        """Moves layers between boxes while the estimated step becomes shorter. Returns the last division."""
        known = dict[tuple[int, int], StageTimes]()
        best = self._estimate(division, known)
        pairs = [(source, target) for source in range(len(division)) for target in range(len(division))]
        while True:
            nearest, moved = best, division
            for source, target in pairs:
                for number in _MOVES:
                    if source != target and division[source] > number:
                        other = list(division)
                        other[source] -= number
                        other[target] += number
                        estimate = self._estimate(tuple(other), known)
                        if estimate < nearest:
                            nearest, moved = estimate, tuple(other)
            if nearest >= (best[0], (1 - _WORTH) * best[1]):
                return division
            best, division = nearest, moved

    def _estimate(self, division: Division, known: dict[tuple[int, int], StageTimes]) -> tuple[int, float]:
        """Returns the number of layers for which there is no room, and the estimated time of a step."""
        no_room = 0
        times = []
        for place in enumerate(division):
            if place not in known:
                known[place] = self._times(*place)
            times.append(known[place])
            no_room += max(0, place[1] + 1 - self._too_many[place[0]])
        return no_room, replace(self.pipeline, stages=tuple(times)).step_s

    def _times(self, box: int, number: int) -> StageTimes:
        """Returns the estimated times of a box with a number of layers: in proportion to those of a known number."""
        like_head = self._like_head
        end = like_head if box == len(self.boxes) - 1 else 0.0
        if not self._known[box]:
            passes_s = self.work_s[box] * (number + end) / (self._num_layers + like_head)
            return StageTimes(
                round_s=passes_s / self.rounds.number,
                computed_s=0.0,
                beside_updates_s=0.0,
                updates_s=0.0,
                first_update_s=0.0,
                alone_s=passes_s,
            )
        nearest = min(self._known[box], key=lambda each: abs(each - number))
        times, share = self._known[box][nearest], (number + end) / (nearest + end)
        return StageTimes(
            round_s=share * times.round_s,
            computed_s=share * times.computed_s,
            beside_updates_s=share * times.beside_updates_s,
            updates_s=share * times.updates_s,
            first_update_s=times.first_update_s,
            alone_s=share * times.alone_s,
        )
