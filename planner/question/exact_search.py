"""The best plan whose device memory, counted exactly, fits."""

import contextlib
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from windlass.engine.memory_plan import (
    RECOMPUTE_ALL,
    BlockActivations,
    MemoryTier,
    UnitNeed,
    leaving_limit,
)
from windlass.planner.cost import Speeds
from windlass.planner.question.profiles import Profiles
from windlass.planner.question.question import PlanQuestion
from windlass.planner.solver import (
    DoesNotFitError,
    Found,
    Limits,
    PlannedJob,
    Solution,
    StepCosts,
    has_least_buffers,
    most_cost_of,
    search,
    solved,
)

# Limits of device memory that a program is solved with are powers of this number, whatever the machine has. So a
# machine with more memory has the plans of one with less.
_LIMIT_STEP = 1.002
# Share of the step by which a plan of `solve_counted` may be worse than the best one by its program.
_WORTH_OF_COUNTED = 1e-2
# Share of device memory by which corrections of `solve_counted` differ, at least, and the number of plans to count.
_LEAST_STEP, _MOST_COUNTED = 0.02, 10
# Share of its cost by which a plan may be worse than one with a larger limit, which is too large, or than one of
# another kind.
_NEAR = 1e-4
# In models with so many layers, a choice of activations that fits for one of them only is left out of the programs.
_MANY_LAYERS = 24
# Number of choices of activations that are left out of a program, at most.
_MOST_LEFT_OUT = 8
# Maximum number of times that a program is solved with another limit, because the exact count was larger.
_MAX_CORRECTIONS = 10


def search_exactly(
    question: PlanQuestion,
    numbers: Iterable[int],
    profiles: Profiles,
    *,
    num_others: int = 0,
    near: float = 0.0,
) -> Found:
    """Returns the best solution for any of these numbers of micro-batches, with exact device memory; see `search`.

    Raises:
        DoesNotFitError: no plan fits.
    """
    counter = _Counter(question, profiles)
    jobs = [counter.with_constants(profiles.job(question, number)) for number in numbers]
    return search(
        jobs,
        question.speeds,
        question.limits,
        solve_kind=counter.solved,
        num_others=num_others,
        near=near,
    )


def solve_kind_exactly(
    question: PlanQuestion, costs: StepCosts, profiles: Profiles, *, below_s: float = math.inf
) -> Solution | None:
    """Returns the best solution for one kind of plan, with exact device memory. `costs`: of a solution of a search.

    None: no plan fits, or each takes at least `below_s`.
    """
    below = most_cost_of(costs, below_s)
    with contextlib.suppress(DoesNotFitError):
        solution = _Counter(question, profiles).solved(costs, below)
        return None if solution is None or solution.step_s >= below_s else solution
    return None


def solve_counted(question: PlanQuestion, job: PlannedJob, profiles: Profiles, *, below: float = math.inf) -> Solution:
    """Returns a good solution with exact device memory, in a fraction of the time of `search_exactly`.

    The program alone says what is best. If that is too large by the exact count, all plans with the same buffers count
    as larger, and the search begins anew. So it may miss a better plan, or the only one: see decision 53.

    Raises:
        DoesNotFitError: no plan fits, or none costs less than `below`.
    """
    constant = _Counter(question, profiles).with_constants(job)
    step_nbytes = _LEAST_STEP * question.limits.device_nbytes
    corrections: dict[tuple[object, ...], _Correction] = defaultdict(_Correction)
    job = replace(
        constant,
        left_out_nbytes=lambda costs: constant.left_out_nbytes(costs) + corrections[_buffers(costs)].nbytes,
    )
    best: Solution | None = None
    for _ in range(_MOST_COUNTED):
        limit = below if best is None else (1 - _WORTH_OF_COUNTED) * best.cost
        try:
            found = search((job,), question.speeds, question.limits, below=limit, worth=_WORTH_OF_COUNTED).best
        except DoesNotFitError as error:
            are_reduced = [each.reduce(step_nbytes) for each in corrections.values()]
            if not any(are_reduced):
                if best is None:
                    raise error from None
                break
            continue
        solution, excess = counted(question, profiles, found)
        correction = corrections[_buffers(solution.costs)]
        if excess > 0:
            correction.increase(max(excess, step_nbytes))
        else:
            best = solution
            correction.reduce(step_nbytes)
            if not any(each.short is not None for each in corrections.values()):
                break  # no plan counts as larger than it is
    if best is None:
        raise DoesNotFitError(lambda: dict.fromkeys(MemoryTier, 0))
    return best


