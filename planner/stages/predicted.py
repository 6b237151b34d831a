"""The predicted step time of a job over boxes: by simulation, or by the formula where that would take long."""

import math
import os

from windlass.actors.worker_policy import Stage
from windlass.planner.simulation import NetworkRates, Stuck, TooLong
from windlass.planner.simulation.boxes import StagesToSimulate, simulated_stages_step_s
from windlass.planner.stages.splits import PlannedStages

# The most events of a simulated step. A plan's time grows by about two seconds then.
_MOST_CALLS = 200_000


def simulated_step_s(planned: PlannedStages) -> float | None:
    """Returns the simulated step time; None if the simulation would take long, or the model has hypothetical layers.

    A step takes no less than the busiest box needs by the bounds of its plan.
    """
    if any(boxes.kind.question.num_layers is not None for boxes in planned.boxes):
        return None
    job = StagesToSimulate(
        plans=[plan.solution for plan in planned.plans],
        stages=tuple(Stage(run.first, run.stop) for run in planned.runs),
        layout=planned.boxes[0].profiles.layout,
        network=NetworkRates(card_bytes=planned.pipeline.network_bytes),
        num_cores=len(os.sched_getaffinity(0)),
    )
    try:
        step_s = simulated_stages_step_s(job, max_calls=_MOST_CALLS)
    except (TooLong, Stuck, ValueError):  # the formula's time remains
        return None
    assert math.isfinite(step_s), "a job that ends has a step"
    return max(step_s, *(plan.times.alone_s for plan in planned.plans))
