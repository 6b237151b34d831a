"""The predicted step time of a job over boxes: by simulation, or by the formula where that would take long."""

import math
import os
from collections.abc import Sequence

from windlass.actors.timeline import StepSpans
from windlass.actors.worker_policy import Stage
from windlass.planner.simulation import NetworkRates, Stuck, TooLong
from windlass.planner.simulation.boxes import StagesToSimulate, simulate_stages, simulated_stages_step_s
from windlass.planner.stages.box_plans import agree
from windlass.planner.stages.splits import PlannedStages

# The most events of a simulated step. Each simulation then adds about two seconds to a plan's time.
MOST_EVENTS = 200_000
# CPU seconds that the timeline of a plan's step may take.
_TIMELINE_S = 20.0


def fastest_by_simulation(
    planned: PlannedStages, *, most_events: int | None = None
) -> tuple[PlannedStages, float | None]:
    """Returns the plan, or the one near it whose simulated step is shortest, and that step time.

    If the plan itself is not simulated, it is returned with None: times by the formula and simulated ones do not
    compare. `most_events`: see `simulated_step_s`.
    """
    step_s = simulated_step_s(planned, most_events=most_events)
    if step_s is None:
        return planned, None
    best, best_s = planned, step_s
    for near in planned.near:
        near_s = simulated_step_s(near, most_events=most_events) if agree(near.plans) else None
        if near_s is not None and near_s < best_s:
            best, best_s = near, near_s
    return best, best_s


def simulated_step_s(planned: PlannedStages, *, most_events: int | None = None) -> float | None:
    """Returns the simulated step time; None if the simulation would take long, or the model has hypothetical layers.

    A step takes no less than the busiest box needs by the bounds of its plan. `most_events`: of a step that is
    simulated; None: `MOST_EVENTS`.
    """
    if any(boxes.kind.question.num_layers is not None for boxes in planned.boxes):
        return None
    max_calls = MOST_EVENTS if most_events is None else most_events
    try:
        step_s = simulated_stages_step_s(_job_of(planned), max_calls=max_calls)
    except (TooLong, Stuck, ValueError):  # the formula's time remains
        return None
    assert math.isfinite(step_s), "a job that ends has a step"
    return max(step_s, *(plan.times.alone_s for plan in planned.plans))


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
