"""Counts the buffers for params and gradients that a device needs, by size.

Two buffers of a size allow one to be filled during the computation with the other.
"""

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from windlass.engine.lanes import LaneDivision
from windlass.engine.memory_plan.param_slices import NORM_ROW_NUMEL, grad_piece_numels
from windlass.storage.ids import Formats

# Default number of blocks whose gradients may be on the device: one is summed while another is copied to the host. With
# only one, the next block's backward pass would wait for the copies.
MAX_GRAD_BUFFERS = 2
# Buffers in the same memory begin at multiples of this, as those of PyTorch's allocator do.
OVERLAY_ALIGNMENT_NBYTES = 512
# Elements at the start of a gradient that are rounded beside it: 8 KiB in 16 bits. All others are rounded in place.
ROUNDING_NUMEL = 2**12
# Elements of a 16-bit gradient that are added to fp32 sums at once on a CPU, which converts them first: 4 MiB.
ADDED_NUMEL = 2**20
_FP32_NBYTES = 4
# Elements of a total that are added to a lane's sum at once, and the number of buffers for them: one is filled while
# another is added. 64 MiB together.
_TOTAL_PART_NUMEL, _NUM_TOTAL_PARTS = 2**23, 2
# Chunks of a gradient in pieces that are gathered for their norms at once, at most. In the order of the backward pass
# these are one between two pieces, and one with the norms and biases. Pieces that come back for a norm need a third.
NUM_GATHERED_CHUNKS = 3


def param_buffers(
    block_numels: Sequence[int], shared: Sequence[Sequence[int]], *, resident: Collection[int], num_ahead: int
) -> Counter[int]:
    """Counts buffers by number of elements: enough for any `num_ahead` consecutive operations of a step.

    `block_numels`: the elements of each block's buffer (`param_buffer_numels`). `shared`: per block, the blocks whose
    params its operation reads. `resident` blocks have their params on the device.
    At the boundary of steps, groups of micro-batches or evaluations, the first params are needed once more and wait for
    a buffer.
    """
    copied = set(range(len(block_numels))).difference(resident)
    forward = [tuple(block_numels[block] for block in blocks if block in copied) for blocks in shared]
    operations = forward + forward[-2::-1]
    # Most layers are alike, so few windows differ.
    windows = dict.fromkeys(tuple(operations[start : start + num_ahead]) for start in range(len(operations)))
    most: Counter[int] = Counter()
    for window in windows:
        most |= Counter(itertools.chain.from_iterable(window))
    return most


def param_buffer_numels(block_numels: Sequence[int], *, ends_share: bool) -> list[int]:
    """Returns the elements of the buffer of each block's params. `ends_share`: see `Plan.ends_share_params`."""
    numels = list(block_numels)
    if ends_share:
        numels[0] = numels[-1] = max(numels[0], numels[-1])
    return numels


def grad_buffers(block_numels: Mapping[int, int], *, resident: Collection[int], num_waiting: int) -> Counter[int]:
    """Counts buffers by number of elements, for gradients of the given blocks that are on the device at once.

    All gradients of `resident` blocks stay there until their update, and at most `num_waiting` of the others.
    """
    offloaded = Counter(numel for block, numel in block_numels.items() if block not in resident)
    most = Counter({numel: min(num_waiting, number) for numel, number in offloaded.items()})
    return most + Counter(numel for block, numel in block_numels.items() if block in resident)


