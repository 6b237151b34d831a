"""The predicted step time of a job over boxes: by simulation, or by the formula where that would take long."""

import math
import os
from collections.abc import Sequence

from windlass.actors.timeline import StepSpans
from windlass.actors.worker_policy import Stage
from windlass.planner.planning import waits
from windlass.planner.simulation import NetworkRates, Stuck, TooLong
from windlass.planner.simulation.boxes import StagesToSimulate, simulate_stages, simulated_stages_step_s
from windlass.planner.stages.box_plans import agree
from windlass.planner.stages.fewer_waits import with_more_gradients, with_other_place, with_ssds_that_idle
from windlass.planner.stages.splits import PlannedStages

# The most events of a simulated step. Each simulation then adds about two seconds to a plan's time.
MOST_EVENTS = 200_000
# Share of a step. The simulation of a plan ends early once its step is longer by more than this than the best one's, as
# the rest of the step is estimated with an error.
_SURE = 1.5e-2
# Share of a step by which a plan waits so long that another cut of matrices is searched for.
_LONG_WAITS = 0.1
# CPU seconds that the timeline of a plan's step may take.
_TIMELINE_S = 20.0


def fastest_by_simulation(
    planned: PlannedStages, *, most_events: int | None = None
) -> tuple[PlannedStages, float | None]:
    """Returns the plan, or another one whose simulated step is shorter, and that step time.

    The others are those near it, whatever their steps are by the formula, which may be too long or too short. If the
    fastest of these waits, they are also plans with other rounds, and then plans of the same kind that may
    wait less. If it waits long, one with another cut of matrices comes between the two.
    If the plan itself is not simulated, it is returned with None: times by the formula and simulated ones do not
    compare. `most_events`: see `simulated_step_s`.
    """
    step_s = simulated_step_s(planned, most_events=most_events)
    if step_s is None:
        return planned, None
    best, best_s = planned, step_s

    def faster(other: PlannedStages | None) -> tuple[PlannedStages, float]:
        """Returns the best plan so far or, if it is faster, another one."""
        if other is None or _least_s(other) >= best_s or not agree(other.plans):
            return best, best_s
        other_s = simulated_step_s(other, most_events=most_events, most_s=(1 + _SURE) * best_s)
        return (best, best_s) if other_s is None or other_s >= best_s else (other, other_s)

    for near in planned.near:
        best, best_s = faster(near)
    if len(planned.boxes) == 1:
        return best, best_s  # it has been compared with those that wait less
    for other in planned.other_rounds:
        if waits(best.step_s, best_s) and _least_s(other) < best_s:
            best, best_s = faster(other.with_own_blocks())
    if best_s > (1 + _LONG_WAITS) * best.step_s:
        best, best_s = faster(planned.find_other_cut(best_s))
    for changed in (with_other_place, with_more_gradients):
        if waits(best.step_s, best_s):
            best, best_s = faster(changed(best))
    if waits(best.step_s, best_s):
        for idle in with_ssds_that_idle(best):
            if _least_s(idle) >= best_s:
                break
            best, best_s = faster(idle)
            if not waits(best.step_s, best_s):
                break
    return best, best_s


def simulated_step_s(
    planned: PlannedStages, *, most_events: int | None = None, most_s: float = math.inf
) -> float | None:
    """Returns the simulated step time; None if the simulation would take long, or the model has hypothetical layers.

    A step takes no less than the busiest box needs by the bounds of its plan. `most_events`: of a step that is
    simulated; None: `MOST_EVENTS`. `most_s`: if the step takes longer, some time above this may be returned.
    """
    if any(boxes.kind.question.num_layers is not None for boxes in planned.boxes):
        return None
    max_calls = MOST_EVENTS if most_events is None else most_events
    try:
        step_s = simulated_stages_step_s(_job_of(planned), max_calls=max_calls, most_s=most_s)
    except (TooLong, Stuck, ValueError):  # the formula's time remains
        return None
    assert math.isfinite(step_s), "a job that ends has a step"
    return max(step_s, _least_s(planned))


def _least_s(planned: PlannedStages) -> float:
    """Returns what a simulated step takes at least. By the formula a step may take longer than that."""
    return max(plan.times.alone_s for plan in planned.plans)


def simulated_timeline(planned: PlannedStages, names: Sequence[str]) -> StepSpans | None:
    """Returns the timeline of a simulated step, for a plan whose step time was simulated. None: it takes too long.

    `names`: of the boxes, in the order of their blocks.
    """
    try:
        return simulate_stages(_job_of(planned, names), limit_s=_TIMELINE_S).steps[-1]
    except (TooLong, Stuck, ValueError):
        return None


def _job_of(planned: PlannedStages, names: Sequence[str] = ()) -> StagesToSimulate:
    return StagesToSimulate(
        plans=[plan.solution for plan in planned.plans],
        stages=tuple(Stage(run.first, run.stop) for run in planned.runs),
        layout=planned.boxes[0].profiles.layout,
        network=NetworkRates(card_bytes=planned.pipeline.network_bytes),
        num_cores=len(os.sched_getaffinity(0)),
        names=tuple(names),
    )
