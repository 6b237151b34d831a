"""Finds the largest job that fits a machine, and the smallest machine for a job."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from windlass.planner.feasibility import largest_fitting, least_gpu, least_memory_of, with_least_gpu, with_part
from windlass.planner.hardware import Hardware, with_more_ssds
from windlass.planner.planning.planner import Planned, planned
from windlass.planner.planning.simulated_search import Watcher, best_plan, fastest_plan
from windlass.planner.profiling import longest_of
from windlass.planner.question import PlanQuestion, Profiles
from windlass.planner.solver import DEFAULT_SLACK, DoesNotFitError, Goal, PlannedJob, Solution, smallest

_Fastest = tuple[PlannedJob, Solution, float | None]  # of `fastest_plan`

_TOKENS_STEP = 256  # tokens: resolution of the search for the longest context


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """A search for a largest number, in at most so many steps as `most` returns."""

    ask: Callable[[PlanQuestion, int], PlanQuestion]  # builds the question after a number of steps
    number: Callable[[PlanQuestion], int | None]  # reads the number from such a question
    most: Callable[[PlanQuestion], int]


def _length_of(question: PlanQuestion, steps: int) -> int:
    longest = longest_of(question.config)
    return steps * _TOKENS_STEP if longest is None else min(steps * _TOKENS_STEP, longest)


_SEARCHES = {
    Goal.LARGEST_BATCH: _Search(
        # One micro-batch in each lane, or more if there are more GPUs.
        ask=lambda question, steps: question.changed(
            batch_size=steps * question.least_microbatches, num_microbatches=question.least_microbatches
        ),
        number=lambda question: question.training.batch_size,
        most=lambda question: 1 << 14,
    ),
    Goal.LONGEST_CONTEXT: _Search(
        ask=lambda question, steps: question.changed(
            sequence_length=_length_of(question, steps), num_microbatches=question.training.batch_size
        ),
        number=lambda question: question.training.sequence_length,
        most=lambda question: math.ceil(min(1 << 21, longest_of(question.config) or 1 << 21) / _TOKENS_STEP),
    ),
    Goal.MOST_LAYERS: _Search(
        ask=lambda question, steps: replace(question, num_layers=steps),
        number=lambda question: question.num_layers,
        most=lambda question: 1 << 11,
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
    fastest: _Fastest | None = None
    if goal is Goal.FEWEST_SSDS:
        ssds = _Part(
            question=question,
            profiles=profiles,
            with_number=lambda number: with_more_ssds(hardware, number - hardware.ssds.count),
            most=hardware.ssds.count,
            slack=slack,
        )
        number, extreme, fastest = ssds.fewest(_first_of_each)
    elif goal is Goal.SMALLEST_GPU:
        number, extreme = _smallest_gpu(question, profiles)
    elif goal is Goal.SMALLEST_RAM:
        ram = _Part(
            question=question,
            profiles=profiles,
            with_number=lambda number: with_part(hardware, host=with_part(hardware.host, memory_gib=number)),
            most=int(hardware.host.memory_gib),
            slack=slack,
        )
        number, extreme, fastest = ram.fewest(_first_of_many)
    else:
        search = _SEARCHES[goal]
        steps = largest_fitting(lambda steps: search.ask(question, steps), profiles, most=search.most(question))
        extreme = search.ask(question, max(1, steps))
        number = (search.number(extreme) or 0) if steps else 0
    if not number:
        return Found(goal=goal, number=0, num_params=0, question=question, planned=None)
    job, solution, step_s = fastest or fastest_plan(extreme, profiles)
    result = planned(extreme, job, solution, profiles, step_s=step_s)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A part of a machine of which fewer may be enough: a step takes at most `slack` longer than with `most`.

    A step takes at least its bound, which is no longer with more of a part. The step itself may be a little longer.
    """

    question: PlanQuestion
    profiles: Profiles
    with_number: Callable[[int], Hardware]
    most: int
    slack: float

    def fewest(
        self, first: Callable[[Callable[[int], bool], int, int], int]
    ) -> tuple[int, PlanQuestion, _Fastest | None]:
        """Finds a number that is enough where one less is not, the job with it, and its plan if that is known.

        The number is 0 if the job does not fit. Numbers with too long a bound are left out. `first`: returns the first
        number of a range that is enough, or the last one.
        """
        try:
            with_most = fastest_plan(self._asked(self.most), self.profiles)
        except DoesNotFitError:
            return 0, self.question, None
        most_s = (1 + self.slack) * _step_of(with_most)
        least = smallest(partial(self._has_bound, most_s), most=self.most) or self.most
        number = first(partial(self._is_enough, most_s), least, self.most)
        return number, self._asked(number), with_most if number == self.most else None

    def _asked(self, number: int) -> PlanQuestion:
        return replace(self.question, hardware=self.with_number(number))

    def _has_bound(self, most_s: float, number: int) -> bool:
        """Returns whether the best plan by the cost model takes at most so long."""
        try:
            return best_plan(self._asked(number), self.profiles)[1].step_s <= most_s
        except DoesNotFitError:
            return False

    def _is_enough(self, most_s: float, number: int) -> bool:
        """Returns whether the simulated step takes at most so long. It ends with the first such plan."""

        def end_if_enough(step_s: float) -> None:
            if step_s <= most_s:
                raise _EnoughError

        watcher = Watcher(see_step=end_if_enough)
        try:
            return _step_of(fastest_plan(self._asked(number), self.profiles, watcher)) <= most_s
        except _EnoughError:
            return True
        except DoesNotFitError:
            return False


class _EnoughError(Exception):
    """A plan is fast enough, so the fastest one is not looked for."""


def _step_of(fastest: _Fastest) -> float:
    _, solution, step_s = fastest
    return solution.step_s if step_s is None else step_s


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
