"""From a job and a machine to one plan: where everything rests, what is computed again, how micro-batches are grouped.

For each size of the groups, an integer program decides the rest (see `step_costs`); the best of all is taken.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from windlass.amounts import bytes_text
from windlass.engine.memory_plan import (
    ACTIVATION_PART_SLOTS,
    ACTIVATION_SLOT_NBYTES,
    LEAVING_ACTIVATION_NBYTES,
    MAX_GRAD_BUFFERS,
    MIN_STATE_DEPTH,
    BlockActivations,
    Placement,
    Plan,
    QueueDepths,
    make_plan,
)
from windlass.planner.cost import ActivationOption, Speeds
from windlass.planner.solver.integer_program import (
    Assignment,
    Outcome,
    Program,
    outcome_of,
    shortfall,
    shortfall_of,
    solve,
)
from windlass.planner.solver.queue_depths import depths_of
from windlass.planner.solver.step_cost import Kind, Limits, Part, PlannedJob, StateTier, StepCosts, Tier

_Any = TypeVar("_Any")

# Of host memory, or of the device: where so much of it is free, no plan waits for it.
_FREE_SHARE = 0.05
# Of the device: what is swapped takes at most so much of it before it has left, where so much is to be had.
_LEAVING_SHARE = 1 / 8
# Of a step: what layers in pieces, and one buffer for gradients, take besides, as the bounds count no waits. In
# simulations of 13B to 175B it was up to 7 percent where it gained less than 1 by its bound.
_RESORT_SHARE = 0.01
# How often the program is asked again, where the arena takes more than the program counted.
_MAX_CORRECTIONS = 5


_MEMORY = {Tier.DEVICE: "device memory", Tier.HOST: "host memory", Tier.SSD: "space on the SSDs"}


class DoesNotFitError(ValueError):
    """No plan fits."""

    def __init__(self, find_missing: Callable[[], dict[Tier, int]]) -> None:
        """`find_missing`: see `missing`; takes its time, and many a search only asks whether something fits."""
        super().__init__()
        self._find_missing = find_missing

    @functools.cached_property
    def missing(self) -> dict[Tier, int]:
        """Bytes of each tier, as little as there can be."""
        return self._find_missing()

    def __str__(self) -> str:
        parts = [f"{bytes_text(nbytes)} of {_MEMORY[tier]}" for tier, nbytes in self.missing.items() if nbytes]
        return f"no plan fits; it lacks {' and '.join(parts) or 'memory'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The best plan, and what it is expected to come to by the cost model."""

    costs: StepCosts  # by which it was chosen
    placement: Placement
    plan: Plan
    step_s: float
    cost: float  # what was made least: the step, a little of all work in it, and of what saves the device's memory
    seconds: dict[Part, float]  # of each part of a step
    nbytes: dict[Tier, int]
    has_room: bool  # in host memory: with more, another plan would hardly be better

    @property
    def busy_s(self) -> dict[str, float]:
        """Of each resource, a step."""
        return {name: sum(self.seconds[part] for part in parts) for name, parts in _RESOURCES.items()}

    @property
    def bottleneck(self) -> str:
        """The resource that is busy longest."""
        return max(self.busy_s, key=self.busy_s.__getitem__)


# The parts that each resource is busy with.
_RESOURCES = {
    "compute": (Part.FORWARD, Part.BACKWARD),
    "h2d": (Part.H2D_FORWARD, Part.H2D_BACKWARD),
    "d2h": (Part.D2H_FORWARD, Part.D2H_BACKWARD),
    "ssd": (Part.SSD_FORWARD, Part.SSD_BACKWARD, Part.SSD_UPDATE, Part.SSD_FLUSH),
    "optimizer": (Part.OPTIMIZER,),
}
# What saves the device's memory and takes time of its own, which may be worth what else is done with the memory.
_RESORTS: tuple[dict[str, Any], ...] = tuple(
    {"num_grad_buffers": num_grad_buffers, "streams": streams}
    for num_grad_buffers in (MAX_GRAD_BUFFERS, 1)
    for streams in (False, True)
)


