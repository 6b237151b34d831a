"""Searches the plan of a job on a machine.

A plan says where states are resident, what is recomputed, and how micro-batches are grouped. An integer program decides
most of it (see `step_cost`). The rest are few choices (see `family`), whose combinations are searched completely: the
one with the smallest lower bound comes next, until no bound is smaller than the best plan's cost. Before that, one of
each way to save device memory is solved for.
"""

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace

from windlass.engine.memory_plan import MemoryTier
from windlass.planner.cost import Speeds
from windlass.planner.solver.family import bases_at_the_border, bases_of, cut_bases_of, kinds_of, smallest_of
from windlass.planner.solver.planned_job import Limits, PlannedJob
from windlass.planner.solver.program import Bound, Prices, Program, least_cost, priced_cost, relaxed
from windlass.planner.solver.solution import (
    DoesNotFitError,
    Solution,
    most_cost_of_any,
    penalty,
    penalty_of_cut,
    shortfall_by_tier,
    solved,
)
from windlass.planner.solver.step_bounds import Part
from windlass.planner.solver.step_cost import StateTier, StepCosts

# Bounds that differ by a smaller share count as equal. Of equal ones, the plan with the larger buffers is tried first.
_EQUAL = 1e-4
# A plan is solved for only if its bound is smaller than the best cost by a larger share.
_WORTH = 3e-4
# Distance to the optimum that is near enough for a kind of plan, as a share of this.
_GAP_OF_WORTH = 0.5
# A base that needs so many times the limit of device memory by formula is not looked at further. The exact count may
# differ a little from it.
_SURELY_TOO_LARGE = 1.02
# Number of prices of other bases by which a base may be excluded.
_MOST_PRICES = 4

# Solves for a kind of plan. Returns None if its cost is not below the given one. Raises DoesNotFitError if none fits.
Solve = Callable[[StepCosts, float], Solution | None]


def solve_job(job: PlannedJob, speeds: Speeds, limits: Limits) -> Solution:
    """Returns the plan with the shortest step.

    Raises:
        DoesNotFitError: no plan fits.
    """
    return search((job,), speeds, limits).best


def least_cost_of(job: PlannedJob, speeds: Speeds, limits: Limits, *, without: Collection[Part] = ()) -> float:
    """Returns a lower bound of the seconds of a step for all plans of a job. It ignores the limits of memory.

    `without`: parts of a step that are not counted.
    """
    least = math.inf
    for base in bases_of(job, speeds, limits):
        fastest = next(kinds_of(base))
        program = fastest.program_without_buffers(fastest.kinds())
        if without:
            program = replace(program, bounds=tuple(_without(bound, without) for bound in program.bounds))
        least = min(least, least_cost(program))
    return least


def least_copied_s(job: PlannedJob, speeds: Speeds, limits: Limits) -> tuple[float, float]:
    """Returns the least seconds in which a step's params and sums are copied to the device, if no states rest there.

    The second number is the share of these that states on the device save at most.
    """
    costs = next(kinds_of(next(bases_of(job, speeds, limits))))
    kinds = costs.kinds()
    total_s, most_s_per_param = 0.0, 0.0
    for kind, group in zip(kinds, costs.program_without_buffers(kinds).blocks, strict=True):
        options = zip(kind.tiers, group.options, strict=False)  # of activations: none
        seconds = [
            option.seconds[Part.H2D_FORWARD] + option.seconds[Part.H2D_BACKWARD]
            for tier, option in options
            if tier is not StateTier.DEVICE
        ]
        if seconds:
            total_s += group.count * min(seconds)
            numel = job.model.blocks[kind.blocks[0]].numel
            most_s_per_param = max(most_s_per_param, min(seconds) / max(1, numel))
    num_resident = 0.0 if job.num_ranks > 1 else limits.device_nbytes / job.read_itemsize
    return total_s, min(1.0, num_resident * most_s_per_param / total_s) if total_s else 1.0


