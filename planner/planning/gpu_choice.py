"""Chooses the number of GPUs of a job that leaves it open: plans each number, and compares the predicted steps."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from windlass.planner.planning.measuring_first import measure_first
from windlass.planner.planning.planner import Planned, advised, answer, planned
from windlass.planner.planning.simulated_search import NOBODY, Watcher, fastest_plan
from windlass.planner.question import PlanQuestion, PlanReport, Profiles, fewest_of_fastest, of_devices
from windlass.planner.solver import DoesNotFitError, PlannedJob, Solution


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenGpus:
    """The plan for the chosen number of GPUs, and those for the other numbers with which the job fits."""

    planned: Planned
    others: tuple[Planned, ...] = ()


def numbers_of_gpus(most: int, num_microbatches: int | None) -> Iterator[int]:
    """Yields the numbers up to `most` that are worth a plan.

    With a known number of micro-batches, a number is left out if each of its GPUs computes as many as with fewer GPUs.
    """
    for number in range(1, most + 1):
        if num_microbatches is None or _largest_share(num_microbatches, number) < _largest_share(
            num_microbatches, number - 1
        ):
            yield number


def _largest_share(num_microbatches: int, number: int) -> float:
    """Returns the most micro-batches that one of so many GPUs computes."""
    return math.ceil(num_microbatches / number) if number else math.inf


def choose_gpus(question: PlanQuestion, watcher: Watcher = NOBODY) -> ChosenGpus:
    """Plans a job for 1 to `question.num_ranks` GPUs, and chooses the number of `fewest_of_fastest`.

    If the job fits with none, the report is that for one GPU. The number of micro-batches and the cut of matrices
    decide the last bits of the results. So if they are chosen, too, all plans have those of the chosen number of GPUs.
    Numbers of GPUs are compared with the best of these for each.
    Raises TimesLackError as `answer`.
    """
    profiles = measure_first(questions_by_number(question), Profiles(question), watcher)
    found = _by_number(question, profiles, watcher=watcher)
    if not found:
        return ChosenGpus(planned=answer(replace(question, num_ranks=1, chooses_ranks=False)))
    chosen = fewest_of_fastest({number: each.step_s or each.solution.step_s for number, each in found.items()})
    job, plans = found[chosen].job, _plans_of(found, profiles)
    rates = {number: plan.report.tokens_per_s or 0.0 for number, plan in plans.items()}
    told = in_words(chosen, rates, most=question.num_ranks, lanes=question.training.lanes)
    told = of_devices(told, is_cpu=not question.has_gpu)
    if question.chooses_microbatches or any(each.job.cut != job.cut for each in found.values()):
        fixed = question.changed(num_microbatches=job.num_microbatches, cut_matrices=job.cut)
        unseen = replace(watcher, see_estimate=None)
        plans = _plans_of(_by_number(fixed, profiles, without=chosen, watcher=unseen), profiles)
    best = found[chosen].planned(profiles)
    best = replace(best, report=_with_reason(best.report, told))
    watcher.see_plan(best.report, found[chosen].solution)
    best = advised(found[chosen].question, best, profiles)
    return ChosenGpus(planned=best, others=tuple(plan for number, plan in plans.items() if number != chosen))


def plan_without_advice(question: PlanQuestion, profiles: Profiles) -> Planned:
    """Returns the plan of `answer` or of `choose_gpus`, without what would be faster or what would fit.

    Raises:
        DoesNotFitError: nothing fits.
    """
    if not question.chooses_ranks:
        return _find(question, profiles).planned(profiles)
    found = _by_number(question, profiles)
    if not found:  # not with one, either: raises the error that says what is lacking
        found = {1: _find(replace(question, num_ranks=1, chooses_ranks=False), profiles)}
    chosen = fewest_of_fastest({number: each.step_s or each.solution.step_s for number, each in found.items()})
    return found[chosen].planned(profiles)


def _by_number(
    question: PlanQuestion, profiles: Profiles, *, without: int | None = None, watcher: Watcher = NOBODY
) -> "dict[int, _Found]":
    """Returns the fastest plan for each number of GPUs with which the job fits. `without`: a number to leave out."""
    found = dict[int, _Found]()
    for of_number in questions_by_number(question):
        if of_number.num_ranks == without:
            continue
        with contextlib.suppress(DoesNotFitError):
            found[of_number.num_ranks] = _find(of_number, profiles, watcher)
    return found


def questions_by_number(question: PlanQuestion) -> list[PlanQuestion]:
    """Returns the question for each number of GPUs that is worth a plan, or as it is if it says the number."""
    if not question.chooses_ranks:
        return [question]
    num_microbatches = None if question.chooses_microbatches else question.training.num_microbatches
    numbers = numbers_of_gpus(question.num_ranks, num_microbatches)
    return [replace(question, num_ranks=number, chooses_ranks=False) for number in numbers]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The fastest plan for a number of GPUs."""

    question: PlanQuestion  # with that number
    job: PlannedJob
    solution: Solution
    step_s: float | None

    def planned(self, profiles: Profiles) -> Planned:
        return planned(self.question, self.job, self.solution, profiles, step_s=self.step_s)


def _find(question: PlanQuestion, profiles: Profiles, watcher: Watcher = NOBODY) -> _Found:
    job, solution, step_s = fastest_plan(question, profiles, watcher)
    return _Found(question=question, job=job, solution=solution, step_s=step_s)


def _plans_of(found: "Mapping[int, _Found]", profiles: Profiles) -> dict[int, Planned]:
    """Returns the plans by their number of GPUs, the fewest first, without advice."""
    return {number: found[number].planned(profiles) for number in sorted(found)}


def in_words(chosen: int, rates: Mapping[int, float], *, most: int, lanes: int = 1) -> str:
    """Tells why a number was chosen: "4 GPUs: 1.9x of one; with 2 it would be 1.6x".

    `rates`: tokens per second by number, of those with which the job fits. `lanes`: of the job.
    """
    if most == 1:
        return "one GPU, because the job can have no more here"
    first = min(rates)
    others = [
        f"with {number} it would be {_times(rates[number], rates[first])}"
        for number in rates
        if number not in (first, chosen)
    ]
    if chosen != first:
        fits = [] if first == 1 else [f"the job does not fit with fewer than {first}"]
        name = str(first) if first > 1 else "one" if lanes == 1 else f"one with {lanes} lanes"
        return "; ".join((f"{chosen} GPUs: {_times(rates[chosen], rates[first])} of {name}", *others, *fits))
    if chosen > 1:
        return "; ".join((f"{chosen} GPUs: the job does not fit with fewer, and more would hardly be faster", *others))
    return "; ".join(("one GPU, because more would hardly be faster", *others))


def _times(rate: float, base: float) -> str:
    ratio = rate / base
    return f"{ratio:.2f}x" if 0.95 < ratio < 1.1 else f"{ratio:.2g}x"


def _with_reason(report: PlanReport, told: str) -> PlanReport:
    bound, *others = report.reasons
    return replace(report, reasons=(bound, told, *others))
