"""Simulates a planned job over several boxes: the scheduler's policy, each box's resources, and the network."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from windlass.actors.worker_policy import Stage
from windlass.engine.model import ModelLayout
from windlass.planner.simulation import (
    NetworkRates,
    SimulatedBox,
    SimulatedSteps,
    box_of_plan,
    in_fewer_chunks,
    may_merge_ssds,
    simulate_boxes,
    simulated_step_s_of_boxes,
)
from windlass.planner.solver import Solution, commit_every_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesToSimulate:
    """A planned job over boxes, in the order of their blocks. One box with all blocks is a job over boxes, too.

    `num_cores`: of each box, used if its device is the CPU.
    """

    plans: Sequence[Solution]
    stages: tuple[Stage, ...]
    layout: ModelLayout  # of the whole model
    network: NetworkRates
    num_cores: int
    names: tuple[str, ...] = ()  # of the boxes, for users; empty: they have none

    def boxes(self, *, merges_ssds: bool) -> list[SimulatedBox]:
        """Returns the boxes, with chunks of one size on all.

        `merges_ssds`: simulate all SSDs of a box as one, if that is good enough.
        """
        merges_ssds = merges_ssds and may_merge_ssds(self.layout, self.plans)
        layout = in_fewer_chunks(self.layout, self.plans, merges_ssds=merges_ssds)
        commit_every = commit_every_of(plan.plan for plan in self.plans)
        has_several = len(self.plans) > 1
        ranks = tuple(plan.costs.job.num_ranks for plan in self.plans)
        return [
            box_of_plan(
                plan,
                layout,
                num_cores=self.num_cores,
                merges_ssds=merges_ssds,
                stages=self.stages if has_several else (),
                ranks=ranks if has_several else (),
                names=self.names if has_several else (),
                box=index,
                commit_every=commit_every if has_several else None,
            )
            for index, plan in enumerate(self.plans)
        ]


def simulated_stages_step_s(job: StagesToSimulate, *, max_calls: int | None = None, most_s: float = math.inf) -> float:
    """Returns the steady step time of a planned job over boxes.

    `most_s`: if the step takes longer, some time above this may be returned in place of the step's.

    Raises:
        Stuck: the job would not end.
        TooLong: a step has more than `max_calls` events.
    """
    return simulated_step_s_of_boxes(job.boxes(merges_ssds=True), job.network, max_calls=max_calls, most_s=most_s)


def simulate_stages(job: StagesToSimulate, *, limit_s: float = math.inf) -> SimulatedSteps:
    """Simulates the steps of a planned job over boxes. The timelines and memory levels are those of all boxes.

    Raises:
        Stuck: the job would not end.
        TooLong: the simulation has taken `limit_s` of CPU time.
    """
    return simulate_boxes(job.boxes(merges_ssds=False), job.network, limit_s=limit_s)
