"""The least memory of each kind with which a job has a plan, counted exactly.

The frontiers of the programs name few assignments. The engine's own arithmetic then counts the best ones to the byte.
What the programs leave out is nearly the same for all assignments of a frontier, so few are counted.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from windlass.engine.memory_plan import ACTIVATION_SLOT_NBYTES, DeviceNeed, MemoryTier, Placement
from windlass.planner.question import PlanQuestion, Profiles
from windlass.planner.solver import (
    Assignment,
    Bytes,
    Limits,
    MemoryFrontier,
    PlannedJob,
    Solution,
    frontiers_of,
    placement_of,
    plan_of,
    solution_of,
)

# Share of a need: the search ends when no other assignment can need less by more than this.
_NEAR = 0.003
# Number of assignments that a search counts exactly, at most. Mostly three to six are enough.
_MOST_COUNTED = 48
# Number of frontiers of which one assignment is counted exactly, at most, before all frontiers are compared.
_MOST_TRIED = 3
# Share of a limit by which exact counts may be smaller than expected, and the number of such assignments to count.
_DOUBT, _MOST_DOUBTED = 0.02, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A plan that needs little memory, with its exact bytes on each tier."""

    job: PlannedJob
    frontier: MemoryFrontier
    placement: Placement
    arena_nbytes: int
    nbytes: Bytes
    on_device: DeviceNeed | None  # None: the model's layers are hypothetical

    def solution(self, limits: Limits) -> Solution:
        """Returns the plan as a solution of the cost model."""
        costs = replace(self.frontier.costs, limits=limits)
        solution = solution_of(costs, self.placement, self.arena_nbytes)
        return replace(solution, nbytes={**solution.nbytes, MemoryTier.DEVICE: int(self.nbytes.device)})


@dataclass(slots=True)
class _Counting:
    """The bytes that the exact counts of a frontier's assignments add to those of its program."""

    frontier: MemoryFrontier
    device: float = 0.0
    host: float = 0.0
    is_known: bool = False

    @property
    def job(self) -> PlannedJob:
        """The job, with its order of updates."""
        return self.frontier.costs.job

    @property
    def is_like(self) -> tuple[object, ...]:
        """Frontiers with the same value leave out nearly the same bytes."""
        costs = self.frontier.costs
        pieces = costs.streams, costs.streams_grads, costs.streams_ends, self.job.cut
        return self.job.num_microbatches, costs.group_size, *pieces, self.job.update_order

    def left(self, limits: Bytes) -> Bytes:
        """Returns the limits without what the program leaves out."""
        return Bytes(device=limits.device - self.device, host=limits.host - self.host, ssd=limits.ssd)

    def more(self, tier: MemoryTier) -> float:
        """Returns the bytes that the program leaves out of a tier."""
        return {MemoryTier.DEVICE: self.device, MemoryTier.HOST: self.host, MemoryTier.SSD: 0.0}[tier]


