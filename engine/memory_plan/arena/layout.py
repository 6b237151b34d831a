"""Makes a job's plan: finds the sizes that fit the budget, and lays out the arena's pools."""

import functools
from dataclasses import replace

from windlass.amounts import bytes_text, describe_largest, least_gib
from windlass.engine.lanes import LaneDivision
from windlass.engine.memory_plan import (
    ACTIVATION_SLOT_NBYTES,
    COMMIT_EVERY,
    NO_CROSSINGS,
    PARTIAL_GRAD_ITEMSIZE,
    TRANSIT_DEPTH,
    Crossings,
    ModelSize,
    Placement,
    Plan,
    PlanError,
    Pool,
)
from windlass.engine.memory_plan.arena.choices import Choice, choices, num_on_ssds
from windlass.engine.memory_plan.arena.placement_checks import check_placement, check_ranks
from windlass.engine.memory_plan.arena.slot_counts import (
    num_grad_slots,
    num_held_slots,
    num_partial_grads,
    num_running_sums,
)
from windlass.engine.memory_plan.arena.streaming import (
    fp32_in_pieces,
    overlaid_blocks,
    streamed_blocks,
    tied_in_pieces,
)

# Pools of slots between a box and each neighbour: for what it sends, and for what it receives. Each has room for a
# group of micro-batches. With less, a box that computes groups ahead would wait for the neighbour's compute.
_NUM_CROSSING_POOLS = 2
_CROSSING_UNIT_NBYTES = 4096  # slots of an arena are multiples of it


def make_plan(
    model: ModelSize,
    *,
    num_optimizers: int,
    grad_itemsize: int,
    keep_grads: bool,
    host_memory_nbytes: int | None,
    num_microbatches: int = 1,
    is_sliced: bool = False,
    num_lanes: int = 1,
    num_ranks: int = 1,
    free_nbytes: int | None = None,
    is_naive: bool = False,
    placement: Placement | None = None,
    crossings: Crossings = NO_CROSSINGS,
) -> Plan:
    """Makes the plan of a job: the fastest arena that fits the budget.

    Args:
        model: the sizes of the model.
        num_optimizers: the number of optimizer actors.
        grad_itemsize: bytes of an element of a gradient in host memory.
        keep_grads: the first update needs all gradients.
        host_memory_nbytes: the budget; its unused rest caches params. None: no budget.
        num_microbatches: the micro-batches of a step.
        is_sliced: the head goes over a micro-batch in several slices.
        num_lanes: the lanes of a step's micro-batches.
        num_ranks: the number of GPU workers.
        free_nbytes: the limit if there is no budget; the plan uses only as much of it as it needs.
        is_naive: an optimizer has only one chunk at a time.
        placement: the places of states and activations.
        crossings: what passes between this box and others.

    Raises:
        PlanError: the budget is below the minimum for the job, or the placement is impossible.
    """
    placement = placement or Placement()
    limit_nbytes = free_nbytes if host_memory_nbytes is None else host_memory_nbytes
    check_placement(model, placement, keep_grads)
    if (
        placement.streams_ends
        and model.shared_blocks
        and not may_stream_tied(model, num_lanes=num_lanes, num_ranks=num_ranks)
    ):
        raise PlanError(
            "streams_ends is set, and blocks share params: these come to the device in pieces only where they are "
            "those of the embedding and the head, with one lane, one GPU and one box; leave streams_ends out"
        )
    if placement.streams_ends and crossings.num_lent_chunks:
        raise PlanError(
            "streams_ends is set, and embedding and head share params on different boxes: these do not come to the "
            "device in pieces; leave streams_ends out"
        )
    check_ranks(placement, num_ranks, num_microbatches)
    lanes = LaneDivision(num_lanes, num_microbatches)
    group_size = _group_size(placement, lanes, num_ranks)
    if placement.streams_grads and lanes.num_open_lanes(group_size):
        raise PlanError(
            f"streams_grads is set, and groups of {group_size} of {num_microbatches} micro-batches end inside of the "
            f"{num_lanes} lanes: gradients leave the device in pieces only where groups are whole lanes; choose "
            f"group_size={lanes.smallest_uncut_group}, or leave streams_grads out"
        )
    lay_out = functools.partial(
        _lay_out, model, placement, num_optimizers, grad_itemsize, lanes, num_ranks, crossings, is_sliced=is_sliced
    )
    for choice in choices(model, placement, keep_grads=keep_grads, is_naive=is_naive):
        plan = lay_out(choice)
        if limit_nbytes is None or plan.arena_nbytes <= limit_nbytes:
            if host_memory_nbytes is None or placement.num_cached_params is not None or is_naive:
                return plan
            num_free = (host_memory_nbytes - plan.arena_nbytes) // plan.params.slot_nbytes
            choice = replace(choice, num_cached=min(choice.num_cached + num_free, num_on_ssds(model, placement)))
            return lay_out(choice)
    assert limit_nbytes is not None, "without a limit the first choice fits"
    raise _too_little_host_memory(plan, limit_nbytes, is_budget=host_memory_nbytes is not None)


