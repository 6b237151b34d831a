"""Adds to a plan what is known of this machine now: its pace, and the errors of its earlier predictions."""

from dataclasses import replace

from windlass.planner.predictions import TimesFrom, step_interval
from windlass.planner.question.question import PlanQuestion
from windlass.planner.question.report import PlanReport, with_interval
from windlass.planner.solver import PlannedJob, Solution, solution_of


def slowdown_of(question: PlanQuestion, job: PlannedJob) -> float:
    """Returns the factor by which the machine computes slower now than when the job's blocks were measured.

    Of a GPU's pace nothing is known: it is 1 then, and where no times of blocks count.
    """
    times = job.model.times
    if question.past is None or question.has_gpu or question.correction.block_s or times is None:
        return 1.0
    return question.pace.slowdown(times.pace_s)


def at_pace(solution: Solution, slowdown: float) -> Solution:
    """Returns the same plan, on a CPU that is so much slower: what it computes, copies and updates takes longer.

    Its SSDs are as fast as before. The decisions stay those for the pace at which the blocks were measured.
    """
    if slowdown == 1.0:
        return solution
    costs = solution.costs
    job = replace(costs.job, model=costs.job.model.sped_up(1 / slowdown))
    slower = replace(costs, job=job, speeds=costs.speeds.with_slower_cpu(slowdown))
    before, after = (solution_of(each, solution.placement, solution.plan.arena_nbytes) for each in (costs, slower))
    # In ratios, because a solver's solution may not count params that are cached only because memory is free.
    longer = {part: after.seconds[part] / seconds if seconds else 1.0 for part, seconds in before.seconds.items()}
    return replace(
        solution,
        costs=slower,
        step_s=solution.step_s * after.step_s / before.step_s,
        cost=solution.cost * after.cost / before.cost,
        seconds={part: longer[part] * seconds for part, seconds in solution.seconds.items()},
    )


def told_of_pace(report: PlanReport, slowdown: float) -> PlanReport:
    """Returns the report with a sentence about the machine's pace, if that has changed since blocks were measured."""
    if slowdown == 1.0:
        return report
    slower = f"{slowdown:.2f} times slower" if slowdown > 1 else f"{1 / slowdown:.2f} times faster"
    told = f"the machine computes {slower} now than when the model's blocks were measured"
    return replace(report, reasons=(*report.reasons, told))


def with_errors(question: PlanQuestion, job: PlannedJob, report: PlanReport) -> PlanReport:
    """Returns the report with the interval of the step time, by the errors of earlier predictions."""
    times, errors = job.model.times, tuple[float, ...]()
    is_of_steps = bool(question.correction.block_s)
    times_from = TimesFrom.STEPS if is_of_steps else TimesFrom.RATES if times is None else TimesFrom.BLOCKS
    if question.past is not None:
        errors = tuple(question.past.errors(times_from))
    assert report.step_s is not None, "it fits"
    standard_error = 0.0 if times is None else times.standard_error
    return with_interval(report, step_interval(report.step_s, times_from, errors=errors, standard_error=standard_error))
