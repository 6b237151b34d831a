"""Simulates a planned job. It includes queueing and waiting, which the planner's cost model leaves out."""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from windlass.actors.activations import slots_of_part
from windlass.actors.job import CoreContext, JobCore, make_core_context
from windlass.actors.messages import Phase
from windlass.actors.policy import SchedulerConfig
from windlass.actors.scheduler import job_shape
from windlass.actors.timeline import StepSpans, TierMemory, memory_of
from windlass.actors.worker_policy import Stage
from windlass.engine.memory_plan import FETCH_DEPTH, MIN_STATE_DEPTH, NUM_PIECE_BUFFERS, MemoryTier, Placement
from windlass.engine.model import CHUNK_GRANULE, ModelLayout
from windlass.planner.cost import Speeds, ways_of_layer
from windlass.planner.simulation.job import SimulatedBox
from windlass.planner.simulation.network import NetworkRates
from windlass.planner.simulation.simulate import Rates, Work, simulate, steady_step_s
from windlass.planner.solver import Part, Solution
from windlass.storage.ids import JobId

# Number of steps to simulate, and number of first steps that are not steady yet.
_NUM_STEPS = 4
_NUM_FIRST_STEPS = 2
# Seconds that a message between two processes takes.
_MESSAGE_S = 0.0005
# Chunks are simulated as fewer, larger ones, as far as so many fit into an optimizer's slots for each simulated SSD, a
# typical block has so many, and further if all blocks have more than so many. See decision 62.
_SLOTS_OF_SSD = 4
_CHUNKS_OF_BLOCK = 8
_MAX_CHUNKS = 4000
# With one slot for each SSD, they are idle for such a share of an update. With more it is less, by this exponent.
_IDLE_WITH_ONE_SLOT, _FEWER_IDLE = 0.13, 2.5
# Beyond so many activation slots, they are simulated as fewer, larger ones.
_MAX_ACTIVATION_SLOTS = 500
_MAX_PIECES = 8  # of a layer, about


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSteps:
    """The simulated step time, and the timelines of the steps."""

    step_s: float  # in steady state
    steps: Sequence[StepSpans]

    @property
    def memory(self) -> dict[MemoryTier, TierMemory]:
        """The memory in use on each tier, from the last step until all is committed.

        If chunks, slots or parts of matrices were enlarged for the simulation, these values are enlarged as well.
        """
        return memory_of(self.steps[-1].levels)


def simulated_step_s(solution: Solution, layout: ModelLayout, *, num_cores: int, most_s: float = math.inf) -> float:
    """Returns the steady step time of a planned job on its machine; see `simulate_planned`.

    `most_s`: if the step takes longer, some time above this may be returned in place of the step's.

    Raises:
        Stuck: the job would not end.
    """
    return simulated_step_s_of_boxes([_one_box(solution, layout, num_cores, merges_ssds=True)], most_s=most_s)


def simulate_planned(
    solution: Solution, layout: ModelLayout, *, num_cores: int, limit_s: float = math.inf
) -> SimulatedSteps:
    """Simulates the steps of a planned job on its machine. `num_cores`: used if the device is the CPU.

    Raises:
        Stuck: the job would not end.
        TooLong: the simulation has taken `limit_s` of CPU time.
    """
    return simulate_boxes([_one_box(solution, layout, num_cores, merges_ssds=False)], limit_s=limit_s)


def simulated_step_s_of_boxes(
    boxes: Sequence[SimulatedBox],
    network: NetworkRates | None = None,
    *,
    max_calls: int | None = None,
    most_s: float = math.inf,
) -> float:
    """Returns the steady step time of a job on one box, or on several that a network connects.

    `most_s`: see `simulated_step_s`.

    Raises:
        Stuck: the job would not end.
        TooLong: a step has more than `max_calls` events.
    """
    first, *others = boxes
    return steady_step_s(
        first.context,
        _shape_of(boxes),
        first.rates,
        first.work,
        others=others,
        network=network,
        max_calls=max_calls,
        most_s=most_s,
    )


def simulate_boxes(
    boxes: Sequence[SimulatedBox], network: NetworkRates | None = None, *, limit_s: float = math.inf
) -> SimulatedSteps:
    """Simulates the steps of a job on one box, or on several that a network connects.

    Raises:
        Stuck: the job would not end.
        TooLong: the simulation has taken `limit_s` of CPU time.
    """
    # CPU time, because the process may be halted meanwhile.
    until_s = time.process_time() + limit_s
    first, *others = boxes
    steps = simulate(
        first.context,
        _shape_of(boxes),
        first.rates,
        first.work,
        is_late=lambda: time.process_time() > until_s,
        others=others,
        network=network,
    )[_NUM_FIRST_STEPS:]
    return SimulatedSteps(step_s=statistics.fmean(step.summary["period_s"] for step in steps), steps=steps)


