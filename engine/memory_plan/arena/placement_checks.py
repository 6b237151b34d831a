"""Refuses placements that are impossible, whatever the budget is."""

from windlass.engine.memory_plan import MIN_PASSING_BLOCKS, ModelSize, Placement, PlanError
from windlass.engine.memory_plan.arena.choices import may_spill


def check_placement(model: ModelSize, placement: Placement, keep_grads: bool) -> None:
    """Raises PlanError if a placement contradicts the model or itself. `keep_grads`: see `make_plan`."""
    num_layers = len(model.blocks) - 2
    if placement.activations and len(placement.activations) != num_layers:
        raise PlanError(
            f"activations are given for {len(placement.activations)} layers; the model has {num_layers}, and each "
            "needs a choice"
        )
    if placement.group_size is not None and placement.group_size < 1:
        raise PlanError(f"group_size is {placement.group_size}; a group has at least 1 micro-batch, or leave it out")
    if placement.num_grad_buffers < 1:
        raise PlanError(
            f"num_grad_buffers is {placement.num_grad_buffers}; at least 1 block's gradient needs room on the device"
        )
    if placement.num_passing_blocks is not None and placement.num_passing_blocks < MIN_PASSING_BLOCKS:
        raise PlanError(
            f"num_passing_blocks is {placement.num_passing_blocks}; gradients of at least {MIN_PASSING_BLOCKS} blocks "
            "need room in host memory, because one arrives while another is updated"
        )
    room_nbytes = placement.host_activation_nbytes + placement.ssd_activation_nbytes
    if not room_nbytes and any(choice.swaps for choice in placement.activations):
        raise PlanError(
            "activations are to be swapped, and there is no room for them: give host_activation_nbytes or "
            "ssd_activation_nbytes"
        )
    in_memory = [*placement.host_blocks, *placement.device_blocks]
    if len(set(in_memory)) < len(in_memory) or not model.own_blocks.issuperset(in_memory):
        raise PlanError(
            f"host_blocks {placement.host_blocks} and device_blocks {placement.device_blocks} must name different "
            f"blocks of {min(filter(model.is_own, model.blocks))} to {max(filter(model.is_own, model.blocks))}"
        )
    streamed = set(placement.streamed_blocks)
    ends = model.blocks[0], model.blocks[-1]
    layers = model.own_blocks.difference(ends, placement.device_blocks, model.shared_blocks)
    if len(streamed) < len(placement.streamed_blocks) or not streamed <= layers:
        surplus = sorted(streamed - layers)
        raise PlanError(
            f"streamed_blocks {placement.streamed_blocks} must name layers, each once: not the embedding (0), the head "
            f"({len(model.blocks) - 1}), blocks resident on the device, nor those whose params others use as well; "
            f"{f'leave out {surplus}' if surplus else 'remove duplicates'}"
        )
    num_kept = placement.num_host_grad_blocks
    if num_kept is not None and num_kept < len(model.blocks) and not may_spill(placement, keep_grads=keep_grads):
        raise PlanError(
            f"num_host_grad_blocks is {num_kept} of {len(model.blocks)}: the others' gradients would go to the SSDs, "
            "but they do only where they are kept until all are known, every step is committed, and no states are "
            "resident in memory; leave it out"
        )


def check_ranks(placement: Placement, num_ranks: int, num_microbatches: int) -> None:
    """Raises PlanError if this number of GPU workers cannot compute the job."""
    if num_ranks > num_microbatches:
        raise PlanError(
            f"{num_ranks} GPUs have {num_microbatches} micro-batches a step, and each needs one at least: ask for "
            "fewer GPUs, or for more micro-batches",
            param="windlass.gpus",
        )
    if num_ranks > 1 and placement.device_blocks:
        raise PlanError(
            f"the states of blocks {sorted(placement.device_blocks)} cannot rest on a GPU, because the job has "
            f"{num_ranks} of them: leave out device_blocks"
        )
