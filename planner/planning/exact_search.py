"""The best plan for a number of micro-batches whose device memory, counted exactly, fits."""

from dataclasses import replace

from windlass.engine.memory_plan import (
    MemoryTier,
)
from windlass.planner.cost import Speeds
from windlass.planner.planning.profiles import Profiles
from windlass.planner.planning.question import PlanQuestion
from windlass.planner.solver import (
    DoesNotFitError,
    Limits,
    MarginSearch,
    PlannedJob,
    Solution,
    candidates,
)

# Maximum number of times that the program is solved again with a smaller limit, because the exact count was larger.
_MAX_CORRECTIONS = 10
# Share of the device memory: the search for the right limit stops when its interval is smaller.
_NEAR = 0.005


def solve_exactly(question: PlanQuestion, num_microbatches: int, profiles: Profiles) -> Solution:
    """Returns the best solution for a number of micro-batches; see `solutions_exactly`."""
    return solutions_exactly(question, num_microbatches, profiles)[1]


def solutions_exactly(
    question: PlanQuestion, num_microbatches: int, profiles: Profiles
) -> tuple[PlannedJob, Solution, list[Solution]]:
    """Returns the best solution by the cost model, with exact device memory, and further candidates that may not fit.

    The program's estimate is lower than the exact count. The difference is subtracted from the program's memory limit
    until the solution fits.
    """
    job = profiles.job(question, num_microbatches)
    speeds, limits = question.speeds, question.limits
    search = MarginSearch(near=_NEAR * limits.device_nbytes)
    best: tuple[PlannedJob, Solution, list[Solution]] | None = None
    for _ in range(_MAX_CORRECTIONS):
        try:
            solution, *others = candidates(job, speeds, _less(limits, search.margin, speeds))
        except DoesNotFitError:
            if not search.margin:
                raise
            if search.found_none():
                continue
            break
        if question.num_layers is not None:  # hypothetical layers cannot be counted exactly
            return job, solution, others
        exact, excess = counted(question, profiles, job, solution)
        left_out = exact.nbytes[MemoryTier.DEVICE] - solution.nbytes[MemoryTier.DEVICE]
        if best is not None:
            return (job, exact, others) if excess <= 0 and exact.cost < best[1].cost else best
        if excess > 0:
            search.exceeded(excess, left_out)
            continue
        best = job, exact, others
        if not search.fitted(left_out):  # else more was subtracted than it needs, so a better one may exist
            return best
    if best is not None:
        return best
    # On a CPU the device's memory is the host's, unless a budget makes it smaller.
    short = MemoryTier.HOST if speeds.shares_cores and limits.device_nbytes >= limits.host_nbytes else MemoryTier.DEVICE
    raise DoesNotFitError(lambda: dict.fromkeys(MemoryTier, 0) | {short: int(search.least_excess)})


def _less(limits: Limits, margin: float, speeds: Speeds) -> Limits:
    """Returns the limits with less device memory. On a CPU, that is the host's memory."""
    less = replace(limits, device_nbytes=limits.device_nbytes - margin)
    return replace(less, host_nbytes=limits.host_nbytes - margin) if speeds.shares_cores else less


def counted(question: PlanQuestion, profiles: Profiles, job: PlannedJob, solution: Solution) -> tuple[Solution, float]:
    """Returns the solution with exact device memory, and the bytes by which it exceeds the limit."""
    shares_cores, limits = solution.costs.speeds.shares_cores, question.limits
    need = profiles.device_need(question, job, solution)
    # The CPU finishes its copies before it computes the next layer, so no bytes are on their way out then.
    nbytes = need.settled_nbytes if shares_cores else need.nbytes
    together = solution.costs.num_devices_in_host * nbytes + solution.plan.arena_nbytes if shares_cores else 0
    excess = max(nbytes - limits.device_nbytes, together - limits.host_nbytes)
    return replace(solution, nbytes={**solution.nbytes, MemoryTier.DEVICE: nbytes}), excess