def may_stream_tied(model: ModelSize, *, num_lanes: int, num_ranks: int) -> bool:
    """Checks whether shared params may come in pieces: the head alone uses the embedding's; one lane, GPU and box."""
    is_tied_head = model.shared_blocks == (0,) and 0 in model.shared[-1]
    return is_tied_head and model.own is None and num_lanes == 1 and num_ranks == 1


def _too_little_host_memory(plan: Plan, limit_nbytes: int, *, is_budget: bool) -> PlanError:
    """Returns the error that no plan fits. `plan`: the smallest plan."""
    parts = {
        "params": plan.params.nbytes,
        "gradients": plan.grads.nbytes
        + plan.partial_grads.nbytes
        + plan.open_lanes.nbytes
        + plan.num_ranks * plan.running_sums.nbytes,
        "states at the optimizers": sum(pool.nbytes for pool in plan.states),
        "resident states": plan.host_states.nbytes,
        "states on their way to or from the device": plan.transit.nbytes,
        "activations": plan.num_ranks * plan.activations.nbytes,
        "hidden states from and to other boxes": plan.num_ranks * plan.crossings.nbytes,
        "shared params from and to other boxes": plan.shared_params.nbytes + plan.shared_sums.nbytes,
    }
    takes = (
        f"the job needs {bytes_text(plan.arena_nbytes)} of host memory for its buffers "
        f"({describe_largest(parts)}), {bytes_text(plan.arena_nbytes - limit_nbytes)} more than "
    )
    if is_budget:
        least = least_gib(plan.arena_nbytes)
        return PlanError(
            f"{takes}its budget of {bytes_text(limit_nbytes)}; set host_memory_gib, in the job's budgets and in the "
            f"settings, to at least {least}",
            param="windlass.budgets.host_memory_gib",
        )
    spare_text = bytes_text(max(0, limit_nbytes))
    return PlanError(f"{takes}the {spare_text} that the machine has to spare; close other programs, or stop other jobs")