def solve_job(job: PlannedJob, speeds: Speeds, limits: Limits) -> Solution:
    """The plan whose steps take least.

    Raises:
        DoesNotFitError: none fits.
    """
    return candidates(job, speeds, limits)[0]


def candidates(job: PlannedJob, speeds: Speeds, limits: Limits) -> list[Solution]:
    """The best plans for each size of groups, with more and with less for what passes through host memory; by the cost
    model the best of all first.

    Raises:
        DoesNotFitError: none fits.
    """
    missing: list[DoesNotFitError] = []
    found: list[Solution] = []
    for spills in _spills(job):
        if found and min(found, key=lambda solution: solution.cost).has_room:
            break
        resorts = iter(_RESORTS)
        for resort in resorts:
            solutions = _solutions(job, speeds, limits, {"spills": spills, **resort}, missing)
            if solutions:
                found += (*solutions, *_with_resorts(solutions, limits, resorts))
                break
    if not found:
        raise DoesNotFitError(
            lambda: min((each.missing for each in missing), key=lambda lacking: sum(lacking.values()))
        )
    best: dict[Placement, Solution] = {}
    for solution in sorted(found, key=lambda solution: solution.cost):
        best.setdefault(solution.placement, solution)
    return list(best.values())


def _solutions(
    job: PlannedJob, speeds: Speeds, limits: Limits, resort: dict[str, Any], missing: list[DoesNotFitError]
) -> list[Solution]:
    """With what a resort says. What is `missing` is added there, where nothing fits."""
    lacking = _programs_without_assignment(job, speeds, limits, resort)
    if lacking is not None:
        missing += (DoesNotFitError(functools.partial(_shortfall, program, speeds)) for program in lacking)
        return []
    found: list[Solution] = []
    leaving_nbytes = int(min(LEAVING_ACTIVATION_NBYTES, max(0.0, _LEAVING_SHARE * limits.device_nbytes)))
    by_leaving = [_depths(job, speeds, leaving) for leaving in dict.fromkeys((leaving_nbytes, 0))]
    for depths in (*by_leaving, [QueueDepths(states=MIN_STATE_DEPTH, leaving_nbytes=0)]):
        if found:
            break
        for group_size in group_sizes(job.num_microbatches):
            costs = StepCosts(job=job, speeds=speeds, limits=limits, group_size=group_size, **resort)
            for each in _saving_memory(costs, depths):
                try:
                    found.append(_solve(each))
                except DoesNotFitError as error:
                    missing.append(error)
                else:
                    if found[-1].has_room:
                        break
    return found


def _with_resorts(found: Sequence[Solution], limits: Limits, resorts: Iterable[dict[str, Any]]) -> Iterator[Solution]:
    """What the best of what was found becomes by the resorts, where more of the device's memory might help.

    One that changes two things is tried only if one of them was worth it.
    """
    best = min(found, key=lambda solution: solution.cost)
    if best.nbytes[Tier.DEVICE] < (1 - _FREE_SHARE) * limits.device_nbytes:
        return
    for resort in resorts:
        if sum(getattr(best.costs, name) != value for name, value in resort.items()) > 1:
            continue
        with contextlib.suppress(DoesNotFitError):
            solution = _solve(replace(best.costs, limits=limits, **resort))
            best = min(best, solution, key=lambda each: each.cost)
            yield solution


def least_nbytes(job: PlannedJob, speeds: Speeds, limits: Limits, tier: Tier) -> float | None:
    """How large the limit of a tier must be at least; what plans take beyond their program is not in it.

    None: however large it is, the other limits are too small. Groups are of one micro-batch, or of all: what lies
    between does not take less.
    """
    found: list[float] = []
    # The cores' memory is the device's as well, and more of it.
    beside = (Tier.DEVICE,) if speeds.shares_cores and tier is Tier.HOST else ()
    for resort in _resorts(job):
        for program in _programs_at_the_border(job, speeds, limits, resort):
            lacking = shortfall_of(program, tier, beside=beside)
            if lacking is not None:
                found.append(limits.by_tier[tier] + lacking)
    return min(found, default=None)


