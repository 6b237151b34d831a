"""How far a machine goes with a job, and how much of it a job needs."""

from dataclasses import dataclass, replace

from windlass.actors.planning import (
    Planned,
    PlanQuestion,
    Profiles,
    best_plan,
    fits,
    limits_of_question,
    planned,
    with_part,
)
from windlass.planner.reach import DEFAULT_SLACK, Goal, largest, smallest
from windlass.planner.solver import DoesNotFitError, solve_job
from windlass.planner.speeds import speeds_of

# What is looked for is at most this.
_MOST_EXAMPLES = 1 << 14
_MOST_LAYERS = 1 << 11
_MOST_TOKENS = 1 << 21
# Contexts are looked for in steps of so many tokens.
_TOKENS_STEP = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A number, and the plan with it; 0, and no plan, where nothing fits."""

    goal: Goal
    number: int
    num_params: int
    planned: Planned | None


def find(question: PlanQuestion, goal: Goal, *, slack: float = DEFAULT_SLACK) -> Found:
    """The extreme number for which the job fits; of SSDs and memory, for which a step takes at most `slack` longer.

    Source of the questions: Ratel, figures 6 to 10.
    """
    question = replace(question, measures=False)
    profiles = Profiles(question)
    match goal:
        case Goal.LARGEST_BATCH:
            question = replace(question, num_microbatches=1)
            number = largest(lambda size: fits(replace(question, batch_size=size), profiles), most=_MOST_EXAMPLES)
            question = replace(question, batch_size=number)
        case Goal.LONGEST_CONTEXT:
            question = replace(question, num_microbatches=question.batch_size)
            number = _TOKENS_STEP * largest(
                lambda steps: fits(replace(question, sequence_length=steps * _TOKENS_STEP), profiles),
                most=_MOST_TOKENS // _TOKENS_STEP,
            )
            question = replace(question, sequence_length=number)
        case Goal.MOST_LAYERS:
            number = largest(lambda layers: fits(replace(question, num_layers=layers), profiles), most=_MOST_LAYERS)
            question = replace(question, num_layers=number)
        case Goal.FEWEST_SSDS:
            number, question = _fewest(question, profiles, "ssds", "count", question.hardware.ssds.count, slack)
        case Goal.SMALLEST_RAM:
            most = int(question.hardware.host.memory_gib)
            number, question = _fewest(question, profiles, "host", "memory_gib", most, slack)
    if not number:
        return Found(goal=goal, number=0, num_params=0, planned=None)
    job, solution = best_plan(question, profiles)
    return Found(
        goal=goal,
        number=number,
        num_params=job.model.numel,
        planned=planned(question, job, solution, profiles, advises=False),
    )


def _fewest(
    question: PlanQuestion, profiles: Profiles, part: str, key: str, most: int, slack: float
) -> tuple[int, PlanQuestion]:
    """The smallest number of a part of the machine that is as good as what is there, and the job on such a machine."""
    hardware = question.hardware

    def with_number(number: int) -> PlanQuestion:
        changed = with_part(getattr(hardware, part), **{key: number})
        return replace(question, hardware=with_part(hardware, **{part: changed}))

    try:
        job, best = best_plan(question, profiles)
    except DoesNotFitError:
        return 0, question

    def is_enough(number: int) -> bool:
        other = with_number(number)
        try:
            found = solve_job(job, speeds_of(other.hardware), limits_of_question(other))
        except DoesNotFitError:
            return False
        return found.step_s <= (1 + slack) * best.step_s

    number = smallest(is_enough, most=most) or most
    return number, replace(with_number(number), num_microbatches=job.num_microbatches)