class LeastMemory:
    """The least memory of a job, for any limits of the other kinds of memory.

    Limits are those of `PlanQuestion.limits`. On a CPU the device's bytes are also bytes of the host.
    """

    def __init__(self, question: PlanQuestion, profiles: Profiles, jobs: Iterable[PlannedJob]) -> None:
        """`jobs`: the job with each number of micro-batches to try, those that save most first."""
        self._question, self._profiles = question, profiles
        # Built as they are needed: the first few often answer the question.
        self._known: list[_Counting] = []
        self._unknown = self._built(jobs)
        self._counted: dict[tuple[int, int, float], Need] = {}
        self._needs: list[Need] = []  # all that were counted, also of assignments that are on no path

    def _built(self, jobs: Iterable[PlannedJob]) -> Iterator[_Counting]:
        question = self._question
        for job in jobs:
            for frontier in frontiers_of(job, question.speeds, question.limits):
                counting = _Counting(frontier)
                like = [each for each in self._known if each.is_like == counting.is_like]
                if like:
                    counting.device, counting.host = like[-1].device, like[-1].host
                self._known.append(counting)
                yield counting

    @property
    def _all(self) -> list[_Counting]:
        """The frontiers of all numbers of micro-batches and of all ways to save memory."""
        for _ in self._unknown:
            pass
        return self._known

    def _each(self) -> Iterator[_Counting]:
        """Yields all frontiers, and builds those that were not needed before."""
        yield from list(self._known)
        # `yield from` would close the generator with this one.
        while (counting := next(self._unknown, None)) is not None:
            yield counting

    def fitting(self, limits: Bytes) -> Need | None:
        """Returns a plan within the limits, or None if there is none."""
        if not self.may_fit(limits):
            return None
        need = self._first_fitting(limits)
        if need is not None:
            return need
        # Each search counts other assignments: those that need least of its own tier. At the border that matters.
        for tier in MemoryTier:
            if not math.isinf(limits.of(tier)):
                need = self.least(tier, limits, enough=limits.of(tier))
                if need is not None and need.nbytes.fits(limits):
                    return need
        return None

    def _first_fitting(self, limits: Bytes) -> Need | None:
        """Returns a plan within the limits if one of the first frontiers that may have one has one."""
        tier, num_tried = MemoryTier.HOST if math.isinf(limits.device) else MemoryTier.DEVICE, 0
        for number, counting in enumerate(self._each()):
            needs = counting.frontier.needs(tier, counting.left(limits)) + counting.more(tier)
            index = int(needs.argmin())
            if needs[index] <= limits.of(tier):
                moved = counting.frontier.moved(index, tier, counting.left(limits))
                need = self._count(number, index, moved)
                num_tried += 1
                if need.nbytes.fits(limits):
                    return need
                if num_tried == _MOST_TRIED:
                    break
        return None

    def may_fit(self, limits: Bytes) -> bool:
        """Returns whether a program has an assignment within the limits. Exact counts may need more."""
        bounds = (each.frontier.bound(MemoryTier.DEVICE, limits) for each in self._each())
        return any(bound <= limits.device and not math.isinf(bound) for bound in bounds)

    def least(self, tier: MemoryTier, limits: Bytes, *, enough: float = 0.0) -> Need | None:
        """Returns the plan that needs least of a tier within the limits of the others.

        None: the others are too small for any plan. A need of `enough` bytes ends the search.
        """
        best = self._search(tier, limits, enough)
        if not enough:
            self._search(tier, limits, enough)  # once more, with what the first search has learned of all frontiers
        for need in self._needs:
            best = _better(best, need, tier, limits)
        return best

    def _search(self, tier: MemoryTier, limits: Bytes, enough: float) -> Need | None:
        skipped = set[tuple[int, int]]()
        best = self._best_of(tier, limits, None, skipped, enough=enough, most=_MOST_COUNTED)
        if best is not None and best.nbytes.of(tier) <= enough:
            return best
        # What the counts add differs a little from assignment to assignment, so some beyond a limit may be within it.
        loose = Bytes(device=limits.device * (1 + _DOUBT), host=limits.host * (1 + _DOUBT), ssd=limits.ssd)
        best = self._best_of(tier, limits, best, skipped, enough=enough, most=_MOST_DOUBTED, promising=loose)
        return self._between_steps(tier, limits, best, enough)

    def _best_of(
        self,
        tier: MemoryTier,
        limits: Bytes,
        best: Need | None,
        skipped: set[tuple[int, int]],
        *,
        enough: float,
        most: int,
        promising: Bytes | None = None,
    ) -> Need | None:
        """Counts at most `most` assignments, and returns the one that needs least of the tier, or else `best`.

        `promising`: limits by which assignments are chosen to be counted; None: those of the plan.
        """
        chosen = promising or limits
        for _ in range(most):
            number, index, nbytes = self._most_promising(
                lambda each: each.frontier.needs(tier, each.left(chosen)) + each.more(tier), skipped
            )
            if math.isinf(nbytes) or (best is not None and nbytes >= best.nbytes.of(tier) * (1 - _NEAR)):
                break
            if enough and nbytes > enough * (1 + _NEAR) and self._known[number].is_known:
                break
            skipped.add((number, index))
            counting = self._known[number]
            moved = counting.frontier.moved(index, tier, counting.left(chosen))
            need = self._count(number, index, moved)
            best = _better(best, need, tier, limits)
            if best is not None and best.nbytes.of(tier) <= enough:
                break
        return best

    def cheapest(self, limits: Bytes, prices: Bytes) -> Need:
        """Returns the plan for which memory above the limits costs least. `prices`: of a byte of each tier."""
        best: tuple[float, Need] | None = None
        skipped = set[tuple[int, int]]()
        for _ in range(_MOST_COUNTED):
            number, index, price = self._most_promising(
                lambda each: each.frontier.prices(each.left(limits), prices), skipped
            )
            if best is not None and price >= best[0] * (1 - _NEAR):
                break
            skipped.add((number, index))
            counting = self._known[number]
            without_room = replace(counting.left(limits), ssd=math.inf)
            need = self._count(number, index, counting.frontier.moved(index, MemoryTier.DEVICE, without_room))
            over = need.nbytes.above(limits)
            price = over.device * prices.device + over.host * prices.host + over.ssd * prices.ssd
            best = (price, need) if best is None or price < best[0] else best
        assert best is not None, "with enough memory of every kind each job has a plan"
        return best[1]

    def _between_steps(self, tier: MemoryTier, limits: Bytes, best: Need | None, enough: float) -> Need | None:
        """Returns the better of `best` and of assignments that are on no path.

        With few layers, an assignment between two steps of a path may need clearly less.
        """
        for counting in self._all:
            left = counting.left(limits)
            bound = counting.frontier.bound(tier, left) + counting.more(tier)
            if math.isinf(bound) or (best is not None and bound >= best.nbytes.of(tier) * (1 - _NEAR)):
                continue
            if enough and bound > enough:
                continue
            assignment = counting.frontier.best_assignment(tier, left)
            if assignment is not None:
                best = _better(best, self._exact(counting, assignment), tier, limits)
        return best

    def _most_promising(
        self, value: Callable[[_Counting], npt.NDArray[np.float64]], skipped: set[tuple[int, int]]
    ) -> tuple[int, int, float]:
        """Returns a frontier and the assignment of it with the smallest value, and that value."""
        result = 0, 0, math.inf
        for number, counting in enumerate(self._all):
            needs = value(counting)
            for other, index in skipped:
                if other == number:
                    needs[index] = np.inf
            index = int(needs.argmin())
            if needs[index] < result[2]:
                result = number, index, float(needs[index])
        return result

    def _count(self, number: int, index: int, moved: float) -> Need:
        """Counts an assignment exactly, and notes what its program left out."""
        key = number, index, moved
        if key not in self._counted:
            counting = self._known[number]
            assignment = counting.frontier.assignment(index, moved)
            self._counted[key] = need = self._exact(counting, assignment)
            nbytes = counting.frontier.nbytes(assignment)
            device, host = need.nbytes.device - nbytes.device, need.nbytes.host - nbytes.host
            counting.is_known = False
            for each in self._known:
                if each.is_like == counting.is_like and not each.is_known:
                    each.device, each.host = device, host
            counting.is_known = True
        return self._counted[key]

    def _exact(self, counting: _Counting, assignment: Assignment) -> Need:
        frontier, job = counting.frontier, counting.job
        costs, question = frontier.costs, self._question
        placement = placement_of(costs, frontier.kinds, assignment)
        placement = replace(
            placement,
            num_cached_params=placement.num_cached_params or 0,
            num_host_grad_blocks=0 if costs.spills else None,
        )
        plan = plan_of(costs, placement, None)
        on_device = None
        if question.num_layers is None:
            on_device = self._profiles.device_need_of_plan(question, job, plan)
            device = on_device.nbytes if question.has_gpu else on_device.settled_nbytes
        else:  # hypothetical layers cannot be counted exactly
            device = math.ceil(frontier.nbytes(assignment).device)
        nbytes = Bytes(
            device=device,
            host=plan.arena_nbytes + costs.num_devices_in_host * device,
            ssd=plan.ssd_nbytes + plan.num_ranks * plan.num_ssd_activations * ACTIVATION_SLOT_NBYTES,
        )
        need = Need(
            job=job,
            frontier=frontier,
            placement=placement,
            arena_nbytes=plan.arena_nbytes,
            nbytes=nbytes,
            on_device=on_device,
        )
        self._needs.append(need)
        return need


def _better(best: Need | None, need: Need, tier: MemoryTier, limits: Bytes) -> Need | None:
    """Returns the plan that needs less of the tier, if the other is within the limits of the others."""
    others = replace(limits, **{_FIELDS[tier]: math.inf})
    if not need.nbytes.fits(others) or (best is not None and best.nbytes.of(tier) <= need.nbytes.of(tier)):
        return best
    return need


_FIELDS = {MemoryTier.DEVICE: "device", MemoryTier.HOST: "host", MemoryTier.SSD: "ssd"}
