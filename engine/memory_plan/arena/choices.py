"""The sizes that the budget decides, from the fastest to the smallest."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from windlass.engine.memory_plan import MIN_PASSING_BLOCKS, MIN_STATE_DEPTH, ModelSize, Placement
from windlass.engine.memory_plan.arena.streaming import streamed_blocks

# Default number of typical blocks whose params stay cached in host memory between uses.
CACHED_BLOCKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The sizes that the budget decides."""

    depth: int  # chunks at an optimizer
    num_cached: int  # cached chunks of params
    num_host_grad_blocks: int | None  # None: gradients are not kept
    num_held_blocks: int = 2  # streamed blocks whose params are in host memory at once
    num_passing_blocks: int = MIN_PASSING_BLOCKS  # typical blocks whose gradients fit, if gradients are not kept


def choices(model: ModelSize, placement: Placement, *, keep_grads: bool, is_naive: bool) -> Iterator[Choice]:
    """Yields choices from the fastest to the smallest.

    First fewer gradients may wait for their update. Then no params are cached, then buffers shrink, then gradients
    spill.
    """
    num_blocks = len(model.blocks)
    kept = placement.num_host_grad_blocks if placement.num_host_grad_blocks is not None else num_blocks
    deepest = placement.depths.states
    depths = (1,) if is_naive else range(deepest, min(deepest, MIN_STATE_DEPTH) - 1, -1)
    requested_cached, total = placement.num_cached_params, num_on_ssds(model, placement)
    wanted = (
        requested_cached if requested_cached is not None else 0 if is_naive else CACHED_BLOCKS * model.typical_chunks
    )
    has_room = keep_grads or placement.num_host_grad_blocks is not None
    choice = Choice(depth=depths[0], num_cached=min(wanted, total), num_host_grad_blocks=kept if has_room else None)
    if placement.num_passing_blocks is not None:
        choice = replace(choice, num_passing_blocks=placement.num_passing_blocks)
    elif not has_room:
        for num_passing in range(most_passing_blocks(len(model.own_blocks)), MIN_PASSING_BLOCKS, -1):
            yield replace(choice, num_passing_blocks=num_passing)
    yield choice
    choice = replace(choice, num_cached=min(requested_cached or 0, total))
    for depth in depths:
        choice = replace(choice, depth=depth)
        yield choice
    if streamed_blocks(model, placement):
        choice = replace(choice, num_held_blocks=1)
        yield choice
    if placement.num_host_grad_blocks is None and may_spill(placement, keep_grads=keep_grads):
        for kept in range(num_blocks - 1, -1, -1):
            yield replace(choice, num_host_grad_blocks=kept)


def num_on_ssds(model: ModelSize, placement: Placement) -> int:
    """Returns the number of chunks whose states are on the SSDs."""
    in_memory = {*placement.host_blocks, *placement.device_blocks}
    return model.total_chunks - sum(map(model.num_chunks, in_memory))


def most_passing_blocks(num_blocks: int) -> int:
    """Returns the number of typical blocks whose gradients may wait for their update. More would not be faster.

    During the next forward pass no gradients arrive, so the waiting ones keep the optimizers busy. A forward pass takes
    at most a third of a step's compute. If updates take as long as the compute, a third of the blocks is enough. If
    they take longer, fewer are enough; if they take less, updates are no bottleneck. The additional blocks are for
    gradients in flight and in the update.
    """
    return -(-num_blocks // 3) + MIN_PASSING_BLOCKS


def may_spill(placement: Placement, *, keep_grads: bool) -> bool:
    """Checks whether gradients may spill to the SSDs.

    A spilled gradient is stored in the place of its chunk's next states, so that place must be free.
    """
    return (
        keep_grads and not placement.host_blocks and not placement.device_blocks and placement.commit_every in (None, 1)
    )
