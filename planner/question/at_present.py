"""Adds to a plan's report what is known of this machine now: its pace, and the errors of its earlier predictions."""

from windlass.planner.predictions import TimesFrom, step_interval
from windlass.planner.profiling import this_machine
from windlass.planner.question.question import PlanQuestion
from windlass.planner.question.report import PlanReport, slowed_down, with_interval
from windlass.planner.solver import PlannedJob


def report_at_present(question: PlanQuestion, job: PlannedJob, report: PlanReport) -> PlanReport:
    """Returns the report for the machine's present pace, with the interval of the step time.

    The decisions stay those for the pace at which the blocks were measured. Where the device is the CPU, another pace
    changes the times of all of them alike. Of a GPU's pace nothing is known.
    """
    times, errors = job.model.times, tuple[float, ...]()
    is_of_steps = bool(question.correction.block_s)
    if question.past is not None and not question.has_gpu and not is_of_steps and times is not None:
        report = slowed_down(report, this_machine().slowdown(times.pace_s))
    times_from = TimesFrom.STEPS if is_of_steps else TimesFrom.RATES if times is None else TimesFrom.BLOCKS
    if question.past is not None:
        errors = tuple(question.past.errors(times_from))
    assert report.step_s is not None, "it fits"
    standard_error = 0.0 if times is None else times.standard_error
    return with_interval(report, step_interval(report.step_s, times_from, errors=errors, standard_error=standard_error))
