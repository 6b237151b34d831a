"""Finds the fastest plan of a job: the best ones by the cost model are simulated, because it counts no waits."""

import math
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from windlass.engine.memory_plan import UpdateOrder
from windlass.planner.feasibility import least_memory_of, limits_for_plans, numbers_of_microbatches, shortfall_of
from windlass.planner.planning.fewer_waits import (
    BUSY_SHARES,
    waits,
    with_deeper_queues,
    with_idle_links,
    with_idle_ssds,
    with_more_passing,
)
from windlass.planner.question import PlanQuestion, Profiles, counted, search_exactly, solve_kind_exactly
from windlass.planner.simulation import simulated_step_s
from windlass.planner.solver import DoesNotFitError, Found, PlannedJob, Solution

# Number of plans to simulate beside the best one by the cost model, at most, whose cost is at most so much larger.
_NUM_OTHERS = 3
_NEAR = 0.02
# Share of a step. If two plans differ by less, something that both use alike bounds them, and the others too.
_ALIKE = 1e-3
# Share of a step. If all plans of the other order, or place of kept gradients, are slower by more, none of their kinds
# is faster. If a plan is slower than the best one's bound by more, that one is tried with fewer waits, too.
_FAR = 0.1
# Share of a step. The simulation of a plan ends early once its step is longer by more than this than that of another
# plan, if the rest takes as long as in the step before. So much less it may take.
_SURE = 1.5e-2
# Share of a step: plans that are faster by less are not looked for.
_WORTH = 5e-3
# Share of a step by which the cost model's bound may grow if more gradients may wait for their update. Plans whose
# bound grows by no more are simulated with so many: the bound does not count that updates come unevenly.
_ROOM = 0.03
# The number of plans with ever fewer swapped activations that are no faster, one after the other, before the last one.
_MOST_SLOWER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Watcher:
    """The caller of a search, while it goes on."""

    # Takes the best plan by the cost model, before any is simulated, for a question. Its step takes at least so long;
    # that of another plan, which costs more, may take less. If blocks are to be measured, it is called before with
    # the best plan by the machine's rates. None: no estimate is wanted.
    see_estimate: Callable[[PlanQuestion, Profiles, Solution], None] | None = None
    # Takes what is measured now in words, how many measurements are done, and how many there are.
    see_measurement: Callable[[str, int, int], None] = lambda what, done, total: None
    # Is called before each simulation and measurement, and may raise an error that ends the search.
    check: Callable[[], None] = lambda: None


NOBODY = Watcher()


@dataclass(slots=True, kw_only=True)
class _Simulated:
    """A plan whose step was simulated."""

    solution: Solution
    step_s: float = math.inf
    most_s: float = 0.0  # if the step is longer, it was not simulated to its end


@dataclass(slots=True, kw_only=True)
class _Simulations:
    """The plans for a question whose steps were simulated."""

    question: PlanQuestion
    profiles: Profiles
    watcher: Watcher
    simulated: list[_Simulated] = field(default_factory=list)

    @property
    def number(self) -> int:
        """The number of plans that were simulated."""
        return len(self.simulated)

    def step_of(self, solution: Solution, below_s: float = math.inf) -> float:
        """Returns the simulated step time of a plan. If it is above `below_s`, some other time above that may come."""
        most_s = (1 + _SURE) * below_s
        known = next((each for each in self.simulated if _is_same_plan(each.solution, solution)), None)
        if known is None:
            known = _Simulated(solution=solution)
            self.simulated.append(known)
        if known.step_s > known.most_s and most_s > known.most_s:
            self.watcher.check()
            known.step_s = promised_step_s(self.question, self.profiles, solution, most_s=most_s)
            known.most_s = most_s
        return max(known.step_s, solution.step_s)


def best_plan(question: PlanQuestion, profiles: Profiles) -> tuple[PlannedJob, Solution]:
    """Returns the best plan by the cost model alone.

    Raises:
        DoesNotFitError: nothing fits.
    """
    best = _search(question, profiles).best
    return best.costs.job, best


def fastest_plan(
    question: PlanQuestion, profiles: Profiles, watcher: Watcher = NOBODY
) -> tuple[PlannedJob, Solution, float | None]:
    """Simulates the best plans by the cost model, and returns the fastest one with its step time.

    The step time is None for a model with hypothetical layers, which cannot be simulated. The cost model gives a lower
    bound, so a plan is skipped if its bound is above the best simulated time.

    Raises:
        DoesNotFitError: nothing fits.
    """
    if question.num_layers is not None:
        return *best_plan(question, profiles), None
    found = _search(question, profiles, num_others=_NUM_OTHERS, near=_NEAR)
    if watcher.see_estimate is not None:
        watcher.see_estimate(question, profiles, found.best)
    simulations = _Simulations(question=question, profiles=profiles, watcher=watcher)
    busy, busy_s = _fastest_of(found, simulations)
    fastest, step_s = _with_fewer_waits(busy, simulations)
    if step_s > (1 + _FAR) * found.best.step_s and _kind_of(busy) != _kind_of(found.best):
        # All wait so much that which one waits least says little.
        rival, rival_s = _with_fewer_waits(found.best, simulations)
        if rival_s < step_s:
            fastest, step_s = rival, rival_s
    if fastest.costs.job.keeps_grads and waits(found.best.step_s, step_s):
        # Where the kept gradients are decides what else is in host memory, and so what waits for the SSDs.
        order, best = fastest.costs.job.update_order, found.best.costs
        spills = best.spills if best.job.update_order is order else fastest.costs.spills
        rivals = found.of_kind(order, not spills, step_s)
        fastest, step_s = _faster_of((fastest, step_s), rivals, simulations, step_s)
    if question.chooses_order:
        # How long work waits is known only by simulation, and it is not the same in both orders.
        (order,) = {UpdateOrder.ACTIVE, UpdateOrder.KEPT} - {fastest.costs.job.update_order}
        rivals = found.of_kind(order, None, step_s)
        fastest, step_s = _faster_of((fastest, step_s), rivals, simulations, busy_s)
    return fastest.costs.job, fastest, step_s


