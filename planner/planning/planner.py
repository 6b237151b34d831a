"""Plans a job before it exists: from a model and a machine to times, memory peaks, choices and reasons."""

import math
import os
from dataclasses import dataclass, replace

from windlass.engine.memory_plan import MemoryTier, UpdateOrder
from windlass.engine.model import ModelLayout
from windlass.planner.feasibility import (
    least_gpu,
    least_memory_of,
    limits_for_plans,
    numbers_of_microbatches,
    shortfall_of,
    what_takes_memory,
    what_would_fit,
    with_least_gpu,
)
from windlass.planner.planning.faster import what_is_faster
from windlass.planner.planning.fewer_waits import BUSY_SHARES, waits, with_idle_ssds, with_more_passing
from windlass.planner.question import (
    ExampleTokens,
    PlanQuestion,
    PlanReport,
    Profiles,
    at_pace,
    counted,
    report_of,
    search_exactly,
    slowdown_of,
    solve_kind_exactly,
    told_of_pace,
    with_errors,
    with_limits,
)
from windlass.planner.simulation import simulated_step_s
from windlass.planner.solver import (
    DoesNotFitError,
    Found,
    PlannedJob,
    Solution,
)

# Number of plans to simulate beside the best one by the cost model, at most, whose cost is at most so much larger.
_NUM_OTHERS = 3
_NEAR = 0.02
# Share of a step. If two plans differ by less, something that both use alike bounds them, and the others too.
_ALIKE = 1e-4
# Share of a step. If all plans of the other order, or place of kept gradients, are slower by more, none of their kinds
# is faster.
_FAR = 0.1
# Share of a step. The simulation of a plan ends early once its step is longer by more than this than that of another
# plan, if the rest takes as long as in the step before. So much less it may take.
_SURE = 1.5e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The report for the user and, if the job fits, the solution for the engine."""

    report: PlanReport
    solution: Solution | None = None
    layout: ModelLayout | None = None  # of the model's blocks; None also if the layers are hypothetical (`num_layers`)


@dataclass(slots=True, kw_only=True)
class _Simulated:
    """A plan whose step was simulated."""

    solution: Solution
    step_s: float = math.inf
    most_s: float = 0.0  # if the step is longer, it was not simulated to its end


def answer(question: PlanQuestion) -> Planned:
    """Returns the job's plan, or a report of the missing memory and of the nearest changes that fit."""
    profiles = Profiles(question)
    try:
        job, solution, step_s = fastest_plan(question, profiles)
    except DoesNotFitError:
        # Times do not matter here, so do not measure any.
        report = _report_of_shortfall(question, profiles.unmeasured())
        return Planned(report=with_limits(report, question.budgets))
    return planned(question, job, solution, profiles, step_s=step_s)


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
    advises: bool = True,
) -> Planned:
    """Builds the answer from a solution. `step_s`: simulated. `advises`: also report what would be faster."""
    slowdown = slowdown_of(question, job)
    now = at_pace(solution, slowdown)
    if step_s is not None and now is not solution:
        # Simulated for the pace of the measured blocks. What waits take of a step stays the same share.
        step_s *= now.step_s / solution.step_s
    report = told_of_pace(report_of(job, now, is_cpu=not question.has_gpu, step_s=step_s), slowdown)
    report = replace(with_limits(report, question.budgets), example_tokens=_tokens_of(question, job.num_microbatches))
    report = with_errors(question, job, report)
    if advises:
        report = replace(report, reasons=(*report.reasons, *what_is_faster(question, job, solution)))
        report = with_least_gpu(report, least_gpu(question, least_memory_of(question, profiles)))
    return Planned(report=report, solution=solution, layout=None if question.num_layers else profiles.layout)


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


def best_plan(question: PlanQuestion, profiles: Profiles) -> tuple[PlannedJob, Solution]:
    """Returns the best plan by the cost model alone.

    Raises:
        DoesNotFitError: nothing fits.
    """
    best = _search(question, profiles).best
    return best.costs.job, best


def fastest_plan(question: PlanQuestion, profiles: Profiles) -> tuple[PlannedJob, Solution, float | None]:
    """Simulates the best plans by the cost model, and returns the fastest one with its step time.

    The step time is None for a model with hypothetical layers, which cannot be simulated. The cost model gives a lower
    bound, so a plan is skipped if its bound is above the best simulated time.

    Raises:
        DoesNotFitError: nothing fits.
    """
    if question.num_layers is not None:
        return *best_plan(question, profiles), None
    found = _search(question, profiles, num_others=_NUM_OTHERS, near=_NEAR)
    simulated: list[_Simulated] = []
    busy, busy_s = _fastest_of(question, profiles, found, simulated)
    fastest, step_s = _with_fewer_waits(question, profiles, busy, simulated)
    if fastest.costs.job.keeps_grads and waits(found.best.step_s, step_s):
        # Where the kept gradients are decides what else is in host memory, and so what waits for the SSDs.
        order, best = fastest.costs.job.update_order, found.best.costs
        spills = best.spills if best.job.update_order is order else fastest.costs.spills
        rivals = found.of_kind(order, not spills, step_s)
        fastest, step_s = _faster_of((fastest, step_s), question, profiles, rivals, simulated, step_s)
    if question.chooses_order:
        # How long work waits is known only by simulation, and it is not the same in both orders.
        (order,) = {UpdateOrder.ACTIVE, UpdateOrder.KEPT} - {fastest.costs.job.update_order}
        rivals = found.of_kind(order, None, step_s)
        fastest, step_s = _faster_of((fastest, step_s), question, profiles, rivals, simulated, busy_s)
    return fastest.costs.job, fastest, step_s


