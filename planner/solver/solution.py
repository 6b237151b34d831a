"""A solution: a plan of a job, with the times and bytes that the cost model expects."""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from windlass.amounts import bytes_text
from windlass.engine.memory_plan import (
    ACTIVATION_SLOT_NBYTES,
    CACHED_BLOCKS,
    MIN_PASSING_BLOCKS,
    RECOMPUTE_ALL,
    MemoryTier,
    Placement,
    Plan,
    QueueDepths,
    make_plan,
    most_passing_blocks,
)
from windlass.planner.cost import ActivationOption
from windlass.planner.solver.bisection import largest
from windlass.planner.solver.depth_choice import depths_to_try
from windlass.planner.solver.planned_job import values_by_tier
from windlass.planner.solver.program import (
    SPARE_WEIGHT,
    Assignment,
    Program,
    outcome_of,
    shortfall,
    solve_in_parts,
)
from windlass.planner.solver.step_bounds import Part
from windlass.planner.solver.step_cost import Kind, StateTier, StepCosts

_Any = TypeVar("_Any")

# Extra cost, as a share of the step, because the bounds count no waits. For each option that saves device memory:
# streaming layers, or embedding and head, a single gradient buffer, and swapped tensors that must leave before the next
# one is computed.
_MEMORY_SAVER_PENALTY = 0.01
# For the smaller operations with parts of matrices: with parts of so many elements or more, and for each halving below.
_CUT_PENALTY = 0.01
_SMALLER_CUT_PENALTY = 0.0025
_LARGE_CUT = 2**28
# For the waits at an optimizer's slots. It is divided by their number.
_SLOTS_PENALTY = 0.1
# A plan's cost over its step, at most: all of the above but that of parts, with two slots, and a small weight of all
# work.
_MOST_COST_OF_STEP = 1.09
# Relative distance to the program's optimum that is near enough.
_GAP = 2e-4
# Maximum number of times that the program is solved again because the arena is larger than it counted.
_MAX_CORRECTIONS = 5


_MEMORY = {MemoryTier.DEVICE: "device memory", MemoryTier.HOST: "host memory", MemoryTier.SSD: "space on the SSDs"}


class DoesNotFitError(ValueError):
    """No plan fits."""

    def __init__(self, find_missing: Callable[[], dict[MemoryTier, int]]) -> None:
        """`find_missing` computes `missing` on demand, because it is slow and many searches need only the exception."""
        super().__init__()
        self._find_missing = find_missing

    @functools.cached_property
    def missing(self) -> dict[MemoryTier, int]:
        """The minimum bytes missing on each tier."""
        return self._find_missing()

    def __str__(self) -> str:
        parts = [f"{bytes_text(nbytes)} of {_MEMORY[tier]}" for tier, nbytes in self.missing.items() if nbytes]
        return f"no plan fits; it lacks {' and '.join(parts) or 'memory'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A plan, with the times and bytes that the cost model expects."""

    costs: StepCosts  # the cost model of the plan
    kind: StepCosts  # the one that it was searched with, before memory that it leaves free made buffers larger
    placement: Placement
    plan: Plan
    step_s: float
    # Minimized value: step time as searches count it, a small weight of all work, and of options that save device
    # memory.
    cost: float
    seconds: dict[Part, float]  # by part of a step
    nbytes: dict[MemoryTier, int]

    @property
    def busy_s(self) -> dict[str, float]:
        """The busy time of each resource in a step."""
        busy_s = {name: sum(self.seconds[part] for part in parts) for name, parts in _RESOURCES.items()}
        if self.costs.speeds.shares_cores:  # the cores' time includes that of their memory
            del busy_s["host_memory"]
        return busy_s

    @property
    def bottleneck(self) -> str:
        """The resource with the longest busy time."""
        return max(self.busy_s, key=self.busy_s.__getitem__)


# The parts of a step that each resource works on.
_RESOURCES = {
    "compute": (Part.FORWARD, Part.BACKWARD),
    "h2d": (Part.H2D_FORWARD, Part.H2D_BACKWARD),
    "d2h": (Part.D2H_FORWARD, Part.D2H_BACKWARD),
    "ssd": (Part.SSD_FORWARD, Part.SSD_BACKWARD, Part.SSD_UPDATE, Part.SSD_FLUSH),
    "optimizer": (Part.OPTIMIZER,),
    "host_memory": (Part.HOST_MEMORY,),
}


def penalty(costs: StepCosts) -> float:
    """Returns the factor on the cost of plans, for waits that the bounds do not count.

    It depends on the plan's own choices only, so that no plan costs more on a better machine.
    """
    saves = [
        costs.streams,
        costs.streams_ends,
        costs.num_grad_buffers == 1 and not costs.streams_grads,
        not costs.depths.leaving_nbytes,
    ]
    waits = 1 + _MEMORY_SAVER_PENALTY * saves.count(True) + _SLOTS_PENALTY / costs.depths.states
    return waits + penalty_of_cut(costs.job.cut)


