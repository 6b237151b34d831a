"""Finds the largest job that fits a machine, and the smallest machine for a job."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from windlass.planner.feasibility import largest_fitting, least_gpu, least_memory_of, with_least_gpu, with_part
from windlass.planner.hardware import Hardware, with_more_ssds
from windlass.planner.planning.planner import Planned, planned
from windlass.planner.planning.simulated_search import best_plan, fastest_plan
from windlass.planner.question import PlanQuestion, Profiles
from windlass.planner.solver import DEFAULT_SLACK, DoesNotFitError, Goal, smallest

_TOKENS_STEP = 256  # tokens: resolution of the search for the longest context


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """A search for a largest number, in at most `most` steps."""

    ask: Callable[[PlanQuestion, int], PlanQuestion]  # builds the question after a number of steps
    number: Callable[[PlanQuestion], int | None]  # reads the number from such a question
    most: int


_SEARCHES = {
    Goal.LARGEST_BATCH: _Search(
        # One micro-batch in each lane, or more if there are more GPUs.
        ask=lambda question, steps: question.changed(
            batch_size=steps * question.least_microbatches, num_microbatches=question.least_microbatches
        ),
        number=lambda question: question.training.batch_size,
        most=1 << 14,
    ),
    Goal.LONGEST_CONTEXT: _Search(
        ask=lambda question, steps: question.changed(
            sequence_length=steps * _TOKENS_STEP, num_microbatches=question.training.batch_size
        ),
        number=lambda question: question.training.sequence_length,
        most=(1 << 21) // _TOKENS_STEP,
    ),
    Goal.MOST_LAYERS: _Search(
        ask=lambda question, steps: replace(question, num_layers=steps),
        number=lambda question: question.num_layers,
        most=1 << 11,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The result of a search. If nothing fits, the number is 0 and there is no plan."""

    goal: Goal
    number: int
    num_params: int
    question: PlanQuestion  # with that number
    planned: Planned | None


def find(question: PlanQuestion, goal: Goal, *, slack: float = DEFAULT_SLACK) -> Found:
    """Finds the largest number for which the job fits, or the smallest part of a machine that is enough.

    For GPU memory, any plan is enough. For SSDs and host memory, "enough" means that a step takes at most `slack` more
    than on the whole machine.

    Source of the questions: Ratel, figures 6 to 10.
    """
    question = replace(question, measures=False)
    profiles = Profiles(question)
    hardware = question.hardware
    ssds, ram_gib = hardware.ssds.count, int(hardware.host.memory_gib)
    if goal is Goal.FEWEST_SSDS:
        number, extreme = _fewest(
            question,
            profiles,
            lambda number: with_more_ssds(hardware, number - ssds),
            ssds,
            slack,
            first=_first_of_each,
        )
    elif goal is Goal.SMALLEST_GPU:
        number, extreme = _smallest_gpu(question, profiles)
    elif goal is Goal.SMALLEST_RAM:
        number, extreme = _fewest(
            question,
            profiles,
            lambda number: with_part(hardware, host=with_part(hardware.host, memory_gib=number)),
            ram_gib,
            slack,
            first=_first_of_many,
        )
    else:
        search = _SEARCHES[goal]
        steps = largest_fitting(lambda steps: search.ask(question, steps), profiles, most=search.most)
        extreme = search.ask(question, max(1, steps))
        number = (search.number(extreme) or 0) if steps else 0
    if not number:
        return Found(goal=goal, number=0, num_params=0, question=question, planned=None)
    job, solution, step_s = fastest_plan(extreme, profiles)
    result = planned(extreme, job, solution, profiles, step_s=step_s, advises=False)
    if goal is Goal.SMALLEST_GPU:
        gpu = least_gpu(extreme, least_memory_of(extreme, profiles))
        result = replace(result, report=with_least_gpu(result.report, gpu))
    return Found(goal=goal, number=number, num_params=job.model.numel, question=extreme, planned=result)


def _smallest_gpu(question: PlanQuestion, profiles: Profiles) -> tuple[int, PlanQuestion]:
    """Finds the least whole GiB of GPU memory with which a job fits on this machine, without a budget for it."""
    question = replace(question, device_memory_nbytes=None)
    least = least_gpu(question, least_memory_of(question, profiles))
    if least is None or least.needs_more:
        return 0, question
    number = math.ceil(least.gib)
    gpus = with_part(question.hardware.gpus, memory_gib=number)
    return number, replace(question, hardware=with_part(question.hardware, gpus=gpus))


def _fewest(
    question: PlanQuestion,
    profiles: Profiles,
    with_number: Callable[[int], Hardware],
    most: int,
    slack: float,
    *,
    first: Callable[[Callable[[int], bool], int, int], int],
) -> tuple[int, PlanQuestion]:
    """Finds a number of a machine part that is enough where one less is not, and the job on such a machine.

    A step takes at least its bound, which is no longer with more of a part. So numbers with a longer one are left out.
    The step itself may be a little longer with more. `first`: returns the first number of a range that is enough, or
    the last one.
    """

    def asked(number: int) -> PlanQuestion:
        return replace(question, hardware=with_number(number))

    def bound_s(number: int) -> float:
        return best_plan(asked(number), profiles)[1].step_s

    def step_s(number: int) -> float:
        _, solution, simulated_s = fastest_plan(asked(number), profiles)
        return solution.step_s if simulated_s is None else simulated_s

    def is_enough(takes_s: Callable[[int], float], number: int) -> bool:
        try:
            return takes_s(number) <= most_s
        except DoesNotFitError:
            return False

    try:
        most_s = (1 + slack) * step_s(most)
    except DoesNotFitError:
        return 0, question
    least = smallest(partial(is_enough, bound_s), most=most) or most
    number = first(partial(is_enough, step_s), least, most)
    return number, asked(number)


def _first_of_each(is_enough: Callable[[int], bool], least: int, most: int) -> int:
    """Returns the first number that is enough, or `most`."""
    return next((number for number in range(least, most) if is_enough(number)), most)


def _first_of_many(is_enough: Callable[[int], bool], least: int, most: int) -> int:
    """Returns a number that is enough where the one before is not, or `most`. It tries numbers at growing distances."""
    below, number, distance = least - 1, least, 1
    while number < most and not is_enough(number):
        below, number, distance = number, number + distance, 2 * distance
    number = min(number, most)
    while number - below > 1:
        middle = (below + number) // 2
        below, number = (below, middle) if is_enough(middle) else (middle, number)
    return number
