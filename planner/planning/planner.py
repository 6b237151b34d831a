"""Plans a job before it exists: from a model and a machine to times, memory peaks, choices and reasons."""

from dataclasses import dataclass, replace

from windlass.engine.memory_plan import MemoryTier
from windlass.engine.model import ModelLayout
from windlass.planner.feasibility import (
    least_gpu,
    least_memory_of,
    shortfall_of,
    what_takes_memory,
    what_would_fit,
    with_least_gpu,
)
from windlass.planner.planning.faster import what_is_faster
from windlass.planner.planning.measuring_first import measure_first, with_measuring_s
from windlass.planner.planning.simulated_search import NOBODY, Watcher, fastest_plan
from windlass.planner.question import (
    ExampleTokens,
    PlanQuestion,
    PlanReport,
    Profiles,
    TimesNeed,
    at_pace,
    report_of,
    slowdown_of,
    told_of_others,
    told_of_pace,
    with_errors,
    with_limits,
)
from windlass.planner.solver import DoesNotFitError, PlannedJob, Solution


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The report for the user and, if the job fits, the solution for the engine."""

    report: PlanReport
    solution: Solution | None = None
    layout: ModelLayout | None = None  # of the model's blocks; None also if the layers are hypothetical (`num_layers`)
    lacking: tuple[TimesNeed, ...] = ()  # times that are left unmeasured, so that the plan is by the machine's rates


def answer(question: PlanQuestion, watcher: Watcher = NOBODY) -> Planned:
    """Returns the job's plan, or a report of the missing memory and of the nearest changes that fit.

    Raises TimesLackError if another process is to measure the model's blocks first.
    """
    profiles = measure_first([question], Profiles(question), watcher)
    try:
        job, solution, step_s = fastest_plan(question, profiles, watcher)
    except DoesNotFitError:
        # Times do not matter here, so do not measure any.
        report = _report_of_shortfall(question, profiles.unmeasured())
        return Planned(report=with_limits(report, question.budgets, is_cpu=not question.has_gpu))
    result, num_gpus = planned(question, job, solution, profiles, step_s=step_s), question.hardware.gpus.count
    if num_gpus > question.num_ranks:
        told = f"the job uses {question.num_ranks} of the machine's {num_gpus} GPUs (gpus)"
        result = replace(result, report=replace(result.report, reasons=(*result.report.reasons, told)))
    watcher.see_plan(result.report, solution)
    return advised(question, result, profiles)


def _report_of_shortfall(question: PlanQuestion, profiles: Profiles) -> PlanReport:
    """Reports what a job lacks that does not fit, and the changes with which it fits."""
    least = least_memory_of(question, profiles)
    shortfall = shortfall_of(question, least)
    missing = shortfall.missing
    reasons = [shortfall.in_words()]
    if missing[MemoryTier.DEVICE]:
        reasons.append(what_takes_memory(shortfall.needs[MemoryTier.DEVICE], on_gpu=question.has_gpu))
    report = PlanReport(
        feasible=False,
        reasons=(*reasons, *what_would_fit(question, profiles, shortfall)),
        missing_bytes={tier.value: nbytes for tier, nbytes in missing.items()},
        missing_together=shortfall.is_together,
    )
    return with_least_gpu(report, least_gpu(question, least))


def planned(
    question: PlanQuestion,
    job: PlannedJob,
    solution: Solution,
    profiles: Profiles,
    *,
    step_s: float | None = None,
) -> Planned:
    """Builds the answer from a solution, without advice. `step_s`: simulated."""
    slowdown = slowdown_of(question, job)
    now = at_pace(solution, slowdown)
    if step_s is not None and now is not solution:
        # Simulated for the pace of the measured blocks. What waits take of a step stays the same share.
        step_s *= now.step_s / solution.step_s
    report = told_of_pace(report_of(job, now, is_cpu=not question.has_gpu, step_s=step_s), slowdown)
    report = told_of_others(question, job, report)
    report = with_limits(report, question.budgets, is_cpu=not question.has_gpu)
    report = replace(report, example_tokens=_tokens_of(question, job.num_microbatches))
    report = with_measuring_s(with_errors(question, job, report), profiles.lacking)
    layout = None if question.num_layers else profiles.layout
    return Planned(report=report, solution=solution, layout=layout, lacking=profiles.lacking)


def advised(question: PlanQuestion, planned: Planned, profiles: Profiles) -> Planned:
    """Returns the answer for a job that fits with its advice: what would be faster, and the least GPU memory."""
    solution = planned.solution
    assert solution is not None, "it fits"
    faster = what_is_faster(question, solution.costs.job, solution)
    report = replace(planned.report, reasons=(*planned.report.reasons, *faster))
    report = with_least_gpu(report, least_gpu(question, least_memory_of(question, profiles)))
    return replace(planned, report=report)


def _tokens_of(question: PlanQuestion, num_microbatches: int) -> ExampleTokens:
    lengths = question.lengths_in(num_microbatches)
    return ExampleTokens(
        limit=question.training.sequence_length,
        widest=question.widest,
        mean=question.training.sequence_length
        if lengths is None
        else lengths.cut(question.training.sequence_length).mean,
        of_data=lengths is not None,
    )