def penalty_of_cut(cut: int | None) -> float:
    """Returns the share of the cost of plans for matrices in parts of so many elements: smaller parts take longer."""
    if cut is None:
        return 0.0
    return _CUT_PENALTY + _SMALLER_CUT_PENALTY * max(0.0, math.log2(_LARGE_CUT / cut))


def most_cost_of_any(cut: int | None, step_s: float) -> float:
    """Returns the most that any plan with this cut of matrices and this step can cost."""
    return (_MOST_COST_OF_STEP + penalty_of_cut(cut)) * step_s


def most_cost_of(costs: StepCosts, step_s: float) -> float:
    """Returns the most that a plan with these costs and this step can cost."""
    return (1 + len(Part) * SPARE_WEIGHT) * penalty(costs) * step_s


def solved(costs: StepCosts, below: float = math.inf, *, gap: float = _GAP) -> Solution | None:
    """Returns the best plan with these costs. None: `below` is finite, and no plan was found that costs less.

    `gap`: relative distance to the program's optimum that is near enough, at least the usual one.
    Memory that it leaves free goes to deeper queues, to gradients that wait, and to cached params, in this order.

    Raises:
        DoesNotFitError: `below` is infinite, and no plan was found that fits.
        SolverError: HiGHS came to no result.
    """
    limits, worth = costs.limits, penalty(costs)
    for _ in range(_MAX_CORRECTIONS):
        kinds = costs.kinds()
        program = costs.program(kinds)
        assignment = solve_in_parts(program, gap=max(_GAP, gap), below=below / worth)
        if assignment is None:
            if below < math.inf:
                return None
            raise DoesNotFitError(functools.partial(shortfall_by_tier, program, costs))
        placement, outcome = placement_of(costs, kinds, assignment), outcome_of(program, assignment)
        on_device = costs.num_devices_in_host * values_by_tier(outcome.nbytes)[MemoryTier.DEVICE]
        # Compare with the arena as the program counts it. With a smaller budget, buffers would shrink and gradients
        # would be spilled, and a step could take several times as long.
        excess = _least_arena_nbytes(costs, placement) + on_device - limits.host_nbytes
        if excess > 0:
            costs = replace(costs, limits=replace(costs.limits, host_nbytes=costs.limits.host_nbytes - excess))
            continue
        kind = costs
        costs, placement = _in_free_memory(costs, placement, limits.host_nbytes - on_device)
        plan = plan_of(costs, placement, limits.host_nbytes - on_device)
        return _solution(costs, kind, placement, plan, assignment, worth)
    if below < math.inf:
        return None
    raise DoesNotFitError(lambda: {MemoryTier.DEVICE: 0, MemoryTier.HOST: int(excess), MemoryTier.SSD: 0})


def _least_arena_nbytes(costs: StepCosts, placement: Placement) -> int:
    """Returns the bytes of the arena without params that are cached only because memory is free."""
    if costs.spills and placement.num_host_grad_blocks is None:
        placement = replace(placement, num_host_grad_blocks=0)
    counted = replace(placement, num_cached_params=placement.num_cached_params or 0)
    return plan_of(costs, counted, None).arena_nbytes


def _in_free_memory(costs: StepCosts, placement: Placement, host_nbytes: float) -> tuple[StepCosts, Placement]:
    """Returns the plan with deeper queues, and with room for more gradients, as far as they fit."""
    job = costs.job
    leaving_nbytes = costs.depths.leaving_nbytes
    tried = depths_to_try(costs.speeds.num_ssds, num_optimizers=job.num_optimizers, leaving_nbytes=leaving_nbytes)
    for depths in tried:
        if depths.states <= costs.depths.states or depths.leaving_nbytes != leaving_nbytes:
            continue
        deeper = replace(depths, leaving_nbytes=placement.depths.leaving_nbytes)
        if _least_arena_nbytes(costs, replace(placement, depths=deeper)) <= host_nbytes:
            costs, placement = replace(costs, depths=depths), replace(placement, depths=deeper)
            break
    if costs.spills:
        # As many blocks as fit keep their gradients in host memory.
        number = _most_fitting(
            lambda number: replace(placement, num_host_grad_blocks=number),
            costs,
            host_nbytes,
            most=len(job.size.blocks),
        )
        placement = replace(placement, num_host_grad_blocks=number)
    elif costs.num_passing_blocks is not None:
        most, usual = most_passing_blocks(job.model.num_own_blocks), placement.num_cached_params
        if usual is None:
            usual = CACHED_BLOCKS * job.size.typical_chunks
        number = _most_fitting(
            lambda number: replace(
                placement, num_passing_blocks=max(number, MIN_PASSING_BLOCKS), num_cached_params=usual
            ),
            costs,
            host_nbytes,
            most=most,
        )
        number = max(number, costs.num_passing_blocks)
        costs = replace(costs, num_passing_blocks=number)
        placement = replace(placement, num_passing_blocks=number)
    return costs, placement