def _faster_of(
    fastest: tuple[Solution, float], rivals: Found | None, simulations: _Simulations, near_s: float
) -> tuple[Solution, float]:
    """Returns the fastest plan or, if it is faster, that of another search. `near_s`: see `_FAR`."""
    if rivals is None or rivals.best.step_s >= fastest[1]:
        return fastest
    rival, rival_s = _fastest_of(rivals, simulations, near_s)
    if rival_s <= (1 + _FAR) * near_s:
        rival, rival_s = _with_fewer_waits(rival, simulations)
    return (rival, rival_s) if rival_s < fastest[1] else fastest


def _fastest_of(found: Found, simulations: _Simulations, below_s: float = math.inf) -> tuple[Solution, float]:
    """Simulates the plans of a search. Returns the fastest one with its step time.

    `below_s`: of the fastest plan that was simulated before.
    """
    question, profiles = simulations.question, simulations.profiles
    fastest, step_s, is_best_left = found.best, math.inf, True
    plain_of_fastest, with_less_room = found.best, list[Solution]()
    # Fewer micro-batches are simulated in less time, and end the simulations of more of them early.
    left = deque(sorted((found.best, *found.others[:_NUM_OTHERS]), key=_num_microbatches))
    while left:
        solution = left.popleft()
        if solution is found.best:
            is_best_left = False
        if solution.step_s >= (1 - _WORTH) * step_s:
            continue
        if solution is not found.best:
            kind = solution.kind
            solution, excess = counted(question, profiles, solution)
            if excess > 0:
                if is_best_left:  # whether it waits is not known yet
                    left.append(solution)
                    continue
                if not waits(fastest.step_s, step_s):
                    continue  # little is to be gained by a search for a plan of this kind that fits
                fitting = solve_kind_exactly(question, replace(kind, limits=question.limits), profiles, below_s=step_s)
                if fitting is None:
                    continue
                solution = fitting
        plain = solution
        below_room_s = min(step_s, (1 + _ROOM) * solution.step_s)
        if (with_room := with_more_passing(question, profiles, solution, below_room_s)) is not None:
            with_less_room.append(plain)
            solution = with_room
        num_simulated = simulations.number
        solution_s = simulations.step_of(solution, min(step_s, (1 + _FAR) * below_s))
        is_new = simulations.number > num_simulated
        is_alike = is_new and step_s < math.inf and abs(solution_s - step_s) <= _ALIKE * step_s
        if solution_s < step_s:
            fastest, step_s, plain_of_fastest = solution, solution_s, plain
        if is_alike and not is_best_left:
            break
    # Where SSDs or optimizers are busy all the time, nothing is faster if more gradients wait for them.
    for plain in (plain_of_fastest, *sorted(with_less_room, key=lambda each: each.step_s)[:1]):
        if plain.step_s < (1 - _WORTH) * step_s:
            plain_s = simulations.step_of(plain, min(step_s, (1 + _FAR) * below_s))
            if plain_s < step_s:
                fastest, step_s = plain, plain_s
    return fastest, step_s


def _num_microbatches(solution: Solution) -> int:
    return solution.costs.job.num_microbatches


def _with_fewer_waits(busy: Solution, simulations: _Simulations) -> tuple[Solution, float]:
    """Returns a plan of about the same kind that waits less, with its step time, or the given one."""
    question, profiles = simulations.question, simulations.profiles
    step_s = simulations.step_of(busy)
    while waits(busy.step_s, step_s) and (deeper := with_deeper_queues(question, profiles, busy, step_s)) is not None:
        deeper_s = simulations.step_of(deeper, step_s)
        if deeper_s >= step_s:
            break
        busy, step_s = deeper, deeper_s
    if waits(busy.step_s, step_s) and (more := with_more_passing(question, profiles, busy, step_s)) is not None:
        busy = min(busy, more, key=lambda each: simulations.step_of(each, step_s))
    for with_idle in (with_idle_ssds, with_idle_links):
        busy = _with_idle(busy, simulations, with_idle)
    return busy, simulations.step_of(busy)


def _with_idle(
    busy: Solution,
    simulations: _Simulations,
    with_idle: Callable[[PlanQuestion, Profiles, Solution, float], Solution | None],
) -> Solution:
    """Returns the fastest of a plan and those that use something for ever smaller shares of the time that it does."""
    fastest, step_s, num_slower = busy, simulations.step_of(busy), 0
    for share in BUSY_SHARES:
        if num_slower == _MOST_SLOWER or not waits(fastest.step_s, step_s):
            break
        solution = with_idle(simulations.question, simulations.profiles, busy, share)
        if solution is None or solution.step_s >= step_s:
            break
        solution_s = simulations.step_of(solution, step_s)
        num_slower = 0 if solution_s < step_s else num_slower + 1
        if solution_s < step_s:
            fastest, step_s = solution, solution_s
    return fastest


def _kind_of(solution: Solution) -> tuple[object, ...]:
    """Returns the choices of a plan that do not change while one that waits less is looked for."""
    costs, job = solution.costs, solution.costs.job
    return (
        job.num_microbatches,
        job.update_order,
        job.cut,
        costs.group_size,
        costs.spills,
        *costs.saver_of_device_memory,
    )


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
