"""Searches the plan of a job on a machine.

A plan says where states are resident, what is recomputed, and how micro-batches are grouped. For each group size, an
integer program decides the rest (see `step_cost`). The best solution of all is taken.
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
    MemoryTier,
    Placement,
    Plan,
    QueueDepths,
    make_plan,
)
from windlass.planner.cost import ActivationOption, Speeds
from windlass.planner.solver.depth_choice import depths_of
from windlass.planner.solver.integer_program import (
    Assignment,
    Outcome,
    Program,
    outcome_of,
    shortfall,
    shortfall_of,
    solve,
)
from windlass.planner.solver.step_cost import (
    TIER_INDEX,
    Kind,
    Limits,
    Part,
    PlannedJob,
    StateTier,
    StepCosts,
    values_by_tier,
)

_Any = TypeVar("_Any")

# If at least this share of host or device memory is unused, stop trying plans that save memory.
_FREE_SHARE = 0.05
# Maximum share of device memory for swapped activations that have not left the device yet.
_LEAVING_SHARE = 1 / 8
# Extra cost, as a share of the step, for streaming layers or for a single gradient buffer, because the bounds count no
# waits. A plan that uses them must be better by more than this share.
_MEMORY_SAVER_PENALTY = 0.01
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

    costs: StepCosts  # the cost model that chose it
    placement: Placement
    plan: Plan
    step_s: float
    cost: float  # minimized value: step time, a small weight of all work, and of options that save device memory
    seconds: dict[Part, float]  # by part of a step
    nbytes: dict[MemoryTier, int]
    has_room: bool  # host memory is slack: with more of it, no other plan would be much better

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _MemorySaver:
    """Options that save memory and cost time. The saved memory may be worth more for other uses."""

    spills: bool  # kept gradients go to the SSDs
    num_grad_buffers: int
    streams: bool  # layers are copied to the device in pieces
    streams_grads: bool = False  # their gradients leave it in pieces

    def num_changes(self, costs: StepCosts) -> int:
        """Returns how many of the options that save device memory differ from those of `costs`."""
        is_layers_changed = (self.streams, self.streams_grads) != (costs.streams, costs.streams_grads)
        return [self.num_grad_buffers != costs.num_grad_buffers, is_layers_changed].count(True)

    def of(self, costs: StepCosts) -> StepCosts:
        """Returns the costs with these options."""
        return replace(
            costs,
            spills=self.spills,
            num_grad_buffers=self.num_grad_buffers,
            streams=self.streams,
            streams_grads=self.streams_grads,
        )


def _memory_savers(job: PlannedJob, *, spills: bool) -> tuple[_MemorySaver, ...]:
    """Returns the combinations of options, those that cost least time first."""
    whole, streamed = (
        [
            _MemorySaver(spills=spills, num_grad_buffers=num_grad_buffers, streams=streams)
            for num_grad_buffers in (MAX_GRAD_BUFFERS, 1)
        ]
        for streams in (False, True)
    )
    with_grads = replace(streamed[0], streams_grads=True)
    return (whole[0], streamed[0], *([with_grads] if may_stream_grads(job) else []), whole[1], streamed[1])


def may_stream_grads(job: PlannedJob) -> bool:
    """Checks whether gradients of streamed layers may leave the device in pieces."""
    return job.lanes.num_lanes == 1 and job.num_ranks == 1


def solve_job(job: PlannedJob, speeds: Speeds, limits: Limits) -> Solution:
    """Returns the plan with the shortest step.

    Raises:
        DoesNotFitError: no plan fits.
    """
    return candidates(job, speeds, limits)[0]


def candidates(job: PlannedJob, speeds: Speeds, limits: Limits) -> list[Solution]:
    """Returns the best plans for each group size, with deep and with shallow queues in host memory, best first.

    Raises:
        DoesNotFitError: no plan fits.
    """
    missing: list[DoesNotFitError] = []
    solutions_found: list[Solution] = []
    for spills in _spills(job):
        if solutions_found and min(solutions_found, key=lambda solution: solution.cost).has_room:
            break
        savers = _memory_savers(job, spills=spills)
        for number, saver in enumerate(savers, start=1):
            solutions = _solutions(job, speeds, limits, saver, missing)
            if solutions:
                solutions_found += (*solutions, *_with_memory_savers(solutions, limits, savers[number:]))
                break
    if not solutions_found:
        raise DoesNotFitError(
            lambda: min((error.missing for error in missing), key=lambda lacking: sum(lacking.values()))
        )
    best: dict[Placement, Solution] = {}
    for solution in sorted(solutions_found, key=lambda solution: solution.cost):
        best.setdefault(solution.placement, solution)
    return list(best.values())


def _solutions(
    job: PlannedJob, speeds: Speeds, limits: Limits, saver: _MemorySaver, missing: list[DoesNotFitError]
) -> list[Solution]:
    """Returns the solutions with a memory-saving option. If there are none, appends the reasons to `missing`."""
    lacking = _programs_without_assignment(job, speeds, limits, saver)
    if lacking is not None:
        missing += (DoesNotFitError(functools.partial(_shortfall, program, speeds)) for program in lacking)
        return []
    solutions: list[Solution] = []
    leaving_nbytes = int(min(LEAVING_ACTIVATION_NBYTES, max(0.0, _LEAVING_SHARE * limits.device_nbytes)))
    by_leaving = [_depths(job, speeds, leaving) for leaving in dict.fromkeys((leaving_nbytes, 0))]
    for depths in (*by_leaving, [QueueDepths(states=MIN_STATE_DEPTH, leaving_nbytes=0)]):
        if solutions:
            break
        for group_size in sorted({*group_sizes(job.largest_group), _smallest_uncut_group(job)}):
            costs = saver.of(StepCosts(job=job, speeds=speeds, limits=limits, group_size=group_size))
            for variant in _saving_memory(costs, depths):
                try:
                    solutions.append(_solve(variant))
                except DoesNotFitError as error:
                    missing.append(error)
                else:
                    if solutions[-1].has_room:
                        break
    return solutions


def _with_memory_savers(
    solutions: Sequence[Solution], limits: Limits, savers: Iterable[_MemorySaver]
) -> Iterator[Solution]:
    """Yields the best solution with further memory-saving options, if device memory is short.

    An option that changes two settings is tried only if one of the two changes was an improvement.
    """
    best = min(solutions, key=lambda solution: solution.cost)
    if best.nbytes[MemoryTier.DEVICE] < (1 - _FREE_SHARE) * limits.device_nbytes:
        return
    for saver in savers:
        if saver.num_changes(best.costs) > 1:
            continue
        with contextlib.suppress(DoesNotFitError):
            solution = _solve(replace(saver.of(best.costs), limits=limits))
            best = min(best, solution, key=lambda candidate: candidate.cost)
            yield solution


def least_nbytes(job: PlannedJob, speeds: Speeds, limits: Limits, tier: MemoryTier) -> float | None:
    """Returns the minimum limit of a tier with which the program has an assignment. A plan may need more.

    Returns None if the other limits are too small for any value. Only groups of one micro-batch, of whole lanes and of
    all micro-batches are tried, because sizes between them do not need less.
    """
    needs: list[float] = []
    # On a CPU the device uses the host's memory, so both limits grow together.
    beside = (TIER_INDEX[MemoryTier.DEVICE],) if speeds.shares_cores and tier is MemoryTier.HOST else ()
    for saver in _all_memory_savers(job):
        for program in _programs_at_the_border(job, speeds, limits, saver):
            lacking = shortfall_of(program, TIER_INDEX[tier], beside=beside)
            if lacking is not None:
                needs.append(limits.by_tier[tier] + lacking)
    return min(needs, default=None)


def may_fit(job: PlannedJob, speeds: Speeds, limits: Limits) -> bool:
    """Checks whether the program has an assignment. A plan may need more. For the groups see `least_nbytes`."""
    savers = reversed(_all_memory_savers(job))  # the most saving options first
    return any(_programs_without_assignment(job, speeds, limits, saver) is None for saver in savers)


def sizes_at_the_border(job: PlannedJob) -> list[int]:
    """Returns the sizes of groups that need least of one tier: of device memory, of host memory, or of both."""
    return sorted({1, _smallest_uncut_group(job), job.largest_group})


def _all_memory_savers(job: PlannedJob) -> list[_MemorySaver]:
    return [saver for spills in _spills(job) for saver in _memory_savers(job, spills=spills)]


def _spills(job: PlannedJob) -> tuple[bool, ...]:
    """Returns the choices for moving kept gradients to the SSDs. The first one takes no time.

    With spilled gradients no states can be resident in host memory, but more activations can.
    """
    return (False, True) if job.keeps_grads else (False,)


def _programs_at_the_border(job: PlannedJob, speeds: Speeds, limits: Limits, saver: _MemorySaver) -> Iterator[Program]:
    """Yields the programs that need least memory. If any program has an assignment, one of these has."""
    depths = QueueDepths(leaving_nbytes=0)
    for group_size, overflows in itertools.product(sizes_at_the_border(job), (True, False)):
        costs = saver.of(
            StepCosts(job=job, speeds=speeds, limits=limits, group_size=group_size, overflows=overflows, depths=depths)
        )
        yield costs.program(costs.kinds())


def _smallest_uncut_group(job: PlannedJob) -> int:
    return min(job.lanes.smallest_uncut_group, job.largest_group)


def _programs_without_assignment(
    job: PlannedJob, speeds: Speeds, limits: Limits, saver: _MemorySaver
) -> list[Program] | None:
    """Returns the programs of `_programs_at_the_border` if none of them has an assignment, else None."""
    programs = []
    for program in _programs_at_the_border(job, speeds, limits, saver):
        if solve(program) is not None:
            return None
        programs.append(program)
    return programs


def _saving_memory(costs: StepCosts, depths: Iterable[QueueDepths]) -> Iterator[StepCosts]:
    """Yields variants with ever smaller buffers in host memory, which leave more of it for resident data."""
    for queue_depths, overflows in itertools.product(depths, (True, False)):
        yield replace(costs, depths=queue_depths, overflows=overflows)


def _depths(job: PlannedJob, speeds: Speeds, leaving_nbytes: int) -> list[QueueDepths]:
    """Returns the depths that keep all SSDs busy, and the minimum depths, which take less memory; each only once."""
    chunk_numel = job.size.chunk_numel
    deep = depths_of(
        speeds,
        param_nbytes=chunk_numel * job.param_itemsize,
        part_slots=ACTIVATION_PART_SLOTS,
        slot_nbytes=ACTIVATION_SLOT_NBYTES,
        num_optimizers=job.num_optimizers,
    )
    return list(dict.fromkeys(replace(depths, leaving_nbytes=leaving_nbytes) for depths in (deep, QueueDepths())))


def group_sizes(num_microbatches: int) -> list[int]:
    """Returns the powers of two below the number of micro-batches, and that number."""
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
        on_device = costs.num_devices_in_host * values_by_tier(outcome.nbytes)[MemoryTier.DEVICE]
        if costs.spills:
            placement = _keeping_grads(costs, placement, limits.host_nbytes - on_device)
        # Compare with the arena as the program counts it. With a smaller budget, buffers would shrink and gradients
        # would be spilled, and a step could take several times as long.
        counted = replace(placement, num_cached_params=placement.num_cached_params or 0)
        excess = plan_of(costs, counted, None).arena_nbytes + on_device - limits.host_nbytes
        if excess > 0:
            costs = replace(costs, limits=replace(costs.limits, host_nbytes=costs.limits.host_nbytes - excess))
            continue
        return _solution(costs, placement, plan_of(costs, placement, limits.host_nbytes - on_device), outcome)
    raise DoesNotFitError(lambda: {MemoryTier.DEVICE: 0, MemoryTier.HOST: int(excess), MemoryTier.SSD: 0})


def _shortfall(program: Program, speeds: Speeds) -> dict[MemoryTier, int]:
    lacking = {tier: int(nbytes) for tier, nbytes in values_by_tier(shortfall(program)).items()}
    limits = values_by_tier(program.limits)
    is_same = limits[MemoryTier.DEVICE] >= limits[MemoryTier.HOST]
    if speeds.shares_cores and is_same:  # on a CPU: counted already as the host's memory
        lacking[MemoryTier.DEVICE] = 0
    return lacking


def _keeping_grads(costs: StepCosts, placement: Placement, host_nbytes: float) -> Placement:
    """Keeps the gradients of as many blocks in host memory as fit beside full-depth buffers."""
    numbers = range(len(costs.job.model.blocks), 0, -1)
    tried = (replace(placement, num_host_grad_blocks=number) for number in numbers)
    fitting = (candidate for candidate in tried if plan_of(costs, candidate, None).arena_nbytes <= host_nbytes)
    return next(fitting, replace(placement, num_host_grad_blocks=0))


def solution_of(costs: StepCosts, placement: Placement, arena_nbytes: int) -> Solution:
    """Evaluates an existing placement with these costs. It need not be the best one.

    `costs` must have the group size and the memory-saving options of the placement. `arena_nbytes`: of its arena.
    """
    kinds = costs.kinds()
    outcome = outcome_of(costs.program(kinds), _assignment(costs, kinds, placement))
    plan = plan_of(costs, placement, arena_nbytes)
    return _solution(costs, placement, plan, outcome)


def _solution(costs: StepCosts, placement: Placement, plan: Plan, outcome: Outcome) -> Solution:
    nbytes = values_by_tier(outcome.nbytes)
    num_memory_savers = [costs.streams, costs.num_grad_buffers == 1].count(True)
    return Solution(
        costs=costs,
        placement=replace(placement, num_cached_params=plan.num_cached_params),
        plan=plan,
        step_s=outcome.step_s,
        cost=outcome.cost * (1 + _MEMORY_SAVER_PENALTY * num_memory_savers),
        seconds=dict(zip(Part, outcome.seconds, strict=True)),
        nbytes={
            MemoryTier.DEVICE: int(nbytes[MemoryTier.DEVICE]),
            MemoryTier.HOST: plan.arena_nbytes,
            MemoryTier.SSD: plan.ssd_nbytes + plan.num_ranks * plan.num_ssd_activations * ACTIVATION_SLOT_NBYTES,
        },
        has_room=nbytes[MemoryTier.HOST] < (1 - _FREE_SHARE) * costs.limits.host_nbytes,
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
        num_lanes=job.lanes.num_lanes,
        num_ranks=job.num_ranks,
        placement=placement,
    )


def _placement(costs: StepCosts, kinds: Sequence[Kind], assignment: Assignment) -> Placement:
    """Converts the program's counts to a placement of blocks.

    Earlier blocks are needed sooner, so their states get the faster tiers (AutoHete, insight 2). Activations of earlier
    layers are kept longer, so they get the options that hold least on the device (insight 1).
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
    moved_nbytes = int(assignment.moved_nbytes) // costs.job.num_ranks
    num_on_ssd = min(num_slots, -(-moved_nbytes // ACTIVATION_SLOT_NBYTES))
    cached = tiers[StateTier.CACHED]
    return Placement(
        device_blocks=tuple(sorted(tiers[StateTier.DEVICE])),
        host_blocks=tuple(sorted(tiers[StateTier.HOST])),
        streamed_blocks=costs.streamed_blocks,
        num_cached_params=sum(map(costs.job.size.num_chunks, cached)) if cached else None,
        group_size=costs.group_size,
        num_grad_buffers=costs.num_grad_buffers,
        streams_grads=costs.streams_grads,
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
        counts.append(tuple(gone.count(way) for way in ways))
        if sum(counts[-1]) < len(kind.blocks):
            raise ValueError(f"blocks {kind.blocks} go ways that were not among those that the planner chooses from")
    return Assignment(counts=tuple(counts), moved_nbytes=costs.job.num_ranks * placement.ssd_activation_nbytes)


def _spread(ways: Iterable[_Any], counts: Iterable[int]) -> Iterator[_Any]:
    for way, count in zip(ways, counts, strict=True):
        yield from [way] * count
