"""Finds the fastest plan of a job: the best ones by the cost model are simulated, because it counts no waits."""

import contextlib
import math
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from windlass.engine.memory_plan import UpdateOrder
from windlass.planner.feasibility import least_memory_of, limits_for_plans, numbers_of_microbatches, shortfall_of
from windlass.planner.planning.fewer_waits import (
    BUSY_SHARES,
    NUMBERS_PASSING,
    at_speeds,
    waits,
    with_deeper_queues,
    with_idle_links,
    with_idle_ssds,
    with_more_passing,
    with_slower_ssds,
)
from windlass.planner.question import (
    PlanQuestion,
    PlanReport,
    Profiles,
    counted,
    search_exactly,
    solve_kind_exactly,
)
from windlass.planner.simulation import simulated_step_s
from windlass.planner.solver import DoesNotFitError, Found, PlannedJob, Solution

# Number of plans to simulate beside the best one by the cost model, at most, whose cost is at most so much larger.
_NUM_OTHERS = 3
_NEAR = 0.02
# If so many kinds of plans with a number of micro-batches were simulated, no more of that number are looked for.
_ENOUGH_KINDS = 2
# The number of plans to simulate with a fixed number of micro-batches, besides those that were simulated before.
_MOST_OF_NUMBER = 2
# Share of a step. If two plans differ by less, something that both use alike bounds them, and the others too.
_ALIKE = 1e-3
# Share of a step. If all plans of the other order, or place of kept gradients, are slower by more, none of their kinds
# is faster. If a plan is slower than the best one's bound by more, that one is tried with fewer waits, too.
_FAR = 0.1
# Share of a plan's bound above which it waits so long that matrices in parts, or whole ones, are tried, too.
_FAR_FOR_CUTS = 0.25
# Share of a step. The simulation of a plan ends early once its step is longer by more than this than that of another
# plan, if the rest takes as long as in the step before. So much less it may take.
_SURE = 1.5e-2
# Share of a step: plans that are faster by less are not looked for.
_WORTH = 5e-3
# Share of the fastest plan's wait that another one of the best plans has at least.
_LEAST_OF_WAITS = 0.25
# Share of a step by which the cost model's bound may grow if more gradients may wait for their update. Plans whose
# bound grows by no more are simulated with so many: the bound does not count that updates come unevenly.
_ROOM = 0.03
# Shares of a step. If the fastest of the best plans takes longer than their least bound by more than the first, and the
# SSDs are busy for more than the second, the plans of machines with slower SSDs are tried. They must be faster by the
# third, because how much the others still gain is not known.
_LONG_WAITS, _MUCH_USED, _CLEARLY = 0.05, 0.25, 1.5e-2
# Rates of such SSDs, over those of the machine.
_SLOWER_SSDS = (0.5, 0.25)
# Share of a step. If the fastest plan takes longer than its bound by more, fewer gradients that may wait help no plan.
_HARDLY_WAITS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Watcher:
    """The caller of a search, while it goes on."""

    # Takes the best plan by the cost model, before any is simulated, for a question. Its step takes at least so long;
    # that of another plan, which costs more, may take less. If blocks are to be measured, it is called before with
    # the best plan by the machine's rates. None: no estimate is wanted.
    see_estimate: Callable[[PlanQuestion, Profiles, Solution], None] | None = None
    # Takes the plan, before its advice is looked for.
    see_plan: Callable[[PlanReport, Solution], None] = lambda report, solution: None
    # Takes what is measured now in words, how many measurements are done, and how many there are.
    see_measurement: Callable[[str, int, int], None] = lambda what, done, total: None
    # Is called before each simulation and measurement, and may raise an error that ends the search.
    check: Callable[[], None] = lambda: None
    # Takes the step time of each plan that is faster than those before. It may raise such an error, too.
    see_step: Callable[[float], None] = lambda step_s: None


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

    def num_kinds(self, num_microbatches: int) -> int:
        """Returns the number of kinds of plans with so many micro-batches that were simulated."""
        solutions = [each.solution for each in self.simulated]
        return len({_kind_of(each) for each in solutions if _num_microbatches(each) == num_microbatches})

    def has_similar(self, solution: Solution) -> bool:
        """Returns whether a plan was simulated that differs so little by the cost model that it waits alike."""
        return any(
            _kind_of(each.solution) == _kind_of(solution)
            and each.solution.placement.num_passing_blocks == solution.placement.num_passing_blocks
            and abs(each.solution.step_s - solution.step_s) <= _ALIKE * solution.step_s
            for each in self.simulated
        )

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
        step_s = max(known.step_s, solution.step_s)
        if step_s < below_s:
            self.watcher.see_step(step_s)
        return step_s


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
    bound, so a plan is skipped if by its bound it gains less than half a percent.

    Raises:
        DoesNotFitError: nothing fits.
    """
    if question.num_layers is not None:
        return *best_plan(question, profiles), None
    found = _search(question, profiles, num_others=_NUM_OTHERS, near=_NEAR)
    if watcher.see_estimate is not None:
        watcher.see_estimate(question, profiles, found.best)
    simulations = _Simulations(question=question, profiles=profiles, watcher=watcher)
    first = _as_with_slower_ssds(found.best, _fastest_of(found, simulations), simulations)
    fastest, step_s = _fastest_like(first, found, simulations)
    for number in _numbers_to_look_at(simulations, found, fastest, step_s):
        fixed = replace(simulations, question=question.changed(num_microbatches=number))
        with contextlib.suppress(DoesNotFitError):
            of_number = _search(fixed.question, profiles, num_others=_NUM_OTHERS, near=_NEAR)
            rival, rival_s = _fastest_like(_fastest_of(of_number, fixed, most_new=_MOST_OF_NUMBER), of_number, fixed)
            if rival_s < step_s:
                fastest, step_s = rival, rival_s
    return fastest.costs.job, fastest, step_s


def _numbers_to_look_at(simulations: _Simulations, found: Found, fastest: Solution, step_s: float) -> set[int]:
    """Returns the numbers of micro-batches of which more plans may be clearly faster, if the planner chooses it.

    Only a few plans near the best one are simulated, and hardly two with the same number. With the fewest, least is
    read and copied. So mostly one of these is the fastest, or one with the number of the fastest plan so far.
    """
    question = simulations.question
    if not question.chooses_microbatches or found.best.step_s >= (1 - _WORTH) * step_s:
        return set()
    fewest = min(numbers_of_microbatches(question))
    if not waits(found.best.step_s, step_s):
        return {fewest} if not simulations.num_kinds(fewest) else set()
    numbers = {fewest, _num_microbatches(fastest)}
    return {number for number in numbers if simulations.num_kinds(number) < _ENOUGH_KINDS}


def _fastest_like(first: tuple[Solution, float], found: Found, simulations: _Simulations) -> tuple[Solution, float]:
    """Returns the fastest of the plans that wait less than the first ones of a search, with its step time.

    `first`: the fastest of those that were simulated so far.
    """
    question, (busy, busy_s) = simulations.question, first
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
        rivals = found.of_kind(lambda costs: costs.job.update_order is order and costs.spills is not spills, step_s)
        fastest, step_s = _faster_of((fastest, step_s), rivals, simulations, (1 + _FAR) * step_s)
    if question.chooses_cut and step_s > (1 + _FAR_FOR_CUTS) * fastest.step_s and fastest.costs.lacks_room_for_layers:
        # What comes and goes in parts waits less than whole layers, of which there is room for few.
        is_cut = fastest.costs.job.cut is not None
        rivals = found.of_kind(lambda costs: (costs.job.cut is None) is is_cut, step_s)
        fastest, step_s = _faster_of((fastest, step_s), rivals, simulations, (1 + _FAR) * step_s)
    if question.chooses_order:
        # How long work waits is known only by simulation, and it is not the same in both orders.
        (other,) = {UpdateOrder.ACTIVE, UpdateOrder.KEPT} - {fastest.costs.job.update_order}
        rivals = found.of_kind(lambda costs: costs.job.update_order is other, step_s)
        fastest, step_s = _faster_of((fastest, step_s), rivals, simulations, (1 + _FAR) * busy_s)
    return fastest, step_s


def _as_with_slower_ssds(
    best: Solution, fastest: tuple[Solution, float], simulations: _Simulations
) -> tuple[Solution, float]:
    """Returns the fastest plan or, if they are clearly faster, that of a machine with slower SSDs.

    Where SSDs are fast, the best plans by the cost model let them be busy all the time, and wait for them. `best`: the
    plan with the least bound.
    """
    question, profiles = simulations.question, simulations.profiles
    plan, step_s = fastest
    most_s = (1 - _CLEARLY) * step_s
    for share in _SLOWER_SSDS:
        if step_s <= (1 + _LONG_WAITS) * best.step_s or best.busy_s["ssd"] <= _MUCH_USED * best.step_s:
            break
        slower = _search(with_slower_ssds(question, share), profiles).best
        other = at_speeds(question, profiles, slower, question.speeds)
        if other is None or other.step_s >= most_s:
            continue
        if simulations.has_similar(other):
            break
        other_s = simulations.step_of(other, most_s)
        if other_s >= most_s:
            break
        plan, step_s, most_s = other, other_s, other_s
    return plan, step_s


def _faster_of(
    fastest: tuple[Solution, float], rivals: Found | None, simulations: _Simulations, below_s: float
) -> tuple[Solution, float]:
    """Returns the fastest plan or, if it is faster, that of another search.

    `below_s`: if all of its plans take longer before their waits are looked at, they are left out.
    """
    if rivals is None or rivals.best.step_s >= fastest[1]:
        return fastest
    rival, rival_s = _fastest_of(rivals, simulations, below_s)
    if rival_s <= below_s:
        rival, rival_s = _with_fewer_waits(rival, simulations)
    return (rival, rival_s) if rival_s < fastest[1] else fastest


@dataclass(slots=True, kw_only=True)
class _Comparison:
    """The fastest of the plans of a search, as far as they were simulated."""

    simulations: _Simulations
    below_s: float  # plans that take longer are of no use
    fastest: Solution
    plain: Solution  # the same one with as few gradients that may wait as by its bound
    step_s: float = math.inf
    with_less_room: list[Solution] = field(default_factory=list)  # plans that were simulated with more room

    def may_gain(self, solution: Solution) -> bool:
        """Returns whether a plan may be clearly faster by its bound, if it waits as little as any does."""
        if self.step_s == math.inf:
            return True
        least_wait_s = _LEAST_OF_WAITS * (self.step_s - self.fastest.step_s)
        return solution.step_s < self.step_s - max(_WORTH * self.step_s, least_wait_s)

    def add(self, solution: Solution, plain: Solution) -> bool:
        """Simulates a plan. Returns whether it is new, and takes as long as the fastest one."""
        num_simulated = self.simulations.number
        if self.step_s < math.inf and self.simulations.has_similar(solution):
            return False
        solution_s = self.simulations.step_of(solution, min(self.step_s, self.below_s))
        is_new = self.simulations.number > num_simulated
        is_alike = is_new and self.step_s < math.inf and abs(solution_s - self.step_s) <= _ALIKE * self.step_s
        if solution_s < self.step_s:
            self.fastest, self.plain, self.step_s = solution, plain, solution_s
        return is_alike

    def add_with_room(self, plain: Solution) -> bool:
        """Simulates a plan with room for gradients that wait, if that costs little by its bound. Returns as `add`."""
        question, profiles = self.simulations.question, self.simulations.profiles
        below_s = min(self.step_s, (1 + _ROOM) * plain.step_s)
        solution = with_more_passing(question, profiles, plain, below_s)
        if solution is None:
            return self.add(plain, plain)
        self.with_less_room.append(plain)
        return self.add(solution, plain)

    def add_with_less_room(self) -> None:
        """Simulates the fastest plan, and the one with the least bound, as they were without more room.

        Where SSDs or optimizers are busy all the time, nothing is faster if more gradients wait for them. Then the
        fastest plan hardly takes longer than its bound, and only the memory for the gradients could be of better use.
        """
        if self.step_s > min(self.below_s, (1 + _HARDLY_WAITS) * self.fastest.step_s):
            return
        least = sorted(self.with_less_room, key=lambda solution: solution.step_s)[:1]
        for plain in (self.plain, *least):
            if self.may_gain(plain):
                self.add(plain, plain)


def _fastest_of(
    found: Found, simulations: _Simulations, below_s: float = math.inf, most_new: int = 1 + _NUM_OTHERS
) -> tuple[Solution, float]:
    """Simulates the plans of a search. Returns the fastest one with its step time.

    `below_s`: plans that take longer are of no use. `most_new`: the number of simulations.
    """
    most_simulations = simulations.number + most_new
    comparison = _Comparison(simulations=simulations, below_s=below_s, fastest=found.best, plain=found.best)
    # Fewer micro-batches are simulated in less time, and end the simulations of more of them early.
    left = deque(sorted((found.best, *found.others[:_NUM_OTHERS]), key=_num_microbatches))
    is_best_left = True
    while left and simulations.number < most_simulations:
        solution, excess = left.popleft(), 0.0
        if solution is found.best:
            is_best_left = False
        if not comparison.may_gain(solution):
            continue
        if solution is not found.best:
            solution, excess = counted(simulations.question, simulations.profiles, solution)
        if excess > 0 and is_best_left:  # whether it waits is not known yet
            left.append(solution)
            continue
        fitting = solution if excess <= 0 else _fitting(solution, comparison)
        if fitting is None or not comparison.may_gain(fitting):
            continue
        if comparison.add_with_room(fitting) and not is_best_left:
            break
    comparison.add_with_less_room()
    return comparison.fastest, comparison.step_s


def _fitting(solution: Solution, comparison: _Comparison) -> Solution | None:
    """Returns the best plan of the same kind that fits, if it may be faster.

    If the fastest plan hardly waits, little is to be gained by a search for it.
    """
    if not waits(comparison.fastest.step_s, comparison.step_s):
        return None
    question, profiles = comparison.simulations.question, comparison.simulations.profiles
    kind = replace(solution.kind, limits=question.limits)
    return solve_kind_exactly(question, kind, profiles, below_s=comparison.step_s)


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
    for number in NUMBERS_PASSING:
        if not waits(busy.step_s, step_s):
            break
        more = with_more_passing(question, profiles, busy, step_s, number)
        if more is None:
            continue
        more_s = simulations.step_of(more, step_s)
        if more_s >= step_s:
            break
        busy, step_s = more, more_s
    for with_idle in (with_idle_ssds, with_idle_links):
        busy = _with_idle(busy, simulations, with_idle)
    return busy, simulations.step_of(busy)


def _with_idle(
    busy: Solution,
    simulations: _Simulations,
    with_idle: Callable[[PlanQuestion, Profiles, Solution, float], Solution | None],
) -> Solution:
    """Returns the fastest of a plan and those that use something for ever smaller shares of the time that it does."""
    fastest, step_s = busy, simulations.step_of(busy)
    for share in BUSY_SHARES:
        if not waits(fastest.step_s, step_s):
            break
        solution = with_idle(simulations.question, simulations.profiles, busy, share)
        if solution is None or solution.step_s >= (1 - _WORTH) * step_s or simulations.has_similar(solution):
            break
        solution_s = simulations.step_of(solution, step_s)
        if solution_s >= step_s:
            break
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
        return Found(best=need.solution(question.limits))