def _most_fitting(placed: Callable[[int], Placement], costs: StepCosts, host_nbytes: float, *, most: int) -> int:
    """Returns the largest number for which the arena fits, or 0."""
    return largest(lambda number: _least_arena_nbytes(costs, placed(number)) <= host_nbytes, most=most)


def commit_every_of(plans: Iterable[Plan]) -> int:
    """Returns the steps between two commits of a job over boxes, which all commit at once.

    A box without states in memory could commit every step, and commits as seldom as the others.
    """
    return min((plan.commit_every for plan in plans if plan.commit_every > 1), default=1)


def shortfall_by_tier(program: Program, costs: StepCosts) -> dict[MemoryTier, int]:
    """Returns the bytes that a program lacks on each tier."""
    lacking = {tier: int(nbytes) for tier, nbytes in values_by_tier(shortfall(program)).items()}
    limits = values_by_tier(program.limits)
    is_same = limits[MemoryTier.DEVICE] >= limits[MemoryTier.HOST]
    if costs.speeds.shares_cores and is_same:  # on a CPU: counted already as the host's memory
        lacking[MemoryTier.DEVICE] = 0
    return lacking


def solution_of(costs: StepCosts, placement: Placement, arena_nbytes: int | None = None) -> Solution:
    """Evaluates an existing placement with these costs. It need not be the best one.

    `costs` must have the group size and the memory-saving options of the placement. `arena_nbytes`: of its arena; None:
    as large as the placement needs.
    """
    plan = plan_of(costs, placement, arena_nbytes)
    if (plan.host_blocks or plan.device_blocks) and plan.commit_every != costs.commit_every:
        costs = replace(costs, given_commit_every=plan.commit_every)
    assignment = _assignment(costs, costs.kinds(), placement)
    return _solution(costs, costs, placement, plan, assignment, penalty(costs))


def _solution(
    costs: StepCosts, kind: StepCosts, placement: Placement, plan: Plan, assignment: Assignment, worth: float
) -> Solution:
    # A machine with more memory may have a plan that leaves less of it to gradients. Its cost must not be larger.
    costs = replace(costs, num_host_grad_blocks=0, has_resident_layers=False)
    outcome = outcome_of(costs.program(costs.kinds()), assignment)
    cost = outcome.cost * worth
    num_host = min(plan.spilled_blocks, default=len(costs.job.size.blocks)) if costs.spills else 0
    has_resident_layers = not set(plan.device_blocks).issubset((0, len(costs.job.model.layers) + 1))
    if num_host or has_resident_layers:
        costs = replace(costs, num_host_grad_blocks=num_host, has_resident_layers=has_resident_layers)
        outcome = outcome_of(costs.program(costs.kinds()), assignment)
    nbytes = values_by_tier(outcome.nbytes)
    return Solution(
        costs=costs,
        kind=kind,
        placement=replace(placement, num_cached_params=plan.num_cached_params),
        plan=plan,
        step_s=outcome.step_s,
        cost=cost,
        seconds=dict(zip(Part, outcome.seconds, strict=True)),
        nbytes={
            MemoryTier.DEVICE: int(nbytes[MemoryTier.DEVICE]),
            MemoryTier.HOST: plan.arena_nbytes,
            MemoryTier.SSD: plan.ssd_nbytes + plan.num_ranks * plan.num_ssd_activations * ACTIVATION_SLOT_NBYTES,
        },
    )


def plan_of(costs: StepCosts, placement: Placement, host_nbytes: float | None) -> Plan:
    """Returns the memory plan of a placement. `host_nbytes`: budget that buffers may fill; None: the minimum."""
    job = costs.job
    return make_plan(
        job.size,
        num_optimizers=job.num_optimizers,
        grad_itemsize=job.grad_itemsize,
        keep_grads=job.keeps_grads,
        is_naive=job.update_order.is_naive,
        host_memory_nbytes=None if host_nbytes is None else int(host_nbytes),
        num_microbatches=job.num_microbatches,
        is_sliced=job.is_sliced,
        num_lanes=job.lanes.num_lanes,
        num_ranks=job.num_ranks,
        placement=placement,
        crossings=job.crossings,
    )


