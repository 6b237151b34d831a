"""Adds to a plan what is known of this machine: its pace, its other work, and the errors of its earlier predictions."""

from dataclasses import replace

from windlass.planner.predictions import CPU_SPREAD, CPU_SPREAD_OF_ONE_RATE, TimesFrom, step_interval
from windlass.planner.question.question import PlanQuestion
from windlass.planner.question.report import PlanReport, with_interval
from windlass.planner.solver import PlannedJob, Solution, solution_of
from windlass.storage.ids import Precision


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


def told_of_others(question: PlanQuestion, job: PlannedJob, report: PlanReport) -> PlanReport:
    """Returns the report with a sentence about other work, if the job's blocks were measured beside much of it."""
    if not (others := _others_of(question, job)):
        return report
    told = (
        f"other processes took {others:.0%} of the cores while the model's blocks were measured, so a step may "
        "take less without them; blocks are measured again when less runs"
    )
    return replace(report, reasons=(*report.reasons, told))


def with_errors(question: PlanQuestion, job: PlannedJob, report: PlanReport) -> PlanReport:
    """Returns the report with the interval of the step time, by the errors of earlier predictions."""
    times, errors = job.model.times, tuple[float, ...]()
    is_of_steps = bool(question.correction.block_s)
    times_from = TimesFrom.STEPS if is_of_steps else TimesFrom.RATES if times is None else TimesFrom.BLOCKS
    if question.past is not None:
        errors = tuple(question.past.errors(times_from))
    assert report.step_s is not None, "it fits"
    interval = step_interval(
        report.step_s,
        times_from,
        errors=errors,
        standard_error=0.0 if times is None else times.standard_error,
        others=_others_of(question, job),
        spread=_spread_on_cpu(question) if times_from is TimesFrom.RATES and not question.has_gpu else None,
    )
    return with_interval(report, interval)


def _spread_on_cpu(question: PlanQuestion) -> float:
    """Returns the spread of predictions by rates: larger if that of the job's precision may not be known."""
    gpus, is_fp32 = question.hardware.gpus, question.training.precision is Precision.FP32
    is_known = gpus.fp32_tflops is not None and (is_fp32 or gpus.fp32_tflops != gpus.tflops)
    return CPU_SPREAD if is_known else CPU_SPREAD_OF_ONE_RATE


def _others_of(question: PlanQuestion, job: PlannedJob) -> float:
    """Returns the share of the cores that other processes took while blocks were measured; 0 if no such times count."""
    times = job.model.times
    return 0.0 if times is None or question.correction.block_s else times.others
