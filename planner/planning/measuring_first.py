"""Measures the blocks that plans need times of. The estimate by the machine's rates comes before.

A measurement takes some seconds for each shape of micro-batches, and all cores.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from windlass.planner.feasibility import fits, numbers_of_microbatches
from windlass.planner.planning.simulated_search import Watcher, best_plan
from windlass.planner.question import PlanQuestion, PlanReport, Profiles, TimesNeed, different_needs
from windlass.planner.solver import DoesNotFitError


class TimesLackError(Exception):
    """Plans need times of blocks that another process is to measure."""


def measure_first(questions: Sequence[PlanQuestion], profiles: Profiles, watcher: Watcher) -> Profiles:
    """Measures the times that the plans for these questions lack. Returns the profiles to plan with.

    If the questions leave them unmeasured, those are by rates: measured times and rates cannot be compared.

    Raises:
        TimesLackError: there are such times, and the questions leave their measurement to another process.
    """
    needs = lacking_times(questions, profiles)
    if not needs:
        return profiles
    if questions[0].leaves_unmeasured:
        return profiles.by_rates(needs)
    if watcher.see_estimate is not None:
        by_rates = profiles.by_rates()
        for question in questions:
            with contextlib.suppress(DoesNotFitError):
                watcher.see_estimate(question, by_rates, best_plan(question, by_rates)[1])
    if questions[0].measures_apart:
        raise TimesLackError
    measure_all(needs, profiles, see=watcher.see_measurement, check=watcher.check)
    return profiles


def lacking_times(questions: Iterable[PlanQuestion], profiles: Profiles) -> list[TimesNeed]:
    """Returns what is to be measured for the plans of those of these questions for which there is one."""
    lacking = list[TimesNeed]()
    for question in questions:
        needs = list(profiles.lacking_times(question, numbers_of_microbatches(question)))
        if needs and fits(question, profiles.of_question(question)):
            lacking += needs
    return different_needs(lacking)


def with_measuring_s(report: PlanReport, needs: Iterable[TimesNeed]) -> PlanReport:
    """Returns the report with the time that it takes to measure what the plan lacks times for."""
    different = different_needs(needs)
    return replace(report, measuring_s=sum(need.measuring_s for need in different) if different else None)


def measure_all(
    needs: Sequence[TimesNeed],
    profiles: Profiles,
    *,
    see: Callable[[str, int, int], None],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Measures times. `see`: see `Watcher.see_measurement`. `check`: is called before each measurement."""
    for index, need in enumerate(needs):
        check()
        num_examples, num_tokens = need.profile.num_examples, need.profile.num_tokens
        examples = f"{num_examples} example{'s' if num_examples > 1 else ''}"
        see(f"the model's blocks with {examples} of {num_tokens} tokens", index, len(needs))
        profiles.measure(need)