def may_fit(job: PlannedJob, speeds: Speeds, limits: Limits) -> bool:
    """Whether there is an assignment; what plans take beyond their program is not in it. Groups: see `least_nbytes`."""
    resorts = reversed(_resorts(job))  # what saves most first
    return any(_programs_without_assignment(job, speeds, limits, resort) is None for resort in resorts)


def _resorts(job: PlannedJob) -> list[dict[str, Any]]:
    return [{"spills": spills, **resort} for spills in _spills(job) for resort in _RESORTS]


def _spills(job: PlannedJob) -> tuple[bool, ...]:
    """Whether gradients that are kept may go to the SSDs, what takes no time first.

    Then no states can rest in host memory, but more activations.
    """
    return (False, True) if job.keeps_grads else (False,)


def _programs_at_the_border(
    job: PlannedJob, speeds: Speeds, limits: Limits, resort: dict[str, Any]
) -> Iterator[Program]:
    """With the groups that take least, one of which fits where anything does."""
    depths = QueueDepths(leaving_nbytes=0)
    for group_size, overflows in itertools.product({1, job.num_microbatches}, (True, False)):
        costs = StepCosts(
            job=job,
            speeds=speeds,
            limits=limits,
            group_size=group_size,
            overflows=overflows,
            depths=depths,
            **resort,
        )
        yield costs.program(costs.kinds())


def _programs_without_assignment(
    job: PlannedJob, speeds: Speeds, limits: Limits, resort: dict[str, Any]
) -> list[Program] | None:
    """Those at the border, where none of them has one: then no other has. None: one has."""
    programs = []
    for program in _programs_at_the_border(job, speeds, limits, resort):
        if solve(program) is not None:
            return None
        programs.append(program)
    return programs


def _saving_memory(costs: StepCosts, depths: Iterable[QueueDepths]) -> Iterator[StepCosts]:
    """Each takes less for what passes through host memory, and leaves more for what rests there."""
    for each, overflows in itertools.product(depths, (True, False)):
        yield replace(costs, depths=each, overflows=overflows)


def _depths(job: PlannedJob, speeds: Speeds, leaving_nbytes: int) -> list[QueueDepths]:
    """What keeps all SSDs busy, and, as that takes memory, the least; one where they are the same."""
    chunk_numel = job.size.chunk_numel
    deep = depths_of(
        speeds,
        param_nbytes=chunk_numel * job.param_itemsize,
        part_slots=ACTIVATION_PART_SLOTS,
        slot_nbytes=ACTIVATION_SLOT_NBYTES,
        num_optimizers=job.num_optimizers,
    )
    return list(dict.fromkeys(replace(each, leaving_nbytes=leaving_nbytes) for each in (deep, QueueDepths())))


def group_sizes(num_microbatches: int) -> list[int]:
    """Powers of two, and all of a step."""
    sizes = [1]
    while sizes[-1] * 2 < num_microbatches:
        sizes.append(sizes[-1] * 2)
    return sizes if num_microbatches == 1 else [*sizes, num_microbatches]