def _faster_of(
    fastest: tuple[Solution, float],
    question: PlanQuestion,
    profiles: Profiles,
    rivals: Found | None,
    simulated: list[_Simulated],
    near_s: float,
) -> tuple[Solution, float]:
    """Returns the fastest plan or, if it is faster, that of another search. `near_s`: see `_FAR`."""
    if rivals is None or rivals.best.step_s >= fastest[1]:
        return fastest
    rival, rival_s = _fastest_of(question, profiles, rivals, simulated, near_s)
    if rival_s <= (1 + _FAR) * near_s:
        rival, rival_s = _with_fewer_waits(question, profiles, rival, simulated)
    return (rival, rival_s) if rival_s < fastest[1] else fastest


def _fastest_of(
    question: PlanQuestion,
    profiles: Profiles,
    found: Found,
    simulated: list[_Simulated],
    below_s: float = math.inf,
) -> tuple[Solution, float]:
    """Simulates the plans of a search. Returns the fastest one with its step time.

    `simulated`: the plans that were simulated before, to which these are added. `below_s`: the fastest of these.
    """
    fastest = found.best
    step_s = _step_of(question, profiles, fastest, simulated, (1 + _FAR) * below_s)
    for other in found.others[:_NUM_OTHERS]:
        if other.step_s >= step_s:
            continue
        solution, excess = counted(question, profiles, other)
        if excess > 0:
            if not waits(fastest.step_s, step_s):
                continue  # little is to be gained by a search for a plan of this kind that fits
            kind = replace(other.kind, limits=question.limits)
            fitting = solve_kind_exactly(question, kind, profiles, below_s=step_s)
            if fitting is None:
                continue
            solution = fitting
        num_simulated = len(simulated)
        other_s = _step_of(question, profiles, solution, simulated, min(step_s, (1 + _FAR) * below_s))
        is_alike = len(simulated) > num_simulated and abs(other_s - step_s) <= _ALIKE * step_s
        if other_s < step_s:
            fastest, step_s = solution, other_s
        if is_alike:
            break
    return fastest, step_s


def _with_fewer_waits(
    question: PlanQuestion, profiles: Profiles, busy: Solution, simulated: list[_Simulated]
) -> tuple[Solution, float]:
    """Returns a plan of about the same kind that waits less, with its step time, or the given one."""
    step_s = _step_of(question, profiles, busy, simulated)
    if waits(busy.step_s, step_s) and (more := with_more_passing(question, profiles, busy, step_s)) is not None:
        busy = min(busy, more, key=lambda each: _step_of(question, profiles, each, simulated, step_s))
    fastest, step_s = busy, _step_of(question, profiles, busy, simulated)
    for share in BUSY_SHARES:
        if not waits(fastest.step_s, step_s):
            break
        solution = with_idle_ssds(question, profiles, busy, share)
        if solution is None or solution.step_s >= step_s:
            break
        solution_s = _step_of(question, profiles, solution, simulated, step_s)
        if solution_s < step_s:
            fastest, step_s = solution, solution_s
    return fastest, step_s


def _step_of(
    question: PlanQuestion,
    profiles: Profiles,
    solution: Solution,
    simulated: list[_Simulated],
    below_s: float = math.inf,
) -> float:
    """Returns the simulated step time of a plan. `simulated`: those that are known, to which it is added.

    If the step takes longer than `below_s`, some time above that may be returned.
    """
    most_s = (1 + _SURE) * below_s
    known = next((each for each in simulated if _is_same_plan(each.solution, solution)), None)
    if known is None:
        known = _Simulated(solution=solution)
        simulated.append(known)
    if known.step_s > known.most_s and most_s > known.most_s:
        known.step_s = promised_step_s(question, profiles, solution, most_s=most_s)
        known.most_s = most_s
    return max(known.step_s, solution.step_s)


def _is_same_plan(one: Solution, other: Solution) -> bool:
    """Returns whether two solutions for a question let the engine do the same.

    They may come from different kinds of plans, because memory that is left free goes to deeper queues.
    """
    return (
        one.costs.job.num_microbatches == other.costs.job.num_microbatches
        and one.costs.job.cut == other.costs.job.cut
        and one.costs.job.update_order is other.costs.job.update_order
        and one.placement == other.placement
        and one.plan == other.plan
    )


def promised_step_s(
    question: PlanQuestion, profiles: Profiles, solution: Solution, *, most_s: float = math.inf
) -> float:
    """Returns the simulated step time, or the cost model's bound if that is larger.

    `most_s`: if the step takes longer, some time above this may be returned in place of the step's.
    """
    num_cores = len(os.sched_getaffinity(0))
    simulated_s = simulated_step_s(solution, profiles.layout, num_cores=num_cores, most_s=most_s)
    return max(solution.step_s, simulated_s)


def _search(question: PlanQuestion, profiles: Profiles, *, num_others: int = 0, near: float = 0.0) -> Found:
    """Returns the best plan for any number of micro-batches; see `search`.

    The plan that needs least memory says whether any fits. Where memory is just enough, it may be the best one.
    """
    least = least_memory_of(question, profiles)
    need = least.fitting(limits_for_plans(question))
    if need is None:
        raise DoesNotFitError(lambda: shortfall_of(question, least).missing)
    try:
        numbers = numbers_of_microbatches(question)
        return search_exactly(question, numbers, profiles, num_others=num_others, near=near)
    except DoesNotFitError:
        return Found(best=need.solution(question.limits), others=[])