@dataclass(slots=True)
class _Correction:
    """The bytes that plans with some buffers count as larger than by their program.

    With `short` bytes, the best plan was too large. With `enough`, it fitted, or none was left.
    """

    nbytes: float = 0.0
    short: float | None = None
    enough: float = math.inf

    def increase(self, excess: float) -> None:
        """Counts more bytes, because the best plan was too large by `excess`."""
        self.short = self.nbytes
        self.nbytes = min(self.nbytes + excess, (self.nbytes + self.enough) / 2)

    def reduce(self, step: float) -> bool:
        """Counts fewer bytes. Returns False if they would be less than `step` fewer, or too few."""
        self.enough = min(self.enough, self.nbytes)
        if self.short is None or self.enough - self.short <= step:
            self.nbytes = self.enough
            return False
        self.nbytes = (self.short + self.enough) / 2
        return True


class _Counter:
    """Solves programs so that the exact device memory fits."""

    def __init__(self, question: PlanQuestion, profiles: Profiles) -> None:
        self.question, self.profiles = question, profiles
        # By buffers and group size: the index of a limit with which a plan fitted. The next one needs about as much.
        self._fitted: dict[tuple[object, ...], int] = {}
        # By the same, and buffers for activations: see `_unfit`.
        self._unfit_by_buffers: dict[tuple[object, ...], frozenset[BlockActivations]] = {}
        self._lasting: dict[tuple[object, ...], int] = {}  # by buffers and group size: see `Profiles.lasting_nbytes`
        # By micro-batches and cut: see `Profiles.needs_of_ways`.
        self._needs: dict[tuple[object, ...], list[dict[BlockActivations, UnitNeed]]] = {}
        # By the same: choices of activations with which the worst moment of a plan needed too much.
        self._heavy: dict[tuple[object, ...], frozenset[BlockActivations]] = {}
        # By all that decides the device's memory, for kinds whose best plan was too large: its cost, and that of the
        # best plan that fits, or a lower bound of it, or the error if none does.
        self._too_large: dict[tuple[object, ...], list[tuple[float, float, DoesNotFitError | None]]] = defaultdict(list)
        # By the id of a job and choices: that job, so that its id stays its own, and the job without the choices.
        self._without_choices: dict[tuple[int, frozenset[BlockActivations]], tuple[PlannedJob, PlannedJob]] = {}

    def with_constants(self, job: PlannedJob) -> PlannedJob:
        """Returns the job with the exact device memory of what its plans have in common.

        Hypothetical layers cannot be counted.
        """
        if self.question.num_layers is not None:
            return job
        known: dict[tuple[object, ...], float] = {}

        def left_out_nbytes(costs: StepCosts) -> float:
            key = _buffers(costs)
            if key not in known:
                plain = replace(costs, job=costs.job.leaving_out(job.left_out_nbytes))
                known[key] = self.profiles.left_out_nbytes(self.question, plain)
            return known[key]

        return job.leaving_out(left_out_nbytes)

    def solved(self, costs: StepCosts, below: float) -> Solution | None:
        """Returns the best solution with these costs, with exact device memory. None: it costs no less than `below`.

        The program's estimate may be lower than the exact count. Then the program is solved with smaller limits.

        Raises:
            DoesNotFitError: no plan fits.
        """
        if self.question.num_layers is not None:
            return solved(costs, below)
        unfit = self._unfit(costs)
        if not unfit:
            return self._solved(costs, below)
        solution = self._solved(replace(costs, job=self._without(costs.job, unfit)), below)
        return None if solution is None else _of_job(solution, costs.job)

    def _unfit(self, costs: StepCosts) -> frozenset[BlockActivations]:
        """Returns the activations that no layer of such a plan can have, whatever the others have.

        With many layers also those that no two neighbors can have: few layers would gain little by them.

        The program does not know: of a layer's passes it counts only the peak of the largest operation. A plan that
        moves no activations to the SSDs is one without buffers for that, too.
        """
        job = costs.job
        buffers, shape = (job.num_microbatches, *_buffers(costs)), (job.num_microbatches, job.cut)
        key = (*buffers, costs.overflows, costs.depths.leaving_nbytes)
        if key in self._unfit_by_buffers:
            return self._unfit_by_buffers[key]
        if buffers not in self._lasting:
            self._lasting[buffers] = self.profiles.lasting_nbytes(self.question, costs)
        if shape not in self._needs:
            self._needs[shape] = self.profiles.needs_of_ways(job)
        needs, limit = self._needs[shape], self.question.limits.device_nbytes - self._lasting[buffers]
        size, num_layers = costs.group_size, job.model.num_own_layers
        all_blocks = job.model.blocks_of_layers.values()
        has_neighbors = all(any(b - a == 1 for a, b in itertools.pairwise(blocks)) for blocks in all_blocks)
        num_alike = 2 if num_layers >= _MANY_LAYERS and has_neighbors else 1
        # Swapped activations of other layers may still be on the device, except those of layers that keep theirs there.
        least_nbytes = min(unit.held_nbytes + sum(unit.swapped) for of_layer in needs for unit in of_layer.values())
        others_nbytes = max(0.0, (num_layers - num_alike) * size * least_nbytes - limit)

        def nbytes_of(unit: UnitNeed) -> float:
            """Returns the least memory in the backward pass of such a layer; see `step_moments`."""
            swapped = sum(unit.swapped)
            returning = swapped * (1 if num_alike == size == 1 else 2)
            held = size * (num_alike * unit.held_nbytes + unit.output_nbytes)
            settled = held + returning + unit.backward_peak_nbytes
            if costs.speeds.shares_cores:  # see `counted`
                return settled
            leaving_nbytes = max(costs.depths.leaving_nbytes, costs.num_leaving * max(unit.swapped, default=0))
            most = leaving_limit([[unit]], leaving_nbytes, has_ssd_store=costs.overflows)
            return settled + min(most, num_alike * size * swapped + others_nbytes)

        all_nbytes = [{choice: nbytes_of(unit) for choice, unit in of_layer.items()} for of_layer in needs]
        # So that each layer has some left.
        limit = max(limit, *(min(of_layer.values()) for of_layer in all_nbytes))
        fitting = {choice for of_layer in all_nbytes for choice, nbytes in of_layer.items() if nbytes <= limit}
        self._unfit_by_buffers[key] = frozenset(choice for of_layer in needs for choice in of_layer) - fitting
        return self._unfit_by_buffers[key]

    def _solved(self, costs: StepCosts, below: float) -> Solution | None:
        """Returns the same as `solved`, where some layers can have all of the activations."""
        solution = solved(costs, below)
        if solution is None:
            return None
        solution, excess = counted(self.question, self.profiles, solution)
        if excess <= 0:
            return solution
        # Plans that differ in host memory alone are as much too large. So one that costs no less before it is made to
        # fit will hardly cost less then. But fitting takes host memory, so those that leave most of it are tried.
        alike = self._too_large[_on_device(costs)]
        is_least = has_least_buffers(costs)
        for cost, fitting_cost, none_fits in () if is_least else alike:
            if none_fits is None and solution.cost >= cost and fitting_cost >= below:
                return None
            if none_fits is not None and (1 + _NEAR) * solution.cost >= cost:
                raise none_fits
        try:
            fitting = self._smaller(costs, below, solution, excess)
        except DoesNotFitError as error:
            # Below a limit, a search does not tell whether none fits at all.
            alike.append((solution.cost, below, error if below == math.inf else None))
            raise
        if fitting is not None and is_least and all(fitting.cost < other for _, other, _ in alike):
            alike.clear()  # host memory is what they lack
        alike.append((solution.cost, below if fitting is None else fitting.cost, None))
        return fitting

    def _smaller(self, costs: StepCosts, below: float, too_large: Solution, excess: float) -> Solution | None:
        """Returns the same as `solved`, where the best plan by its program is too large by `excess`."""
        key = (costs.job.num_microbatches, *_buffers(costs))
        limit_nbytes = costs.limits.device_nbytes
        # Indices of limits: with `short` there is no plan of use, or one that fits; with `excessive`, the plan is too
        # large.
        short, excessive = 0, math.floor(math.log(limit_nbytes, _LIMIT_STEP)) + 1
        is_cut, least_excess, least_cost = False, excess, too_large.cost
        best: Solution | None = None
        tried = self._fitted.get(key, _index_below(limit_nbytes - excess))
        for _ in range(_MAX_CORRECTIONS):
            # In the middle where the last plan says nothing of a limit that was not tried.
            tried = tried if short < tried < excessive else (short + excessive) // 2
            try:
                solution = solved(_less(costs, limit_nbytes - _LIMIT_STEP**tried), below)
            except DoesNotFitError:
                short = tried
            else:
                if solution is None:
                    is_cut, short = True, tried
                else:
                    solution, excess = counted(self.question, self.profiles, solution)
                    if excess > 0:
                        excessive, least_excess = tried, min(least_excess, excess)
                        least_cost = max(least_cost, solution.cost)
                    else:
                        best, short = solution, tried
                        self._fitted[key] = tried
                    # What a plan leaves free may be enough for a better one.
                    tried = _index_below(_LIMIT_STEP**tried - excess)
                    if best is not None and (tried <= short or best.cost <= (1 + _NEAR) * least_cost):
                        break
            if excessive - short <= 1:
                break
        most = min(below, math.inf if best is None else best.cost)
        lighter = self._lighter(costs, most) or self._with_lightest(costs, most)
        if lighter is not None or best is not None or is_cut:
            return lighter or best
        short_tier, missing = _short_tier(costs.speeds, costs.limits), int(least_excess)
        raise DoesNotFitError(lambda: dict.fromkeys(MemoryTier, 0) | {short_tier: missing})

    def _lighter(self, costs: StepCosts, below: float) -> Solution | None:
        """Returns a plan that fits without the activations that need most at the worst moment of plans that do not.

        A single layer with such activations may need far more than the program counts, whatever its limit is.
        """
        key = (costs.job.num_microbatches, *_buffers(costs))
        best: Solution | None = None
        for _ in range(_MOST_LEFT_OUT):
            left_out = self._heavy.get(key, frozenset())
            lighter, excess = replace(costs, job=self._without(costs.job, left_out)), 0.0
            if not all(map(lighter.job.ways, costs.job.model.blocks_of_layers)):
                break  # a layer has none left
            for _ in range(2):  # the second time with as much less memory as the first plan needs more
                try:
                    solution = solved(_less(lighter, excess), below)
                except DoesNotFitError:
                    break
                if solution is None:
                    break
                solution, more = counted(self.question, self.profiles, solution)
                if more <= 0:
                    best = _of_job(solution, costs.job)
                    below = best.cost
                    break
                if not excess:
                    choice = self._heaviest(solution)
                excess += more
            if not excess or choice is None or choice in left_out:
                break
            self._heavy[key] = left_out | {choice}
        return best

    def _with_lightest(self, costs: StepCosts, below: float) -> Solution | None:
        """Returns a plan that fits with as many of the lightest activations to choose from as possible.

        The worst moment may be in a block that keeps nothing, because the others keep or swap more than is counted. So
        it does not say which activations to leave out.
        """
        nbytes: dict[BlockActivations, float] = {}
        for layer in set(costs.job.model.layers):
            for way in costs.job.ways(layer):
                nbytes[way.choice] = max(nbytes.get(way.choice, 0.0), way.held_nbytes + way.swapped_nbytes)
        choices = sorted(nbytes, key=lambda choice: (choice != RECOMPUTE_ALL, nbytes[choice]))
        best: Solution | None = None
        enough, excessive = 0, len(choices)
        while excessive - enough > 1:
            number = (enough + excessive) // 2
            lighter = replace(costs, job=self._without(costs.job, frozenset(choices[number:])))
            try:
                solution = solved(lighter, below)
            except DoesNotFitError:
                solution = None
            if solution is not None:
                solution, excess = counted(self.question, self.profiles, solution)
                if excess > 0:
                    excessive = number
                    continue
                best = _of_job(solution, costs.job)
                below = best.cost
            enough = number
        return best

    def _heaviest(self, solution: Solution) -> BlockActivations | None:
        """Returns the activations of the layer at the worst moment; None: it recomputes all, or it is no layer."""
        block = self.profiles.device_need(self.question, solution.costs.job, solution).moment.block
        if not 1 <= block <= len(solution.placement.activations):
            return None
        choice = solution.placement.activations[block - 1]
        return None if choice == RECOMPUTE_ALL else choice

    def _without(self, job: PlannedJob, left_out: frozenset[BlockActivations]) -> PlannedJob:
        """Returns the job without some choices of activations. It is made once, because programs are made for it."""
        if not left_out:
            return job
        key = (id(job), left_out)
        if key not in self._without_choices:
            ways = job.ways
            without = replace(job, ways=lambda layer: tuple(way for way in ways(layer) if way.choice not in left_out))
            self._without_choices[key] = job, without
        return self._without_choices[key][1]


