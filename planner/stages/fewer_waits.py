"""Plans of the same boxes and blocks that may wait less: such as those that a job on one box is compared with, too."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

from windlass.engine.memory_plan import Placement
from windlass.planner.planning import BUSY_SHARES, with_idle_ssds, with_more_passing
from windlass.planner.question import PlanQuestion, Profiles
from windlass.planner.solver import Solution
from windlass.planner.stages.box_plans import BoxPlan, BoxPlans, agree, times_of
from windlass.planner.stages.splits import PlannedStages

# Returns another plan of a box for its blocks. None: there is none.
_Change = Callable[[PlanQuestion, Profiles, Solution], Solution | None]


def with_other_place(planned: PlannedStages) -> PlannedStages | None:
    """Returns the plan with the other place of kept gradients on all boxes: memory or SSDs. None: there is none."""
    job = planned.plans[0].solution.costs.job
    if not job.keeps_grads:
        return None
    spills = any(plan.solution.costs.spills for plan in planned.plans)
    boxes = tuple(_with_place(box, planned, spills=not spills) for box in planned.boxes)
    other = replace(planned, boxes=boxes, near=(), other_rounds=()).with_own_blocks()
    return other if other is not None and agree(other.plans) else None


def _with_place(box: BoxPlans, planned: PlannedStages, *, spills: bool) -> BoxPlans:
    """Returns the plans of a box with one place of kept gradients, and with the order of updates that is planned."""
    order = planned.plans[0].solution.costs.job.update_order
    alike = (each for each in box.alike if each.kind.question.training.order_of_updates is order)
    return next(each for each in alike if each.spills is spills)


def with_more_gradients(planned: PlannedStages) -> PlannedStages | None:
    """Returns the plan with more gradients that may wait for their update, on each box that has few. None: none has."""
    return _changed(planned, with_more_passing)


def with_ssds_that_idle(planned: PlannedStages) -> Iterator[PlannedStages]:
    """Yields plans with which the SSDs of boxes that swap activations to them are busy for less and less of a step."""
    before = planned
    for share in BUSY_SHARES:
        changed = _changed(planned, functools.partial(with_idle_ssds, share=share))
        if changed is None:
            return
        if _placements(changed) != _placements(before):
            yield changed
        before = changed


def _placements(planned: PlannedStages) -> list[Placement]:
    return [plan.solution.placement for plan in planned.plans]


def _changed(planned: PlannedStages, change: _Change) -> PlannedStages | None:
    """Returns the plan with the changed plan of each box that has one. None: no box has one, or they do not agree."""
    plans = list[BoxPlan]()
    for box, plan in zip(planned.boxes, planned.plans, strict=True):
        solution = change(box.question_of(planned.rounds), box.profiles, plan.solution)
        plans.append(plan if solution is None else BoxPlan(solution=solution, times=times_of(solution, planned.rounds)))
    if all(one is other for one, other in zip(plans, planned.plans, strict=True)) or not agree(plans):
        return None
    pipeline = replace(planned.pipeline, stages=tuple(plan.times for plan in plans))
    return replace(planned, plans=tuple(plans), pipeline=pipeline, near=(), other_rounds=())
