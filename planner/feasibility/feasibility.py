"""Checks whether jobs fit, and finds the largest job that fits.

Each such question tries many jobs. The programs' frontiers alone exclude most of them at once. A job counts as fitting
only if a plan's memory was counted exactly, which is done only near the border.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from pydantic import BaseModel

from windlass.planner.feasibility.least_memory import LeastMemory
from windlass.planner.feasibility.shortfall import extremes, limits_for_plans
from windlass.planner.question import PlanQuestion, Profiles
from windlass.planner.solver import largest

_Part = TypeVar("_Part", bound=BaseModel)


def with_part(part: _Part, **changes: Any) -> _Part:
    """Returns a copy of a machine, or of a part of one, with some fields changed."""
    return part.model_copy(update=changes)


def least_memory_of(question: PlanQuestion, profiles: Profiles) -> LeastMemory:
    """Returns the search for the least memory of a job, with the numbers of micro-batches that may need least."""
    # Times do not matter here, so do not measure any.
    profiles = profiles.unmeasured()
    numbers = extremes(numbers_of_microbatches(question))
    return LeastMemory(question, profiles, (profiles.job(question, number) for number in numbers))


def fits(question: PlanQuestion, profiles: Profiles) -> bool:
    """Checks whether a plan exists."""
    return least_memory_of(question, profiles).fitting(limits_for_plans(question)) is not None


def largest_fitting(ask: Callable[[int], PlanQuestion], profiles: Profiles, *, most: int) -> int:
    """Returns the largest number up to `most` for which the job fits, or 0 if it does not fit for 1.

    The job must fit for all smaller numbers as well. The search starts at the border that the programs find. The exact
    border is close to it, because the programs leave out few bytes.
    """
    number = largest(lambda each: _may_fit(ask(each), profiles), most=most)
    does_not, step = number + 1, max(1, number // 32)
    while number and not fits(ask(number), profiles):
        does_not, number, step = number, max(0, number - step), 2 * step
    while does_not - number > 1:
        middle = (number + does_not) // 2
        number, does_not = (middle, does_not) if fits(ask(middle), profiles) else (number, middle)
    return number


def numbers_of_microbatches(question: PlanQuestion) -> Iterator[int]:
    """The numbers of micro-batches to try: the requested one, or numbers up to the batch size.

    The first is the smallest one with equal lanes and a micro-batch for each GPU. Each next one is twice as large.
    """
    if not question.chooses_microbatches:
        yield question.training.num_microbatches
        return
    number = min(question.least_microbatches, question.training.batch_size)
    while number <= question.training.batch_size:
        yield number
        number *= 2


def _may_fit(question: PlanQuestion, profiles: Profiles) -> bool:
    return least_memory_of(question, profiles).may_fit(limits_for_plans(question))