def _shape_of(boxes: Sequence[SimulatedBox]) -> SchedulerConfig:
    """Returns the policy's view of a job on some boxes. A simulated job writes no files."""
    first, *others = (box.context for box in boxes)
    return job_shape(first, "", others)


def _one_box(solution: Solution, layout: ModelLayout, num_cores: int, *, merges_ssds: bool) -> SimulatedBox:
    merges_ssds = merges_ssds and may_merge_ssds(layout, [solution])
    layout = in_fewer_chunks(layout, [solution], merges_ssds=merges_ssds)
    return box_of_plan(solution, layout, num_cores=num_cores, merges_ssds=merges_ssds)


def box_of_plan(
    solution: Solution,
    layout: ModelLayout,
    *,
    num_cores: int,
    merges_ssds: bool,
    stages: tuple[Stage, ...] = (),
    ranks: tuple[int, ...] = (),
    names: tuple[str, ...] = (),
    box: int = 0,
    commit_every: int | None = None,
) -> SimulatedBox:
    """Returns a box with its plan. `layout`: of the whole model, as `in_fewer_chunks` returns it for all boxes.

    `merges_ssds`: simulate all SSDs of the box as one that is as fast as they are together. Each chunk of it stands for
    one on each SSD, or for more.
    `stages`, `ranks` and `names`: the blocks, the number of GPUs and the name of each box of the job; empty: it has one
    box, or they have no names. `commit_every`: of the job; None: that of the plan.
    """
    if merges_ssds and solution.costs.speeds.num_ssds > 1:
        solution = _with_one_ssd(solution)
    spec = replace(_spec_of(solution), stages=stages, ranks_of_boxes=ranks, box_names=names, box=box)
    spec = replace(spec, placement=_in_larger_chunks(solution, layout), host_memory_nbytes=None)
    if commit_every is not None:
        spec = replace(spec, placement=replace(spec.placement, commit_every=commit_every))
    context = make_core_context(spec, layout, solution.costs.speeds.num_ssds)
    context, work = _with_fewer_slots(context, work_of(solution))
    # Slots have the size of the widest micro-batches; the transfers have that of the mean one.
    work = _of_mean_size(work, solution.costs.job.model.size_share)
    rates = rates_of(solution.costs.speeds, solution.costs.job.num_optimizers, num_cores=num_cores)
    return SimulatedBox(context=context, rates=rates, work=work)


def rates_of(speeds: Speeds, num_optimizers: int, *, num_cores: int) -> Rates:
    """Converts a machine's rates for the simulator. On a CPU, rates are those of all cores."""
    return Rates(
        h2d_bytes=speeds.h2d_bytes,
        d2h_bytes=speeds.d2h_bytes,
        duplex_share=speeds.duplex_share,
        host_memory_bytes=speeds.host_memory_bytes,
        ssd_read_bytes=(speeds.ssd_read_bytes,) * speeds.num_ssds,
        ssd_write_bytes=(speeds.ssd_write_bytes,) * speeds.num_ssds,
        optimizer_params=speeds.optimizer_params / (1 if speeds.shares_cores else num_optimizers),
        device_params=speeds.device_params,
        device_rounded_params=speeds.device_rounded_params,
        device_added_params=speeds.device_added_params,
        message_s=_MESSAGE_S,
        launches_ahead=not speeds.shares_cores,
        num_cores=num_cores if speeds.shares_cores else None,
        ssd_cpu_s_per_byte=speeds.ssd_cpu_s_per_byte,
    )


def work_of(solution: Solution) -> Work:
    """Returns the times of operations by the plan's costs, and the bytes that they swap and keep."""
    costs, model = solution.costs, solution.costs.job.model
    group_size, head = costs.group_size, len(model.layers) + 1
    embedding_s = costs.compute_s(model.embedding)
    seconds = {
        (Phase.FORWARD, 0): group_size * embedding_s[0],
        (Phase.BACKWARD, 0): group_size * embedding_s[1],
        (Phase.HEAD, head): group_size * sum(costs.compute_s(model.head)),
    }
    swapped, held = {}, {}
    ways = {layer: {way.choice: way for way in ways_of_layer(layer)} for layer in model.blocks_of_layers}
    for block in model.own_layers:
        layer, choice = model.layers[block - 1], solution.placement.activations[block - 1]
        way = ways[layer][choice]
        seconds[(Phase.FORWARD, block)] = group_size * costs.compute_s(layer)[0]
        seconds[(Phase.BACKWARD, block)] = group_size * costs.backward_s(layer, way)
        held[block] = way.held_nbytes
        if choice.swaps:
            swapped[block] = way.out_nbytes
    own = [block for block in range(head + 1) if model.is_own(block)]
    return Work(
        compute_s=seconds,
        swapped_nbytes=swapped,
        held_nbytes=held,
        peak_nbytes={block: model.blocks[block].peak_nbytes for block in own},
        norms_s={block: costs.norms_s(block) for block in own},
        crossing_nbytes=costs.job.crossings.microbatch_nbytes,
        head_slices=costs.job.num_head_slices,
    )


