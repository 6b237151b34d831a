"""The blocks that come to the device or leave it in pieces, and those that lie in the memory of these pieces."""

from windlass.engine.memory_plan import PARTIAL_GRAD_ITEMSIZE, ModelSize, Placement


def _ends(model: ModelSize, placement: Placement) -> tuple[int, ...]:
    """Returns the embedding and the head, if this box has them and their states are not on the device."""
    ends = (model.blocks[0], model.blocks[-1])
    return tuple(block for block in ends if model.is_own(block) and block not in placement.device_blocks)


def _streamed_ends(model: ModelSize, placement: Placement) -> tuple[int, ...]:
    """Returns those of embedding and head that come in pieces. A tied head has no matrix of its own."""
    ends = _ends(model, placement) if placement.streams_ends else ()
    return tuple(block for block in ends if not model.shared_blocks or block in model.shared_blocks)


def tied_in_pieces(model: ModelSize, placement: Placement) -> tuple[int, ...]:
    """See `Plan.tied_in_pieces`."""
    streamed = _streamed_ends(model, placement) if placement.streams_grads else ()
    return tuple(block for block in streamed if block in model.shared_blocks)


def fp32_in_pieces(model: ModelSize, placement: Placement, *, grad_itemsize: int, is_sliced: bool) -> tuple[int, ...]:
    """See `Plan.fp32_in_pieces`. `is_sliced`: the head goes over a micro-batch in several slices."""
    tied, head = tied_in_pieces(model, placement), model.blocks[-1]
    sums_slices = is_sliced and placement.streams_grads and head in _streamed_ends(model, placement)
    return (*tied, head) if sums_slices and grad_itemsize < PARTIAL_GRAD_ITEMSIZE else tied


def streamed_blocks(model: ModelSize, placement: Placement) -> tuple[int, ...]:
    """Returns the blocks whose params come in pieces; see `Plan.streamed_blocks`."""
    return tuple(sorted((*placement.streamed_blocks, *_streamed_ends(model, placement))))


def overlaid_blocks(model: ModelSize, placement: Placement) -> tuple[int, ...]:
    """Returns the blocks whose gradients lie in the memory of those in pieces; see `Plan.grad_overlaid_blocks`."""
    if not placement.streams_grads or not placement.streamed_blocks or placement.streams_ends:
        return ()
    return _ends(model, placement)
