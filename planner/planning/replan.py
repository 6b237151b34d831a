"""Makes the plan of a running job again from its measured steps, and decides whether a new plan is worth a restart.

Both plans are simulated with the same corrected rates. The old plan's measured time is not compared with a new plan's
predicted time, because a measurement includes what no prediction knows.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from windlass.engine.memory_plan import Placement
from windlass.planner.planning.faster import WORTH
from windlass.planner.planning.planner import Planned, advised, planned
from windlass.planner.planning.simulated_search import fastest_plan, promised_step_s
from windlass.planner.predictions import MeasuredStep, correction_of
from windlass.planner.question import PlanQuestion, Profiles, counted
from windlass.planner.solver import DoesNotFitError, PlannedJob, Solution, StepCosts, solution_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningJob:
    """A job and the plan that it runs with."""

    placement: Placement
    arena_nbytes: int
    spills_grads: bool  # kept gradients go to the SSDs
    step_s: float  # planned
    compute_s: float  # planned compute time of a step
    num_steps_left: int
    restart_s: float  # seconds that another attempt costs
    may_change: bool = True  # else only its prediction is made again


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectedPlan:
    """The plan from now on, and whether it differs from the current one."""

    planned: Planned
    changes: bool
    in_words: str
    others: tuple[Planned, ...] = ()  # for other numbers of GPUs with which the job fits


def correct(
    question: PlanQuestion,
    profiles: Profiles,
    running: RunningJob,
    steps: Sequence[MeasuredStep],
    *,
    other_numbers: Iterable[int] = (),
) -> CorrectedPlan:
    """Corrects a running job's plan. `question` is that of the original plan, with its number of micro-batches.

    `other_numbers`: of GPUs. They are planned again with the same corrected rates.
    """
    correction = correction_of(
        steps, costs_of(question, profiles, running), running.placement, planned_compute_s=running.compute_s
    )
    question = replace(question, correction=correction)
    profiles = profiles.corrected(question)
    costs = costs_of(question, profiles, running)
    old = solution_of(costs, running.placement, running.arena_nbytes)
    measured = "; ".join(correction.in_words) or "the machine does what its profile says"
    old_s = promised_step_s(question, profiles, old)
    message = f"Measured: {measured}. So a step takes {old_s:.3g} s; the plan said {running.step_s:.3g} s"
    if not running.may_change:
        same = _unchanged(question, costs.job, old, old_s, profiles)
        return CorrectedPlan(planned=same, changes=False, in_words=message)
    new, new_s = _best(question, profiles, old, old_s)
    others = tuple(_of_other_numbers(question, profiles, other_numbers))
    share = 1 - new_s / old_s
    saved_s = share * median(step.period_s for step in steps) * running.num_steps_left
    if share >= WORTH and saved_s > running.restart_s:
        message += f"; the job continues with another plan, with which a step takes {new_s:.3g} s"
        better = advised(question, planned(question, new.costs.job, new, profiles, step_s=new_s), profiles)
        return CorrectedPlan(planned=better, changes=True, in_words=message, others=others)
    if share >= WORTH:
        message += (
            f"; another plan would take {new_s:.3g} s, but in the remaining steps it would save {saved_s:.0f} s, "
            f"and a restart costs {running.restart_s:.0f} s"
        )
    else:
        message += "; no other plan is worth a change"
    same = _unchanged(question, costs.job, old, old_s, profiles)
    return CorrectedPlan(planned=same, changes=False, in_words=message, others=others)


def _unchanged(question: PlanQuestion, job: PlannedJob, old: Solution, old_s: float, profiles: Profiles) -> Planned:
    """Returns the plan that the job runs with, with corrected times and the exact device memory."""
    exact, _ = counted(question, profiles, old)
    return advised(question, planned(question, job, exact, profiles, step_s=old_s), profiles)


def _of_other_numbers(question: PlanQuestion, profiles: Profiles, numbers: Iterable[int]) -> Iterator[Planned]:
    for number in numbers:
        other = replace(question, num_ranks=number)
        with contextlib.suppress(DoesNotFitError):
            job, solution, step_s = fastest_plan(other, profiles)
            yield planned(other, job, solution, profiles, step_s=step_s)


def _best(question: PlanQuestion, profiles: Profiles, old: Solution, old_s: float) -> tuple[Solution, float]:
    try:
        _, new, new_s = fastest_plan(question, profiles)
    except DoesNotFitError:  # the old plan still fits; only the search for a better one failed
        return old, old_s
    assert new_s is not None, "the model of a job that runs has no hypothetical layers"
    return new, new_s


def costs_of(question: PlanQuestion, profiles: Profiles, running: RunningJob) -> StepCosts:
    """Returns the cost model with the options that the placement was found with, and the cut of the job's config."""
    assert not question.chooses_microbatches, "a job that runs has a number of them"
    job, placement = profiles.job(question, question.training.num_microbatches), running.placement
    return StepCosts(
        job=job,
        speeds=question.speeds,
        limits=question.limits,
        group_size=min(placement.group_size or job.largest_group, job.largest_group),
        streams=bool(placement.streamed_blocks),
        spills=running.spills_grads,
        overflows=placement.ssd_activation_nbytes > 0,
        num_grad_buffers=placement.num_grad_buffers,
        streams_grads=placement.streams_grads,
        streams_ends=placement.streams_ends,
        num_passing_blocks=placement.num_passing_blocks,
        depths=placement.depths,
    )