def grad_buffers_of_job(
    block_numels: Sequence[int],
    shared: Sequence[Sequence[int]],
    *,
    itemsize: int,
    summed_in_fp32: Collection[int],
    resident: Collection[int],
    num_groups: int,
    num_grad_buffers: int = MAX_GRAD_BUFFERS,
    elsewhere: Collection[int] = (),
    tied_in_pieces: Collection[int] = (),
    lanes: LaneDivision | None = None,
    group_size: int = 1,
) -> Counter[tuple[int, int]]:
    """Counts a job's gradient buffers by (number of elements, bytes of an element).

    They hold the sums for each use of a block, and the gradients in the format in which they leave the device.

    Args:
        block_numels: the elements of each block.
        shared: per block, the blocks whose params its operation reads; none if another box computes it.
        itemsize: bytes of an element of a gradient that leaves the device.
        summed_in_fp32: blocks whose gradients are summed in fp32 regardless of `itemsize`.
        resident: blocks whose states are on the device.
        num_groups: the groups of micro-batches of a step.
        num_grad_buffers: blocks whose gradients may be in flight to the host.
        elsewhere: blocks whose own gradients have other buffers (`grad_overlay_of_job`).
        tied_in_pieces: of these, those whose sums of other blocks' operations have, too.
        lanes: the lanes of a step; None if there is only one.
        group_size: the micro-batches of a group; it matters only with several lanes.
    """
    own = {block for block, blocks in enumerate(shared) if blocks}  # others are computed on other boxes
    elsewhere = frozenset(elsewhere)
    # One more buffer, because the next group's partial sum arrives while others are summed and copied out.
    num_waiting = num_grad_buffers + (1 if num_groups > 1 else 0)
    most: Counter[tuple[int, int]] = Counter()
    # A gradient that is always summed in fp32 is rounded in place if it leaves in another format. So it has no second
    # buffer, and 16-bit sums never take more memory than fp32 sums.
    wide = summed_in_fp32 if itemsize < _FP32_NBYTES else ()
    narrow = own.difference(wide)
    for element_nbytes, blocks in ((itemsize, narrow), (_FP32_NBYTES, wide)):
        numels = {block: block_numels[block] for block in blocks if block in own and block not in elsewhere}
        numbers = grad_buffers(numels, resident=resident, num_waiting=num_waiting)
        most |= Counter({(numel, element_nbytes): number for numel, number in numbers.items()})
    # The sum of a tied use keeps its buffer until the block's last use has run.
    tied = (block for blocks in shared for block in blocks[1:] if block not in tied_in_pieces)
    most.update((block_numels[block], _FP32_NBYTES) for block in tied)
    if lanes is not None and lanes.num_lanes > 1:  # then all sums are fp32
        totals = Counter({numel: number for (numel, _), number in most.items()})
        of_lanes = lane_buffers(block_numels, shared, totals, lanes=lanes, group_size=group_size, elsewhere=elsewhere)
        most.update({(numel, _FP32_NBYTES): number for numel, number in of_lanes.items()})
    return most


def grad_overlay_of_job(
    block_numels: Sequence[int],
    pieces: Mapping[int, Sequence[int]],
    blocks: Collection[int],
    *,
    itemsize: int,
    summed_in_fp32: Collection[int],
    is_summed: bool,
    fp32_in_pieces: Collection[int] = (),
    has_lanes: bool = False,
) -> dict[int | None, list[tuple[int, int]]]:
    """Returns the gradient buffers that lie in the same memory, by user: (number of elements, bytes of an element).

    The users are all blocks whose gradients leave in pieces together (None), and blocks that are computed before and
    after all layers. Of these, the first buffer is for the sum. With several lanes it is a lane's, and the others are
    for parts of the total. A block whose gradient leaves in pieces, as sums in fp32, is a user, too.

    Args:
        block_numels: the elements of each block.
        pieces: the bounds of the pieces of each layer whose gradient leaves in pieces.
        blocks: the other users: see `Plan.grad_overlaid_blocks`.
        itemsize: bytes of an element of a gradient that leaves the device.
        summed_in_fp32: blocks whose gradients are always summed in fp32.
        is_summed: several micro-batches are summed.
        fp32_in_pieces: see `Plan.fp32_in_pieces`.
        has_lanes: they are summed in several lanes.
    """
    users: dict[int | None, list[tuple[int, int]]] = {None: []}
    # In steps in which the head has one slice, its gradient uses the buffers of layers.
    together = [block for block in pieces if block not in fp32_in_pieces or block == len(block_numels) - 1]
    for user in (None, *fp32_in_pieces):
        mine = together if user is None else [user]
        numels = [block_numels[block] for block in mine]
        # The sums of both uses of a tied block come back, and those of slices.
        in_pieces, rests = grad_piece_numels(
            [pieces[block] for block in mine], numels, is_summed=is_summed or user is not None
        )
        nbytes = itemsize if user is None else _FP32_NBYTES
        users[user] = [(numel, nbytes) for numel in (*in_pieces, *rests)]
    for block in blocks:
        # A sum in fp32 is rounded in place if it leaves in another format.
        users[block] = [(block_numels[block], _FP32_NBYTES if block in summed_in_fp32 else itemsize)]
        if has_lanes:
            users[block] += [(min(block_numels[block], _TOTAL_PART_NUMEL), _FP32_NBYTES)] * _NUM_TOTAL_PARTS
    return users