def _without(bound: Bound, parts: Collection[Part]) -> Bound:
    """Returns a bound that counts some parts, and its constant seconds, as nothing."""
    weights = tuple(0.0 if part in parts else weight for part, weight in enumerate(bound.weights))
    return replace(bound, weights=weights, constant_s=0.0)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best plan by the cost model, and others that are nearly as good and differ from it."""

    best: Solution
    find_others: Callable[[], list[Solution]] = list  # takes time, and the best plan is of use before
    # Returns the same for the wanted kinds of plans. It goes on with what is known from this search. None: no such plan
    # fits, or each takes longer than the given seconds.
    of_kind: "Callable[[Callable[[StepCosts], bool], float], Found | None]" = lambda is_wanted, below_s: None

    @functools.cached_property
    def others(self) -> list[Solution]:
        """The others, best first, and then those that differ in the depth of queues. They are not counted exactly."""
        return self.find_others()


def search(
    jobs: Iterable[PlannedJob],
    speeds: Speeds,
    limits: Limits,
    *,
    solve_kind: Solve | None = None,
    num_others: int = 0,
    near: float = 0.0,
    below: float = math.inf,
    worth: float = _WORTH,
) -> Found:
    """Returns the best plan of several variants of a job, such as numbers of micro-batches.

    `solve_kind` solves for one kind of plan; None: without exact counts. `num_others`: also solve for so many plans of
    other kinds. Their bounds are at most a share `near` larger than the best cost. `worth`: the share by which the best
    plan may cost less than the one that is found.

    Raises:
        DoesNotFitError: no plan fits, or none costs less than `below`.
    """
    solve = solve_kind or functools.partial(solved, gap=_GAP_OF_WORTH * worth)
    started = _Search(speeds, limits, solve, below, worth, is_exact=solve_kind is not None)
    started.run(tuple(jobs))
    return started.found(num_others, near)


@dataclass(order=True, slots=True)
class _Entry:
    """A base, all cuts of it, or one of its kinds of plans, with a lower bound of its cost."""

    level: float  # the bound, rounded so that equal ones are equal
    number: int  # the order of arrival
    bound: float = field(compare=False)
    costs: StepCosts = field(compare=False)
    is_kind: bool = field(compare=False)
    prices: Prices | None = field(compare=False, default=None)
    # It stands for the base with each cut that the planner may choose. They are looked at only if the base itself is.
    is_of_cuts: bool = field(compare=False, default=False)
    has_cuts_apart: bool = field(compare=False, default=False)  # of a base: there is such an entry for it


class _Search:
    """The state of a search: what is left to try, and the best plan so far."""

    def __init__(
        self, speeds: Speeds, limits: Limits, solve_kind: Solve, below: float, worth: float, *, is_exact: bool
    ) -> None:
        """`is_exact`: device memory is counted exactly."""
        self._speeds, self._limits, self._solve_kind, self._below = speeds, limits, solve_kind, below
        self._worth, self._is_exact = worth, is_exact
        self._entries: list[_Entry] = []
        self._numbers = itertools.count()
        self._best: Solution | None = None
        self._others: list[Solution] = []
        # Kinds of which no plan cost less than the best one did, and those that were solved without an exact count.
        self._excluded: list[_Entry] = []
        self._errors: list[DoesNotFitError] = []
        self._prices: dict[int, list[Prices]] = {}  # of bases, by their number of bounds; the newest first
        self._later: list[_Entry] | None = None  # entries of cuts that are not to be tried yet

    def run(self, jobs: tuple[PlannedJob, ...]) -> None:
        """Finds the best plan. Raises DoesNotFitError."""
        for job in jobs:
            for base in bases_of(job, self._speeds, self._limits):
                fastest = next(kinds_of(base))
                without_limits = fastest.program_without_buffers(fastest.kinds())
                self._push(base, _least_penalty(base) * least_cost(without_limits), is_kind=False)
        if self._is_exact:
            self._solve_one_of_each_saver()
        self._solve_best()
        if self._best is None:
            raise self._does_not_fit(jobs)

    def found(self, num_others: int, near: float) -> Found:
        """Returns the best plan, and others that are nearly as good; see `search`."""
        best = self._best
        assert best is not None, "a search without a plan raises an error"

        def of_kind(is_wanted: Callable[[StepCosts], bool], below_s: float) -> Found | None:
            narrowed = self._narrowed(is_wanted, most_cost_of_any(best.costs.job.cut, below_s))
            return None if narrowed._best is None else narrowed.found(num_others, near)

        return Found(best=best, find_others=lambda: self._others_near(best, near, num_others), of_kind=of_kind)

    def _narrowed(self, is_wanted: Callable[[StepCosts], bool], below: float) -> "_Search":
        """Returns this search for some kinds of plans only, continued to its end; see `Found.of_kind`."""
        narrowed = _Search(self._speeds, self._limits, self._solve_kind, below, self._worth, is_exact=self._is_exact)
        narrowed._numbers, narrowed._prices = self._numbers, self._prices
        # Copies, because a search notes in them what it has made of them.
        narrowed._entries = [replace(entry) for entry in (*self._entries, *self._excluded) if is_wanted(entry.costs)]
        heapq.heapify(narrowed._entries)
        known = [solution for solution in (self._best, *self._others) if solution is not None]
        for solution in known:
            if is_wanted(solution.costs):
                narrowed._add(solution)
        if self._is_exact and narrowed._best is None:
            narrowed._solve_one_of_each_saver()
        narrowed._solve_best()
        return narrowed

    def _solve_one_of_each_saver(self) -> None:
        """Solves for the kind with the smallest bound of each way to save device memory.

        Where that memory is short and counted exactly, plans that save none of it have small bounds, and need more than
        they are counted with. A good plan of another way excludes most of them before they are solved.
        """
        by_saver: dict[tuple[object, ...], list[_Entry]] = {}
        self._later = []
        for entry in sorted(self._entries):
            if entry.is_of_cuts:
                self._later.append(entry)
            else:
                by_saver.setdefault(entry.costs.saver_of_device_memory, []).append(entry)
        all_entries: list[_Entry] = []
        for entries in by_saver.values():
            self._entries = entries
            self._solve_best(most=1)
            all_entries += self._entries
        all_entries, self._later = all_entries + self._later, None
        heapq.heapify(all_entries)
        self._entries = all_entries

    def _solve_best(self, *, most: int | None = None) -> None:
        """Solves for kinds of plans by their bounds until no bound is worth it, or until `most` kinds were solved."""
        num_solved = 0
        while self._entries and num_solved != most:
            entry = heapq.heappop(self._entries)
            if entry.bound >= self._limit:
                heapq.heappush(self._entries, entry)
                break
            if entry.is_kind:
                self._solve(entry)
                num_solved += 1
            else:
                self._divide(entry)

    def _others_near(self, best: Solution, near: float, most: int) -> list[Solution]:
        """Solves for plans that differ from the best one in more than the sizes of buffers. Returns them, best first.

        If there are fewer than `most`, plans that differ in the depth of the queues for states come after them. Their
        device memory is not counted exactly.
        """
        limit, known = (1 + near) * best.cost, {_traits(best.costs)}
        others, deeper = list[Solution](), list[Solution | _Entry]()
        for solution in sorted(self._others, key=_cost_of):
            if solution.cost > limit:
                break
            if _traits(solution.costs) in known:
                deeper.append(solution)
                continue
            known.add(_traits(solution.costs))
            others.append(solution)
        while self._entries and len(others) < most:
            entry = heapq.heappop(self._entries)
            if entry.bound > limit:
                heapq.heappush(self._entries, entry)
                break
            if not entry.is_kind:
                self._divide(entry)
                continue
            self._excluded.append(entry)
            if _traits(entry.costs) in known:
                deeper.append(entry)
            elif (other := solved(entry.costs, limit)) is not None:
                known.add(_traits(entry.costs))
                others.append(other)
        others.sort(key=_cost_of)
        depths = {_traits_and_depth(each.costs) for each in (best, *others)}
        for each in deeper:
            if len(others) >= most:
                break
            if (traits := _traits_and_depth(each.costs)) not in depths:
                depths.add(traits)
                other = each if isinstance(each, Solution) else solved(each.costs, limit)
                others += [] if other is None else [other]
        return others

    def _push(self, costs: StepCosts, bound: float, *, is_kind: bool, prices: Prices | None = None) -> None:
        heapq.heappush(self._entries, _Entry(_level_of(bound), next(self._numbers), bound, costs, is_kind, prices))

    def _push_again(self, entry: _Entry, bound: float, prices: Prices | None = None) -> None:
        """Puts a base, or all cuts of one, back with a better bound."""
        level, number = _level_of(bound), next(self._numbers)
        heapq.heappush(self._entries, replace(entry, level=level, number=number, bound=bound, prices=prices))

    def _divide(self, entry: _Entry) -> None:
        """Replaces a base by its kinds of plans. Before that, finds its prices, and with them a better bound."""
        if entry.is_of_cuts:
            for cut in cut_bases_of(entry.costs):
                self._push(cut, entry.bound, is_kind=False)
            return
        if entry.prices is None:
            self._price(entry)
            return
        for costs in kinds_of(entry.costs):
            program = costs.program(costs.kinds())
            if not _never_fits(program):
                bound = max(entry.bound, penalty(costs) * priced_cost(program, entry.prices))
                self._push(costs, bound, is_kind=True)

    def _price(self, entry: _Entry) -> None:
        """Puts a base back with a better bound: by another base's prices if that excludes it, else by its own ones."""
        if entry.costs.formula_on_device > _SURELY_TOO_LARGE * self._limits.device_nbytes:
            self._set_cuts_apart(entry, None, None)
            return
        worth, program = _least_penalty(entry.costs), _smallest_program(entry.costs)
        for prices in self._prices.get(len(program.bounds), ()):
            bound = worth * priced_cost(program, prices)
            if bound >= self._limit > entry.bound:
                self._set_cuts_apart(entry, program, prices)
                self._push_again(entry, bound)
                return
        found = relaxed(program)
        self._set_cuts_apart(entry, program, None if found is None else found[1])
        if found is not None:
            known = self._prices.setdefault(len(program.bounds), [])
            known.insert(0, found[1])
            del known[_MOST_PRICES:]
            self._push_again(entry, max(entry.bound, worth * found[0]), found[1])

    def _set_cuts_apart(self, entry: _Entry, program: Program | None, prices: Prices | None) -> None:
        """Adds an entry for all cuts of a base, once. `program`: of the base, `prices`: its own or another base's.

        Without these the bound is looser.

        A cut takes no less time, and saves no more than what pieces and operations take of the device's memory. So its
        bound follows from that of the base.
        """
        if entry.is_of_cuts or entry.has_cuts_apart or not entry.costs.job.cuts or not entry.costs.streamed_layers:
            return
        entry.has_cuts_apart = True
        costs = entry.costs
        whole = _least_penalty(costs)
        worth = whole + penalty_of_cut(costs.job.cuts[0])  # the largest parts cost least
        bound, free = worth / whole * entry.bound, None
        if costs.may_stream_ends:  # whose copies no other block waits for
            ends = replace(costs, streams_ends=True)
            free = ends.program_without_buffers(ends.kinds())
            bound = min(bound, worth * least_cost(free))
        if program is not None and prices is not None:
            least = [_without_operations(costs, program)]
            if free is not None:
                least.append(replace(least[0], blocks=free.blocks, seconds=free.seconds))
            bound = max(bound, worth * min(priced_cost(each, prices) for each in least))
        level, number = _level_of(bound), next(self._numbers)
        apart = _Entry(level, number, bound, costs, is_kind=False, is_of_cuts=True)
        if self._later is None:
            heapq.heappush(self._entries, apart)
        else:
            self._later.append(apart)

    @property
    def _limit(self) -> float:
        """The cost below which a plan is worth more than the best one so far."""
        return self._below if self._best is None else min(self._below, (1 - self._worth) * self._best.cost)

    def _solve(self, entry: _Entry) -> None:
        limit = self._limit
        try:
            solution = self._solve_kind(entry.costs, limit)
        except DoesNotFitError as error:
            self._errors.append(error)
            return
        if solution is not None:
            self._add(solution)
        else:
            self._excluded.append(replace(entry, level=_level_of(limit), bound=max(entry.bound, limit)))

    def _add(self, solution: Solution) -> None:
        if self._best is None:
            self._best = solution
        elif solution.cost < self._best.cost:
            self._others.append(self._best)
            self._best = solution
        else:
            self._others.append(solution)

    def _does_not_fit(self, jobs: tuple[PlannedJob, ...]) -> DoesNotFitError:
        def find_missing() -> dict[MemoryTier, int]:
            programs = (each for job in jobs for each in _programs_at_the_border(job, self._speeds, self._limits))
            all_missing = [error.missing for error in self._errors] or [
                shortfall_by_tier(program, costs) for costs, program in programs
            ]
            return min(all_missing, key=lambda missing: sum(missing.values()))

        return DoesNotFitError(find_missing)