def _of_job(solution: Solution, job: PlannedJob) -> Solution:
    """Returns a solution for a job with fewer choices of activations as one for the whole job."""
    return replace(solution, costs=replace(solution.costs, job=job), kind=replace(solution.kind, job=job))


def _buffers(costs: StepCosts) -> tuple[object, ...]:
    """Returns the choices by which the buffers on the device, and what they hold, differ."""
    return costs.group_size, *costs.saver_of_device_memory


def _on_device(costs: StepCosts) -> tuple[object, ...]:
    """Returns the choices by which the device's memory, and what plans keep there, differ."""
    job = costs.job
    swaps = costs.spills, costs.overflows, costs.depths.leaving_nbytes
    return job.num_microbatches, job.update_order, *_buffers(costs), *swaps


def _index_below(nbytes: float) -> int:
    return math.floor(math.log(max(1.0, nbytes), _LIMIT_STEP))


def _less(costs: StepCosts, nbytes: float) -> StepCosts:
    """Returns costs with a smaller limit of device memory. On a CPU, that is the host's memory."""
    limits = costs.limits
    less = replace(limits, device_nbytes=limits.device_nbytes - nbytes)
    if costs.speeds.shares_cores:
        less = replace(less, host_nbytes=limits.host_nbytes - nbytes)
    return replace(costs, limits=less)


def _short_tier(speeds: Speeds, limits: Limits) -> MemoryTier:
    """Returns the memory that is short. On a CPU it is the host's, unless a budget makes the device's smaller."""
    return MemoryTier.HOST if speeds.shares_cores and limits.device_nbytes >= limits.host_nbytes else MemoryTier.DEVICE


def counted(question: PlanQuestion, profiles: Profiles, solution: Solution) -> tuple[Solution, float]:
    """Returns the solution with exact device memory, and the bytes by which it exceeds the limit."""
    shares_cores, limits = solution.costs.speeds.shares_cores, question.limits
    need = profiles.device_need(question, solution.costs.job, solution)
    # The CPU finishes its copies before it computes the next layer, so no bytes are on their way out then.
    nbytes = need.settled_nbytes if shares_cores else need.nbytes
    together = solution.costs.num_devices_in_host * nbytes + solution.plan.arena_nbytes if shares_cores else 0
    excess = max(nbytes - limits.device_nbytes, together - limits.host_nbytes)
    return replace(solution, nbytes={**solution.nbytes, MemoryTier.DEVICE: nbytes}), excess
