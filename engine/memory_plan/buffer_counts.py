"""How many buffers for params and gradients a device needs, by their size: two of a size let one be filled while the
other is computed with.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

# Gradients of so many blocks may lie on the device, where nobody says otherwise: one is summed while another is copied
# out. With one, the next block's backward pass waits for the copies.
MAX_GRAD_BUFFERS = 2


def param_buffers(
    block_numels: Sequence[int], shared: Sequence[Sequence[int]], *, resident: Collection[int], num_ahead: int
) -> Counter[int]:
    """Buffers by their number of elements: as many as `num_ahead` operations of a step that follow each other need.

    `shared`: per block, the blocks whose params its operation reads. `resident` blocks have their params on the device.
    Where a step, one of its groups of micro-batches or an evaluation ends and the next begins, the first params are
    wanted once more; they wait for a buffer.
    """
    forward = list(range(len(block_numels)))
    operations = forward + forward[-2::-1]
    most: Counter[int] = Counter()
    for start in range(len(operations)):
        blocks = [block for operation in operations[start : start + num_ahead] for block in shared[operation]]
        most |= Counter(block_numels[block] for block in blocks if block not in resident)
    return most


def grad_buffers(block_numels: Mapping[int, int], *, resident: Collection[int], num_waiting: int) -> Counter[int]:
    """Buffers by their number of elements, for the gradients of some blocks that are on the device at once.

    Those of `resident` blocks all stay there until their update; of the others `num_waiting` at most.
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
) -> Counter[tuple[int, int]]:
    """Buffers by their number of elements and the bytes of one: for sums of each use of a block, and for what sums
    become in the type in which they travel, which takes `itemsize`.

    `summed_in_fp32`: blocks whose gradients may be, whatever they travel in. `num_groups`: of a step's micro-batches.
    `num_grad_buffers`: blocks whose gradients may be on their way out.
    """
    # What the next group goes on with comes while others are added to and copied out.
    num_waiting = num_grad_buffers + (1 if num_groups > 1 else 0)
    most: Counter[tuple[int, int]] = Counter()
    for each, blocks in ((itemsize, range(len(block_numels))), (4, summed_in_fp32)):
        numels = {block: block_numels[block] for block in blocks}
        numbers = grad_buffers(numels, resident=resident, num_waiting=num_waiting)
        most |= Counter({(numel, each): number for numel, number in numbers.items()})
    # Each is where it is until the last.
    most.update((block_numels[block], 4) for blocks in shared for block in blocks[1:])
    return most


def summed_in_fp32(shared: Sequence[Sequence[int]], *, is_sliced: bool) -> set[int]:
    """Blocks whose gradients are sums over tied uses, or, where the head `is_sliced`, over slices of tokens; those over
    micro-batches are fp32 unless the job wants less."""
    tied = {block for blocks in shared for block in blocks[1:]}
    return tied.union(shared[-1] if is_sliced else ())