def streamed_grads_nbytes(
    block_numels: Sequence[int],
    pieces: Mapping[int, Sequence[int]],
    blocks: Collection[int],
    *,
    itemsize: int,
    summed_in_fp32: Collection[int],
    is_summed: bool,
    fp32_in_pieces: Collection[int] = (),
    has_lanes: bool,
    chunk_numel: int,
) -> int:
    """Returns the bytes of the buffers of `grad_overlay_of_job`, and of those for a layer's norms during an operation.

    These are norms by row, or with several lanes the chunks that lie in several pieces.
    """
    if not pieces:
        return 0
    users = grad_overlay_of_job(
        block_numels,
        pieces,
        blocks,
        itemsize=itemsize,
        summed_in_fp32=summed_in_fp32,
        is_summed=is_summed,
        fp32_in_pieces=fp32_in_pieces,
        has_lanes=has_lanes,
    )
    largest = max(block_numels[layer] for layer in pieces)
    norms_nbytes = 8 * (largest // NORM_ROW_NUMEL)
    if has_lanes:
        norms_nbytes = min(largest, NUM_GATHERED_CHUNKS * chunk_numel) * _FP32_NBYTES
    return overlay_nbytes([numel * size for numel, size in buffers] for buffers in users.values()) + norms_nbytes


def overlay_nbytes(users: Iterable[Sequence[int]]) -> int:
    """Returns the bytes of memory in which each user has its buffers from the start. `users`: bytes of each buffer."""
    unit = OVERLAY_ALIGNMENT_NBYTES
    return max((sum(-(-nbytes // unit) * unit for nbytes in buffers) for buffers in users), default=0)


def lane_buffers(
    block_numels: Sequence[int],
    shared: Sequence[Sequence[int]],
    totals: Counter[int],
    *,
    lanes: LaneDivision,
    group_size: int,
    elsewhere: Collection[int] = (),
) -> Counter[int]:
    """Counts buffers by number of elements, for sums of lanes beside the totals of finished lanes.

    `totals`: the buffers for totals, by number of elements. If groups end inside of lanes, each total may have a lane's
    sum beside it, wherever it is. Otherwise only the running operation has sums of lanes. `elsewhere`: blocks whose own
    sums have other buffers.
    """
    if lanes.num_lanes == 1:
        return Counter()
    if lanes.num_open_lanes(group_size):
        return totals
    most: Counter[int] = Counter()
    for user, blocks in enumerate(shared):
        most |= Counter(block_numels[block] for block in blocks if block != user or block not in elsewhere)
    return most


def summed_in_fp32(shared: Sequence[Sequence[int]], *, is_sliced: bool) -> set[int]:
    """Returns the blocks whose gradients are always summed in fp32: sums over tied uses or over slices of the head.

    The head's slices count only if it `is_sliced`. Sums over micro-batches are not included, because the job may choose
    a smaller format for them.
    """
    tied = {block for blocks in shared for block in blocks[1:]}
    return tied.union(shared[-1] if is_sliced else ())


def rounding_nbytes(block_numels: Sequence[int], summed_in_fp32: Collection[int], *, itemsize: int) -> int:
    """Returns the bytes beside the buffers in which gradients are rounded in place.

    Args:
        block_numels: the elements of each block.
        summed_in_fp32: blocks whose gradients are always summed in fp32.
        itemsize: bytes of an element of a gradient that leaves the device.
    """
    if itemsize == _FP32_NBYTES:
        return 0
    largest = max((block_numels[block] for block in summed_in_fp32), default=0)
    return min(largest, ROUNDING_NUMEL) * itemsize


def rounded_numel(formats: Formats, chunk_numel: int, *, resident: Collection[int], on_gpu: bool) -> int:
    """Returns the elements of the buffer in which a GPU rounds a chunk's params from its master, before they are saved.

    It is 0 where no params follow from a master that is `resident` on the device. A CPU rounds into host memory.
    """
    return chunk_numel if on_gpu and resident and formats.derives_param else 0