def _solve(costs: StepCosts) -> Solution:
    limits = costs.limits
    for _ in range(_MAX_CORRECTIONS):
        kinds = costs.kinds()
        program = costs.program(kinds)
        assignment = solve(program)
        if assignment is None:
            raise DoesNotFitError(functools.partial(_shortfall, program, costs.speeds))
        placement, outcome = _placement(costs, kinds, assignment), outcome_of(program, assignment)
        on_device = outcome.nbytes[Tier.DEVICE] if costs.speeds.shares_cores else 0.0
        if costs.spills:
            placement = _keeping_grads(costs, placement, limits.host_nbytes - on_device)
        # As the program counts it; within a budget that is too small for that buffers would shrink and gradients go to
        # the SSDs, which may take several times as long.
        counted = replace(placement, num_cached_params=placement.num_cached_params or 0)
        excess = plan_of(costs, counted, None).arena_nbytes + on_device - limits.host_nbytes
        if excess > 0:
            costs = replace(costs, limits=replace(costs.limits, host_nbytes=costs.limits.host_nbytes - excess))
            continue
        return _solution(costs, placement, plan_of(costs, placement, limits.host_nbytes - on_device), outcome)
    raise DoesNotFitError(lambda: {Tier.DEVICE: 0, Tier.HOST: int(excess), Tier.SSD: 0})


def _shortfall(program: Program, speeds: Speeds) -> dict[Tier, int]:
    lacking = {tier: int(nbytes) for tier, nbytes in zip(Tier, shortfall(program), strict=True)}
    is_same = program.limits[Tier.DEVICE] >= program.limits[Tier.HOST]
    if speeds.shares_cores and is_same:  # the device's memory is the host's, and was counted there
        lacking[Tier.DEVICE] = 0
    return lacking


def _keeping_grads(costs: StepCosts, placement: Placement, host_nbytes: float) -> Placement:
    """Gradients of as many blocks in host memory as have room beside buffers of their full depth; of none at least."""
    numbers = range(len(costs.job.model.blocks), 0, -1)
    tried = (replace(placement, num_host_grad_blocks=number) for number in numbers)
    fitting = (each for each in tried if plan_of(costs, each, None).arena_nbytes <= host_nbytes)
    return next(fitting, replace(placement, num_host_grad_blocks=0))


def solution_of(costs: StepCosts, placement: Placement, arena_nbytes: int) -> Solution:
    """What a placement comes to that was solved for before, by these costs; whether it is the best or not.

    `costs`: with the group size, and what saves memory, of that time. `arena_nbytes`: as it has them.
    """
    kinds = costs.kinds()
    outcome = outcome_of(costs.program(kinds), _assignment(costs, kinds, placement))
    plan = plan_of(costs, placement, arena_nbytes)
    return _solution(costs, placement, plan, outcome)


def _solution(costs: StepCosts, placement: Placement, plan: Plan, outcome: Outcome) -> Solution:
    return Solution(
        costs=costs,
        placement=replace(placement, num_cached_params=plan.num_cached_params),
        plan=plan,
        step_s=outcome.step_s,
        cost=outcome.cost * (1 + _RESORT_SHARE * (costs.streams + (costs.num_grad_buffers == 1))),
        seconds=dict(zip(Part, outcome.seconds, strict=True)),
        nbytes={
            Tier.DEVICE: int(outcome.nbytes[Tier.DEVICE]),
            Tier.HOST: plan.arena_nbytes,
            Tier.SSD: plan.ssd_nbytes + plan.num_ssd_activations * ACTIVATION_SLOT_NBYTES,
        },
        has_room=outcome.nbytes[Tier.HOST] < (1 - _FREE_SHARE) * costs.limits.host_nbytes,
    )


def plan_of(costs: StepCosts, placement: Placement, host_nbytes: float | None) -> Plan:
    """The arena of a job with a placement; `host_nbytes`: of the budget, which buffers fill where it is more."""
    job = costs.job
    return make_plan(
        job.size,
        num_optimizers=job.num_optimizers,
        grad_itemsize=job.grad_itemsize,
        keep_grads=job.keeps_grads,
        is_naive=job.update_order.is_naive,
        host_memory_nbytes=None if host_nbytes is None else int(host_nbytes),
        num_microbatches=job.num_microbatches,
        placement=placement,
    )