def placement_of(costs: StepCosts, kinds: Sequence[Kind], assignment: Assignment) -> Placement:
    """Converts the program's counts to a placement of blocks.

    Earlier blocks are needed sooner, so theirs are the states on the device (AutoHete, insight 2). Blocks with states
    in host memory lie among those with states on the SSDs, so that CPU and SSDs work at the same time. Activations of
    earlier layers are kept longer, so they get the options that hold least on the device (insight 1).
    """
    tiers: dict[StateTier, list[int]] = {tier: [] for tier in StateTier}
    layers: list[tuple[int, ActivationOption]] = []
    for kind, counts in zip(kinds, assignment.counts, strict=True):
        if kind.tiers:
            for block, tier in zip(
                kind.blocks, _among_each_other(dict(zip(kind.tiers, counts, strict=True))), strict=True
            ):
                tiers[tier].append(block)
        else:
            ways = sorted(_one_after_the_other(kind.activations, counts), key=lambda way: way.held_nbytes)
            layers += zip(kind.blocks, ways, strict=True)
    by_layer = {block: way.choice for block, way in layers}
    chosen = (by_layer.get(block, RECOMPUTE_ALL) for block in range(1, len(costs.job.model.layers) + 1))
    num_slots = costs.num_held_microbatches * sum(way.num_slots for _, way in layers)
    moved_nbytes = int(assignment.moved_nbytes) // costs.job.num_ranks
    num_on_ssd = min(num_slots, -(-moved_nbytes // ACTIVATION_SLOT_NBYTES))
    cached = tiers[StateTier.CACHED]
    rests_in_memory = bool(tiers[StateTier.DEVICE] or tiers[StateTier.HOST])
    return Placement(
        commit_every=costs.commit_every if rests_in_memory else None,
        device_blocks=tuple(sorted(tiers[StateTier.DEVICE])),
        host_blocks=tuple(sorted(tiers[StateTier.HOST])),
        streamed_blocks=costs.streamed_layers,
        num_cached_params=sum(map(costs.job.size.num_chunks, cached)) if cached else None,
        group_size=costs.group_size,
        num_grad_buffers=costs.num_grad_buffers,
        streams_grads=costs.streams_grads,
        streams_ends=costs.streams_ends,
        num_passing_blocks=costs.num_passing_blocks,
        depths=_letting_tensors_leave(costs, [way for _, way in layers], num_stores=2 if num_on_ssd else 1),
        activations=tuple(chosen),
        host_activation_nbytes=(num_slots - num_on_ssd) * ACTIVATION_SLOT_NBYTES,
        ssd_activation_nbytes=num_on_ssd * ACTIVATION_SLOT_NBYTES,
    )


def _letting_tensors_leave(costs: StepCosts, ways: Iterable[ActivationOption], *, num_stores: int) -> QueueDepths:
    """Returns depths with room for the largest swapped tensors: one for each store, and see `StepCosts.num_leaving`.

    On a CPU nothing is on its way out while the next layer is computed, so the depths do not change.
    """
    largest = max((nbytes for way in ways for nbytes in way.out_nbytes), default=0)
    if costs.speeds.shares_cores:
        return costs.depths
    num_leaving = max(costs.num_leaving, num_stores)
    return replace(costs.depths, leaving_nbytes=max(costs.depths.leaving_nbytes, num_leaving * largest))


def _assignment(costs: StepCosts, kinds: Sequence[Kind], placement: Placement) -> Assignment:
    """Converts a placement to counts. Params cached in host memory are those of the first blocks on the SSDs."""
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
        number = Counter(gone)
        counts.append(tuple(number[way] for way in ways))
        if sum(counts[-1]) < len(kind.blocks):
            raise ValueError(f"blocks {kind.blocks} go ways that were not among those that the planner chooses from")
    return Assignment(counts=tuple(counts), moved_nbytes=costs.job.num_ranks * placement.ssd_activation_nbytes)


def _one_after_the_other(ways: Iterable[_Any], counts: Iterable[int]) -> Iterator[_Any]:
    for way, count in zip(ways, counts, strict=True):
        yield from [way] * count


def _among_each_other(counts: Mapping[StateTier, int]) -> Iterator[StateTier]:
    """Yields the tier of each block of a kind, in the order of blocks.

    Updates come in the order of blocks, or against it. If all blocks in host memory came before the others, the SSDs
    would wait meanwhile, and then the CPU. So these blocks are spread evenly over all that are not on the device.
    Params in host memory are those of the first blocks on the SSDs.
    """
    yield from [StateTier.DEVICE] * counts.get(StateTier.DEVICE, 0)
    num_host, num_cached = counts.get(StateTier.HOST, 0), counts.get(StateTier.CACHED, 0)
    number = num_host + num_cached + counts.get(StateTier.SSD, 0)
    num_before = 0  # of blocks that are not in host memory
    for place in range(number):
        # Rounded up, so that the first block is in host memory if any is.
        if -(-(place + 1) * num_host // number) > -(-place * num_host // number):
            yield StateTier.HOST
        else:
            yield StateTier.CACHED if num_before < num_cached else StateTier.SSD
            num_before += 1
