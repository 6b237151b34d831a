"""Measures how fast this machine computes a job's blocks while the job runs, but independently of it.

A virtual machine's pace changes within seconds. A prediction holds for the pace at which its blocks were measured. So
the job's process is stopped again and again for some seconds, in which the same blocks are measured in another process.
"""

import time
from dataclasses import dataclass

import torch

from windlass.planner.cost import ModelProfile
from windlass.planner.profiling import BlockBench, MeasuredBlocks, Round
from windlass.planner.question import PlanQuestion
from windlass.planner.solver import PlannedJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The seconds of a micro-batch in all blocks, forward and backward: for the plan, and while the job ran."""

    planned_s: float
    meanwhile_s: float
    standard_error: float  # of `meanwhile_s`, relative
    num_rounds: int  # measurements that `meanwhile_s` is the mean of

    @property
    def slowdown(self) -> float:
        """The factor by which the machine computed slower while the job ran than when the job was planned."""
        return self.meanwhile_s / self.planned_s


class PaceProbe:
    """The blocks of a planned job, ready to be measured."""

    def __init__(self, question: PlanQuestion, job: PlannedJob) -> None:
        training = job.training
        self._job = job
        self._bench = BlockBench(
            job.model,
            question.config,
            training.precision,
            torch.device("cpu"),
            sums_grads=training.num_microbatches > 1,
            grad_precision=training.grad_precision,
            head_slices=training.head_slices,
        )
        self._bench.round()  # one-time work
        self._before = self._bench.round()
        self._rounds: list[tuple[float, Round]] = []

    def measure(self) -> None:
        """Measures all blocks once."""
        start_s = time.monotonic()
        self._rounds.append((start_s, self._bench.round()))

    def pace(self, start_s: float, end_s: float) -> Pace:
        """Returns the pace between two times of the monotonic clock.

        If none was measured then, as in a short job or one that failed, measurements before and after it count.
        """
        rounds = [taken for at_s, taken in self._rounds if start_s <= at_s <= end_s]
        rounds = rounds or [self._before, *(taken for _, taken in self._rounds), self._bench.round()]
        measured = self._bench.times_of(rounds)
        return Pace(
            planned_s=_planned_s(self._job.model),
            meanwhile_s=_measured_s(measured),
            standard_error=measured.standard_error,
            num_rounds=len(rounds),
        )


def _measured_s(measured: MeasuredBlocks) -> float:
    return sum(times.forward_s + times.backward_s for times in measured.times.values())


def _planned_s(model: ModelProfile) -> float:
    """Returns the seconds that the plan's blocks took when they were measured for it."""
    seconds = 0.0
    for block in model.blocks:
        assert block.forward_s is not None, "the blocks were measured"
        assert block.backward_s is not None, "the blocks were measured"
        seconds += block.forward_s + block.backward_s
    return seconds
