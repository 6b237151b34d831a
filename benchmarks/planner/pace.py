"""Measures how fast this machine computes a job's blocks, independently of the job: before it, and after it.

A virtual machine's pace changes within minutes. A prediction holds for the pace at which its blocks were measured. So
they are measured again right before and right after the job runs, and the job's time is compared with both.
"""

import statistics
from dataclasses import dataclass

import torch

from windlass.planner.cost import ModelProfile
from windlass.planner.profiling import measure_blocks
from windlass.planner.question import PlanQuestion
from windlass.planner.solver import PlannedJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The seconds of a micro-batch in all blocks, forward and backward: for the plan, before the job, and after it."""

    planned_s: float
    before_s: float
    after_s: float

    @property
    def slowdown(self) -> float:
        """The factor by which the machine computed slower around the job than when the job was planned."""
        return statistics.fmean((self.before_s, self.after_s)) / self.planned_s


def planned_blocks_s(job: PlannedJob) -> float:
    """Returns the seconds that the plan's blocks took when they were measured for it."""
    return _sum_s(job.model)


def blocks_s(question: PlanQuestion, job: PlannedJob) -> float:
    """Measures the same blocks in the same way again, and returns their seconds."""
    model, training = job.model, job.training
    measured = measure_blocks(
        model,
        question.config,
        training.precision,
        torch.device("cpu"),
        sums_grads=training.num_microbatches > 1,
        grad_precision=training.grad_precision,
        head_slices=training.head_slices,
    )
    return sum(times.forward_s + times.backward_s for times in measured.times.values())


def _sum_s(model: ModelProfile) -> float:
    seconds = 0.0
    for block in model.blocks:
        assert block.forward_s is not None, "the blocks were measured"
        assert block.backward_s is not None, "the blocks were measured"
        seconds += block.forward_s + block.backward_s
    return seconds