def _of_mean_size(work: Work, share: float) -> Work:
    """Returns the work with swapped bytes, and those that pass to other boxes, multiplied by `share`."""
    swapped = {block: [max(1, int(share * nbytes)) for nbytes in out] for block, out in work.swapped_nbytes.items()}
    return replace(work, swapped_nbytes=swapped, crossing_nbytes=int(share * work.crossing_nbytes))


def _with_one_ssd(solution: Solution) -> Solution:
    """Returns the plan for a machine with one SSD that is as fast as all together, with its slots for states."""
    speeds, depths = solution.costs.speeds, solution.placement.depths
    share = _busy_share(solution)
    merged = replace(
        speeds,
        num_ssds=1,
        ssd_read_bytes=share * speeds.read_bytes,
        ssd_write_bytes=share * speeds.write_bytes,
    )
    # The depth of states follows from the size of chunks.
    staged = max(1, -(-depths.staged_activations // speeds.num_ssds))
    placement = replace(solution.placement, depths=replace(depths, staged_activations=staged))
    return replace(solution, costs=replace(solution.costs, speeds=merged), placement=placement)


def _num_slots(solution: Solution) -> float:
    """Returns the number of chunks whose states may be on their way from and to the SSDs; infinite if none is there."""
    slots = [pool.num_slots for pool in solution.plan.states if pool.num_slots]
    return sum(max(1, number - 1) for number in slots) if slots else math.inf


def _busy_share(solution: Solution) -> float:
    """Returns the share of their rate at which several SSDs work together.

    With few slots for states, some have nothing to do while the chunks in the slots are on others. Params and
    activations have slots of their own. The numbers are those of simulations with all SSDs and chunks of the real size
    (decision 62). The slot of the chunk that is updated counts half, because most of the time none is.
    """
    seconds, num_ssds, num_slots = solution.seconds, solution.costs.speeds.num_ssds, _num_slots(solution)
    idle = _IDLE_WITH_ONE_SLOT * math.pow(max(1.0, num_slots / num_ssds), -_FEWER_IDLE)
    of_states = min(1.0, (num_slots + 0.5) / num_ssds) * (1 - idle)
    update_s, passes_s = seconds[Part.SSD_UPDATE], seconds[Part.SSD_FORWARD] + seconds[Part.SSD_BACKWARD]
    return (update_s + passes_s) / (update_s / of_states + passes_s) if update_s else 1.0


def may_merge_ssds(layout: ModelLayout, plans: Sequence[Solution]) -> bool:
    """Returns whether a job with the SSDs of each box merged into one is simulated well, and in less time.

    Its SSDs need a slot for states each, else they wait for each other. With as many chunks it takes as long, and a
    block may have fewer chunks than there are SSDs. But where chunks must be enlarged much, SSDs that are not merged
    would have none in their slots.
    """
    apart, merged = (_enlargement(layout, plans, merges_ssds=merges) for merges in (False, True))
    least = _least_enlargement(layout)
    if least > max(1.0, apart):
        return True
    return merged > max(1.0, apart) and all(_num_slots(plan) >= plan.costs.speeds.num_ssds for plan in plans)


def in_fewer_chunks(layout: ModelLayout, plans: Sequence[Solution], *, merges_ssds: bool) -> ModelLayout:
    """Returns the layout with larger chunks, of which as many bytes are in flight in each plan as of the real ones.

    A typical block has a whole number of them, so that the SSDs share it evenly.
    """
    factor = max(1.0, _enlargement(layout, plans, merges_ssds=merges_ssds), _least_enlargement(layout))
    typical = _typical_numel(layout)
    number = max(1, round(-(-typical // layout.chunk_numel) / factor))
    granules = -(-typical // (number * CHUNK_GRANULE))
    return replace(layout, chunk_numel=max(layout.chunk_numel, granules * CHUNK_GRANULE))


def _enlargement(layout: ModelLayout, plans: Sequence[Solution], *, merges_ssds: bool) -> float:
    """Returns the factor by which chunks may be larger: blocks and slots then still have enough."""
    factor = -(-_typical_numel(layout) // layout.chunk_numel) / _CHUNKS_OF_BLOCK
    for plan in plans:
        num_ssds = 1 if merges_ssds else plan.costs.speeds.num_ssds
        factor = min(factor, _num_slots(plan) / (_SLOTS_OF_SSD * num_ssds))
    return factor


def _least_enlargement(layout: ModelLayout) -> float:
    """Returns the factor by which chunks must be larger, else there are too many."""
    return sum(block.numel for block in layout.blocks) / (_MAX_CHUNKS * layout.chunk_numel)


def _typical_numel(layout: ModelLayout) -> int:
    numels = sorted(block.numel for block in layout.blocks)
    return numels[len(numels) // 2]


def _in_larger_chunks(solution: Solution, layout: ModelLayout) -> Placement:
    """Fixes all choices that follow from the budget, because larger chunks would change them.

    Queues have room for as many bytes. A tied embedding is simulated as a whole block. What it moves more in pieces is
    in the plan's bound only.
    """
    plan, placement = solution.plan, solution.placement
    cached_nbytes = plan.num_cached_params * plan.params.slot_nbytes
    num_host_grad_blocks = min(plan.spilled_blocks, default=None)  # those before it keep theirs in host memory
    factor = layout.chunk_numel / solution.costs.job.model.chunk_numel
    depths = replace(
        placement.depths,
        params=max(FETCH_DEPTH, round(placement.depths.params / factor)),
        states=max(MIN_STATE_DEPTH, round((plan.states[0].num_slots - 1) / factor) + 1),
    )
    return replace(
        placement,
        streams_ends=placement.streams_ends and not solution.costs.tied_in_pieces,
        num_cached_params=cached_nbytes // (layout.chunk_numel * solution.costs.job.param_itemsize),
        num_host_grad_blocks=num_host_grad_blocks,
        num_passing_blocks=None if plan.spilled_blocks else placement.num_passing_blocks,
        depths=depths,
    )


def _with_fewer_slots(context: CoreContext, work: Work) -> tuple[CoreContext, Work]:
    """Enlarges the slots of swapped activations. Keeps the number of staged parts and the share on the SSDs.

    A slot may then hold a whole tensor, and goes to one SSD. So all tensors of a layer get the same size: else large
    ones could go to some SSDs, and small ones to others.
    """
    plan, pool = context.plan, context.plan.activations
    number = plan.group_size * context.num_groups_in_flight
    factor = number * sum(map(sum, work.swapped_nbytes.values())) // (_MAX_ACTIVATION_SLOTS * pool.slot_nbytes)
    if factor <= 1:
        return context, work
    slot_nbytes = factor * pool.slot_nbytes
    # A layer swaps nothing if all tensors of its choice are too small for it.
    swapped = {
        block: [-(-sum(each) // len(each))] * len(each) if each else [] for block, each in work.swapped_nbytes.items()
    }
    needed = number * sum(-(-nbytes // slot_nbytes) for of_layer in swapped.values() for nbytes in of_layer)
    share = plan.num_ssd_activations / (plan.num_host_activations + plan.num_ssd_activations)
    num_ssd = math.ceil(needed * share)
    num_staged = plan.num_staged_activations // slots_of_part(plan.num_staged_activations, max(1, len(context.ssds)))
    activations = replace(pool, slot_nbytes=slot_nbytes, num_slots=needed - num_ssd + num_staged)
    changed = replace(plan, activations=activations, num_ssd_activations=num_ssd, num_staged_activations=num_staged)
    return replace(context, plan=changed), replace(work, swapped_nbytes=swapped)


def _in_larger_parts(solution: Solution) -> int | None:
    """Returns the cut of matrices, in parts so large that no layer has many pieces."""
    job = solution.costs.job
    if job.cut is None:
        return None
    most = max((layer.numel for layer in job.model.layers), default=0) // _MAX_PIECES
    if solution.costs.streams_ends:
        # Embedding and head must not have so few that these stay in the buffers, unless they do.
        most = min(
            most, *((job.model.blocks[block].numel - 1) // NUM_PIECE_BUFFERS for block in solution.costs.own_ends)
        )
    return max(job.cut, most)


def _spec_of(solution: Solution) -> JobCore:
    """Returns the planned job, with few steps and without checkpoints."""
    job = solution.costs.job
    training = replace(
        job.training,
        total_steps=_NUM_STEPS,
        update_order=job.update_order,
        clip_norm=None,  # no gradient has a norm; the update order includes the effect of clipping
        cut_matrices=_in_larger_parts(solution),
        checkpoint_every=None,
    )
    return JobCore(
        job=JobId("planned"),
        training=training,
        num_ranks=job.num_ranks,
        num_cpu_optimizers=job.num_optimizers,
        host_memory_nbytes=solution.plan.arena_nbytes,
        deadline_s=1.0,
        placement=solution.placement,
    )
