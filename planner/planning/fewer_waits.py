"""Plans that wait less than the best one by the cost model, which counts no waits. Simulation tells which is faster.

See docs/decisions/0044-monotone-plans.md.
"""

import math
from dataclasses import replace

from windlass.engine.memory_plan import most_passing_blocks
from windlass.planner.cost import Speeds
from windlass.planner.question import PlanQuestion, Profiles, counted, solve_kind_exactly
from windlass.planner.solver import Solution, depths_to_try, solution_of

# Share of a step. Plans that wait less are tried if the step is longer than the cost model's bound by more.
_LEAST_WAIT = 0.03
# If a plan that swaps activations to the SSDs waits, plans are tried that let the SSDs be busy for these shares of the
# time that it does. The same for the links.
BUSY_SHARES = (0.85, 0.7, 0.55, 0.4, 0.25, 0.1)
# If a plan waits and gradients of fewer typical blocks may wait for their update, it is also tried with so many.
NUMBERS_PASSING = (8, 16)


def waits(bound_s: float, step_s: float) -> bool:
    """Returns whether a step takes clearly longer than the cost model's bound, because work waits for other work."""
    return step_s > (1 + _LEAST_WAIT) * bound_s


def with_deeper_queues(
    question: PlanQuestion, profiles: Profiles, busy: Solution, below_s: float = math.inf
) -> Solution | None:
    """Returns the same kind of plan with more slots for states, and so with fewer states in host memory.

    More updates wait for the SSDs then, which have work while the backward pass is at layers without any for them. The
    number is the least that is larger. None: there is none below.
    """
    costs, states = busy.costs, busy.placement.depths.states
    leaving_nbytes = busy.kind.depths.leaving_nbytes
    tried = depths_to_try(costs.speeds.num_ssds, num_optimizers=costs.job.num_optimizers, leaving_nbytes=leaving_nbytes)
    deeper = [each for each in tried if each.states > states and each.leaving_nbytes == leaving_nbytes]
    if not deeper:
        return None
    return solve_kind_exactly(
        question, replace(busy.kind, depths=deeper[-1], limits=question.limits), profiles, below_s=below_s
    )


def with_more_passing(
    question: PlanQuestion,
    profiles: Profiles,
    busy: Solution,
    below_s: float = math.inf,
    at_most: int = NUMBERS_PASSING[0],
) -> Solution | None:
    """Returns the same kind of plan with more gradients that may wait for their update. None: there is none below.

    By the cost model alone, few are enough if updates take less time than the backward pass. But they come unevenly.
    """
    number = busy.placement.num_passing_blocks
    more = min(at_most, most_passing_blocks(busy.costs.job.model.num_own_blocks))
    if number is None or number >= more:
        return None
    kind = replace(busy.kind, num_passing_blocks=more, limits=question.limits)
    return solve_kind_exactly(question, kind, profiles, below_s=below_s)


def with_idle_ssds(question: PlanQuestion, profiles: Profiles, busy: Solution, share: float) -> Solution | None:
    """Returns the same kind of plan with SSDs that are busy for about a share of their time. None: there is none.

    By the cost model alone, a plan uses the SSDs as much as it can if that saves any compute. But if two resources are
    busy all the time, each waits for the other. So the plan is solved for as if the SSDs were slower.
    """
    if not busy.placement.ssd_activation_nbytes:
        return None
    speeds, factor = busy.costs.speeds, share * busy.busy_s["ssd"] / busy.step_s
    slower = replace(
        speeds, ssd_read_bytes=factor * speeds.ssd_read_bytes, ssd_write_bytes=factor * speeds.ssd_write_bytes
    )
    return _solved_for(question, profiles, busy, slower)


def with_idle_links(question: PlanQuestion, profiles: Profiles, busy: Solution, share: float) -> Solution | None:
    """Returns the same for the links to the GPUs, which also move states that could be on the device."""
    speeds, busy_s = busy.costs.speeds, max(busy.busy_s["h2d"], busy.busy_s["d2h"])
    factor = share * busy_s / busy.step_s
    if speeds.shares_cores or not factor:
        return None
    slower = replace(speeds, h2d_bytes=factor * speeds.h2d_bytes, d2h_bytes=factor * speeds.d2h_bytes)
    return _solved_for(question, profiles, busy, slower)


def _solved_for(question: PlanQuestion, profiles: Profiles, busy: Solution, slower: Speeds) -> Solution | None:
    """Returns the best plan of the same kind on a slower machine, as it is on the job's. None: it does not fit."""
    found = solve_kind_exactly(question, replace(busy.kind, speeds=slower, limits=question.limits), profiles)
    return None if found is None else at_speeds(question, profiles, found, busy.costs.speeds)


def at_speeds(question: PlanQuestion, profiles: Profiles, other: Solution, speeds: Speeds) -> Solution | None:
    """Returns the plan of a machine with other rates as it is with these ones. None: it does not fit."""
    costs, kind = (replace(each, speeds=speeds) for each in (other.costs, other.kind))
    solution, excess = counted(question, profiles, solution_of(costs, other.placement, other.plan.arena_nbytes))
    return None if excess > 0 else replace(solution, kind=kind)


def with_slower_ssds(question: PlanQuestion, share: float) -> PlanQuestion:
    """Returns the question for a machine whose SSDs do a share of what they do on this one."""
    ssds = question.hardware.ssds
    rates = ("read_gb_per_s", "write_gb_per_s", "combined_gb_per_s")
    slower = {name: share * rate for name in rates if (rate := getattr(ssds, name)) is not None}
    hardware = question.hardware.model_copy(update={"ssds": ssds.model_copy(update=slower)})
    return replace(question, hardware=hardware)
