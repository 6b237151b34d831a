"""Counts the slots of each pool of the arena."""

from collections.abc import Collection

from windlass.engine.lanes import LaneDivision
from windlass.engine.memory_plan import ModelSize, Placement
from windlass.engine.memory_plan.arena.choices import Choice
from windlass.engine.memory_plan.arena.streaming import overlaid_blocks, streamed_blocks, tied_in_pieces


def num_grad_slots(model: ModelSize, placement: Placement, choice: Choice) -> int:
    """Returns the slots for gradients: all kept ones, and room for some typical blocks or for the largest other one."""
    num_host_grad_blocks = choice.num_host_grad_blocks
    resident = frozenset(placement.device_blocks)
    offloaded = [block for block in model.blocks if block not in resident]
    if num_host_grad_blocks is None:
        kept, passing = [], offloaded
    else:
        kept = [block for block in offloaded if block < num_host_grad_blocks]
        passing = [block for block in offloaded if block >= num_host_grad_blocks]
    largest = max((model.num_chunks(block) for block in passing), default=0)
    wanted = min(choice.num_passing_blocks * model.typical_chunks, sum(map(model.num_chunks, passing)))
    num_passing = max(largest, wanted)
    num_kept = sum(model.num_chunks(block) for block in kept)
    return max(1, num_kept + num_passing)


def num_held_slots(model: ModelSize, placement: Placement, choice: Choice) -> int:
    """Returns the slots for params of streamed blocks, which are copied to the device several times while in use.

    The GPU worker requests chunks in the order of operations. So a block without slots of its own waits only for
    earlier blocks, and there is no deadlock.
    """
    streamed = map(model.num_chunks, set(streamed_blocks(model, placement)).difference(placement.host_blocks))
    return sum(sorted(streamed)[-choice.num_held_blocks :])


def num_partial_grads(
    model: ModelSize,
    placement: Placement,
    num_groups: int,
    num_ranks: int,
    lanes: LaneDivision,
    num_passed: int,
) -> int:
    """Returns the slots for sums that groups pass on. Sums of device-resident blocks stay on the device and need none.

    A sum that waits for a group which the same GPU worker computes later needs slots of its own. One that another GPU
    worker takes at once does not: each passes on those of two typical blocks, or of the operation with most. It takes
    the total of lanes that lies in the memory of pieces at its operation's end (`SumBesideTotal`). Meanwhile this one
    begins a layer. `num_passed`: see `Crossings.num_passed_chunks`.
    """
    if num_groups == 1:
        # The head's sum waits for the embedding's operation, and that of the embedding between its micro-batches.
        num_sums = 1 + (lanes.num_microbatches > 1)
        return num_sums * sum(map(model.num_chunks, tied_in_pieces(model, placement)))
    uses = (*model.blocks, *model.shared_blocks)
    num_chunks = [model.num_chunks(block) for block in uses if block not in placement.device_blocks]
    if num_groups > num_ranks:
        return sum(num_chunks) + num_passed
    most = max(map(model.num_chunks, model.blocks))
    if lanes.num_lanes > 1 and (ends := overlaid_blocks(model, placement)):
        layer = max(map(model.num_chunks, placement.streamed_blocks))
        most = max(most, max(map(model.num_chunks, ends)) + layer)
    num_shared = sum(map(model.num_chunks, model.shared_blocks)) + num_passed
    return (num_groups - 1) * max(2 * model.typical_chunks, most + num_shared)


def num_running_sums(
    model: ModelSize, placement: Placement, lanes: LaneDivision, group_size: int, in_fp32: Collection[int]
) -> int:
    """Returns the slots of one GPU worker in `Plan.running_sums`. `in_fp32`: see `Plan.fp32_in_pieces`."""
    if not placement.streams_grads:
        return 0
    if lanes.num_lanes == 1:  # with several, gradients leave in fp32
        return sum(model.num_chunks(block) for block in in_fp32 if block not in model.shared_blocks)
    blocks = streamed_blocks(model, placement)
    if not lanes.has_long_lane:
        # A lane's sum of the head waits between slices of a micro-batch, too. How many there are is not known here.
        blocks = tuple(block for block in blocks if block == model.blocks[-1])
    others = overlaid_blocks(model, placement) if lanes.most_lanes_in_group(group_size) > 1 else ()
    return max(map(model.num_chunks, (*blocks, *others)), default=0)
