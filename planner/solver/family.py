"""All kinds of plans of a job: the choices that the integer program leaves open, in every combination.

Two kinds that share a *base* differ only in buffers. Their programs have the same options, and nearly the same value.
The choices are the same on every machine, or more on a better one. So a better machine has the plans of a lesser one.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from windlass.engine.memory_plan import (
    LEAVING_ACTIVATION_NBYTES,
    MAX_GRAD_BUFFERS,
    MIN_PASSING_BLOCKS,
    MIN_STATE_DEPTH,
    QueueDepths,
    most_passing_blocks,
)
from windlass.planner.cost import Speeds
from windlass.planner.solver.depth_choice import depths_to_try
from windlass.planner.solver.planned_job import Limits, PlannedJob
from windlass.planner.solver.step_cost import StepCosts

# Maximum share of device memory for swapped activations that have not left the device yet.
_LEAVING_SHARE = 1 / 8
# The fewest elements of a part of a matrix. Other parts have so many times more, up to the largest matrix.
_LEAST_CUT, _CUT_STEP = 2**24, 4


def bases_of(job: PlannedJob, speeds: Speeds, limits: Limits) -> Iterator[StepCosts]:
    """Yields a base for each order of updates, group size and way to save memory. Those that save least come first."""
    for one in job.by_order:
        sizes = reversed(all_group_sizes(one))
        savers = itertools.product(_spills(one), _savers_of_device_memory())
        for (spills, (streams, streams_grads, num_grad_buffers)), size in itertools.product(savers, list(sizes)):
            if streams_grads and not may_stream_grads(one, size):
                continue
            base = StepCosts(
                job=one,
                speeds=speeds,
                limits=limits,
                group_size=size,
                spills=spills,
                streams=streams,
                streams_grads=streams_grads,
                num_grad_buffers=num_grad_buffers,
            )
            yield base
            if one.cut is not None and base.may_stream_ends:  # whole matrices would need larger pieces
                yield replace(base, streams_ends=True)


def cuts_of(largest_numel: int) -> tuple[int, ...]:
    """Returns the numbers of elements of a part of a matrix to try, the largest first.

    `largest_numel`: of the largest matrix. With more elements in a part, no matrix is cut.
    """
    cuts = [_LEAST_CUT]
    while cuts[0] * _CUT_STEP < largest_numel:
        cuts.insert(0, cuts[0] * _CUT_STEP)
    return tuple(cut for cut in cuts if cut < largest_numel)


def cut_bases_of(base: StepCosts) -> list[StepCosts]:
    """Returns a base whose matrices are whole with each cut that the planner may choose, the largest parts first.

    With and without embedding and head in pieces, as far as that is possible. Only matrices of layers that come in
    pieces take less memory so.
    """
    if not base.streamed_layers:
        return []
    ends = (False, True) if base.may_stream_ends else (False,)
    return [replace(base, job=job, streams_ends=streams) for job in base.job.by_cut for streams in ends]


def bases_at_the_border(job: PlannedJob, speeds: Speeds, limits: Limits) -> Iterator[StepCosts]:
    """Yields the bases that need least memory of any kind, those that save most first.

    Those that cut matrices come last. They have the smallest parts.
    """
    sizes = sizes_at_the_border(job)
    bases = [base for base in bases_of(job, speeds, limits) if base.group_size in sizes]
    yield from reversed(bases)
    for base in reversed(bases):
        if base.streams_grads or not may_stream_grads(base.job, base.group_size):
            yield from (cut for cut in cut_bases_of(base) if cut.job.cut == base.job.cuts[-1])


def kinds_of(base: StepCosts) -> Iterator[StepCosts]:
    """Yields the base with each size of its buffers, the largest first."""
    job, limits = base.job, base.limits
    leaving_nbytes = int(min(LEAVING_ACTIVATION_NBYTES, max(0.0, _LEAVING_SHARE * limits.device_nbytes)))
    depths = depths_to_try(base.speeds.num_ssds, num_optimizers=job.num_optimizers, leaving_nbytes=leaving_nbytes)
    passing: tuple[int | None, ...] = (None,) if job.keeps_grads else tuple(_numbers_passing(job))
    for queue_depths, overflows, number in itertools.product(depths, (True, False), passing):
        yield replace(base, depths=queue_depths, overflows=overflows, num_passing_blocks=number)


def smallest_of(base: StepCosts, *, overflows: bool = True) -> StepCosts:
    """Returns the base with the smallest buffers. If any of its plans fits, one of these does."""
    return replace(
        base,
        depths=QueueDepths(states=MIN_STATE_DEPTH, leaving_nbytes=0),
        overflows=overflows,
        num_passing_blocks=None if base.job.keeps_grads else MIN_PASSING_BLOCKS,
    )


def has_least_buffers(costs: StepCosts) -> bool:
    """Returns whether no kind with as much of its base in device memory has smaller buffers in host memory."""
    leaving_nbytes = costs.depths.leaving_nbytes
    depths = depths_to_try(
        costs.speeds.num_ssds, num_optimizers=costs.job.num_optimizers, leaving_nbytes=leaving_nbytes
    )
    least = [each for each in depths if each.leaving_nbytes == leaving_nbytes][-1]
    return costs.depths == least and costs.num_passing_blocks in (None, MIN_PASSING_BLOCKS)


def all_group_sizes(job: PlannedJob) -> list[int]:
    """Returns the sizes of groups to try."""
    if job.group_size is not None:
        return [job.group_size]
    return sorted({*group_sizes(job.largest_group), smallest_uncut_group(job)})


def group_sizes(num_microbatches: int) -> list[int]:
    """Returns the powers of two below the number of micro-batches, and that number."""
    sizes = [1]
    while sizes[-1] * 2 < num_microbatches:
        sizes.append(sizes[-1] * 2)
    return sizes if num_microbatches == 1 else [*sizes, num_microbatches]


def smallest_uncut_group(job: PlannedJob) -> int:
    """Returns the smallest group that ends with a lane, or the largest one."""
    return min(job.lanes.smallest_uncut_group, job.largest_group)


def sizes_at_the_border(job: PlannedJob) -> list[int]:
    """Returns the sizes of groups that need least of one tier: of device memory, of host memory, or of both."""
    if job.group_size is not None:
        return [job.group_size]
    return sorted({1, smallest_uncut_group(job), job.largest_group})


def _spills(job: PlannedJob) -> tuple[bool, ...]:
    """Returns the choices for moving kept gradients to the SSDs. The first one takes no time.

    With spilled gradients no states can be resident in host memory, but more activations can.
    """
    if not job.keeps_grads:
        return (False,)
    return (False, True) if job.spills is None else (job.spills,)


def _savers_of_device_memory() -> Iterator[tuple[bool, bool, int]]:
    """Yields whether layers, and their gradients, come in pieces, and the number of buffers for gradients.

    Beside gradients in pieces, a second buffer for whole ones saves no time: between the head and the embedding, all
    layers are computed.
    """
    yield from ((False, False, number) for number in (MAX_GRAD_BUFFERS, 1))
    yield from ((True, False, number) for number in (MAX_GRAD_BUFFERS, 1))
    yield True, True, 1


def may_stream_grads(job: PlannedJob, group_size: int) -> bool:
    """Checks whether there are streamed layers whose gradients may leave in pieces: groups must be whole lanes."""
    return bool(job.model.unshared_layers) and not job.lanes.num_open_lanes(group_size)


def _numbers_passing(job: PlannedJob) -> Iterator[int]:
    """Yields numbers of typical blocks whose gradients may wait for their update, the largest first."""
    number = most_passing_blocks(job.model.num_own_blocks)
    powers = (2**power for power in range(number.bit_length(), 0, -1))
    yield number
    yield from (power for power in powers if MIN_PASSING_BLOCKS <= power < number)
