"""The bytes of the device's buffers and of its largest operation."""

from collections import Counter
from dataclasses import replace

from windlass.engine.memory_plan import (
    NUM_PIECE_BUFFERS,
    grad_buffers,
    grad_overlay_of_job,
    lane_buffers,
    overlay_nbytes,
    param_buffer_numels,
    param_buffers,
)
from windlass.planner.solver.plan_choices import PlanChoices, known_or_new


def always_on_device(plan: PlanChoices) -> float:
    """Returns the bytes of the device's buffers and of the largest operation, as far as the formula knows them."""
    model, cut = plan.job.model, plan.job.cut
    piece = max((model.layers[block - 1].largest_param_numel for block in plan.streamed_layers), default=0)
    if plan.streams_ends:
        piece = max(piece, model.embedding.numel, model.head.numel)
    peak = max(block.peak_nbytes for block in model.blocks)
    return _buffers_nbytes(plan, piece=piece if cut is None else min(piece, cut)) + peak


def least_on_device_if_cut(plan: PlanChoices) -> float:
    """Returns a lower bound of the same for all cuts of matrices: without pieces and operations."""
    least = replace(plan, streams_ends=True) if plan.may_stream_ends else plan
    return _buffers_nbytes(least, piece=0)


def _buffers_nbytes(plan: PlanChoices, *, piece: int) -> float:
    """Returns the bytes of the device's buffers. `piece`: elements of the largest piece."""
    job, model = plan.job, plan.job.model
    numels = [block.numel for block in model.blocks]
    resident = plan.streamed_blocks  # streamed layers have no buffers of their own
    params = known_or_new(job.known, ("params", resident, plan.ends_share_params), lambda: _params(plan, numels))
    num_waiting = plan.num_grad_buffers + (1 if plan.num_groups > 1 else 0)
    elsewhere = {*resident, *plan.overlaid_blocks} if plan.is_in_pieces else ()
    whole = {block: numel for block, numel in enumerate(numels) if block not in elsewhere}
    grads = grad_buffers(whole, resident=(), num_waiting=num_waiting)
    grads += lane_buffers(numels, model.shared, grads, lanes=job.lanes, group_size=plan.group_size, elsewhere=elsewhere)
    param_numel = sum(numel * count for numel, count in params.items()) + NUM_PIECE_BUFFERS * piece
    grad_numel = sum(numel * count for numel, count in grads.items())
    overlay = _overlay_nbytes(plan, piece) if plan.is_in_pieces else 0
    return param_numel * job.param_itemsize + grad_numel * job.grad_itemsize + overlay


def _params(plan: PlanChoices, numels: list[int]) -> Counter[int]:
    """Counts the buffers for params by number of elements, without those for pieces."""
    of_params = param_buffer_numels(numels, ends_share=plan.ends_share_params)
    return param_buffers(
        of_params, plan.job.model.shared, resident=plan.streamed_blocks, num_ahead=plan.job.num_prefetched
    )


def _overlay_nbytes(plan: PlanChoices, piece: int) -> int:
    """Returns the bytes of the memory that gradients in pieces use. `piece`: elements of the largest one."""
    job, layer = plan.job, plan.streamed_layers[0]
    users = grad_overlay_of_job(
        [
            piece if block in (layer, *plan.fp32_in_pieces) else profile.numel
            for block, profile in enumerate(job.model.blocks)
        ],
        {layer: (0, piece), **dict.fromkeys(plan.fp32_in_pieces, (0, piece))},
        plan.overlaid_blocks,
        itemsize=job.grad_itemsize,
        summed_in_fp32=job.model.shared_blocks,
        is_summed=job.num_microbatches > 1,
        fp32_in_pieces=plan.fp32_in_pieces,
        has_lanes=job.lanes.num_lanes > 1,
    )
    return overlay_nbytes([numel * itemsize for numel, itemsize in buffers] for buffers in users.values())