def _level_of(bound: float) -> float:
    """Returns a bound, rounded so that nearly equal ones are equal."""
    return math.floor(math.log(bound) / _EQUAL) if bound > 0 else -math.inf


def _smallest_program(base: StepCosts) -> Program:
    """Returns a program whose value is a lower bound for all kinds of plans of a base."""
    costs, fastest = smallest_of(base), next(kinds_of(base))
    program = costs.program(costs.kinds())
    # The bounds are those of the largest buffers, the memory is that of the smallest ones.
    without = smallest_of(base, overflows=False)
    return replace(
        program,
        bounds=fastest.program_without_buffers(fastest.kinds()).bounds,
        nbytes=tuple(map(min, program.nbytes, without.program(without.kinds()).nbytes)),
    )


def _without_operations(costs: StepCosts, program: Program) -> Program:
    """Returns a base's program without the device memory of pieces and of operations."""
    less = costs.always_on_device - costs.least_on_device_if_cut
    lesser = {MemoryTier.DEVICE: less, MemoryTier.HOST: costs.num_devices_in_host * less}
    nbytes = (each - lesser.get(tier, 0.0) for tier, each in zip(MemoryTier, program.nbytes, strict=True))
    return replace(program, nbytes=tuple(nbytes))


def _least_penalty(base: StepCosts) -> float:
    return penalty(next(kinds_of(base)))  # the largest buffers save least, and have most slots


def _never_fits(program: Program) -> bool:
    """Returns whether the buffers alone are too large."""
    return any(nbytes > limit for nbytes, limit in zip(program.nbytes, program.limits, strict=True))


def _traits(costs: StepCosts) -> tuple[object, ...]:
    """Returns the choices of a kind of plan by which its simulated step may differ much from others'.

    Without the depth of the queues for states: a plan that waits gets deeper ones.
    """
    job = costs.job
    savers = costs.streams, costs.streams_grads, costs.streams_ends, job.cut is None, costs.depths.leaving_nbytes
    return job.num_microbatches, job.update_order, costs.group_size, costs.spills, *savers


def _traits_and_depth(costs: StepCosts) -> tuple[object, ...]:
    return *_traits(costs), costs.depths.states


def _cost_of(solution: Solution) -> float:
    return solution.cost


def _programs_at_the_border(job: PlannedJob, speeds: Speeds, limits: Limits) -> Iterator[tuple[StepCosts, Program]]:
    """Yields the programs that need least memory. If any program has an assignment, one of these has."""
    for base in bases_at_the_border(job, speeds, limits):
        for overflows in (True, False):
            costs = smallest_of(base, overflows=overflows)
            yield costs, costs.program(costs.kinds())
