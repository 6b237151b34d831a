"""Chooses the number of GPUs of a job that leaves it open: plans each number, and compares the predicted steps."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from windlass.planner.planning.measuring_first import measure_first
from windlass.planner.planning.planner import Planned, answer, planned
from windlass.planner.planning.simulated_search import NOBODY, Watcher, fastest_plan
from windlass.planner.question import EQUAL_SHARE, PlanQuestion, PlanReport, Profiles, fewest_of_fastest
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
    Raises TimesLackError as `answer`.
    """
    profiles = measure_first(questions_by_number(question), Profiles(question), watcher)
    found = _by_number(question, profiles, watcher=watcher)
    if not found:
        return ChosenGpus(planned=answer(replace(question, num_ranks=1, chooses_ranks=False)))
    chosen = fewest_of_fastest({number: each.step_s or each.solution.step_s for number, each in found.items()})
    job, alone = found[chosen].job, _one_by_itself(question, found, profiles, watcher)
    if question.chooses_microbatches or any(each.job.cut != job.cut for each in found.values()):
        fixed = question.changed(num_microbatches=job.num_microbatches, cut_matrices=job.cut)
        found = _by_number(fixed, profiles, without=chosen) | {chosen: found[chosen]}
    plans = {number: found[number].planned(profiles, advises=False) for number in sorted(found)}
    rates = {number: plan.report.tokens_per_s or 0.0 for number, plan in plans.items()}
    best = found[chosen].planned(profiles, advises=True)
    told = _reason(question, found[chosen], rates, alone, profiles)
    best = replace(best, report=_with_reason(best.report, told))
    return ChosenGpus(planned=best, others=tuple(plan for number, plan in plans.items() if number != chosen))


def plan_without_advice(question: PlanQuestion, profiles: Profiles) -> Planned:
    """Returns the plan of `answer` or of `choose_gpus`, without what would be faster or what would fit.

    Raises:
        DoesNotFitError: nothing fits.
    """
    if not question.chooses_ranks:
        return _find(question, profiles).planned(profiles, advises=False)
    found = _by_number(question, profiles)
    if not found:
        found = {1: _find(replace(question, num_ranks=1, chooses_ranks=False), profiles)}
    chosen = fewest_of_fastest({number: each.step_s or each.solution.step_s for number, each in found.items()})
    return found[chosen].planned(profiles, advises=False)


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

    def planned(self, profiles: Profiles, *, advises: bool) -> Planned:
        return planned(self.question, self.job, self.solution, profiles, step_s=self.step_s, advises=advises)


def _find(question: PlanQuestion, profiles: Profiles, watcher: Watcher = NOBODY) -> _Found:
    job, solution, step_s = fastest_plan(question, profiles, watcher)
    return _Found(question=question, job=job, solution=solution, step_s=step_s)


def _one_by_itself(
    question: PlanQuestion, found: "Mapping[int, _Found]", profiles: Profiles, watcher: Watcher
) -> "_Found | None":
    """Returns the plan of a job for one GPU. Returns None if it does not fit.

    A job with a lane for each GPU then has one lane, and a number of micro-batches of its own. Nothing is measured for
    it, because the plan only tells of it.
    """
    if 1 not in found or not 1 < question.training.lanes == question.num_ranks:
        return found.get(1)
    one = replace(question.changed(lanes=1), num_ranks=1, chooses_ranks=False)
    with contextlib.suppress(DoesNotFitError):
        return _find(one, profiles.unmeasured().of_question(one), replace(watcher, see_estimate=None))
    return None


def _reason(
    question: PlanQuestion, best: "_Found", rates: Mapping[int, float], alone: "_Found | None", profiles: Profiles
) -> str:
    """Tells why the best plan's number of GPUs was chosen. `rates`: see `in_words`. `alone`: see `_one_by_itself`."""
    chosen, most = best.question.num_ranks, question.num_ranks
    # Measured times and those by rates cannot be compared.
    if alone is None or (alone.job.model.times is None) != (best.job.model.times is None):
        return in_words(chosen, rates, most=most, lanes=question.training.lanes)
    rate = alone.planned(profiles, advises=False).report.tokens_per_s
    return in_words(chosen, rates, most=most, alone=rate, lanes=alone.job.training.lanes)


def in_words(chosen: int, rates: Mapping[int, float], *, most: int, alone: float | None = None, lanes: int = 1) -> str:
    """Tells why a number was chosen: "4 GPUs: 1.9x of one; with 2 it would be 1.6x".

    `rates`: tokens per second by number, of those with which the job fits. `alone`: of a job for one GPU, with which
    they are compared; None: they are compared with the fewest GPUs. `lanes`: of the job that they are compared with.
    """
    if most == 1:
        return "one GPU, because the job can have no more here"
    first = min(rates)
    base = alone if alone is not None and first == 1 < chosen else rates[first]
    others = [
        f"with {number} it would be {_times(rates[number], base)}" for number in rates if number not in (first, chosen)
    ]
    if chosen != first:
        fits = [] if first == 1 else [f"the job does not fit with fewer than {first}"]
        name = str(first) if first > 1 else "one" if lanes == 1 else f"one with {lanes} lanes"
        return "; ".join((f"{chosen} GPUs: {_times(rates[chosen], base)} of {name}", *others, *fits))
    if chosen > 1:
        return "; ".join((f"{chosen} GPUs: the job does not fit with fewer, and more would not be faster", *others))
    told = []
    if alone is not None and alone > (1 + EQUAL_SHARE) * rates[1]:
        told = [f"a job for one GPU has one lane, and would be {_times(alone, rates[1])}"]
    return "; ".join(("one GPU, because more would not be faster", *others, *told))


def _times(rate: float, base: float) -> str:
    return f"{rate / base:.2g}x"


def _with_reason(report: PlanReport, told: str) -> PlanReport:
    bound, *others = report.reasons
    return replace(report, reasons=(bound, told, *others))