def _placement(costs: StepCosts, kinds: Sequence[Kind], assignment: Assignment) -> Placement:
    """Counts become blocks.

    States rest the faster the earlier a block is needed (AutoHete, insight 2); the activations of earlier layers lie
    longer, so they take least of the device (insight 1).
    """
    tiers: dict[StateTier, list[int]] = {tier: [] for tier in StateTier}
    layers: list[tuple[int, ActivationOption]] = []
    for kind, counts in zip(kinds, assignment.counts, strict=True):
        if kind.tiers:
            for block, tier in zip(kind.blocks, _spread(kind.tiers, counts), strict=True):
                tiers[tier].append(block)
        else:
            ways = sorted(_spread(kind.activations, counts), key=lambda way: way.held_nbytes)
            layers += zip(kind.blocks, ways, strict=True)
    chosen: list[BlockActivations] = [way.choice for _, way in sorted(layers, key=lambda pair: pair[0])]
    num_slots = costs.group_size * sum(way.num_slots for _, way in layers)
    num_on_ssd = min(num_slots, -(-int(assignment.moved_nbytes) // ACTIVATION_SLOT_NBYTES))
    cached = tiers[StateTier.CACHED]
    return Placement(
        device_blocks=tuple(sorted(tiers[StateTier.DEVICE])),
        host_blocks=tuple(sorted(tiers[StateTier.HOST])),
        streamed_blocks=costs.streamed_blocks,
        num_cached_params=sum(map(costs.job.size.num_chunks, cached)) if cached else None,
        group_size=costs.group_size,
        num_grad_buffers=costs.num_grad_buffers,
        depths=_letting_tensors_leave(costs, [way for _, way in layers], num_stores=2 if num_on_ssd else 1),
        activations=tuple(chosen),
        host_activation_nbytes=(num_slots - num_on_ssd) * ACTIVATION_SLOT_NBYTES,
        ssd_activation_nbytes=num_on_ssd * ACTIVATION_SLOT_NBYTES,
    )


def _letting_tensors_leave(costs: StepCosts, ways: Iterable[ActivationOption], *, num_stores: int) -> QueueDepths:
    """A tensor is always let through, so a device has room for the largest: smaller ones may leave there together.

    Where the device is the CPU, nothing leaves before something else is computed.
    """
    largest = max((nbytes for way in ways for nbytes in way.out_nbytes), default=0)
    if costs.speeds.shares_cores:
        return costs.depths
    return replace(costs.depths, leaving_nbytes=max(costs.depths.leaving_nbytes, num_stores * largest))


def _assignment(costs: StepCosts, kinds: Sequence[Kind], placement: Placement) -> Assignment:
    """Blocks become counts; the params that stay in host memory are those of the first blocks on the SSDs."""
    tiers = dict.fromkeys(placement.device_blocks, StateTier.DEVICE)
    tiers |= dict.fromkeys(placement.host_blocks, StateTier.HOST)
    num_left = placement.num_cached_params or 0
    for block in range(len(costs.job.model.blocks)):
        if block not in tiers and (num_chunks := costs.job.size.num_chunks(block)) <= num_left:
            tiers[block] = StateTier.CACHED
            num_left -= num_chunks
    counts = []
    for kind in kinds:
        if kind.tiers:
            gone: Sequence[Any] = [tiers.get(block, StateTier.SSD) for block in kind.blocks]
            ways: Sequence[Any] = kind.tiers
        else:
            gone = [placement.activations[block - 1] for block in kind.blocks]
            ways = [way.choice for way in kind.activations]
        counts.append(tuple(gone.count(way) for way in ways))
        if sum(counts[-1]) < len(kind.blocks):
            raise ValueError(f"blocks {kind.blocks} go ways that were not among those that the planner chooses from")
    return Assignment(counts=tuple(counts), moved_nbytes=placement.ssd_activation_nbytes)


def _spread(ways: Iterable[_Any], counts: Iterable[int]) -> Iterator[_Any]:
    for way, count in zip(ways, counts, strict=True):
        yield from [way] * count