def _group_size(placement: Placement, lanes: LaneDivision, num_ranks: int) -> int:
    """Returns the micro-batches of a group.

    As many GPU workers as possible compute a group. The last ones may have none: 4 micro-batches make 2 groups for 3.
    """
    largest_group = -(-lanes.num_microbatches // num_ranks)
    return min(placement.group_size or largest_group, largest_group)


def _lay_out(
    model: ModelSize,
    placement: Placement,
    num_optimizers: int,
    grad_itemsize: int,
    lanes: LaneDivision,
    num_ranks: int,
    crossings: Crossings,
    choice: Choice,
    *,
    is_sliced: bool,
) -> Plan:
    chunk, total = model.chunk_numel, model.total_chunks
    in_fp32 = fp32_in_pieces(model, placement, grad_itemsize=grad_itemsize, is_sliced=is_sliced)
    num_kept = choice.num_host_grad_blocks
    spilled = () if num_kept is None else tuple(filter(model.is_own, model.blocks[num_kept:]))
    in_memory = placement.host_blocks or placement.device_blocks
    num_fetched = min(placement.depths.params, total)
    # In the backward pass each rank is a block behind the one before. Params stay until all ranks have copied them.
    num_skewed = (num_ranks - 1) * model.typical_chunks
    num_params = num_fetched + num_skewed + num_held_slots(model, placement, choice) + choice.num_cached
    params = Pool(offset=0, slot_nbytes=chunk * model.param_itemsize, num_slots=num_params)
    grads = Pool(
        offset=params.nbytes,
        slot_nbytes=chunk * grad_itemsize,
        num_slots=num_grad_slots(model, placement, choice),
    )
    state_nbytes = chunk * model.state_itemsize
    states = []
    offset = grads.offset + grads.nbytes
    for _ in range(num_optimizers):
        slot_nbytes = state_nbytes + (grads.slot_nbytes if spilled else 0)
        pool = Pool(offset=offset, slot_nbytes=slot_nbytes, num_slots=min(choice.depth, total))
        states.append(pool)
        offset += pool.nbytes
    num_host = sum(model.num_chunks(block) for block in placement.host_blocks)
    host_states = Pool(offset=offset, slot_nbytes=state_nbytes, num_slots=num_host)
    transit = Pool(
        offset=offset + host_states.nbytes,
        slot_nbytes=state_nbytes,
        num_slots=TRANSIT_DEPTH if placement.device_blocks else 0,
    )
    group_size = _group_size(placement, lanes, num_ranks)
    num_groups = -(-lanes.num_microbatches // group_size)
    num_passed = crossings.num_passed_chunks(num_ranks)
    partial_grads = Pool(
        offset=transit.offset + transit.nbytes,
        slot_nbytes=chunk * PARTIAL_GRAD_ITEMSIZE,
        num_slots=num_partial_grads(model, placement, num_groups, num_ranks, lanes, num_passed),
    )
    open_lanes = Pool(
        offset=partial_grads.offset + partial_grads.nbytes,
        slot_nbytes=partial_grads.slot_nbytes,
        num_slots=partial_grads.num_slots if lanes.num_open_lanes(group_size) else 0,
    )
    running_sums = Pool(
        offset=open_lanes.offset + open_lanes.nbytes,
        slot_nbytes=partial_grads.slot_nbytes,
        num_slots=num_running_sums(model, placement, lanes, group_size, in_fp32),
    )
    num_ssd_activations = -(-placement.ssd_activation_nbytes // ACTIVATION_SLOT_NBYTES)
    num_staged = min(placement.depths.staged_activations, num_ssd_activations)
    activations = Pool(
        offset=running_sums.offset + num_ranks * running_sums.nbytes,
        slot_nbytes=ACTIVATION_SLOT_NBYTES,
        num_slots=-(-placement.host_activation_nbytes // ACTIVATION_SLOT_NBYTES) + num_staged,
    )
    hidden_states = Pool(
        offset=activations.offset + num_ranks * activations.nbytes,
        slot_nbytes=max(1, -(-crossings.microbatch_nbytes // _CROSSING_UNIT_NBYTES)) * _CROSSING_UNIT_NBYTES,
        num_slots=crossings.num_neighbours * _NUM_CROSSING_POOLS * group_size,
    )
    # What a box sends is a whole block, because its compute must not wait for the other box. What it receives goes on
    # to the device at once.
    num_lent, num_borrowed = crossings.num_lent_chunks, crossings.num_borrowed_chunks
    shared_params = Pool(
        offset=hidden_states.offset + num_ranks * hidden_states.nbytes,
        slot_nbytes=chunk * model.param_itemsize,
        num_slots=num_lent + min(num_borrowed, TRANSIT_DEPTH),
    )
    shared_sums = Pool(
        offset=shared_params.offset + shared_params.nbytes,
        slot_nbytes=chunk * PARTIAL_GRAD_ITEMSIZE,
        num_slots=num_borrowed + min(num_lent, TRANSIT_DEPTH),
    )
    streamed, overlaid = streamed_blocks(model, placement), overlaid_blocks(model, placement)
    return Plan(
        params=params,
        grads=grads,
        states=tuple(states),
        host_states=host_states,
        transit=transit,
        partial_grads=partial_grads,
        open_lanes=open_lanes,
        running_sums=running_sums,
        num_cached_params=choice.num_cached,
        host_blocks=tuple(sorted(placement.host_blocks)),
        device_blocks=tuple(sorted(placement.device_blocks)),
        streamed_blocks=streamed,
        spilled_blocks=spilled,
        commit_every=placement.commit_every or (COMMIT_EVERY if in_memory else 1),
        group_size=group_size,
        num_groups=num_groups,
        num_ranks=num_ranks,
        ssd_nbytes=2 * total * state_nbytes,
        layer_activations=placement.activations,
        activations=activations,
        num_staged_activations=num_staged,
        num_ssd_activations=num_ssd_activations,
        num_grad_buffers=placement.num_grad_buffers,
        grad_streamed_blocks=streamed if placement.streams_grads else (),
        grad_overlaid_blocks=overlaid,
        ends_share_params=len(overlaid) == 2 and not model.shared_blocks,  # the head uses a tied embedding
        streams_ends=placement.streams_ends,
        tied_in_pieces=tied_in_pieces(model, placement),
        fp32_in_pieces=in_fp32,
        num_fetched_params=num_fetched,
        leaving_nbytes=placement.depths.leaving_nbytes,
        crossings=hidden_states,
        shared_params=shared_params,
        shared_sums=shared_sums,
    )
